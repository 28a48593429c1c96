"""A line a job while jobs run in other processes: when it starts, how far it is, how it ended."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from lmtool.errors import DONE
from lmtool.reporting.console import Output
from lmtool.reporting.text import number
from lmtool.sweeps import records
from lmtool.sweeps.folders import Place
from lmtool.sweeps.table import end_of_job

_SECONDS = 0.5
_TAIL = 4096


class Watch(threading.Thread):
    """Reads the folders of jobs until it is left: nothing has to reach this process from the others."""

    def __init__(self, places: Sequence[Place], output: Output):
        super().__init__(daemon=True)
        self.places, self.output = places, output
        self._known = {place.number: records.read(place.folder) for place in places}
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        with ExitStack() as stack:
            live = None
            if self.output.live:
                from rich.live import Live

                live = stack.enter_context(Live(console=self.output.console, transient=True, refresh_per_second=2))
            while not self._over.wait(_SECONDS):
                self._look()
                if live is not None:
                    live.update("\n".join(self._under_way()))
            self._look()

    def _look(self) -> None:
        for place in self.places:
            record = records.read(place.folder)
            if record and record != self._known[place.number]:
                self._known[place.number] = record
                if record.get("error"):
                    self.output.line(f"job {record.get('job')}: {record['error']}")
                ended = record.get("exit_status") == DONE or record.get("error")
                self.output.line(end_of_job(record, place.folder.parent) if ended else start_line(record))

    def _under_way(self) -> list[str]:
        running = [place for place in self.places if records.under_way(self._known[place.number])]
        return [f"job {place.number}{progress(place.folder)}  {place.folder.name}" for place in running]


def start_line(record: dict[str, Any]) -> str:
    verb = "resumes" if record.get("resumed") else "runs"
    varied = " ".join(f"{key}={value}" for key, value in record.get("varied", {}).items())
    return f"job {record.get('job')} {verb}{f': {varied}' if varied else ''}; {record.get('folder')}/{records.LOG}"


def progress(folder: Path) -> str:
    """`  step 120  loss 3.21`, of the last row of metrics.jsonl; "" where there is none yet."""
    with suppress(OSError, ValueError, IndexError):
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            row = json.loads(file.read().split(b"\n")[-2])
        loss = row.get("loss")
        return f"  step {row['step']}" + (f"  loss {number(loss)}" if isinstance(loss, int | float) else "")
    return ""
