"""`lmtool fetch`: downloads everything that a run reads from the network, so that it can run with `offline=true`.

Each source of the configuration is opened by the reader that the run uses: first offline, to check whether it is
cached, then online. A second `fetch` therefore downloads nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtool.costs.memory_of_run import TrainingConfig
from lmtool.data.configs import DataConfig, HubConfig, hub_folder
from lmtool.data.hub_source import complete_shards, folder_of
from lmtool.data.sources import open_source
from lmtool.distillation.configs.modes import CodistillationConfig
from lmtool.errors import UserError
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.text import size
from lmtool.resolver.commands import FinetuneConfig
from lmtool.runs.finding import find
from lmtool.session import suite
from lmtool.system.files import Damaged
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.mixture import GlueConfig, TaskTextConfig, tasks_of
from lmtool.tasks.files import read_hub
from lmtool.tokenizers.configs import TOKENIZER_FILES, FolderConfig
from lmtool.weights.base import saved_base
from lmtool.weights.folders import fetch_file, hf_folder, tokenizer_folder, weight_file
from lmtool.weights.reading import shards_of_index
from lmtool.weights.sentence_encoders import Dense, dense_file, sentence_encoder


def is_remote(checkpoint: str) -> bool:
    """Whether a checkpoint, or the base of a tuned one, is on the hub. Raises UserError if the checkpoint cannot be
    read."""
    if "://" in checkpoint:
        return True
    if hf_folder(checkpoint, offline=True) is not None:
        return False
    base = saved_base(find(checkpoint))
    address = None if base is None else base.address()
    return address is not None and is_remote(address)


def files_of(checkpoint: str, offline: bool) -> list[Path]:
    """Returns the files of a checkpoint that a run reads, including those of its base if it was tuned. Raises UserError
    if a file is missing.

    offline: whether connections are forbidden.
    """
    published = hf_folder(checkpoint, offline)
    if published is None:
        folder = find(checkpoint)
        base = saved_base(folder)
        address = None if base is None else base.address()
        files = [path for path in folder.iterdir() if path.is_file()]
        return files if address is None else [*files, *files_of(address, offline)]
    files = [weight_file(published, offline)]
    if files[0].name.endswith(".index.json"):
        shards = sorted(set(shards_of_index(files[0]).values()))
        files += [path for name in shards if (path := fetch_file(published, name, offline)) is not None]
    encoder = sentence_encoder(published, offline)
    modules = () if encoder is None else encoder.modules
    files += [dense_file(published, module, offline) for module in modules if isinstance(module, Dense)]
    return [*files, *(path for name in TOKENIZER_FILES if (path := published.path / name).is_file())]


PRESENT, FETCHED, MISSING = "was there", "fetched", "missing"


@dataclass(frozen=True)
class RemoteSource:
    """A source that a run reads from the network. name: as typed. read: takes `offline`, and returns the known files of
    the source; raises UserError if it is not available."""

    name: str
    read: Callable[[bool], Iterable[Path]]


def run(config: TrainingConfig, verb: str, words: Sequence[str]) -> int:
    """Fetches all sources and prints their states. words: the command line of the run. Raises UserError if a source
    could not be fetched, after fetching the others."""
    output = Output()
    sources = list({source.name: source for source in remote_sources(config, output)}.values())
    if not sources:
        output.line(f"lmtool {verb} reads nothing from the network: nothing to fetch")
        return 0
    rows: list[list[str]] = []
    failures: list[UserError] = []
    for source in sources:
        state, files, failure = _fetched(source, config.offline, output)
        total = sum(path.stat().st_size for path in files)
        rows.append([source.name, state, size(total) if total else ""])
        failures += [] if failure is None else [failure]
    print_table(output, ["what", "state", "size"], rows, heading=f"fetch of lmtool {verb}")
    if failures:
        more = f" (missing: {len(failures)} of {len(sources)} sources)" if len(sources) > 1 else ""
        raise UserError(f"{failures[0].message}{more}", failures[0].hint)
    overrides = [word for word in words if word != "offline=true"]
    output.line(f" next   {shlex.join(['lmtool', *overrides, 'offline=true'])}")
    return 0


def _fetched(source: RemoteSource, offline: bool, output: Output) -> tuple[str, list[Path], UserError | None]:
    try:
        return PRESENT, list(source.read(True)), None
    except UserError as absent:
        if offline:
            return MISSING, [], absent
    output.line(f"fetching {source.name} …")
    try:
        return FETCHED, list(source.read(False)), None
    except UserError as failure:
        return MISSING, [], failure


def remote_sources(config: TrainingConfig, output: Output) -> Iterator[RemoteSource]:
    """Yields the sources that a run reads from the network."""
    yield from _checkpoints(config)
    path = config.tokenizer.path if isinstance(config.tokenizer, FolderConfig) else ""
    if "://" in path:
        yield RemoteSource(f"tokenizer.path={path}", lambda offline: tokenizer_folder(path, offline).iterdir())
    if isinstance(config, FinetuneConfig):
        tasks = (
            tuple(suite.tasks_of_suite(config.task))
            if isinstance(config.task, GlueConfig)
            else config.task.member_configs()
        )
        yield from _tasks(config, tasks)
        return
    for phase in config.phase_configs:
        yield from _tasks(config, tasks_of(phase.objective))
        if isinstance(phase.data, TaskTextConfig):
            yield from _tasks(config, phase.data.task.member_configs())
        elif isinstance(phase.data, HubConfig):
            yield _hub_text(config, phase.data, output)
        elif phase.data.downloads:
            yield _text(config, phase.data, output)


def _checkpoints(config: TrainingConfig) -> Iterator[RemoteSource]:
    origins = [("checkpoint", config.checkpoint)]
    if isinstance(config.distill, CodistillationConfig):
        origins.append(("distill.checkpoint", config.distill.checkpoint))
    origins += [("distill.teacher", teacher) for teacher in config.distill.checkpoints]
    for key, origin in origins:
        if origin is not None and origin != "none" and is_remote(origin):
            yield RemoteSource(f"{key}={origin}", lambda offline, origin=origin: files_of(origin, offline))  # type: ignore[misc]


def _tasks(config: TrainingConfig, tasks: Iterable[TaskConfig]) -> Iterator[RemoteSource]:
    for task in tasks:
        if task.path is None and task.embedded is None and task.hub is not None:
            yield _task(config, task)


def _task(config: TrainingConfig, task: TaskConfig) -> RemoteSource:
    def read(offline: bool) -> list[Path]:
        read_hub(task, config.cache_dir, offline)
        return _files_in(Path(hub_folder(str(task.hub), config.cache_dir)))

    return RemoteSource(f"task={task.name} ({task.hub})", read)


def _text(config: TrainingConfig, data: DataConfig, output: Output) -> RemoteSource:
    def read(offline: bool) -> list[Path]:
        open_source(data, config.cache_dir, output.stage, offline)
        return []

    return RemoteSource(f"data={data.name}", read)


def _hub_text(config: TrainingConfig, data: HubConfig, output: Output) -> RemoteSource:
    splits = (data.split, *([] if data.validation is None else [data.validation]))

    def read(offline: bool) -> list[Path]:
        folders = [folder_of(data, split, config.cache_dir) for split in splits]
        if not offline or not all(map(_is_complete, folders)):
            open_source(data, config.cache_dir, output.stage, offline)
        return [path for folder in folders for path in _files_in(folder)]

    return RemoteSource(f"data={data.name} ({data.hub})", read)


def _is_complete(folder: Path) -> bool:
    try:
        return complete_shards(folder) is not None
    except Damaged:
        return False


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
