"""A run under way: its folder, opened and locked, and where it speaks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lmtool.config import saved
from lmtool.config.plugins import command_line
from lmtool.errors import UserError
from lmtool.manifest import MANIFEST
from lmtool.reporting.console import Output
from lmtool.resolver.decoding import completed
from lmtool.runs.following import FollowedFolder
from lmtool.runs.run_folder import RunFolder, choose_folder
from lmtool.schema.run import RunConfig
from lmtool.secrets import masked
from lmtool.session.extending import require_same_past
from lmtool.signals import Interrupts, stopped, take_late
from lmtool.trackers.base import RunFacts
from lmtool.trackers.tracking import Trackers
from lmtool.training.agreement import keys, require_same, versions
from lmtool.training.compiling import require_compiler
from lmtool.training.group import ALONE, Group
from lmtool.training.launching import note_run
from lmtool.training.precision import Precision, choose_device, choose_precision
from lmtool.training.processes import process_group

RUNS = Path("runs")


@dataclass
class OpenRun:
    """One run under way: its folder, where it speaks, and in which number format it computes."""

    verb: str
    config: RunConfig
    folder: RunFolder
    output: Output
    precision: Precision
    trackers: Trackers
    group: Group = ALONE

    @cached_property
    def checkpoint(self) -> Path | None:
        """The run's own checkpoint that it resumes from, where it has one: intact, and the same for all that is read
        from it, in all processes. Damaged ones are reported when it is first asked for; all processes ask at once."""
        point = self.folder.resume_point(_warned(self.output)) if self.folder.writes else None
        point = self.group.first(point)
        if isinstance(self.folder, FollowedFolder):
            self.folder.follow(point)
        if point is not None:
            manifest = point / MANIFEST
            content = manifest.read_bytes() if manifest.is_file() else b""
            require_same(
                self.group, {f"checkpoint {point}": hashlib.sha256(content).hexdigest() if content else "none"}
            )
        return point


@contextmanager
def open_run(verb: str, config: RunConfig, stem: str) -> Iterator[OpenRun]:
    """Open the run's folder, locked; what is said goes to its log too.

    stem: what a run without a name is called, before its counter.
    """
    precision = choose_precision(config.precision, choose_device(config.device))
    require_compiler(config.compile, precision.device)
    take_late()  # of a run before, in this process
    with Interrupts(), process_group(precision.device) as group:
        data = saved.save(config, verb)
        if group.size > 1:
            require_same(group, {**versions(tuple(config.plugins)), **keys(saved.body(data))})
        if group.rank > 0:
            yield _followed(verb, config, precision, group, data)
            return
        with _opened(verb, config, stem, precision, group, data) as opened:
            yield opened


def _followed(verb: str, config: RunConfig, precision: Precision, group: Group, data: dict[str, Any]) -> OpenRun:
    """The run as the processes behind the first have it."""
    path, result = group.first(("", None))
    folder, output = FollowedFolder(Path(path), data, result), Output()
    return OpenRun(verb, config, folder, output, precision, _trackers(verb, config, folder, output), group)


@contextmanager
def _opened(
    verb: str, config: RunConfig, stem: str, precision: Precision, group: Group, data: dict[str, Any]
) -> Iterator[OpenRun]:
    """The run as the process has it that writes."""
    others, folder = RUNS.exists(), None
    try:
        folder = choose_folder(RUNS, config.name, config.run_dir, stem)
        same_past = partial(require_same_past, verb, config)
        with RunFolder(folder, data, saved.to_yaml(data), same_past, completed) as run:
            output = Output(log=run.append_log)
            if run.extends:  # held against its past before anything is written
                run.resume_point(_warned(output))
            note_run(run.path)
            result = run.result()
            group.first((str(run.path), result))
            if result is None:
                run.write_environment(sys.argv, {"device": str(precision.device), "devices": group.size})
            with _trackers(verb, config, run, output) as trackers:
                yield OpenRun(verb, config, run, output, precision, trackers, group)
    except KeyboardInterrupt as interrupt:
        resume = None if folder is None else command_line("resume", str(folder))
        raise stopped(interrupt, " while the run was made ready", resume) from interrupt
    except UserError:
        if not others:  # a mistake leaves no empty folder behind; one with runs in it stays
            with suppress(OSError):
                RUNS.rmdir()
        raise


def _trackers(verb: str, config: RunConfig, run: RunFolder, output: Output) -> Trackers:
    """The trackers of a run; of several processes that train together the first one's alone."""
    path = run.path.resolve()
    is_job = (path / "job.json").is_file()
    facts = partial(
        RunFacts,
        str(path),
        masked(f"{path.parent.name}/{path.name}" if is_job else path.name),
        masked(path.parent.name) if is_job else None,
        verb,
        run.config,
        config.offline,
    )
    chosen = config.logger if run.writes else {}
    return Trackers(chosen, facts, lambda line: output.line(line), _warned(output))


def _warned(output: Output) -> Callable[[str], None]:
    return lambda text: output.line(f"warning: {text}", "yellow")
