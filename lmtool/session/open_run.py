"""A run under way: its folder, opened and locked, and where it speaks."""

from __future__ import annotations

import hashlib
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.config import saved
from lmtool.config.checkpoint import read_config, read_state
from lmtool.config.plugins import command_line
from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.reporting.trackers.base import RunMetadata
from lmtool.reporting.trackers.tracking import Trackers
from lmtool.resolver.decoding import completed
from lmtool.resolver.schema.run import RunConfig
from lmtool.resolver.trunks import phases_ended
from lmtool.runs.following import FollowedFolder
from lmtool.runs.identity import BUDGETS, budgets
from lmtool.runs.run_folder import RunFolder, select_folder
from lmtool.system.files import MANIFEST
from lmtool.system.secrets import masked
from lmtool.system.signals import Interrupts, stopped, take_late
from lmtool.training.compiling import require_compiler
from lmtool.training.consistency import keys, require_same, versions
from lmtool.training.group import ALONE, ProcessGroup, process_group
from lmtool.training.launching import note_run
from lmtool.training.precision import Precision, select_device, select_precision

_COMPARED = 10_000  # steps of the past, evenly spaced


def require_same_past(verb: str, config: RunConfig, folder: Path, point: Path) -> None:
    """UserError, with the command of a branch, where the past of a run is not what it would have been with the budgets
    that it has now. folder: the run's. point: the checkpoint that it resumes from."""
    state, before = read_state(point), read_config(point)
    given = {key: getattr(config, key) for key in budgets(before) if getattr(config, key) != before[key]}
    typed = [f"{key}={'null' if value is None else value}" for key, value in given.items()]
    command = ["lmtool", verb, f"branch={folder}@{state['step']}", *typed]
    if state.get("ended") == "patience":
        raise UserError(
            f"{folder} was ended by patience after step {state['step']}: a larger budget does not train it further",
            " ".join(map(shlex.quote, [*command, "patience=null", "name=NEW"])),
        )
    if phases_ended(state):
        raise UserError(
            f"{folder} cannot be extended: its phases are shares of the budget, and those of a larger one would "
            f"have had other borders before step {state['step']}",
            f"start another run from its weights: the same command with checkpoint={folder} name=NEW",
        )
    old, new = _horizon(before, state), _new_horizon(config, before, state)
    schedule, done = build(config.schedule), state["step"]
    for step in np.unique(np.linspace(1, done, min(done, _COMPARED)).round()).astype(int).tolist():
        then, now = schedule(step, old), schedule(step, new)
        if then != now:
            keys = ", ".join(f"{key} {before[key]:g} -> {value or math.inf:g}" for key, value in given.items())
            raise UserError(
                f"{folder} cannot be extended ({keys}): schedule={config.schedule.name} depends on the end of the run. "
                f"The learning rate of step {step} was {then * config.optimizer.lr:.3g}, and would have been "
                f"{now * config.optimizer.lr:.3g}",
                " ".join(map(shlex.quote, [*command, "name=NEW"])),
            )


def _horizon(before: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    """The steps of the run as its schedule saw them."""
    return state.get("total_steps") or before.get("max_steps") or math.inf


def _new_horizon(config: RunConfig, before: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    """The steps of the run with its new budgets; where these are no steps, in proportion to the one that set them."""
    steps, bound = config.max_steps or math.inf, state.get("horizon")
    if bound not in BUDGETS or bound == "max_steps" or bound not in before:
        return steps
    limit = getattr(config, str(bound))
    return min(steps, math.inf if limit is None else math.ceil(_horizon(before, state) * limit / before[bound]))


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
    group: ProcessGroup = ALONE

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
    precision = select_precision(config.precision, select_device(config.device))
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


def _followed(verb: str, config: RunConfig, precision: Precision, group: ProcessGroup, data: dict[str, Any]) -> OpenRun:
    """The run as the processes behind the first have it."""
    path, result = group.first(("", None))
    folder, output = FollowedFolder(Path(path), data, result), Output()
    return OpenRun(verb, config, folder, output, precision, _trackers(verb, config, folder, output), group)


@contextmanager
def _opened(
    verb: str, config: RunConfig, stem: str, precision: Precision, group: ProcessGroup, data: dict[str, Any]
) -> Iterator[OpenRun]:
    """The run as the process has it that writes."""
    others, folder = RUNS.exists(), None
    try:
        folder = select_folder(RUNS, config.name, config.run_dir, stem)
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
        opened = folder is not None and (folder / "config.yaml").exists()
        resume = command_line("resume", str(folder)) if opened else None
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
    metadata = partial(
        RunMetadata,
        str(path),
        masked(f"{path.parent.name}/{path.name}" if is_job else path.name),
        masked(path.parent.name) if is_job else None,
        verb,
        run.config,
        config.offline,
    )
    chosen = config.logger if run.writes else {}
    return Trackers(chosen, metadata, lambda line: output.line(line), _warned(output))


def _warned(output: Output) -> Callable[[str], None]:
    return lambda text: output.line(f"warning: {text}", "yellow")
