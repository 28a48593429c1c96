"""`lmtool runs [FOLDER]`: a table of all runs and sweeps in a folder, also as a page. `lmtool runs prune`: frees space
in it."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import yaml

from lmtool.config import saved
from lmtool.config.base import JsonMapping
from lmtool.config.registry import command_line
from lmtool.errors import UserError
from lmtool.reporting import html
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.run_files import RunFiles, read_object, read_result
from lmtool.reporting.scores import score_of
from lmtool.reporting.sweep_files import DONE_JOB, is_sweep, last_step_text, read_sweep
from lmtool.reporting.text import duration, is_number, size, title
from lmtool.resolver.commands import PruneConfig
from lmtool.runs.finding import removable_optimizers, remove_optimizer
from lmtool.runs.identity import finished_result
from lmtool.runs.locks import is_held
from lmtool.system.files import user_path
from lmtool.system.terminal import counted, say

_HEADER = ("run", "last written", "what", "score", "baseline", "state", "took", "size")


def main(words: list[str]) -> int:
    """Prints the table of runs, and writes it as a page. words: the folder to list, at most one; runs/ without one."""
    if len(words) > 1 or any("=" in word for word in words):
        raise UserError(f"{' '.join(['runs', *words])}: takes at most one folder", "lmtool runs FOLDER")
    root = user_path(words[0] if words else "runs")
    if not root.is_dir():
        hint = "name the folder of your runs, or start a first run: lmtool pretrain experiment=bert_tiny"
        raise UserError(f"{root}: no such folder", hint)
    folders = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    lines = [_sweep_line(path) if is_sweep(path) else _run_line(path) for path in folders]
    runs = sorted((line for line in lines if line is not None), key=lambda line: line.last_write)
    if not runs:
        say(f"{root} has no runs yet")
        return 0
    now = time.time()
    rows = [
        [
            run.name,
            _ago(run.last_write, now),
            run.description,
            f"{title(run.metric)} {run.score}".strip(),
            run.baseline,
            run.state,
            None if run.seconds is None else duration(run.seconds),
            size(run.size),
        ]
        for run in runs
    ]
    print_table(Output(), _HEADER, rows)
    total = size(sum(run.size for run in runs))
    say(f"{counted(len(runs), 'run')} in {root}, {total}; lmtool report {root}/NAME shows one")
    say(_write_page(root, runs))
    return 0


def _write_page(root: Path, runs: Sequence[RunLine]) -> str:
    path = root / "index.html"
    if not any(run.is_own for run in runs):
        return f"{path} was not written: lmtool wrote no config.yaml in the folder"
    if os.path.lexists(path) and not _is_own_page(path):
        return f"{path} was not written: lmtool did not write the file that is there"
    values = [
        {
            "line": run,
            "path": "" if run.is_sweep else shlex.quote(str(root / run.name)),
            "page": quote(f"{run.name}/{run.page}") if run.page else "",
            "written": _time(run.last_write),
            "took": "" if run.seconds is None else duration(run.seconds),
            "size": size(run.size),
        }
        for run in reversed(runs)
    ]
    summary = f"{counted(len(runs), 'run')}, {size(sum(run.size for run in runs))}"
    folder = {"folder": str(root), "quoted_folder": shlex.quote(str(root))}
    try:
        html.write_page(path, "runs.html", f"Runs in {root}", runs=values, summary=summary, **folder)
    except UserError as error:
        return f"{path} was not written: {error.message}"
    return f"page: {path}"


def _is_own_page(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return html.GENERATOR.encode() in file.read(1000)
    except OSError:
        return False


def prune(config: PruneConfig) -> None:
    """Lists the optimizer states of finished runs that no resume needs; removes them if `delete` is true."""
    root = user_path(config.folder)
    if not root.is_dir():
        raise UserError(f"folder={root}: no such folder", "name the folder of your runs, or a run")
    removable: dict[Path, int] = {}
    for folder in (root, *sorted(root.glob("*")), *sorted(root.glob("*/*"))):
        if folder.is_symlink() or not (folder / "config.yaml").is_file() or finished_result(folder) is None:
            continue
        if not is_held(folder / "LOCK"):
            keys = saved.read(folder / "config.yaml")
            keep, keep_every = keys.get("keep"), keys.get("keep_every")
            removable |= removable_optimizers(folder / "checkpoints", config.keep_optimizer, keep, keep_every)
    if not removable:
        say(f"{root} has no optimizer state that a finished run does not need")
        return
    print_table(Output(), ("checkpoint", "size"), [[str(folder), size(bytes_)] for folder, bytes_ in removable.items()])
    total = size(sum(removable.values()))
    if not config.delete:
        options = ["keep_optimizer=none"] if config.keep_optimizer == "none" else []
        say(f"{total} could be freed: {command_line('runs', 'prune', str(root), *options, 'delete=true')}")
        return
    for folder in removable:
        remove_optimizer(folder)
    say(f"{total} freed")


@dataclass(frozen=True)
class RunLine:
    """A run or a sweep. last_write: last modification of a file, in seconds since 1970. score: the value and its
    standard error as text. size: in bytes. page: the name of its page; "" without one. is_own: whether lmtool wrote
    it."""

    name: str
    last_write: float
    description: str
    metric: str
    value: float | None
    score: str
    baseline: float | None
    state: str
    seconds: float | None
    size: int
    page: str
    is_own: bool
    is_sweep: bool = False


def _ago(timestamp: float, now: float) -> str:
    """Returns '3 h 5 min ago' within the last day, otherwise '2026-03-01 14:05'."""
    past = now - timestamp
    if 0 <= past < 86_400:
        return f"{duration(past)} ago"
    return _time(timestamp)


def _time(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(timestamp))


def _run_line(folder: Path) -> RunLine | None:
    if not (folder / "config.yaml").is_file():
        return None
    config: object = None
    with suppress(OSError, yaml.YAMLError, UnicodeDecodeError):
        config = saved.load((folder / "config.yaml").read_text(encoding="utf-8"))
    files = RunFiles(folder)
    files.result = read_result(files, required=False)
    files.metadata = read_object(files, "facts.json", required=False)
    score = score_of(files.result, files.baseline)
    timestamp, size_bytes = _written_and_size(folder)
    seconds = files.result.get("seconds")
    return RunLine(
        folder.name,
        timestamp,
        _description(config),
        "" if score is None else score.metric,
        None if score is None else score.value,
        "" if score is None else score.text.removeprefix(title(score.metric)).strip(),
        None if score is None else score.baseline,
        _state(folder, files.result),
        float(seconds) if is_number(seconds) else None,
        size_bytes,
        _page(folder, "report.html"),
        isinstance(config, dict) and {"version", "command"} <= config.keys(),
    )


def _sweep_line(folder: Path) -> RunLine:
    sweep = read_sweep(folder)
    counts = Counter(job.status for job in sweep.jobs)
    state = f"{counts.pop(DONE_JOB, 0)} of {len(sweep.jobs)} done"
    state = ", ".join([state, *(f"{count} {status}" for status, count in counts.items())])
    seconds = [job.seconds for job in sweep.jobs if job.seconds is not None]
    timestamp, size_bytes = _written_and_size(folder)
    description = f"sweep of {sweep.command}".removesuffix(" of ")
    return RunLine(
        folder.name,
        timestamp,
        description,
        metric="",
        value=None,
        score="",
        baseline=None,
        state=state,
        seconds=sum(seconds) if seconds else None,
        size=size_bytes,
        page=_page(folder, "sweep.html"),
        is_own=True,
        is_sweep=True,
    )


def _page(folder: Path, name: str) -> str:
    path = folder / name
    return name if path.is_file() and not path.is_symlink() else ""


def _state(folder: Path, result: JsonMapping) -> str:
    if is_held(folder / "LOCK"):
        return f"running {last_step_text(folder)}".rstrip()
    status = result.get("status")
    return title(str(status)) if status else f"stopped {last_step_text(folder)}".rstrip()


def _description(config: object) -> str:
    """Returns the command, model, task and tuning: `finetune bert on sst2, lora`."""
    if not isinstance(config, dict):
        return "config.yaml cannot be read"

    def name(section: str, *keys: str) -> str:
        values = config.get(section)
        names = (values.get(key) for key in keys) if isinstance(values, dict) else ()
        return str(next(filter(None, names), ""))

    learned_name = name("task", "name", "kind") or name("objective", "name")
    tuning = name("tuning", "name")
    words = [str(config.get("command", "")), name("model", "name"), f"on {learned_name}" if learned_name else ""]
    return " ".join(filter(None, words)) + (f", {tuning}" if tuning not in ("", "full") else "")


def _written_and_size(folder: Path) -> tuple[float, int]:
    timestamp, size_bytes = folder.stat().st_mtime, 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                stat = os.lstat(os.path.join(path, name))
                timestamp, size_bytes = max(timestamp, stat.st_mtime), size_bytes + stat.st_size
    return timestamp, size_bytes
