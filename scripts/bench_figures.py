"""Figures from the rows of `make bench`: speeds, ratios within rounds, memory, the share of the machine's products, and
whether an aim was reached. No process is started here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench_works import MEMORY_AIM, PRODUCTS, Comparison, Work

Row = dict[str, Any]
STEP_TOLERANCE = 1e-4
DIFFERENT, DIFFERENT_STEP = "NOT THE SAME EXAMPLES", "ANOTHER STEP"
STEADY = 1.25
"""How far the machine's fastest and slowest round may lie apart before the table warns."""


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.smallest:{form}} to {self.largest:{form}})"


@dataclass(frozen=True)
class Ratio:
    """A comparison as it was measured. memory: peaks in all and above imports, lmtool's over the rival's."""

    comparison: Comparison
    speed: Spread
    rounds: int
    memory: float
    memory_above_imports: float

    @property
    def verdict(self) -> str:
        return verdict(self.speed.median, self.comparison.aim)


def verdict(value: float, aim: float | None) -> str:
    """Whether an aim is reached, in words."""
    if aim is None:
        return "no aim"
    return f"aim {aim:g}x reached" if value >= aim else f"aim {aim:g}x NOT reached"


def turns(rows: Sequence[Row], variant: str, work: str | None = None) -> list[Row]:
    """The finished turns of a variant; of a round that was measured again the last."""
    own = [row for row in rows if row["kind"] == "turn" and row["variant"] == variant and work in (None, row["work"])]
    return list({row["round"]: row for row in own}.values())


def rates(rows: Sequence[Row], variant: str, unit: str) -> dict[int, float]:
    """`unit` a second of a variant, by round."""
    return {row["round"]: row[unit] / row["seconds"] for row in turns(rows, variant)}


def memory(rows: Sequence[Row], variant: str) -> tuple[int, int]:
    """Peak resident bytes of a variant's process: in all, and above what it held after its imports."""
    own = turns(rows, variant)
    peak = max(row["peak_bytes"] for row in own)
    return peak, peak - own[0]["imports_bytes"]


def of_work(work: Work, rows: Sequence[Row]) -> list[Row]:
    """The rows of a work."""
    return [row for row in rows if row.get("work") == work.name]


def ratios(work: Work, rows: Sequence[Row]) -> list[Ratio]:
    """Each comparison that has rounds both finished: speed taken within a round, and memory."""
    rows, table = of_work(work, rows), []
    for comparison in work.comparisons:
        ours, theirs = (rates(rows, name, work.unit) for name in (comparison.own, comparison.rival))
        pairs = [ours[number] / theirs[number] for number in ours if number in theirs]
        if pairs:
            held, held_by_rival = memory(rows, comparison.own), memory(rows, comparison.rival)
            fractions = (own / other for own, other in zip(held, held_by_rival, strict=True))
            table.append(Ratio(comparison, Spread.of(pairs), len(pairs), *fractions))
    return table


def same_examples(comparison: Comparison, rows: Sequence[Row]) -> bool:
    """Whether both read as many tokens in each of their turns."""
    ours, theirs = (
        {row["round"]: row["tokens"] for row in turns(rows, name)} for name in (comparison.own, comparison.rival)
    )
    return all(ours[number] == theirs[number] for number in ours if number in theirs)


def fractions(work: Work, rows: Sequence[Row], variant: str) -> Spread | None:
    """The FLOPs of a variant's real tokens a second over those of the machine's own products in the same round. The
    count is lmtool's, of real work: the head where it predicts, causal attention at half. None where it is not
    known."""
    rows = of_work(work, rows)
    counted = [row["flops_per_token"] for row in rows if row["kind"] == "worker" and row.get("flops_per_token")]
    speeds, products = rates(rows, variant, "tokens"), rates(rows, PRODUCTS, "flops")
    pairs = [speeds[number] * counted[0] / products[number] for number in speeds if counted and number in products]
    return Spread.of(pairs) if pairs else None


def checks(work: Work, rows: Sequence[Row]) -> list[str]:
    """What is known of "the same work", a line for each comparison that claims it."""
    rows, lines = of_work(work, rows), []
    for comparison in work.comparisons:
        if not comparison.same:
            continue
        same = "the same examples in every turn" if same_examples(comparison, rows) else DIFFERENT
        pair = f"{comparison.own} and {comparison.rival}"
        for row in (row for row in rows if row["kind"] == "check" and row["rival"] == comparison.rival):
            lines.append(f"{pair}: {same}; {step_line(row)}")
    return lines


def apart(row: Row) -> tuple[float, float]:
    """How far the losses and the gradient norms of a check lie apart, relative."""
    pairs = (row["loss"], row["rival_loss"]), (row["norm"], row["rival_norm"])
    loss, norm = (abs(own - rival) / abs(rival) for own, rival in pairs)
    return loss, norm


def step_line(row: Row) -> str:
    """One step of both from the same weights, without dropout, in fp32."""
    norms = apart(row)[1]
    same = "the same step" if max(apart(row)) <= STEP_TOLERANCE else DIFFERENT_STEP
    return f"{same} (losses {row['loss']:.5f} and {row['rival_loss']:.5f}, gradient norms {norms:.0e} apart)"


def unsteady(rows: Sequence[Row]) -> str | None:
    """A warning where the machine's own products changed their speed between rounds; None where they did not."""
    speeds = [row["flops"] / row["seconds"] / 1e9 for row in rows if row["kind"] == "turn" and "flops" in row]
    if not speeds or max(speeds) <= STEADY * min(speeds):
        return None
    return (
        f"the machine's own products ran at {min(speeds):.0f} to {max(speeds):.0f} GFLOP/s: others were at work; "
        "ratios within rounds stand, speeds do not"
    )


def memory_verdict(share: float) -> str:
    return f"{share:.2f}x, aim {MEMORY_AIM:g}x {'reached' if share <= MEMORY_AIM else 'NOT reached'}"


def share_line(work: Work, rows: Sequence[Row]) -> str | None:
    """How much of the machine's products lmtool gets, where the work has an aim for it."""
    share = fractions(work, rows, work.own[-1].name)
    if share is None or work.share_aim is None:
        return None
    reached = "reached" if share.median >= work.share_aim else "NOT reached"
    return (
        f"{work.own[-1].label}: the FLOPs of its real tokens are {share:.0%} of what the machine's own products "
        f"do; aim {work.share_aim:.0%} {reached}"
    )
