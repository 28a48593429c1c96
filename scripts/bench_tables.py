"""The tables of `make bench`: as text for the terminal, and in markdown for docs/speed.md."""

from __future__ import annotations

from collections.abc import Sequence

from bench_figures import (
    STEP_TOLERANCE,
    Row,
    Spread,
    apart,
    checks,
    fractions,
    memory,
    memory_verdict,
    of_work,
    rates,
    ratios,
    share_line,
    turns,
    unsteady,
)
from bench_works import MEMORY_AIM, Variant, Work

BUSY = 0.5


def machine_line(rows: Sequence[Row]) -> str:
    """The machine, which is the first row, and its rates, which the first examples came with."""
    machine, rates = rows[0], next((row["gflops"] for row in rows if row["kind"] == "examples"), {})
    parts = [
        f"{machine['processor']}, {machine['cores']} cores, as many threads",
        ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "lmtool")),
    ]
    if rates:
        products = ", ".join(f"{name} {value:.0f}" for name, value in rates.items())
        parts.append(f"matrix products {products} GFLOP/s")
    busy = " (others were at work: do not trust the figures)" if machine["load_before"] > BUSY else ""
    parts.append(f"load before {machine['load_before']:g}{busy}")
    return "Machine: " + "; ".join(parts)


def settings_line(settings: Row) -> str:
    model = settings["model"]
    return (
        f"Both: BERT or GPT-2, H{model['hidden_size']} L{model['num_layers']} heads {model['num_heads']}"
        f" FF{model['feedforward_size']} V{model['vocab_size']}, dropout {model['dropout']:g}, attention dropout"
        f" {model['attention_dropout']:g}, {settings['precision']}, fused AdamW, clip {settings['clip_norm']:g}"
    )


def variant_line(work: Work, variant: Variant, rows: Sequence[Row]) -> str:
    """Speed, padding, the share of the machine's products, and memory of a variant."""
    own = turns(rows, variant.name)
    if not own:
        why = next((row["why"] for row in rows if row["kind"] == "failed" and row["variant"] == variant.name), None)
        return f"not measured{': ' + why if why else ''}"
    speed, share = Spread.of(rates(rows, variant.name, work.unit).values()), fractions(work, rows, variant.name)
    padding = 1 - sum(row["tokens"] for row in own) / sum(row["slots"] for row in own)
    whole, above = (held / 1e6 for held in memory(rows, variant.name))
    span = f"({speed.smallest:.0f}-{speed.largest:.0f})"
    part = "" if share is None else f"{share.median:.0%}"
    return f"{speed.median:8.0f}  {span:>15}  {padding:7.0%}  {part:>8}  {whole:7.0f}  {above:13.0f}"


def compose(work: Work, rows: Sequence[Row]) -> str:
    """The table of a work, from the rows of its turns."""
    rows = of_work(work, rows)
    width = max(len(variant.label) for variant in work.variants)
    head = f"  {'':{width}}  {work.unit + '/s':>8}  {'(min-max)':>15}  padding  products  peak MB  above imports"
    lines = [work.title, head]
    lines += [f"  {variant.label:{width}}  {variant_line(work, variant, rows)}" for variant in work.variants]
    table = ratios(work, rows)
    for ratio in table:
        own, rival = (work.variant(name).label for name in (ratio.comparison.own, ratio.comparison.rival))
        rounds = "1 round" if ratio.rounds == 1 else f"{ratio.rounds} rounds"
        lines.append(
            f"  {ratio.speed.median:.2f}x as fast ({ratio.speed.smallest:.2f} to {ratio.speed.largest:.2f} in {rounds};"
            f" {ratio.verdict}), memory {memory_verdict(ratio.memory)}: {own} over {rival}"
        )
    notes = [share_line(work, rows), *checks(work, rows), *(work.notes if table else ()), unsteady(rows)]
    return "\n".join([*lines, *(f"  {note}" for note in notes if note)])


def cells(*values: str) -> str:
    return "| " + " | ".join(values) + " |"


def sentence(line: str) -> str:
    """A line as a sentence begins; a command's name stays as it is typed."""
    return line if line.startswith("lmtool") else f"{line[0].upper()}{line[1:]}"


def markdown(works: Sequence[Work], rows: Sequence[Row]) -> str:
    """The table of docs/speed.md: a row a comparison. rows: of the machine and the settings first."""
    lines = [cells("work", "lmtool", "beside", "times as fast", "aim", "peak memory")]
    lines.append(cells("---", "---", "---", "---:", "---", "---:"))
    for work in works:
        measured = {(ratio.comparison.own, ratio.comparison.rival): ratio for ratio in ratios(work, rows)}
        title = work.title.partition(",")[0]
        for number, comparison in enumerate(work.comparisons):
            own, rival = (work.variant(name).label for name in (comparison.own, comparison.rival))
            ratio = measured.get((comparison.own, comparison.rival))
            speed, memory_share = (f"{ratio.speed:.2f}", f"{ratio.memory:.2f}") if ratio else ("not measured", "")
            aim = "" if comparison.aim is None else f"{comparison.aim:g}x"
            if ratio and aim:
                aim = ratio.verdict.removeprefix("aim ").lower()
            lines.append(cells(title if not number else "", own, rival, speed, aim, memory_share))
    steps = [max(apart(row)) <= STEP_TOLERANCE for row in rows if row["kind"] == "check"]
    about = [share_line(work, rows) for work in works] + [unsteady(rows)]
    about.append(f"one step of both sides was the same in {sum(steps)} of {len(steps)} comparisons that claim it")
    lines += ["", f"{machine_line(rows)}. {settings_line(rows[1])}."]
    lines.append(
        f"Peak memory: lmtool's over the other's, aim {MEMORY_AIM:g}; medians, smallest and largest of rounds."
    )
    return "\n".join([*lines, *(f"{sentence(line)}." for line in about if line)])
