"""Computes speeds, ratios within rounds, memory, fractions of the machine's products and reached aims from the rows of
turns; prints them as text for the terminal and as Markdown for docs/speed.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from timing.works import MEMORY_AIM, PRODUCTS, Comparison, Variant, Work

Row = dict[str, Any]
STEP_TOLERANCE = 1e-4
DIFFERENT, DIFFERENT_STEP, DIFFERENT_RESULTS = "NOT THE SAME EXAMPLES", "ANOTHER STEP", "OTHER RESULTS"
DIFFERENCES = (DIFFERENT, DIFFERENT_STEP, DIFFERENT_RESULTS)
STEADY_RATIO = 1.25
"""The table mentions the speed of the machine if the ratio of its fastest to its slowest round exceeds this."""
MAX_LOAD = 0.5
"""The table warns if the load of the machine was above this before the measurements."""
MAX_FOREIGN = 0.05
"""The table warns if others used more than this fraction of the processors."""


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
    """A measured comparison. memory: peak of lmtool over that of the rival."""

    comparison: Comparison
    speed: Spread
    rounds: int
    memory: float

    @property
    def verdict(self) -> str:
        aim = self.comparison.aim
        return "no aim" if aim is None else f"aim {aim:g}x {aim_verdict(self.speed.median >= aim)}"


def aim_verdict(holds: bool) -> str:
    return "reached" if holds else "NOT reached"


def turns(rows: Sequence[Row], variant: str) -> list[Row]:
    """The finished turns of a variant; the last one of a round that was measured twice."""
    own = [row for row in rows if row["kind"] == "turn" and row["variant"] == variant]
    return list({row["round"]: row for row in own}.values())


def rates(rows: Sequence[Row], variant: str, unit: str) -> dict[int, float]:
    """`unit` a second of a variant, by round."""
    return {row["round"]: row[unit] / row["seconds"] for row in turns(rows, variant)}


def ratios_within_rounds(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Ratios in the rounds that both finished."""
    return [ours[number] / theirs[number] for number in ours if number in theirs]


def memory(rows: Sequence[Row], variant: str) -> tuple[int, int]:
    """Peak resident bytes of a variant's process: in total, and above those after its imports."""
    own = turns(rows, variant)
    peak = max(row["peak_bytes"] for row in own)
    return peak, peak - own[0]["imports_bytes"]


def rows_of_work(work: Work, rows: Sequence[Row]) -> list[Row]:
    """The rows of a work."""
    return [row for row in rows if row.get("work") == work.name]


def ratios(work: Work, rows: Sequence[Row]) -> list[Ratio]:
    """Speed within rounds, and memory, for each comparison with a round that both variants finished."""
    rows, table = rows_of_work(work, rows), []
    for comparison in work.comparisons:
        names = comparison.own, comparison.rival
        if pairs := ratios_within_rounds(*(rates(rows, name, work.unit) for name in names)):
            (own, _), (other, _) = (memory(rows, name) for name in names)
            table.append(Ratio(comparison, Spread.of(pairs), len(pairs), own / other))
    return table


def shares(work: Work, rows: Sequence[Row], variant: str) -> Spread | None:
    """FLOP/s of a variant's real tokens over those of the machine's matrix products in the same round; None if unknown.
    lmtool counts the FLOPs: the head only at predicted positions, causal attention at half."""
    rows = rows_of_work(work, rows)
    counted = [row["flops_per_token"] for row in rows if row["kind"] == "worker" and row.get("flops_per_token")]
    parts = ratios_within_rounds(rates(rows, variant, "tokens"), rates(rows, PRODUCTS, "flops"))
    return Spread.of(part * counted[0] for part in parts) if counted and parts else None


def relative_differences(row: Row) -> tuple[float, float]:
    """The relative differences of the losses and of the gradient norms of a check."""
    pairs = (row["loss"], row["rival_loss"]), (row["norm"], row["rival_norm"])
    loss, norm = (abs(own - rival) / abs(rival) for own, rival in pairs)
    return loss, norm


def is_same(row: Row) -> bool:
    """Whether both sides agree in a check: of their results, or of one step."""
    return row["apart"] <= row["tolerance"] if "results" in row else max(relative_differences(row)) <= STEP_TOLERANCE


def check_line(row: Row) -> str:
    """Compares results of both sides, or one step from the same weights, without dropout, in fp32."""
    if "results" in row:
        apart = f"at most {row['apart']:.0e} apart" if row["tolerance"] else f"{row['apart']:,} differ"
        return f"{'the same' if is_same(row) else DIFFERENT_RESULTS + ','} {row['results']} ({row['count']:,}, {apart})"
    same = "the same step" if is_same(row) else DIFFERENT_STEP
    losses = f"losses {row['loss']:.5f} and {row['rival_loss']:.5f}"
    return f"{same} ({losses}, gradient norms {relative_differences(row)[1]:.0e} apart)"


def checks(work: Work, rows: Sequence[Row]) -> list[str]:
    """A line for each comparison that claims the same work: whether both sides read as many tokens in each turn, and
    the comparison of one step or of the results."""
    rows, lines = rows_of_work(work, rows), []
    for comparison in (comparison for comparison in work.comparisons if comparison.same):
        names = comparison.own, comparison.rival
        ours, theirs = ({row["round"]: row["tokens"] for row in turns(rows, name)} for name in names)
        equal = [ours[number] == theirs[number] for number in ours.keys() & theirs.keys()]
        same = DIFFERENT if not all(equal) else "the same examples in every turn" if equal else "no turn in common"
        found = [row for row in rows if row["kind"] == "check" and row["rival"] == comparison.rival]
        lines += [f"{' and '.join(names)}: {same}; {check_line(row)}" for row in found]
    return lines


def speed_note(rows: Sequence[Row]) -> str | None:
    """Returns a remark if the speed of the machine's matrix products changed between rounds."""
    speeds = [row["flops"] / row["seconds"] / 1e9 for row in rows if row["kind"] == "turn" and "flops" in row]
    if not speeds or max(speeds) <= STEADY_RATIO * min(speeds):
        return None
    return (
        f"the machine's own products ran at {min(speeds):.0f} to {max(speeds):.0f} GFLOP/s, so speeds of different "
        "rounds differ, and ratios within a round do not"
    )


def foreign_line(rows: Sequence[Row]) -> str | None:
    """Returns the fraction of the processors that others used while the works were measured; None if unknown."""
    fractions = [row["foreign"] for row in rows if row["kind"] == "finished" and "foreign" in row]
    if not fractions:
        return None
    used = (
        f"{max(fractions):.1%} of the processors{': do not trust the figures' if max(fractions) > MAX_FOREIGN else ''}"
    )
    return f"other processes, the system and other machines of the host used {used}"


def share_line(work: Work, rows: Sequence[Row]) -> str | None:
    """The fraction of the machine's matrix products that lmtool reaches, if the work has an aim for it."""
    share = shares(work, rows, work.own[-1].name)
    if share is None or work.share_aim is None:
        return None
    return (
        f"{work.own[-1].label}: the FLOPs of its real tokens are {share:.0%} of what the machine's own products "
        f"do; aim {work.share_aim:.0%} {aim_verdict(share.median >= work.share_aim)}"
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def machine_line(rows: Sequence[Row]) -> str:
    """Describes the machine (the first row) and its rates (in the first row of examples)."""
    machine, speeds = rows[0], next((row["gflops"] for row in rows if row["kind"] == "examples"), {})
    parts = [f"{machine['processor']}, {machine['cores']} cores, as many threads"]
    parts.append(", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "lmtool")))
    if speeds:
        products = ", ".join(f"{name} {value:.0f}" for name, value in speeds.items())
        parts.append(f"matrix products {products} GFLOP/s")
    busy = " (others were at work: do not trust the figures)" if machine["load_before"] > MAX_LOAD else ""
    return "Machine: " + "; ".join([*parts, f"load before {machine['load_before']:g}{busy}"])


def settings_line(settings: Row) -> str:
    model = settings["model"]
    return (
        f"Both: BERT or GPT-2, H{model['hidden_size']} L{model['num_layers']} heads {model['num_heads']}"
        f" FF{model['feedforward_size']} V{model['vocab_size']}, dropout {model['dropout']:g}, attention dropout"
        f" {model['attention_dropout']:g}, {settings['precision']}, fused AdamW, clip {settings['clip_norm']:g}"
    )


def variant_line(work: Work, variant: Variant, rows: Sequence[Row]) -> str:
    """Speed, padding, fraction of the machine's products, memory and milliseconds a step of a variant. On CUDA also the
    graphs that torch.compile built after the first steps, and how often a step makes the host wait."""
    own = turns(rows, variant.name)
    if not own:
        why = next((row["why"] for row in rows if row["kind"] == "failed" and row["variant"] == variant.name), None)
        return f"not measured{': ' + why if why else ''}"
    speed, share = Spread.of(rates(rows, variant.name, work.unit).values()), shares(work, rows, variant.name)
    padding = 1 - sum(row["tokens"] for row in own) / sum(row["slots"] for row in own)
    whole, above = (held / 1e6 for held in memory(rows, variant.name))
    span, part = f"({speed.smallest:.0f}-{speed.largest:.0f})", "" if share is None else f"{share.median:.0%}"
    step = 1000 * sum(row["seconds"] for row in own) / sum(row["steps"] for row in own)
    line = f"{speed.median:8.0f}  {span:>15}  {padding:7.0%}  {part:>8}  {whole:7.0f}  {above:13.0f}  {step:7.1f}"
    counted = [row for row in rows if row["kind"] == "counted" and row["variant"] == variant.name and "waits" in row]
    if counted:
        graphs = sum(row["graphs"] for row in own)
        line += f"  {graphs:10}  {counted[-1]['waits'] / counted[-1]['steps']:5.1f}"
    return line


def compose(work: Work, rows: Sequence[Row]) -> str:
    """The table of a work, from the rows of its turns."""
    rows = rows_of_work(work, rows)
    width = max(len(variant.label) for variant in work.variants)
    head = (
        f"  {'':{width}}  {work.unit + '/s':>8}  {'(min-max)':>15}  padding  products  peak MB  above imports  ms/step"
    )
    head += "  recompiles  waits" if any(row["kind"] == "counted" for row in rows) else ""
    lines = [work.title, head]
    lines += [f"  {variant.label:{width}}  {variant_line(work, variant, rows)}" for variant in work.variants]
    table = ratios(work, rows)
    for ratio in table:
        own, rival = (work.variant(name).label for name in (ratio.comparison.own, ratio.comparison.rival))
        rounds = "1 round" if ratio.rounds == 1 else f"{ratio.rounds} rounds"
        held = f"memory {ratio.memory:.2f}x"
        if ratio.comparison.aim is not None:
            held += f", aim {MEMORY_AIM:g}x {aim_verdict(ratio.memory <= MEMORY_AIM)}"
        lines.append(
            f"  {ratio.speed.median:.2f}x as fast ({ratio.speed.smallest:.2f} to {ratio.speed.largest:.2f} in {rounds};"
            f" {ratio.verdict}), {held}: {own} over {rival}"
        )
    notes = [share_line(work, rows), *checks(work, rows), *(work.notes if table else ()), speed_note(rows)]
    notes.append(foreign_line(rows))
    return "\n".join([*lines, *(f"  {note}" for note in notes if note)])


def markdown_row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown(works: Sequence[Work], rows: Sequence[Row]) -> str:
    """The table of docs/speed.md, with a row for each comparison. rows: those of the machine and the settings first."""
    lines = [markdown_row("work", "lmtool", "compared with", "times as fast", "aim", "peak memory")]
    lines.append(markdown_row("---", "---", "---", "---:", "---", "---:"))
    for work in works:
        measured = {(ratio.comparison.own, ratio.comparison.rival): ratio for ratio in ratios(work, rows)}
        title = work.title.partition(",")[0]
        for number, comparison in enumerate(work.comparisons):
            own, rival = (work.variant(name).label for name in (comparison.own, comparison.rival))
            ratio = measured.get((comparison.own, comparison.rival))
            speed, share = (f"{ratio.speed:.2f}", f"{ratio.memory:.2f}") if ratio else ("not measured", "")
            aim = "" if comparison.aim is None else f"{comparison.aim:g}x"
            aim = ratio.verdict.removeprefix("aim ").lower() if ratio and aim else aim
            lines.append(markdown_row(title if not number else "", own, rival, speed, aim, share))
    found = [row for row in rows if row["kind"] == "check"]
    steps, results = ([is_same(row) for row in found if ("results" in row) == part] for part in (False, True))
    about = [share_line(work, rows) for work in works] + [speed_note(rows), foreign_line(rows)]
    claims = (("one step", steps), ("the tokens, vectors or scores", results))
    about += [
        f"{what} of both sides {'was' if what == 'one step' else 'were'} the same in {sum(same)} of {len(same)} "
        "comparisons that claim it"
        for what, same in claims
        if same
    ]
    lines += ["", f"{machine_line(rows)}. {settings_line(rows[1])}."]
    lines.append(
        f"Peak memory: lmtool's over the other's, aim {MEMORY_AIM:g}; medians, smallest and largest of rounds."
    )
    sentences = (line if line.startswith("lmtool") else line[0].upper() + line[1:] for line in about if line)
    return "\n".join([*lines, *(f"{sentence}." for sentence in sentences)])
