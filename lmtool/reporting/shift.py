"""The table of `lmtool inspect` that says how far texts and labels are from each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.reporting.text import percent

_HEADINGS = ("from", "to", "rows", "words", "by chance", "unknown words", "unknown types", "labels")


def print_shifts(output: Output, shifts: Sequence[Any], heading: str) -> None:
    """shifts: as `lmtool.tasks.shift.Shift`."""
    rows = [
        [
            shift.source, shift.target, f"{shift.rows:,}", f"{shift.words:.4f}", f"{shift.chance:.4f}",
            percent(shift.unknown), percent(shift.unknown_types),
            "" if shift.labels is None else f"{shift.labels:.4f}",
        ]
        for shift in shifts
    ]  # fmt: skip
    if rows:
        print_table(output, list(_HEADINGS), rows, f"shift · {heading}")
        output.paragraph(
            "words, labels: Jensen-Shannon divergence in bits, 0 to 1; by chance: of a draw of the first rows beside "
            "the rest of them; unknown: what the first rows never have; of 20,000 rows of a side at most", "dim"
        )  # fmt: skip
