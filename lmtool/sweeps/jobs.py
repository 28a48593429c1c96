"""Sweeps: Hydra's own launchers and sweepers run one command many times.

One folder a sweep with one child a job. Each child has a `job.json` (what was varied, how it ended), so that the
summary at the end reads the same whichever process a launcher ran a job in.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from lmtool import errors
from lmtool.config import compose, overrides
from lmtool.config.overrides import Offers, Typed
from lmtool.config.saved import save, to_yaml
from lmtool.errors import ConfigError, LmtoolError, Problem, Stopped, UserError
from lmtool.reporting.sweep.files import PLAN
from lmtool.secrets import masked_data
from lmtool.sweeps.table import end_of_job, write_plan
from lmtool.terminal import say, say_error

# What ends worst comes last.
_SEVERITY = (
    errors.DONE,
    errors.REQUEUE,
    errors.CHECK_FAILED,
    errors.USER_ERROR,
    errors.DIVERGED,
    errors.FAULT,
    errors.TERMINATED,
    errors.INTERRUPTED,
)
# Hydra writes no log, no copy of the configuration and changes no folder: the run folder is lmtool's.
_QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null", "hydra.job.chdir=false"]


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as typed. read, decode and run are functions of modules, for launchers that pickle them.

    read(overrides, offers) -> what was typed; decode(data, problems, running) -> configuration;
    run(data, overrides) -> the job's result, a dict or None.
    show(folder) prints the summary that ends it; the exit statuses of its jobs.
    """

    verb: str
    primary: str
    overrides: Sequence[str]
    config_dirs: Sequence[Path]
    read: Callable[[Sequence[str], Offers], Typed]
    decode: Callable[[dict[str, Any], Sequence[Problem], bool], Any]
    run: Callable[[dict[str, Any], list[str]], Any]
    show: Callable[[Path], Sequence[int]]


def run(request: SweepRequest, *, print_config: bool = False, root: Path = Path("runs")) -> int:
    """Run a sweep, print its table, and return the exit status of its worst job.

    Every job is decoded before the first starts, where the jobs are known beforehand: a mistake in any leaves nothing
    behind. print_config: print each job's configuration instead.
    """
    offers = compose.what_is_offered(request.primary, request.config_dirs)
    typed = request.read(request.overrides, offers)
    chosen = {text.partition("=")[0]: text.partition("=")[2] for text in typed.hydra}
    known = chosen.get("hydra/sweeper", "basic") == "basic" and not any(
        key.startswith("hydra.sweeper") for key in chosen
    )
    if typed.problems and not known:
        raise ConfigError(typed.problems)
    if known:
        here = chosen.get("hydra/launcher", "basic") == "basic" and not print_config
        configs = list(_decoded_jobs(request, typed, here))
        if print_config:
            say("---\n".join(to_yaml(save(config, request.verb)) for config in configs).removesuffix("\n"))
            return errors.DONE
    folder = Path(chosen["hydra.sweep.dir"]) if "hydra.sweep.dir" in chosen else _folder(request, typed, root)
    interrupted = errors.DONE
    try:
        write_plan(folder, request.verb, [[*job.choices, *job.values] for job in jobs_of(typed)] if known else None)
        _launch(request, typed, folder, chosen)
    except UserError:
        with contextlib.suppress(OSError):  # where nothing has run in them
            (folder / PLAN).unlink(missing_ok=True)
            folder.rmdir()
            folder.parent.rmdir()
        raise
    except KeyboardInterrupt:
        interrupted = errors.INTERRUPTED
    except SystemExit as stopped:
        interrupted = stopped.code if isinstance(stopped.code, int) else errors.FAULT
    finally:
        _mask_file(folder / "multirun.yaml")
    return max([interrupted, *request.show(folder)], key=_severity)


def _severity(status: int) -> int:
    return _SEVERITY.index(status) if status in _SEVERITY else len(_SEVERITY)


def _decoded_jobs(request: SweepRequest, typed: overrides.Typed, running: bool) -> Iterator[Any]:
    """The configuration of each job. Raises ConfigError with the errors of all jobs, each reported once."""
    problems: dict[str, Problem] = {problem.message: problem for problem in typed.problems}
    configs = []
    for job in jobs_of(typed):
        try:
            data = compose.compose(request.primary, job, request.config_dirs)
            configs.append(request.decode(data, typed.problems, running))
        except ConfigError as error:
            problems |= {problem.message: problem for problem in error.problems if problem.message not in problems}
    if problems:
        raise ConfigError(list(problems.values()))
    yield from configs


def jobs_of(typed: overrides.Typed) -> Iterator[overrides.Typed]:
    """The jobs of a plain sweep: every combination of the values, the last key fastest, as Hydra orders them."""
    parser = OverridesParser.create()
    choices, varied = [], []
    for text in typed.all:
        override = parser.parse_override(text)
        if text in typed.hydra or not override.is_sweep_override():
            varied.append([text])
        elif override.is_discrete_sweep():
            varied.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            message = f"{text.lstrip('+')}: the plain sweeper takes lists of values"
            raise UserError(message, "separate the values by commas, or take a range: range(1,4)")
        choices.append(text in typed.choices)
    for combination in itertools.product(*varied):
        chosen = [text for text, is_choice in zip(combination, choices, strict=True) if is_choice]
        values = [text for text in combination if text not in chosen and not text.startswith(("hydra.", "hydra/"))]
        yield replace(typed, choices=chosen, values=values)


def _folder(request: SweepRequest, typed: overrides.Typed, root: Path) -> Path:
    """The sweep's folder, made: runs/NAME for a typed name, else the verb and the next free number."""
    named = [text.partition("=")[2] for text in typed.values if text.startswith("++name=")]
    try:
        if named and "," not in named[-1] and named[-1] != "null":
            folder = root / named[-1].strip("'\"")
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        for number in itertools.count(1):
            folder = root / f"{request.verb}-sweep-{number:04d}"
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        raise UserError(f"{root}: {error.strerror}", "start in a folder you can write to, or give name=NAME") from error
    raise AssertionError("itertools.count ends never")


def _launch(request: SweepRequest, typed: overrides.Typed, folder: Path, chosen: dict[str, str]) -> None:
    settings = [*_QUIET, f"hydra.sweep.dir='{folder}'", "hydra.sweep.subdir=${hydra.job.num}"]
    settings = [setting for setting in settings if setting.partition("=")[0] not in chosen]
    words = [*typed.all, *settings, *compose.search_path(request.config_dirs)]
    with compose.plainly(), compose.hydra_at() as hydra:
        compose.require_known_targets(hydra, request.primary, words)
        hydra.multirun(
            config_name=request.primary,
            task_function=partial(_job, request.run),
            overrides=words,
            with_log_configuration=False,
        )


def _job(run_command: Callable[[dict[str, Any], list[str]], Any], config: Any) -> float:
    """What a launcher calls: run one job in its folder, and give the sweeper its metric (nan where it has none).

    A failed job is written down and reported; the others run. An interrupt ends the sweep.
    """
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    typed = [text.lstrip("+") for text in settings.overrides.task]
    record: dict[str, Any] = {"job": settings.job.num, "overrides": typed, "exit_status": errors.FAULT}
    started = time.monotonic()
    _write(folder, record)
    say(f"job {settings.job.num}: {' '.join(typed)}")
    try:
        data = compose.to_data(config) | {"name": None, "run_dir": _shown(folder)}
        with errors.system_errors():
            result = run_command(data, typed) or {}
        record |= {"exit_status": errors.DONE, "metric": result.get("metric"), "value": result.get("value")}
    except Stopped as error:
        record |= {"exit_status": error.exit_status, "error": error.message}
        # Not an Exception, which Hydra would keep for the end: no further job starts.
        raise SystemExit(error.exit_status) from error
    except KeyboardInterrupt:
        record |= {"exit_status": errors.INTERRUPTED, "error": "interrupted"}
        raise
    except LmtoolError as error:
        record |= {"exit_status": error.exit_status, "error": error.message}
        say_error(f"job {settings.job.num}: {error.message}", error.hint)
    # A fault in one job (memory, a bug) must not cost the others; it is reported here and in the table.
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
        say(traceback.format_exc().rstrip(), sys.stderr)
    finally:
        record["seconds"] = round(time.monotonic() - started, 3)
        _write(folder, record)
        say(end_of_job(record, folder.parent))
    value = record.get("value")
    return float(value) if isinstance(value, int | float) else math.nan


def _shown(folder: Path) -> str:
    """The folder as the user would type it: relative to here where it lies below."""
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _write(folder: Path, record: dict[str, Any]) -> None:
    temporary = folder / "job.json.tmp"
    temporary.write_text(json.dumps(masked_data(record), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(folder / "job.json")


def _mask_file(path: Path) -> None:
    """Hydra's own note of a sweep holds what was typed: mask it."""
    if path.is_file():
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        if masked_data(data) != data:
            path.write_text(to_yaml(masked_data(data)), encoding="utf-8")
