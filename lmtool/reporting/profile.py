"""Where the time of a training step goes, as it is shown: a table by part, and what stands out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.reporting.text import count, percent, size
from lmtool.system.terminal import counted

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
        """Of the step, of all parts whose name begins so."""
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
        inside = profile.products_flops / profile.products_milliseconds * 1000
        text += f", at {inside / 1e9:,.0f} GFLOP/s"
        if profile.product_rate:
            whole = profile.products_flops / profile.unprofiled_milliseconds * 1000
            text += (
                f" = {percent(inside / profile.product_rate)} of the {profile.product_rate / 1e9:,.0f} of large square "
                f"{profile.precision} products here; the step, unprofiled, at {percent(whole / profile.product_rate)}"
            )
    return text


def remarks(profile: StepProfile) -> Iterator[str]:
    """What is worth a look, with the override that changes it where there is one."""
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
