"""A plan as it is shown: what a run costs before anything is spent."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmtool.reporting.text import count, duration, flops, percent, size


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
    phases, numbers of a step are means, and the memory is that of the phase that takes most."""

    parameters: dict[str, int]
    trainable_parameters: int
    flops_per_token: float
    tokens_per_step: float
    steps: int
    memory_bytes: dict[str, int]
    checkpoint_bytes: int
    checkpoints: int
    flops_per_second: float | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)
    phases: tuple[PhasePlan, ...] = ()

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

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
    def disk_bytes(self) -> int:
        return self.checkpoint_bytes * self.checkpoints

    @property
    def seconds(self) -> float | None:
        """Estimated seconds of training; None where no rate was given."""
        return self.flops / self.flops_per_second if self.flops_per_second else None


def plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """The plan as (what, how much) rows, for a table or a screen."""
    # Exact, so that they can be held against the published counts.
    parts = " · ".join(f"{part} {number:,}" for part, number in plan.parameters.items())
    memory = sum(plan.memory_bytes.values())
    memory_parts = " · ".join(f"{part} {size(number)}" for part, number in plan.memory_bytes.items())
    rows = [
        ("parameters", f"{plan.total_parameters:,} ({plan.trainable_parameters:,} learn): {parts}"),
        ("steps", f"{count(plan.steps)} of {count(round(plan.tokens_per_step))} tokens"),
        *((f"phase {number}", phase.words) for number, phase in enumerate(plan.phases, 1)),
        ("tokens", count(round(plan.tokens))),
        (
            "FLOPs",
            f"{flops(plan.flops_per_token)} a token, {flops(plan.flops_per_step)} a step, {flops(plan.flops)} in all",
        ),
        ("memory", f"about {size(memory)}: {memory_parts}"),
        ("disk", f"{size(plan.disk_bytes)}: {plan.checkpoints} × {size(plan.checkpoint_bytes)} a checkpoint"),
    ]
    if plan.seconds is not None and plan.flops_per_second is not None:
        rows.append(("time", f"about {duration(plan.seconds)} at {flops(plan.flops_per_second)}/s"))
    else:
        rows.append(("time", "unknown: no rate was measured"))
    return rows + [("note", note) for note in plan.notes]
