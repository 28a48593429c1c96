"""A run under way: its folder, opened and locked, and where it speaks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lmtool.commands.configs import RunConfig
from lmtool.commands.decoding import completed
from lmtool.commands.extending import require_same_past
from lmtool.config import saved
from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.runs.run_folder import RunFolder, choose_folder
from lmtool.secrets import masked
from lmtool.trackers.base import RunFacts
from lmtool.trackers.tracking import Trackers
from lmtool.training.compiling import require_compiler
from lmtool.training.precision import Precision, choose_device, choose_precision

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

    @property
    def checkpoint(self) -> Path | None:
        """The run's own checkpoint that it resumes from, where it has one: intact, and the same for all that is read
        from it. Damaged ones are reported when it is first asked for."""
        return self.folder.resume_point(_warned(self.output))


@contextmanager
def open_run(verb: str, config: RunConfig, stem: str) -> Iterator[OpenRun]:
    """Open the run's folder, locked; what is said goes to its log too.

    stem: what a run without a name is called, before its counter.
    """
    precision = choose_precision(config.precision, choose_device(config.device))
    require_compiler(config.compile, precision.device)
    others = RUNS.exists()
    try:
        folder = choose_folder(RUNS, config.name, config.run_dir, stem)
        data = saved.save(config, verb)
        same_past = partial(require_same_past, verb, config)
        with RunFolder(folder, data, saved.to_yaml(data), same_past, completed) as run:
            output = Output(log=run.append_log)
            if run.extends:  # held against its past before anything is written
                run.resume_point(_warned(output))
            if run.result() is None:
                run.write_environment(sys.argv, {"device": str(precision.device)})
            with _trackers(verb, config, run, output) as trackers:
                yield OpenRun(verb, config, run, output, precision, trackers)
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


def words(command: Sequence[str]) -> str:
    """A command line as a user would type it."""
    return " ".join(shlex.quote(word) for word in command)
