"""The lines that a sweep prints while it runs, and the sweep's summary."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from lmtool.config.base import JsonMapping
from lmtool.errors import DONE, UserError
from lmtool.reporting.console import Output
from lmtool.reporting.run_files import RunFiles, read_object
from lmtool.reporting.sweep_files import NOT_STARTED, count_finished, read_sweep
from lmtool.reporting.sweep_report import end_line, report_sweep
from lmtool.reporting.text import number
from lmtool.runs.files import replace_text
from lmtool.runs.finding import SWEEP
from lmtool.sweeps import folders
from lmtool.sweeps.folders import JobEntry
from lmtool.system.secrets import masked_data
from lmtool.system.terminal import say_error


def show(folder: Path) -> list[int]:
    """Prints the summary of a sweep, writes the report files, and returns the exit statuses of the started jobs."""
    try:
        sweep = report_sweep(Output(), folder)
    except UserError as error:
        # A report that cannot be written must not change the outcome of the sweep.
        say_error(error.message, error.hint)
        sweep = read_sweep(folder)
    return [job.exit_status for job in sweep.jobs if job.status != NOT_STARTED]


def write_plan(folder: Path, command: str, jobs: Sequence[Sequence[str]] | None) -> None:
    """Records the requested jobs and the start time. jobs: the overrides of each job; None if the sweeper chooses the
    jobs while running."""
    requested = None if jobs is None else [[text.lstrip("+") for text in overrides] for overrides in jobs]
    plan = {"command": command, "jobs": requested, "started": time.time(), "ended_before": count_finished(folder)}
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / SWEEP, json.dumps(masked_data(plan), ensure_ascii=False) + "\n")


def end_of_job(record: dict[str, object], folder: Path) -> str:
    """Returns the line about a finished job, with the remaining time, which is extrapolated from the jobs that this
    start of the sweep has finished. folder: the sweep's folder."""
    plan = read_object(RunFiles(folder), SWEEP, required=False)
    requested, count = plan.get("jobs"), count_finished(folder)
    if not isinstance(requested, list):
        return end_line(record, count, None, None)
    seconds_left, finished_now = None, count - int(plan.get("ended_before") or 0)
    if finished_now > 0 and isinstance(plan.get("started"), int | float):
        seconds_left = max(time.time() - plan["started"], 0.0) / finished_now * max(len(requested) - count, 0)
    return end_line(record, count, len(requested), seconds_left)


# Lines about the start, progress and end of jobs in other processes.

_POLL_SECONDS = 0.5
_TAIL_BYTES = 4096


class Watch(threading.Thread):
    """A thread that polls the folders of jobs, and prints their start, progress and end until the context ends."""

    def __init__(self, entries: Sequence[JobEntry], output: Output):
        super().__init__(daemon=True)
        self.entries, self.output = entries, output
        self._records = {entry.number: folders.read_record(entry.folder) for entry in entries}
        self._ended = threading.Event()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        with ExitStack() as stack:
            live = None
            if self.output.live:
                from rich.live import Live

                live = stack.enter_context(Live(console=self.output.console, transient=True, refresh_per_second=2))
            while not self._ended.wait(_POLL_SECONDS):
                self._print_changes()
                if live is not None:
                    live.update("\n".join(self._progress_lines()))
            self._print_changes()

    def _print_changes(self) -> None:
        for entry in self.entries:
            record = folders.read_record(entry.folder)
            if record and record != self._records[entry.number]:
                self._records[entry.number] = record
                if record.get("error"):
                    self.output.line(f"job {record.get('job')}: {record['error']}")
                ended = record.get("exit_status") == DONE or record.get("error")
                self.output.line(end_of_job(record, entry.folder.parent) if ended else start_line(record))

    def _progress_lines(self) -> list[str]:
        running = [entry for entry in self.entries if folders.running_process(self._records[entry.number])]
        return [f"job {entry.number}{progress(entry.folder)}  {entry.folder.name}" for entry in running]


def start_line(record: JsonMapping) -> str:
    """Returns the line about a job that starts or resumes."""
    verb = "resumes" if record.get("resumed") else "runs"
    varied = " ".join(f"{key}={value}" for key, value in record.get("varied", {}).items())
    return f"job {record.get('job')} {verb}{f': {varied}' if varied else ''}; {record.get('folder')}/{folders.LOG}"


def progress(folder: Path) -> str:
    """Returns `  step 120  loss 3.21` for the last complete row of metrics.jsonl; "" if there is none."""
    with suppress(OSError, ValueError, IndexError):
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            row = json.loads(file.read().split(b"\n")[-2])
        loss = row.get("loss")
        return f"  step {row['step']}" + (f"  loss {number(loss)}" if isinstance(loss, int | float) else "")
    return ""
