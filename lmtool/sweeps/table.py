"""What a sweep says while it runs, and the summary that ends it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.reporting.run_files import RunFiles, read_object
from lmtool.reporting.sweep.files import NOT_STARTED, PLAN, ended, read_sweep
from lmtool.reporting.sweep.screen import report_sweep
from lmtool.reporting.sweep.words import end_line
from lmtool.runs.files import replace_text
from lmtool.secrets import masked_data
from lmtool.terminal import say_error


def show(folder: Path) -> list[int]:
    """Print the summary of a sweep and write its files; the exit statuses of its jobs, of those that never ran none."""
    try:
        sweep = report_sweep(Output(), folder)
    except UserError as error:
        # The jobs are what the sweep was for: a page that cannot be written does not decide how it ended.
        say_error(error.message, error.hint)
        sweep = read_sweep(folder)
    return [job.exit_status for job in sweep.jobs if job.status != NOT_STARTED]


def write_plan(folder: Path, command: str, jobs: Sequence[Sequence[str]] | None) -> None:
    """Note what was asked for and when, before the first job. jobs: the overrides of each; None where the sweeper
    chooses them on the way."""
    planned = None if jobs is None else [[text.lstrip("+") for text in typed] for typed in jobs]
    plan = {"command": command, "jobs": planned, "started": time.time(), "ended_before": ended(folder)}
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / PLAN, json.dumps(masked_data(plan), ensure_ascii=False) + "\n")


def end_of_job(record: dict[str, Any], folder: Path) -> str:
    """The line for a job that has ended. folder: of the sweep. The time left is that of the others at the rate of this
    start, whichever processes they run in."""
    plan = read_object(RunFiles(folder), PLAN, needed=False)
    planned, count = plan.get("jobs"), ended(folder)
    if not isinstance(planned, list):
        return end_line(record, count, None, None)
    left, ended_here = None, count - int(plan.get("ended_before") or 0)
    if ended_here > 0 and isinstance(plan.get("started"), int | float):
        left = max(time.time() - plan["started"], 0.0) / ended_here * max(len(planned) - count, 0)
    return end_line(record, count, len(planned), left)
