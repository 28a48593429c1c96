"""A plan as it is shown: what a run costs before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmtool.reporting.text import count, duration, flops, percent, size
from lmtool.system.terminal import plural

# What scoring a token takes of training on it: a forward is a third, and losses are kept one by one (.5 to .6 measured
# of tiny BERT and ELECTRA on a CPU).
_EVALUATED = 0.55
# Evaluations that take less of the training time are not worth a word.
_SHOWN = 0.05
_UNITS = {"max_steps": "step", "max_epochs": "epoch", "max_tokens": "token", "max_minutes": "minute"}


@dataclass(frozen=True)
class PhasePlan:
    """A phase of a run. given: what differs in it, as it is typed. share: of the budget. first, last: its steps."""

    given: str
    share: float
    first: int
    last: int
    tokens_per_step: float

    @property
    def words(self) -> str:
        """The phase on a line."""
        steps = f"steps {self.first:,} to {self.last:,}" if self.first <= self.last else "no step"
        text = f"{percent(self.share)} of the budget, {steps} of {count(round(self.tokens_per_step))} tokens"
        return f"{text} · {self.given}" if self.given else text


@dataclass(frozen=True)
class RunPlan:
    """What a run will take. FLOPs are of training (forward and backward); memory and time are estimates. Of a run in
    phases, numbers of a step are means, and the memory is that of the phase that takes most.

    memory_bytes: of one device, by part. room_bytes: that it has; None where nobody says. step_seconds: at least and at
    most; None where no rate is known. rate: how it was found. evaluations: of the held-out data, evaluation_tokens each
    (0: not known). budgets: those that it has, by their keys; ends_by: the one that ends it. epochs: passes over the
    training data, None where these are not known; epoch_text: what one is. advice: overrides with which it fits, each
    with what it takes then. warnings: of settings without effect.
    """

    parameters: dict[str, int]
    trainable_parameters: int
    flops_per_token: float
    tokens_per_step: float
    steps: int
    memory_bytes: dict[str, int]
    checkpoint_bytes: int
    checkpoints: int
    log_bytes: int = 0
    store_bytes: int | None = None
    step_seconds: tuple[float, float] | None = None
    rate: str = ""
    evaluations: int = 0
    evaluation_tokens: int = 0
    budgets: Mapping[str, float] = field(default_factory=dict)
    ends_by: str = ""
    epochs: float | None = None
    epoch_text: str = ""
    devices: int = 1
    room_bytes: int | None = None
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    phases: tuple[PhasePlan, ...] = ()

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def steps_text(self) -> str:
        """Its steps; of a run that a clock ends, as many as it takes in its time by the estimate."""
        return f"about {count(self.steps)}" if self.ends_by == "max_minutes" else count(self.steps)

    @property
    def ends_text(self) -> str:
        """What ends it, and which of its budgets would have ended it later. A clock is estimated."""
        others = [f"{key}={count(value)}" for key, value in self.budgets.items() if key != self.ends_by]
        estimated = ", by the estimate" if others and "max_minutes" in self.budgets else ""
        before = f"{estimated} before {', '.join(others)}" if others else ""
        amount = self.budgets[self.ends_by]
        unit = _UNITS.get(self.ends_by)
        spent = flops(amount) if unit is None else f"{count(amount)} {plural(amount, unit)}"
        return f"after {spent} ({self.ends_by}){before}"

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.tokens_per_step

    @property
    def tokens(self) -> float:
        return self.tokens_per_step * self.steps

    @property
    def flops(self) -> float:
        return self.flops_per_step * self.steps

    @property
    def needed_bytes(self) -> int:
        """Of one device."""
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether it fits into the memory of its device, as far as that is known."""
        return self.room_bytes is None or self.needed_bytes <= self.room_bytes

    @property
    def disk_bytes(self) -> int:
        return self.checkpoint_bytes * self.checkpoints + self.log_bytes + (self.store_bytes or 0)

    @property
    def seconds(self) -> float | None:
        """Estimated seconds of training, the middle of the range; None where no rate is known."""
        return None if self.step_seconds is None else self.steps * sum(self.step_seconds) / 2

    @property
    def evaluation_seconds(self) -> float:
        """Estimated seconds of all evaluations, 0 where they are not known."""
        if self.step_seconds is None:
            return 0.0
        trained = self.evaluations * self.evaluation_tokens / self.tokens_per_step * sum(self.step_seconds) / 2
        return _EVALUATED * trained

    @property
    def time_text(self) -> str:
        """The estimated time: one number, or from the least to the most where these differ."""
        if self.step_seconds is None:
            return "unknown"
        low, high = (duration(self.steps * seconds) for seconds in self.step_seconds)
        text = f"about {low}" if low == high else f"{low} to {high}"
        shown = self.evaluation_seconds > _SHOWN * (self.seconds or 0)
        return f"{text}, and {duration(self.evaluation_seconds)} of evaluation" if shown else text


def plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """The plan as (what, how much) rows, for a table or a screen."""
    # Exact, so that they can be held against the published counts.
    parts = " · ".join(f"{part} {number:,}" for part, number in plan.parameters.items())
    each = f", {count(round(plan.tokens_per_step / plan.devices))} a device" if plan.devices > 1 else ""
    rows = [
        ("parameters", f"{plan.total_parameters:,} ({plan.trainable_parameters:,} learn): {parts}"),
        ("steps", f"{plan.steps_text} of {count(round(plan.tokens_per_step))} tokens{each}"),
        *((f"phase {number}", phase.words) for number, phase in enumerate(plan.phases, 1)),
        *([("ends", plan.ends_text)] if plan.ends_by else []),
        ("tokens", count(round(plan.tokens))),
        *([("epochs", f"{count(float(f'{plan.epochs:.3g}'))}{plan.epoch_text}")] if plan.epochs is not None else []),
        (
            "FLOPs",
            f"{flops(plan.flops_per_token)} a token, {flops(plan.flops_per_step)} a step, {flops(plan.flops)} in all",
        ),
        *_memory_rows(plan),
        ("disk", _disk_text(plan)),
        ("time", f"{plan.time_text}{f': {plan.rate}' if plan.rate else ''}"),
    ]
    return [*rows, *(("note", note) for note in plan.notes), *(("warning", text) for text in plan.warnings)]


def _memory_rows(plan: RunPlan) -> list[tuple[str, str]]:
    parts = [f"{part} {size(number)}" for part, number in plan.memory_bytes.items()]
    each = "" if plan.devices == 1 else " a device"
    rows = [("memory", f"about {size(plan.needed_bytes)}{each}")]
    rows += [("", " · ".join(parts[start : start + 4])) for start in range(0, len(parts), 4)]
    if plan.room_bytes is None:
        return rows
    has = f"{size(plan.room_bytes)} are there"
    if plan.fits:
        return [*rows, ("fits", f"yes: {has}")]
    lacks = f"no: {size(plan.needed_bytes - plan.room_bytes)} too much, {has}"
    advice = plan.advice or ("nothing that was tried makes it fit: take a smaller model, or another device",)
    return [*rows, ("fits", lacks), *(("would fit", line) for line in advice)]


def _disk_text(plan: RunPlan) -> str:
    parts = [f"{plan.checkpoints} × {size(plan.checkpoint_bytes)} a checkpoint"]
    if plan.store_bytes is not None:
        parts.append(f"token store about {size(plan.store_bytes)}")
    if plan.log_bytes:
        parts.append(f"logs {size(plan.log_bytes)}")
    return f"{size(plan.disk_bytes)}: {', '.join(parts)}"
