"""Screens of plans and profiles: the cost of a run, and the time of each part of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lmtool.config.base import JsonObject
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.text import count, duration, flops, percent, size, tenths
from lmtool.system.terminal import counted, plural

# Time of scoring a token relative to training on it: a forward pass is a third, and losses are stored per target (0.5
# to 0.6 measured with tiny BERT and ELECTRA on a CPU).
_EVALUATION_COST = 0.55
# Evaluation time below this fraction of the training time is not reported.
_MIN_EVALUATION_FRACTION = 0.05
_UNITS = {
    "max_steps": "step",
    "max_epochs": "epoch",
    "max_tokens": "token",
    "max_words": "word",
    "max_minutes": "minute",
}


@dataclass(frozen=True)
class PhasePlan:
    """A phase of a run. overrides: the keys that it changes. share: fraction of the budget. first, last: its first and
    last step."""

    overrides: str
    share: float
    first: int
    last: int
    tokens_per_step: float

    @property
    def text(self) -> str:
        """The phase as one line."""
        steps = f"steps {self.first:,} to {self.last:,}" if self.first <= self.last else "no step"
        text = f"{percent(self.share)} of the budget, {steps} of {count(round(self.tokens_per_step))} tokens"
        return f"{text} · {self.overrides}" if self.overrides else text


@dataclass(frozen=True)
class RunPlan:
    """The cost of a run. FLOPs count training (forward and backward); memory and time are estimates. For a run in
    phases, numbers per step are means, and the memory is the maximum over phases.

    blocks: parameters of the backbone by kind of block. memory_bytes: per device, by part. capacity_bytes: memory of a
    device; None if unknown. store_bytes: size of the token store; None without one. shared_bytes: size of the plan of
    an epoch, on each machine. step_seconds: lower and upper estimate; None if unknown. time_source: source of that
    estimate. evaluations: number of evaluations. evaluation_tokens, final_tokens: the tokens of each, and of the scores
    at the end; 0 if unknown. budgets: the budgets by key. ends_by: the key of the budget that ends the run. epochs:
    passes over the training data; None if unknown. epoch_text: explains an epoch. advice: overrides that make the run
    fit, with the memory each needs. warnings: settings without effect.
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
    time_source: str = ""
    evaluations: int = 0
    evaluation_tokens: int = 0
    final_tokens: int = 0
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
    blocks: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def steps_text(self) -> str:
        """The number of steps; estimated if a time budget ends the run."""
        return f"about {count(self.steps)}" if self.ends_by == "max_minutes" else count(self.steps)

    @property
    def ends_text(self) -> str:
        """The budget that ends the run, and the budgets that would end it later."""
        others = [f"{key}={count(value)}" for key, value in self.budgets.items() if key != self.ends_by]
        estimated = ", estimated" if others and "max_minutes" in self.budgets else ""
        later_budgets = f"{estimated} before {', '.join(others)}" if others else ""
        amount = self.budgets[self.ends_by]
        unit = _UNITS.get(self.ends_by)
        amount_text = flops(amount) if unit is None else f"{count(amount)} {plural(amount, unit)}"
        return f"after {amount_text} ({self.ends_by}){later_budgets}"

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
        """Bytes needed per device."""
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether the run fits into device memory; True if that is unknown."""
        return self.capacity_bytes is None or self.needed_bytes <= self.capacity_bytes

    @property
    def disk_bytes(self) -> int:
        return self.checkpoint_bytes * self.checkpoints + self.log_bytes + (self.store_bytes or 0) + self.shared_bytes

    @property
    def seconds(self) -> float | None:
        """Estimated seconds of training, the middle of the range; None if unknown."""
        return None if self.step_seconds is None else self.steps * sum(self.step_seconds) / 2

    @property
    def evaluation_seconds(self) -> float:
        """Estimated seconds of all evaluations; 0 if unknown."""
        if self.step_seconds is None:
            return 0.0
        tokens = self.evaluations * self.evaluation_tokens + self.final_tokens
        return _EVALUATION_COST * tokens / self.tokens_per_step * sum(self.step_seconds) / 2

    @property
    def time_text(self) -> str:
        """The estimated time, as a range if its bounds differ."""
        if self.step_seconds is None:
            return "unknown"
        low, high = (duration(self.steps * seconds) for seconds in self.step_seconds)
        text = f"about {low}" if low == high else f"{low} to {high}"
        shows_evaluation = self.evaluation_seconds > _MIN_EVALUATION_FRACTION * (self.seconds or 0)
        return f"{text}, and {duration(self.evaluation_seconds)} of evaluation" if shows_evaluation else text


def plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns the plan as (label, text) rows."""
    # Exact, for comparison with published counts.
    parts = " · ".join(f"{part} {number:,}" for part, number in plan.parameters.items())
    per_device = f", {count(round(plan.tokens_per_step / plan.devices))} per device" if plan.devices > 1 else ""
    backbone = sum(plan.blocks.values())
    shares = " · ".join(f"{kind} {tenths(number / backbone)}" for kind, number in plan.blocks.items())
    rows = [
        ("parameters", f"{plan.total_parameters:,} ({plan.trainable_parameters:,} trainable): {parts}"),
        *([("backbone", shares)] if plan.blocks else []),
        ("steps", f"{plan.steps_text} of {count(round(plan.tokens_per_step))} tokens{per_device}"),
        *((f"phase {number}", phase.text) for number, phase in enumerate(plan.phases, 1)),
        *([("ends", plan.ends_text)] if plan.ends_by else []),
        ("tokens", count(round(plan.tokens))),
        *([("epochs", f"{count(float(f'{plan.epochs:.3g}'))}{plan.epoch_text}")] if plan.epochs is not None else []),
        (
            "FLOPs",
            f"{flops(plan.flops_per_token)} per token, {flops(plan.flops_per_step)} per step, "
            f"{flops(plan.flops)} in total",
        ),
        *_memory_rows(plan),
        ("disk", _disk_text(plan)),
        ("time", f"{plan.time_text}{f': {plan.time_source}' if plan.time_source else ''}"),
    ]
    return [*rows, *(("note", note) for note in plan.notes), *(("warning", text) for text in plan.warnings)]


def _memory_rows(plan: RunPlan) -> list[tuple[str, str]]:
    parts = [f"{part} {size(number)}" for part, number in plan.memory_bytes.items()]
    per_device = "" if plan.devices == 1 else " per device"
    rows = [("memory", f"about {size(plan.needed_bytes)}{per_device}")]
    rows += [("", " · ".join(parts[start : start + 4])) for start in range(0, len(parts), 4)]
    if plan.capacity_bytes is None:
        return rows
    available = f"{size(plan.capacity_bytes)} available"
    if plan.fits:
        return [*rows, ("fits", f"yes: {available}")]
    missing = f"no: {size(plan.needed_bytes - plan.capacity_bytes)} too much, {available}"
    advice = plan.advice or ("no override that was tried is enough: use a smaller model or another device",)
    return [*rows, ("fits", missing), *(("would fit", line) for line in advice)]


def _disk_text(plan: RunPlan) -> str:
    parts = [f"{plan.checkpoints} × {size(plan.checkpoint_bytes)} per checkpoint"]
    if plan.store_bytes is not None:
        parts.append(f"token store about {size(plan.store_bytes)}")
    if plan.shared_bytes:
        parts.append(f"plan of an epoch about {size(plan.shared_bytes)} per machine")
    if plan.log_bytes:
        parts.append(f"logs {size(plan.log_bytes)}")
    return f"{size(plan.disk_bytes)}: {', '.join(parts)}"


# Profile of a training step: a table by part, and remarks about unusual times.

_HOST, _DATA = "host", "data"
# The order of the rows; other parts come after these, before the optimizer.
_FIRST_PARTS = (
    "embedding",
    "attention: projections",
    "attention: scores",
    "cross-attention: projections",
    "cross-attention: scores",
    "feed-forward",
    "norms, dropout, residuals",
    "adapters and prefixes",
    "layers, compiled",
    "batch layout",
    "head",
    "loss",
)
_LAST_PARTS = ("optimizer: clip", "optimizer: step", "optimizer: zeroing", _DATA, "other", _HOST)


@dataclass(frozen=True)
class StepProfile:
    """Profile of a training step, averaged over `steps`.

    milliseconds: the time per step with the profiler. unprofiled_milliseconds: the same steps without it, with data
    preloaded. parts: by name, milliseconds `forward`, `backward` and `host` (Python between the part's operators,
    included in the row `host`), and operator `calls`. products_milliseconds, products_flops: of the
    matrix products. product_rate: FLOP/s of the device in large square matrix products.
    tokens, micro_batches: per step; a step of generation has no micro-batches. metadata: the metadata of the run's
    configuration and data.
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
    metadata: JsonObject = field(default_factory=dict)
    product_rate: float | None = None

    def share(self, *names: str) -> float:
        """Returns the fraction of the step spent in parts whose names start with one of `names`."""
        busy = sum(row["forward"] + row["backward"] for name, row in self.parts.items() if name.startswith(names))
        return busy / self.milliseconds

    @property
    def trains(self) -> bool:
        return self.micro_batches > 0

    @property
    def calls(self) -> float:
        """Operator calls per step."""
        return sum(row["calls"] for row in self.parts.values())


def print_profile(output: Output, profile: StepProfile, heading: str) -> None:
    """Prints the table, the matrix products, the profiler's overhead and remarks."""
    rows = []
    for name, row in sorted(profile.parts.items(), key=lambda item: _order(item[0])):
        forward, backward, host, calls = (row[key] for key in ("forward", "backward", "host", "calls"))
        if forward + backward >= 0.005 or calls >= 1:  # others would show only zeros
            passes = [f"{forward:.2f}", f"{backward:.2f}" if backward else ""] if profile.trains else []
            cells = [name, *passes, f"{forward + backward:.2f}", f"{profile.share(name):.1%}"]
            rows.append([*cells, f"{host:.2f}" if name != _HOST else "", f"{calls:,.0f}"])
    blank, passes = (["", ""], ["forward ms", "backward ms"]) if profile.trains else ([], [])
    total = ["step", *blank, f"{profile.milliseconds:.2f}", "100.0%", "", f"{profile.calls:,.0f}"]
    print_table(output, ["part", *passes, "ms", "share", "host ms", "calls"], [*rows, total], heading)
    micro_batches = f" in {profile.micro_batches:.3g} micro-batch{'' if profile.micro_batches == 1 else 'es'}"
    threads = "" if profile.device.startswith("cuda") else f", {counted(profile.threads, 'thread')}"
    output.line(
        f"{profile.precision} on {profile.device}{threads}; {counted(profile.steps, 'step')} of "
        f"{counted(round(profile.tokens), 'token')}{micro_batches if profile.trains else ''}; "
        f"peak memory {size(profile.peak_memory_bytes)}"
    )
    output.line(_products(profile))
    slower = profile.milliseconds / profile.unprofiled_milliseconds - 1
    overhead = f"profiling adds {slower:+.0%}, mostly to `host` and to short calls"
    output.line(
        f"without the profiler the same steps take {profile.unprofiled_milliseconds:.2f} ms each"
        f"{', with data preloaded' if profile.trains else ''}: "
        + (overhead if slower > 0.02 else "the overhead of profiling is within the machine's noise")
    )
    for sentence in remarks(profile):
        output.line(f"note: {sentence}")


def _order(name: str) -> tuple[int, str]:
    if name in _FIRST_PARTS:
        return _FIRST_PARTS.index(name), ""
    return (100 + _LAST_PARTS.index(name), "") if name in _LAST_PARTS else (50, name)


def _products(profile: StepProfile) -> str:
    share = profile.products_milliseconds / profile.milliseconds
    text = f"matrix products: {percent(share)} of the step"
    if profile.products_milliseconds:
        measured_rate = profile.products_flops / profile.products_milliseconds * 1000
        text += f", at {_rate(measured_rate)}"
        if profile.product_rate:
            step_rate = profile.products_flops / profile.unprofiled_milliseconds * 1000
            products_share, step_share = (percent(rate / profile.product_rate) for rate in (measured_rate, step_rate))
            text += (
                f" = {products_share} of the {_rate(profile.product_rate)} of large square "
                f"{profile.precision} products on this device; the whole step, unprofiled, reaches {step_share}"
            )
    return text


def _rate(flops_per_second: float) -> str:
    rate = flops_per_second / 1e9
    return f"{rate:,.0f} GFLOP/s" if rate >= 10 else f"{rate:.2g} GFLOP/s"


def remarks(profile: StepProfile) -> Iterator[str]:
    """Yields remarks about unusual times, each with the override that helps, if there is one."""
    metadata, cuda = profile.metadata, profile.device.startswith("cuda")
    scores, host, head = profile.share("attention: scores"), profile.share(_HOST), profile.share("head", "loss")
    if profile.precision == "fp32" and metadata.get("native_bf16"):
        yield "matrix products in fp32 on a device with native bf16: try precision=bf16"
    if profile.precision == "bf16" and not metadata.get("native_bf16"):
        yield "matrix products in bf16 on a device without native bf16: try precision=fp32"
    if scores > 0.12 and metadata.get("attention_dropout"):
        yield (
            f"attention scores take {percent(scores)}: model.attention_dropout=0 enables the fused kernel, but changes "
            "the recipe"
        )
    if host > 0.15:
        call_microseconds = 1000 * (1 - host) * profile.milliseconds / max(profile.calls, 1)
        compile_advice = ", or set compile=true" if cuda and not metadata.get("compiled") else ""
        cause = (
            "the device waits for Python"
            if cuda
            else f"{count(round(profile.calls))} calls of {call_microseconds:.0f} us"
        )
        yield (
            f"{percent(host)} is Python and operator launches, profiler overhead included ({cause}): "
            + (f"{_larger_batch(metadata)}{compile_advice}" if profile.trains else _MORE_PROMPTS)
        )
    optimizer = profile.share("optimizer:")
    if optimizer > 0.15:
        yield (
            f"the optimizer takes {percent(optimizer)}, whatever the number of tokens, and a step has "
            f"{count(round(profile.tokens))}: {_larger_batch(metadata)}, with a learning rate to match"
        )
    if head > 0.25:
        rows = f"{metadata['vocab_size']:,}"
        yield f"head and loss take {percent(head)}, in proportion to the {rows} rows of the vocabulary"
    if profile.share(_DATA) > 0.05:
        yield f"waiting for data takes {percent(profile.share(_DATA))} of the step: the loader is too slow"
    if profile.micro_batches > 1:
        yield (
            f"a step is {profile.micro_batches:.3g} micro-batches: a micro_batch_tokens above "
            f"{metadata.get('micro_batch_tokens')} gives fewer and larger matrix products, but needs more memory"
        )
    if metadata.get("gradient_checkpointing"):
        yield "layers are recomputed in the backward pass: set gradient_checkpointing=false if memory allows"
    avoided_padding = metadata.get("padding_avoided")
    if avoided_padding:
        yield f"packing avoids {percent(avoided_padding)} padding"


_MORE_PROMPTS = "a step takes less time per text with more prompts at a time: input=FILE, or a larger batch_tokens"


def _larger_batch(metadata: JsonObject) -> str:
    key = "batch_tokens" if metadata.get("batch_tokens") else "batch_examples"
    return f"raise {key} above {metadata.get(key)}"
