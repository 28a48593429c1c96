"""Plans and profiles as they are shown: what a run will cost, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmtool.reporting.console import Output, print_table
from lmtool.reporting.text import count, duration, flops, percent, size
from lmtool.system.terminal import counted, plural

# A plan as it is shown: what a run costs before anything is spent.


# What scoring a token takes of training on it: a forward is a third, and losses are kept one by one (.5 to .6 measured
# of tiny BERT and ELECTRA on a CPU).
_EVALUATED = 0.55
# Evaluations that take less of the training time are not worth a word.
_SHOWN_FRACTION = 0.05
_UNITS = {"max_steps": "step", "max_epochs": "epoch", "max_tokens": "token", "max_minutes": "minute"}


@dataclass(frozen=True)
class PhasePlan:
    """A phase of a run. overrides: what differs in it, as it is typed. share: of the budget. first, last: its steps."""

    overrides: str
    share: float
    first: int
    last: int
    tokens_per_step: float

    @property
    def words(self) -> str:
        """The phase on a line."""
        steps = f"steps {self.first:,} to {self.last:,}" if self.first <= self.last else "no step"
        text = f"{percent(self.share)} of the budget, {steps} of {count(round(self.tokens_per_step))} tokens"
        return f"{text} · {self.overrides}" if self.overrides else text


@dataclass(frozen=True)
class RunPlan:
    """What a run will take. FLOPs are of training (forward and backward); memory and time are estimates. Of a run in
    phases, numbers of a step are means, and the memory is that of the phase that takes most.

    memory_bytes: of one device, by part. capacity_bytes: its memory; None if unknown. shared_bytes: of the file that
    holds the plan of an epoch on each machine, 0 without one. step_seconds: at least and at most; None where no rate
    is known. rate: how it was found. evaluations: of the held-out data, evaluation_tokens each (0: not known).
    budgets: those that it has, by their keys; ends_by: the one that ends it. epochs: passes over the training data,
    None where these are not known; epoch_text: what one is. advice: overrides with which it fits, each with what it
    takes then. warnings: of settings without effect.
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
    shared_bytes: int = 0
    step_seconds: tuple[float, float] | None = None
    rate: str = ""
    evaluations: int = 0
    evaluation_tokens: int = 0
    budgets: Mapping[str, float] = field(default_factory=dict)
    ends_by: str = ""
    epochs: float | None = None
    epoch_text: str = ""
    devices: int = 1
    capacity_bytes: int | None = None
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
        """The budget that ends it, and those that would have ended it later. A clock is estimated."""
        other_budgets = [f"{key}={count(value)}" for key, value in self.budgets.items() if key != self.ends_by]
        estimated = ", by the estimate" if other_budgets and "max_minutes" in self.budgets else ""
        before = f"{estimated} before {', '.join(other_budgets)}" if other_budgets else ""
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
        """Bytes of one device."""
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether it fits into the memory of its device, as far as that is known."""
        return self.capacity_bytes is None or self.needed_bytes <= self.capacity_bytes

    @property
    def disk_bytes(self) -> int:
        return self.checkpoint_bytes * self.checkpoints + self.log_bytes + (self.store_bytes or 0) + self.shared_bytes

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
        shows_evaluation = self.evaluation_seconds > _SHOWN_FRACTION * (self.seconds or 0)
        return f"{text}, and {duration(self.evaluation_seconds)} of evaluation" if shows_evaluation else text


def plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """The plan as (what, how much) rows, for a table or a screen."""
    # Exact, so that they can be held against the published counts.
    parts = " · ".join(f"{part} {number:,}" for part, number in plan.parameters.items())
    each = f", {count(round(plan.tokens_per_step / plan.devices))} a device" if plan.devices > 1 else ""
    rows = [
        ("parameters", f"{plan.total_parameters:,} ({plan.trainable_parameters:,} trainable): {parts}"),
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
    if plan.capacity_bytes is None:
        return rows
    has = f"{size(plan.capacity_bytes)} are there"
    if plan.fits:
        return [*rows, ("fits", f"yes: {has}")]
    missing = f"no: {size(plan.needed_bytes - plan.capacity_bytes)} too much, {has}"
    advice = plan.advice or ("nothing that was tried makes it fit: take a smaller model, or another device",)
    return [*rows, ("fits", missing), *(("would fit", line) for line in advice)]


def _disk_text(plan: RunPlan) -> str:
    parts = [f"{plan.checkpoints} × {size(plan.checkpoint_bytes)} a checkpoint"]
    if plan.store_bytes is not None:
        parts.append(f"token store about {size(plan.store_bytes)}")
    if plan.shared_bytes:
        parts.append(f"plan of an epoch about {size(plan.shared_bytes)} a machine")
    if plan.log_bytes:
        parts.append(f"logs {size(plan.log_bytes)}")
    return f"{size(plan.disk_bytes)}: {', '.join(parts)}"


# Where the time of a training step goes, as it is shown: a table by part, and what stands out.


_HOST, _DATA = "host", "data"
# The order of the rows; a part that is not named stands behind these, before the optimizer.
_FIRST = (
    "embedding", "attention: projections", "attention: scores", "cross-attention: projections",
    "cross-attention: scores", "feed-forward", "norms, dropout, residuals", "adapters and prefixes", "layers, compiled",
    "batch layout", "head", "loss",
)  # fmt: skip
_LAST = ("optimizer: clip", "optimizer: step", "optimizer: zeroing", _DATA, "other", _HOST)


@dataclass(frozen=True)
class StepProfile:
    """A step of a run, mean over `steps`.

    milliseconds: with the profiler; unprofiled_milliseconds: of the same steps without it, their data at hand. parts:
    by name, milliseconds `forward`, `backward` and `host` (Python between its operators, which the row `host` has in
    sum), and operator `calls`. products_*: of matrix products. product_rate: FLOP/s of the device. tokens,
    micro_batches: of a step. metadata: of the run's configuration and data.
    """

    milliseconds: float
    unprofiled_milliseconds: float
    parts: dict[str, dict[str, float]]
    products_milliseconds: float
    products_flops: float
    steps: int
    tokens: float
    micro_batches: float
    peak_memory_bytes: int
    precision: str
    device: str
    threads: int
    metadata: dict[str, Any] = field(default_factory=dict)
    product_rate: float | None = None

    def share(self, *names: str) -> float:
        """The fraction of the step in parts whose names begin so."""
        spent = sum(row["forward"] + row["backward"] for name, row in self.parts.items() if name.startswith(names))
        return spent / self.milliseconds

    @property
    def calls(self) -> float:
        """Operator calls of a step."""
        return sum(row["calls"] for row in self.parts.values())


def print_profile(output: Output, profile: StepProfile, heading: str) -> None:
    """The table, the matrix products, the profiler's own cost, and what stands out."""
    rows = [
        [
            name, f"{row['forward']:.2f}", f"{row['backward']:.2f}" if row["backward"] else "",
            f"{row['forward'] + row['backward']:.2f}", f"{profile.share(name):.1%}",
            f"{row['host']:.2f}" if name != _HOST else "", f"{row['calls']:,.0f}",
        ]
        for name, row in sorted(profile.parts.items(), key=lambda item: _order(item[0]))
        if row["forward"] + row["backward"] >= 0.005 or row["calls"] >= 1
    ]  # fmt: skip
    total = ["step", "", "", f"{profile.milliseconds:.2f}", "100.0%", "", f"{profile.calls:,.0f}"]
    header = ["part", "forward ms", "backward ms", "ms", "share", "its host ms", "calls"]
    print_table(output, header, [*rows, total], heading)
    micro_batches = f"{profile.micro_batches:.3g} micro-batch{'' if profile.micro_batches == 1 else 'es'}"
    threads = "" if profile.device.startswith("cuda") else f", {counted(profile.threads, 'thread')}"
    output.line(
        f"{profile.precision} on {profile.device}{threads}; {counted(profile.steps, 'step')} of "
        f"{count(round(profile.tokens))} tokens in {micro_batches}; peak memory {size(profile.peak_memory_bytes)}"
    )
    output.line(_products(profile))
    slower = profile.milliseconds / profile.unprofiled_milliseconds - 1
    costs = f"profiling costs {slower:+.0%}, most of it in `host` and in short calls"
    output.line(
        f"without the profiler the same steps take {profile.unprofiled_milliseconds:.2f} ms each, their data at hand: "
        + (costs if slower > 0.02 else "what profiling costs cannot be told from what else the machine does")
    )
    for sentence in remarks(profile):
        output.line(f"stands out: {sentence}")


def _order(name: str) -> tuple[int, str]:
    if name in _FIRST:
        return _FIRST.index(name), ""
    return (100 + _LAST.index(name), "") if name in _LAST else (50, name)


def _products(profile: StepProfile) -> str:
    share = profile.products_milliseconds / profile.milliseconds
    text = f"matrix products: {percent(share)} of the step"
    if profile.products_milliseconds:
        measured_rate = profile.products_flops / profile.products_milliseconds * 1000
        text += f", at {measured_rate / 1e9:,.0f} GFLOP/s"
        if profile.product_rate:
            step_rate = profile.products_flops / profile.unprofiled_milliseconds * 1000
            fraction, of_step = (percent(rate / profile.product_rate) for rate in (measured_rate, step_rate))
            text += (
                f" = {fraction} of the {profile.product_rate / 1e9:,.0f} of large square {profile.precision} products"
            )
            text += f" here; the step, unprofiled, at {of_step}"
    return text


def remarks(profile: StepProfile) -> Iterator[str]:
    """Sentences about unusual times, with the override that changes them where there is one."""
    metadata, cuda = profile.metadata, profile.device.startswith("cuda")
    scores, host, head = profile.share("attention: scores"), profile.share(_HOST), profile.share("head", "loss")
    if profile.precision == "fp32" and metadata.get("native_bf16"):
        yield "products in fp32 on a device that multiplies bf16 itself: precision=bf16"
    if profile.precision == "bf16" and not metadata.get("native_bf16"):
        yield "products in bf16 on a device that has none of its own, and computes them by others: precision=fp32"
    if scores > 0.12 and metadata.get("attention_dropout"):
        yield (
            f"attention's scores take {percent(scores)}: model.attention_dropout=0 gives them to the fused kernel, and "
            "is another recipe"
        )
    if host > 0.15:
        short = 1000 * (1 - host) * profile.milliseconds / max(profile.calls, 1)
        more = ", or compile=true" if cuda and not metadata.get("compiled") else ""
        waits = "the device waits for Python" if cuda else f"{count(round(profile.calls))} calls of {short:.0f} us"
        yield (
            f"{percent(host)} is Python and the launching of operators, the profiler's part included ({waits}): "
            f"{_larger(metadata)}{more}"
        )
    moved = profile.share("optimizer:")
    if moved > 0.15:
        yield (
            f"the optimizer takes {percent(moved)}, the same for any number of tokens, and a step has "
            f"{count(round(profile.tokens))}: {_larger(metadata)}, with a learning rate to match"
        )
    if head > 0.25:
        rows = f"{metadata['vocab_size']:,}"
        yield f"head and loss take {percent(head)}, in proportion to the {rows} rows of the vocabulary"
    if profile.share(_DATA) > 0.05:
        yield f"the loader is waited for {percent(profile.share(_DATA))} of the step: the data is not made fast enough"
    if profile.micro_batches > 1:
        yield (
            f"a step is {profile.micro_batches:.3g} micro-batches: a larger micro_batch_tokens="
            f"{metadata.get('micro_batch_tokens')} has fewer and larger products, and takes more memory"
        )
    if metadata.get("gradient_checkpointing"):
        yield "layers are computed again in the backward: gradient_checkpointing=false, where the memory allows it"
    avoided = metadata.get("padding_avoided")
    if avoided:
        yield f"nothing is padded: rectangles of the same batches would be {percent(avoided)} padding"


def _larger(metadata: dict[str, Any]) -> str:
    key = "batch_tokens" if metadata.get("batch_tokens") else "batch_examples"
    return f"more in a step is cheaper, {key}={metadata.get(key)} now"
