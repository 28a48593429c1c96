"""Sweeps: one command run many times by Hydra's launchers and sweepers.

A sweep's folder has a subfolder per job. The `job.json` there records the varied keys and the outcome of the job, so
that the summary does not depend on the process that ran the job, and rerunning the command resumes the sweep.
"""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from lmtool import errors
from lmtool.config import compose, overrides
from lmtool.config.base import Config
from lmtool.config.overrides import AcceptedOverrides, CheckedOverrides, key_of
from lmtool.config.saved import JsonObject, save, to_yaml
from lmtool.errors import ConfigError, LmtoolError, Problem, UserError
from lmtool.reporting.sweep_files import JOB
from lmtool.reporting.text import lower_is_better
from lmtool.runs.finding import SWEEP
from lmtool.runs.identity import require_name, require_own_folder
from lmtool.sweeps import folders
from lmtool.sweeps.folders import JobEntry, Sweeper, SweepFolder
from lmtool.sweeps.job import Run
from lmtool.sweeps.launching import LOCAL, DryLauncher, FirstJobs, Launch, LaunchAdapter
from lmtool.sweeps.table import write_plan
from lmtool.system.files import user_path
from lmtool.system.signals import stop_error
from lmtool.system.terminal import counted, say


def with_grid(
    words: Sequence[str], accepted: AcceptedOverrides, primary: str, config_dirs: Sequence[Path]
) -> CheckedOverrides:
    """Checks the typed overrides. Adds the sweep values that the selected YAML files set for other keys."""
    checked = overrides.read(words, accepted, multirun=True)
    if checked.problems:
        return checked
    grid = compose.grid(primary, checked, config_dirs)
    typed_keys = {key_of(text) for text in words}
    from_yaml = [f"{key}={values}" for key, values in grid.items() if key_of(key) not in typed_keys]
    return overrides.read([*from_yaml, *words], accepted, multirun=True) if from_yaml else checked


BATCH_SIZE = "hydra.sweeper.max_batch_size"
"""The key for the number of jobs that the plain sweeper passes to its launcher at a time."""
# Exit statuses from best to worst.
_SEVERITY = (
    errors.DONE, errors.REQUEUE, errors.CHECK_FAILED, errors.USER_ERROR, errors.DIVERGED, errors.FAULT,
    errors.TERMINATED, errors.INTERRUPTED,
)  # fmt: skip
_SWEEPER_ERRORS = (AssertionError, ValueError, RuntimeError)
"""Exceptions that Hydra's sweepers raise."""
# Hydra must not write a log or a copy of the configuration, nor change the working directory: lmtool writes the run
# folder.
_QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null", "hydra.job.chdir=false"]


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as typed.

    verb: the command. primary: the command's primary YAML file. accepted: the keys and groups that the command accepts.
    decode(data, problems, running) returns a job's configuration; running: whether the job will run on this machine.
    run(data) runs a job with its complete configuration and returns the result; launchers can pickle it. show(folder)
    prints the final summary. typed: the arguments of the command line, for the command that resumes the sweep.
    has_result: whether the command writes a result.json.
    """

    verb: str
    primary: str
    accepted: AcceptedOverrides
    overrides: Sequence[str]
    config_dirs: Sequence[Path]
    decode: Callable[[JsonObject, Sequence[Problem], bool], Config]
    run: Run
    show: Callable[[Path], object]
    plugins: Sequence[str] = ()
    typed: Sequence[str] = ()
    has_result: bool = True


def run(request: SweepRequest, *, print_config: bool = False, root: Path = Path("runs")) -> int:
    """Runs a sweep, prints the summary, and returns the worst exit status of the jobs.

    If the jobs are known in advance, all are decoded before the first job starts, so that an error in any job leaves no
    files behind. If the sweeper chooses jobs by the scores of earlier jobs, each job is decoded before it starts.

    Args:
        request: the sweep.
        print_config: only print the configurations of the jobs (or of the jobs that the sweeper could start with).
        root: the parent of the sweep's folder.
    """
    checked = with_grid(request.overrides, request.accepted, request.primary, request.config_dirs)
    hydra_keys = {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in checked.hydra}
    launcher, sweeper = hydra_keys.get("hydra/launcher", "basic"), hydra_keys.get("hydra/sweeper", "basic")
    is_grid = sweeper == "basic"
    checked = _with_sweep_problems(checked, hydra_keys)
    if checked.problems and not is_grid:
        raise ConfigError(checked.problems)
    compose.require_plugin("hydra/launcher", launcher)
    compose.require_plugin("hydra/sweeper", sweeper)
    checked, name = _pop_name(checked)
    jobs = _decoded_jobs(request, checked, running=launcher in LOCAL and not print_config) if is_grid else None
    if print_config:
        configs = _first_configs(request, checked, hydra_keys) if jobs is None else [config for _, config in jobs]
        if jobs is None:
            say(f"# hydra/sweeper={sweeper} chooses jobs by the scores of earlier jobs; it could start with these")
        say("---\n".join(to_yaml(save(config, request.verb)) for config in configs).removesuffix("\n"))
        return errors.DONE
    folder = _create_folder(request, name, hydra_keys.get("hydra.sweep.dir"), root)
    was_empty = not any(folder.iterdir())
    resume = _resume_command(request, folder, name or hydra_keys.get("hydra.sweep.dir"))
    try:
        sweep = SweepFolder(folder, request.verb, checked)
        statuses = _run_jobs(request, checked, sweep, hydra_keys, jobs, resume)
    except (LmtoolError, OSError):
        if was_empty and not any(folder.glob(f"*/{JOB}")):  # an error leaves no files behind
            shutil.rmtree(folder, ignore_errors=True)
            if folder.parent == root and not any(root.iterdir()):
                root.rmdir()
        raise
    request.show(folder)
    worst = max([errors.DONE, *statuses], key=_severity)
    if worst != errors.DONE:
        say(f"to resume or repeat the unfinished jobs: {resume}")
    return worst


def _run_jobs(
    request: SweepRequest,
    checked: CheckedOverrides,
    sweep: SweepFolder,
    hydra_keys: dict[str, str],
    jobs: Sequence[tuple[list[str], Config]] | None,
    resume: str,
) -> list[int]:
    """Runs the jobs of a sweep in its folder. Returns the exit statuses of the jobs and of an interruption. jobs: their
    overrides and configurations; None if the sweeper chooses the jobs. resume: the command that resumes the sweep."""
    submitted = sweep.submitted()
    entries = [_entry(request, sweep, job, config) for job, config in jobs or ()]
    requested = submitted | {entry.folder: entry.overrides for entry in entries}
    write_plan(sweep.path, request.verb, None if jobs is None else list(requested.values()))
    launch: Launch | None = None
    try:
        with _composition(request, checked, sweep.path, hydra_keys) as (hydra, config):
            launch = Launch(sweep, config, Callbacks(config), request.run, request.plugins, request.has_result)
            say(f"{sweep.path}: {'a sweep' if jobs is None else counted(len(jobs), 'job')}; to resume it: {resume}")
            if jobs is None:
                _search(request, sweep, checked, hydra, launch)
            else:
                launch.start(entries, config.hydra.sweeper.max_batch_size)
    except KeyboardInterrupt as interrupt:
        status = (launch.interrupted if launch else 0) or stop_error(interrupt).exit_status
        return [status, *(launch.statuses() if launch else [])]
    except SystemExit as system_exit:
        return [system_exit.code if isinstance(system_exit.code, int) else errors.FAULT]
    return [launch.interrupted, *launch.statuses()]


@contextmanager
def _composition(
    request: SweepRequest, checked: CheckedOverrides, folder: Path, hydra_keys: dict[str, str]
) -> Iterator[tuple[Hydra, DictConfig]]:
    words = [*checked.all, *_hydra_defaults(folder, hydra_keys), *compose.search_path(request.config_dirs)]
    with compose.translated_errors(), compose.initialized_hydra() as hydra:
        with compose.named_list_errors(request.primary, words):
            compose.require_known_targets(hydra, request.primary, words)
        yield hydra, hydra.compose_config(request.primary, words, RunMode.MULTIRUN, with_log_configuration=False)


def _sweeper(hydra: Hydra, config: DictConfig, callbacks: Callbacks) -> Sweeper:
    """Returns the selected sweeper of Hydra; for optuna, the implementation behind the plugin."""
    sweeper = Plugins.instance().instantiate_sweeper(
        config=config,
        hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=callbacks),
        task_function=float,  # never called, since the launcher is replaced
    )
    return cast(Sweeper, getattr(sweeper, "sweeper", sweeper))


def _search(request: SweepRequest, sweep: SweepFolder, checked: CheckedOverrides, hydra: Hydra, launch: Launch) -> None:
    """Runs jobs that a sweeper of Hydra chooses by the scores of earlier jobs."""
    config = launch.config

    def prepare(job: list[str]) -> JobEntry:
        return _entry(request, sweep, job, _job_config(request, checked, job, running=launch.name in LOCAL))

    sweeper = _sweeper(hydra, config, launch.callbacks)
    sweeper.launcher = LaunchAdapter(launch, prepare)
    arguments = [str(text) for text in config.hydra.overrides.task]
    if config.hydra.runtime.choices["hydra/sweeper"] == "optuna":
        if not any(text.startswith("hydra.sweeper.direction=") for text in checked.hydra):
            sweeper.direction = _direction(request, checked, sweep)
        folders.resume_search(sweeper, arguments, sweep.path, request.has_result)
    try:
        sweeper.sweep(arguments=arguments)
    except LmtoolError:
        raise
    except _SWEEPER_ERRORS as error:
        if not any(sweep.path.glob(f"*/{JOB}")):
            raise _no_first_job(config, error) from error
        # A sweeper fails if all jobs have failed; the summary shows the errors of the jobs.
        say(f"warning: the sweeper ended early: {_error_text(error)}")


def _first_configs(request: SweepRequest, checked: CheckedOverrides, hydra_keys: dict[str, str]) -> list[Config]:
    """Returns the configurations of the jobs that a sweeper of Hydra could start with, without running any."""
    with (
        TemporaryDirectory(prefix="lmtool-sweep-") as folder,
        _composition(request, checked, Path(folder), hydra_keys) as (hydra, config),
    ):
        sweeper = _sweeper(hydra, config, Callbacks(config))
        sweeper.launcher = DryLauncher()
        if config.hydra.runtime.choices["hydra/sweeper"] == "optuna":
            folders.start_new_search(sweeper)
        try:
            sweeper.sweep(arguments=[str(text) for text in config.hydra.overrides.task])
        except FirstJobs as first:
            return [_job_config(request, checked, job, running=False) for job in first.jobs]
        except _SWEEPER_ERRORS as error:
            raise _no_first_job(config, error) from error
    raise UserError("the sweeper chose no job", "check the keys hydra.sweeper.*")


def _job_config(request: SweepRequest, checked: CheckedOverrides, job: Sequence[str], running: bool) -> Config:
    job_overrides = replace(checked, choices=[text for text in job if text[:1] != "+"], hydra=[])
    job_overrides.values = [text for text in job if text[:1] == "+"]
    return request.decode(compose.compose(request.primary, job_overrides, request.config_dirs), (), running)


def _no_first_job(config: DictConfig, error: Exception) -> UserError:
    name = config.hydra.runtime.choices["hydra/sweeper"]
    message = f"hydra/sweeper={name} failed before its first job: {_error_text(error)}"
    return UserError(message, "check the keys hydra.sweeper.*; --debug prints the traceback")


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _direction(request: SweepRequest, checked: CheckedOverrides, sweep: SweepFolder) -> str:
    """Returns "maximize" or "minimize" for the metric of the task if all jobs have the same task, else for the loss."""
    choices, values = (
        [text for text in texts if text.lstrip("+").partition("=")[0] in sweep.fixed]
        for texts in (checked.choices, checked.values)
    )
    data = compose.compose(request.primary, replace(checked, choices=choices, values=values), request.config_dirs)
    task = data.get("task")
    metric = str(task.get("metric")) if isinstance(task, dict) and task.get("metric") else "loss"
    direction = "minimize" if lower_is_better(metric) else "maximize"
    say(f"hydra.sweeper.direction={direction}, for the metric {metric}")
    return direction


def _entry(request: SweepRequest, sweep: SweepFolder, job: Sequence[str], config: Config) -> JobEntry:
    return sweep.entry(job, save(config, request.verb), json.loads(config.model_dump_json()))


def _hydra_defaults(folder: Path, hydra_keys: dict[str, str]) -> list[str]:
    """Returns the overrides of Hydra's configuration that lmtool adds, without the keys that the user typed."""
    quoted = str(folder).replace("'", "\\'")
    # GRID is cleared because `with_grid` has already added its values to the overrides.
    settings = [*_QUIET, f"hydra.sweep.dir='{quoted}'", f"{overrides.GRID}=null"]
    return [setting for setting in settings if setting.partition("=")[0] not in hydra_keys]


def _severity(status: int) -> int:
    return _SEVERITY.index(status) if status in _SEVERITY else len(_SEVERITY)


def _with_sweep_problems(checked: CheckedOverrides, hydra_keys: dict[str, str]) -> CheckedOverrides:
    """Adds problems for an invalid max_batch_size, and for keys that would put two jobs into one folder."""
    problems = list(checked.problems)
    size = hydra_keys.get(BATCH_SIZE, "null")
    if size != "null" and (not size.isdecimal() or int(size) < 1):
        problems.append(
            Problem(BATCH_SIZE, f"{BATCH_SIZE}={size} is not a positive integer", "omit it to start all jobs together")
        )
    if "hydra.sweep.subdir" in hydra_keys:
        subdir = hydra_keys["hydra.sweep.subdir"]
        message = f"hydra.sweep.subdir={subdir}: folders of jobs are named after the varied keys"
        problems.append(Problem("hydra.sweep.subdir", message, "omit it; set name=NAME to name the sweep"))
    for text in checked.values:
        key, _, value = text.lstrip("+").partition("=")
        if key == "run_dir":
            message = f"run_dir={value}: each job of a sweep has a separate folder"
            problems.append(Problem("run_dir", message, "set name=NAME or hydra.sweep.dir=FOLDER for the sweep"))
        if key == "name" and OverridesParser.create().parse_override(text).is_sweep_override():
            problems.append(Problem("name", f"name={value}: a sweep has one name", "set a single name=NAME"))
    return replace(checked, problems=problems)


def _pop_name(checked: CheckedOverrides) -> tuple[CheckedOverrides, str | None]:
    """Returns the overrides without the name of the sweep, and the name. Raises UserError if the name is invalid."""
    names = [text.partition("=")[2].strip("'\"") for text in checked.values if text.startswith("++name=")]
    name = names[-1] if names and names[-1] != "null" else None
    if name is not None and not any(problem.key == "name" for problem in checked.problems):
        require_name(name)
    return replace(checked, values=[text for text in checked.values if not text.startswith("++name=")]), name


def _resume_command(request: SweepRequest, folder: Path, location: str | None) -> str:
    words = [word for word in request.typed if not word.startswith("name=")]
    is_named = len(words) < len(request.typed)  # otherwise a location was typed as hydra.sweep.dir=
    name = [] if location and not is_named else [f"name={folder.name}"]
    return shlex.join(["lmtool", request.verb, *words, *name])


def _decoded_jobs(request: SweepRequest, checked: CheckedOverrides, running: bool) -> list[tuple[list[str], Config]]:
    problems: dict[str, Problem] = {problem.message: problem for problem in checked.problems}
    jobs = []
    for job in jobs_of(checked):
        try:
            data = compose.compose(request.primary, job, request.config_dirs)
            words = [*job.choices, *job.values, *(f"{key}={value}" for key, value in job.verbatim.items())]
            jobs.append((words, request.decode(data, checked.problems, running)))
        except ConfigError as error:
            problems |= {problem.message: problem for problem in error.problems if problem.message not in problems}
    if problems:
        raise ConfigError(list(problems.values()))
    return jobs


def jobs_of(checked: overrides.CheckedOverrides) -> Iterator[overrides.CheckedOverrides]:
    """Yields the jobs of a plain sweep: every combination of the values, in Hydra's order (the last key varies
    fastest). If a group varies, jobs with GROUP=none omit the group's keys: with `distill=soft,none distill.teacher=X`,
    the second job has no teacher."""
    parser = OverridesParser.create()
    is_choice, alternatives = [], []
    for text in checked.all:
        override = parser.parse_override(text)
        if text in checked.hydra or not override.is_sweep_override():
            alternatives.append([text])
        elif override.is_discrete_sweep():
            alternatives.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            message = f"{text.lstrip('+')}: the plain sweeper accepts only lists of values"
            raise UserError(message, "separate the values by commas, or use a range such as range(1,4)")
        is_choice.append(text in checked.choices)
    for combination in itertools.product(*alternatives):
        selected = [text for text, chosen in zip(combination, is_choice, strict=True) if chosen]
        omitted_prefixes = tuple(
            f"{key_of(text)}."
            for text, options in zip(combination, alternatives, strict=True)
            if text in selected and len(options) > 1 and text.endswith("=none")
        )
        values = [text for text in combination if text not in selected and not text.startswith(("hydra.", "hydra/"))]
        values = [text for text in values if not key_of(text).startswith(omitted_prefixes)]
        yield replace(checked, choices=selected, values=values, sweeps=False)


def _create_folder(request: SweepRequest, name: str | None, sweep_dir: str | None, root: Path) -> Path:
    """Creates the sweep's folder: `sweep_dir`, otherwise runs/NAME, otherwise runs/VERB-sweep-NUMBER with the next
    number."""
    try:
        if sweep_dir is not None or name is not None:
            folder = user_path(sweep_dir.strip("'\"")) if sweep_dir is not None else root / str(name)
            key = "name" if sweep_dir is None else "hydra.sweep.dir"
            require_own_folder(folder, (folders.SUBMISSION, SWEEP), "sweep", key)
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
        hint = "set hydra.sweep.dir= to a folder that you can write to"
        raise UserError(f"cannot create the sweep's folder {error.filename or root}: {error.strerror}", hint) from error
    raise AssertionError("itertools.count never ends")
