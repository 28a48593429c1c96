"""The table that ends a sweep."""

from __future__ import annotations

from pathlib import Path

from lmtool.reporting.console import Output
from lmtool.reporting.sweep.files import SweepFiles, read_sweep
from lmtool.reporting.sweep.groups import Block, blocks_of
from lmtool.reporting.sweep.page import write_sweep
from lmtool.reporting.sweep.words import group_table, headline, sentences, status_line, unscored_table
from lmtool.reporting.table import print_table
from lmtool.reporting.text import plain
from lmtool.system.terminal import counted

_GROUPS, _UNSCORED = 60, 20


def report_sweep(output: Output, folder: str | Path, against: str | None = None) -> SweepFiles:
    """Print the summary of a sweep's folder, and write sweep.html and sweep.csv there. against: as in `blocks_of`.
    UserError where the folder holds no sweep, or cannot be written."""
    sweep = read_sweep(folder)
    blocks = blocks_of(sweep, against)
    print_summary(output, sweep, blocks)
    for path in write_sweep(sweep, blocks):
        output.line(str(path))
    return sweep


def print_summary(output: Output, sweep: SweepFiles, blocks: list[Block]) -> None:
    """Print the groups of each block, best first, the jobs without a score, and the sentences to quote."""
    output.line(f"{plain(sweep.name, 80)}: {status_line(sweep)}", "bold")
    for block in blocks:
        header, rows = group_table(block)
        heading = plain(block.learns, 80) if len(blocks) > 1 else None
        print_table(output, header, rows[:_GROUPS], heading, best=0)
        if len(rows) > _GROUPS:
            output.line(f"and {counted(len(rows) - _GROUPS, 'more setting')}, in sweep.html and sweep.csv")
    header, rows = unscored_table(sweep)
    if rows:
        print_table(output, header, rows[:_UNSCORED], "without a score")
    if len(rows) > _UNSCORED:
        output.line(f"and {len(rows) - _UNSCORED} more, in sweep.csv")
    for block in blocks:
        output.line(headline(block), "bold")
        for sentence in sentences(block):
            output.line(sentence)
    for problem in sweep.problems:
        output.line(f"warning: {problem}", "yellow")
