"""`lmtool runs [FOLDER]`: all runs and sweeps of a folder, a line each."""

from __future__ import annotations

import time
from pathlib import Path

from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.reporting.runs import lines_in, print_runs
from lmtool.reporting.text import size
from lmtool.system.terminal import say


def main(words: list[str]) -> int:
    """words: the folder to list; runs/ if there is none."""
    if len(words) > 1 or any("=" in word for word in words):
        raise UserError(f"{' '.join(['runs', *words])}: give one folder, or none for runs", "lmtool runs FOLDER")
    root = Path(words[0] if words else "runs").expanduser()
    if not root.is_dir():
        raise UserError(f"{root}: no such folder", "lmtool pretrain experiment=bert_tiny makes a first run")
    lines = lines_in(root)
    if not lines:
        say(f"{root} holds no run yet")
        return 0
    print_runs(Output(), lines, time.time())
    say(f"{len(lines)} in {root}, {size(sum(line.size for line in lines))}; lmtool report {root}/NAME shows one")
    return 0
