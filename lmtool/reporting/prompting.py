"""What `lmtool evaluate shots=` prints: scores over draws of demonstrations, beside what answering blindly scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.reporting.text import plain

_LINES, _WIDTH = 12, 100


def print_prompted(output: Output, title: str, shots: int, summary: Mapping[str, Any], prompt: str) -> None:
    """One split. summary: `n`, `metrics`, `baseline`, `questions`, `cut`, `kept`, `warnings`, as
    `lmtool.session.prompted_evaluation` has them. prompt: the first question, of which the end is shown."""
    metrics, baseline = summary["metrics"], summary["baseline"]
    draws = len(next(iter(metrics.values()))["draws"])
    rows = []
    for name, score in metrics.items():
        deviation = "" if score["standard_deviation"] is None else f"{score['standard_deviation']:.4f}"
        each = " ".join(f"{value:.4f}" for value in score["draws"])
        rows.append([name, f"{score['mean']:.4f}", deviation, each, f"{baseline['metrics'][name]:.4f}"])
    several = f"{draws} draws" if draws > 1 else "1 draw"
    heading = f"{title} · {shots} {'shot' if shots == 1 else 'shots'} · n = {summary['n']:,} · {several}"
    print_table(output, ["metric", "mean", "standard deviation", "draws", str(baseline["name"])], rows, heading=heading)
    lines = prompt.split("\n")
    output.line("the first prompt ends:" if len(lines) > _LINES else "the first prompt:")
    for line in lines[-_LINES:]:
        output.line(f"  {plain(line, _WIDTH)}", "dim")
    if summary["cut"]:
        output.line(
            f"warning: {summary['cut']:,} of {summary['questions']:,} prompts had no room for {shots} demonstrations: "
            f"the oldest were left out, {summary['kept']:.1f} stayed on the mean; max_length= reads more",
            "yellow",
        )
    for warning in summary["warnings"]:
        output.line(f"warning: {plain(warning, 2 * _WIDTH)}", "yellow")
