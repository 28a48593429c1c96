"""Waiting for jobs that submitit has handed to a queue or to processes of their own.

submitit asks sacct how a job ended, which many clusters do not have, and raises at the first job without a result. Here
each job is waited for, and how it ended stands in its folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmtool.sweeps import records

_ASK_EVERY = 5.0
"""Seconds between two questions to SLURM about a job."""


class Waited:
    """A job that was submitted. folder: of the job in its sweep."""

    def __init__(self, submitted: Any, folder: Path, by_slurm: bool):
        self.submitted, self.folder, self.by_slurm = submitted, folder, by_slurm
        self._asked = time.monotonic()

    def results(self) -> list[None]:
        """Wait for its end, however it ends; `job.json` says how."""
        while not self.ended():
            time.sleep(0.2)
        return [None]

    def ended(self) -> bool:
        if self.submitted.paths.result_pickle.exists():
            return True
        if not self.by_slurm:
            return bool(self.submitted.done())
        if time.monotonic() - self._asked < _ASK_EVERY:
            return False
        self._asked = time.monotonic()
        return records.queue_state(self.submitted.job_id) is None

    def interrupt(self) -> None:
        """End it: the training saves a checkpoint first; what has not started never does."""
        if self.by_slurm:
            for command in (["--signal=INT"], ["--state=PENDING"]):
                with suppress(OSError):
                    words = ["scancel", *command, self.submitted.job_id]
                    subprocess.run(words, capture_output=True, check=False)
            return
        interrupt(self.folder, signal.SIGINT)


def interrupt(folder: Path, number: int) -> None:
    """Send a signal to the process of this machine that runs the job of a folder."""
    record = records.read(folder)
    owner = record.get("owner")
    if isinstance(owner, dict) and "slurm" not in record and records.under_way(record):
        with suppress(OSError):
            os.kill(owner["pid"], number)


@contextmanager
def waited_for(folders: Sequence[Path]) -> Iterator[list[Waited]]:
    """Inside, what submitit's launcher submits is waited for as `Waited`; the list fills when it does."""
    import submitit
    from submitit.local import local

    known, jobs = submitit.AutoExecutor, list[Waited]()

    class Executor(known):  # type: ignore[misc, valid-type]
        """The one difference: what it gives back."""

        def map_array(self, *arguments: Any) -> list[Waited]:
            submitted = super().map_array(*arguments)
            by_slurm = self.cluster == "slurm"
            jobs.extend(Waited(job, folder, by_slurm) for job, folder in zip(submitted, folders, strict=True))
            return jobs

    submitit.AutoExecutor = Executor  # type: ignore[misc]
    # Out of the terminal's group: its Ctrl-C would end what looks after a job, which kills the job a second later.
    apart = partial(subprocess.Popen, process_group=0)
    local.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": apart})  # type: ignore[assignment]
    try:
        yield jobs
    finally:
        local.subprocess = subprocess
        submitit.AutoExecutor = known  # type: ignore[misc]
