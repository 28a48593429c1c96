"""The table of all runs and sweeps in a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from lmtool.config import saved
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.run_files import Baseline, RunFiles, read_object
from lmtool.reporting.scores import score_of
from lmtool.reporting.sweep_files import DONE_JOB, is_sweep, last_step_text, read_sweep
from lmtool.reporting.text import duration, size, title
from lmtool.runs.locks import is_held

_HEADER = ("run", "last written", "what", "score", "baseline", "state", "took", "size")


@dataclass(frozen=True)
class RunLine:
    """A run or a sweep. written: last modification of a file, in seconds since 1970. size: in bytes."""

    name: str
    written: float
    what: str
    score: str
    baseline: float | None
    state: str
    seconds: float | None
    size: int


def lines_in(root: Path) -> list[RunLine]:
    """The runs and sweeps directly in a folder, latest last."""
    folders = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    read = [_of_sweep(path) if is_sweep(path) else _of_run(path) for path in folders]
    return sorted((line for line in read if line is not None), key=lambda line: line.written)


def print_runs(output: Output, lines: Sequence[RunLine], now: float) -> None:
    """Prints the table of runs. now: in seconds since 1970, for relative times."""
    rows = [
        [line.name, _ago(line.written, now), line.what, line.score, line.baseline, line.state,
         None if line.seconds is None else duration(line.seconds), size(line.size)]
        for line in lines
    ]  # fmt: skip
    print_table(output, _HEADER, rows)


def _ago(written: float, now: float) -> str:
    """'3 h 5 min ago' within the last day, otherwise '2026-03-01 14:05'."""
    past = now - written
    if 0 <= past < 86_400:
        return f"{duration(past)} ago"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(written))


def _of_run(folder: Path) -> RunLine | None:
    """None if the folder is not a run."""
    if not (folder / "config.yaml").is_file():
        return None
    files = RunFiles(folder)
    result = read_object(files, "result.json", needed=False)
    baseline = read_object(files, "facts.json", needed=False).get("baseline")
    examples = result.get("validation_examples")
    score = score_of(
        result,
        cast(Baseline, baseline) if isinstance(baseline, dict) else None,
        examples if isinstance(examples, int) else None,
    )
    written, size_bytes = _written_and_size(folder)
    seconds = result.get("seconds")
    return RunLine(
        folder.name,
        written,
        _what(folder),
        "" if score is None else score.text,
        None if score is None else score.baseline,
        _state(folder, result),
        float(seconds) if isinstance(seconds, (int, float)) else None,
        size_bytes,
    )


def _of_sweep(folder: Path) -> RunLine:
    sweep = read_sweep(folder)
    done = [job for job in sweep.jobs if job.status == DONE_JOB]
    counts: dict[str, int] = {}
    for job in sweep.jobs:
        if job.status != DONE_JOB:
            counts[job.status] = counts.get(job.status, 0) + 1
    state = ", ".join([f"{len(done)} of {len(sweep.jobs)} done", *(f"{n} {status}" for status, n in counts.items())])
    seconds = [job.seconds for job in sweep.jobs if job.seconds is not None]
    written, size_bytes = _written_and_size(folder)
    what = f"sweep of {sweep.command}".removesuffix(" of ")
    return RunLine(folder.name, written, what, "", None, state, sum(seconds) if seconds else None, size_bytes)


def _state(folder: Path, result: dict[str, Any]) -> str:
    """'running at step N', 'stopped at step N', or the status in result.json."""
    if is_held(folder / "LOCK"):
        return f"running {last_step_text(folder)}".rstrip()
    status = result.get("status")
    return title(str(status)) if status else f"stopped {last_step_text(folder)}".rstrip()


def _what(folder: Path) -> str:
    """Command, model, task and tuning: `finetune bert on sst2, lora`."""
    config: Any = None
    with suppress(OSError, yaml.YAMLError, UnicodeDecodeError):
        config = saved.load((folder / "config.yaml").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        return "config.yaml cannot be read"

    def name(section: str, *keys: str) -> str:
        values = config.get(section)
        named = (values.get(key) for key in keys) if isinstance(values, dict) else ()
        return str(next((value for value in named if value), ""))

    learned = name("task", "name", "kind") or name("objective", "name")
    tuning = name("tuning", "name")
    words = [str(config.get("command", "")), name("model", "name"), f"on {learned}" if learned else ""]
    return " ".join(filter(None, words)) + (f", {tuning}" if tuning not in ("", "full") else "")


def _written_and_size(folder: Path) -> tuple[float, int]:
    """The last modification of a file below the folder, and the bytes of all files. Skips files that vanish
    meanwhile."""
    written, size_bytes = folder.stat().st_mtime, 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                stat = os.lstat(os.path.join(path, name))
                written, size_bytes = max(written, stat.st_mtime), size_bytes + stat.st_size
    return written, size_bytes
