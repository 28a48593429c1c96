"""`lmtool report RUN [RUN ...]`: write the report of a run again, or lay several beside each other."""

from __future__ import annotations

from lmtool.config.checkpoint import run_folder
from lmtool.errors import UserError
from lmtool.reporting.comparison import write_comparison
from lmtool.reporting.console import Output
from lmtool.reporting.report import write_report


def main(words: list[str]) -> int:
    """words: run folders."""
    if not words or any("=" in word for word in words):
        raise UserError(f"{' '.join(['report', *words])}: give run folders", "lmtool report runs/NAME")
    folders = [run_folder(word) for word in words]
    if len(folders) == 1:
        page = write_report(folders[0])
    else:
        page = write_comparison(folders, folders[0].parent / "comparison.html")
    Output().line(str(page))
    return 0
