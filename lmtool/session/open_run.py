"""An open run: its folder (locked), its output, and the tokenizer and weights that it starts from."""

from __future__ import annotations

import hashlib
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from lmtool.config import saved
from lmtool.config.checkpoint import find, read_config, read_state
from lmtool.config.plugins import command_line
from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.reporting.console import Output
from lmtool.reporting.trackers.base import RunMetadata
from lmtool.reporting.trackers.tracking import Trackers
from lmtool.resolver.decoding import completed
from lmtool.resolver.matcher import missing_token, tokens_around
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.resolver.teachers import TeacherSpec, differing_tokenizer
from lmtool.resolver.trunks import phases_ended
from lmtool.runs.checkpoints import tensor_names
from lmtool.runs.following import FollowedFolder
from lmtool.runs.identity import BUDGETS, budgets
from lmtool.runs.run_folder import RunFolder, select_folder
from lmtool.system.files import MANIFEST
from lmtool.system.secrets import masked
from lmtool.system.signals import Interrupts, stopped, take_late
from lmtool.tasks.labels import LoadedHead
from lmtool.tokenizers.configs import FolderConfig, TokenizerConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.compiling import require_compiler
from lmtool.training.consistency import keys, require_same, versions
from lmtool.training.group import ALONE, ProcessGroup, process_group
from lmtool.training.launching import note_run
from lmtool.training.precision import Precision, select_device, select_precision
from lmtool.types import part_of
from lmtool.weights.folders import hf_folder, tokenizer_folder
from lmtool.weights.load import merged, saved_config
from lmtool.weights.loading import Base, LoadReport, digest, left_to_base, saved_base
from lmtool.weights.reading import Weights, read, read_base

_COMPARED_STEPS = 10_000  # steps of the past, evenly spaced


def require_same_past(verb: str, config: RunConfig, folder: Path, point: Path) -> None:
    """UserError, with the command of a branch, where the past of a run is not what it would have been with the budgets
    that it has now. folder: the run's. point: the checkpoint that it resumes from."""
    state, before = read_state(point), read_config(point)
    changed = {key: getattr(config, key) for key in budgets(before) if getattr(config, key) != before[key]}
    typed = [f"{key}={'null' if value is None else value}" for key, value in changed.items()]
    command = ["lmtool", verb, f"branch={folder}@{state['step']}", *typed]
    if state.get("ended") == "patience":
        raise UserError(
            f"{folder} was ended by patience after step {state['step']}: a larger budget does not train it further",
            " ".join(map(shlex.quote, [*command, "patience=null", "name=NEW"])),
        )
    if phases_ended(state):
        raise UserError(
            f"{folder} cannot be extended: its phases are shares of the budget, and those of a larger one would "
            f"have had other boundaries before step {state['step']}",
            f"start another run from its weights: the same command with checkpoint={folder} name=NEW",
        )
    old, new = _horizon(before, state), _new_horizon(config, before, state)
    schedule, done = build(config.schedule), state["step"]
    for step in np.unique(np.linspace(1, done, min(done, _COMPARED_STEPS)).round()).astype(int).tolist():
        then, now = schedule(step, old), schedule(step, new)
        if then != now:
            keys = ", ".join(f"{key} {before[key]:g} -> {value or math.inf:g}" for key, value in changed.items())
            raise UserError(
                f"{folder} cannot be extended ({keys}): schedule={config.schedule.name} depends on the end of the run. "
                f"The learning rate of step {step} was {then * config.optimizer.lr:.3g}, and would have been "
                f"{now * config.optimizer.lr:.3g}",
                " ".join(map(shlex.quote, [*command, "name=NEW"])),
            )


def _horizon(before: JsonMapping, state: JsonMapping) -> float:
    """The steps of the run as its schedule saw them."""
    return state.get("total_steps") or before.get("max_steps") or math.inf


def _new_horizon(config: RunConfig, before: JsonMapping, state: JsonMapping) -> float:
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


def _followed(verb: str, config: RunConfig, precision: Precision, group: ProcessGroup, data: JsonObject) -> OpenRun:
    """The run as the processes behind the first have it."""
    path, result = group.first(("", None))
    folder, output = FollowedFolder(Path(path), data, result), Output()
    return OpenRun(verb, config, folder, output, precision, _trackers(verb, config, folder, output), group)


@contextmanager
def _opened(
    verb: str, config: RunConfig, stem: str, precision: Precision, group: ProcessGroup, data: JsonObject
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
    tracked_run = partial(
        RunMetadata,
        str(path),
        masked(f"{path.parent.name}/{path.name}" if is_job else path.name),
        masked(path.parent.name) if is_job else None,
        verb,
        run.config,
        config.offline,
    )
    chosen = config.logger if run.writes else {}
    return Trackers(chosen, tracked_run, lambda line: output.line(line), _warned(output))


def _warned(output: Output) -> Callable[[str], None]:
    return lambda text: output.line(f"warning: {text}", "yellow")


# The start of a run: its tokenizer and its weights.


def saved_tokenizer(run: OpenRun) -> Tokenizer | None:
    """The tokenizer this run must use: of its own checkpoint, else of the one it starts from; else None."""
    if run.checkpoint is not None:
        return Tokenizer.load(run.checkpoint, run.config.tokenizer.parse_special_tokens)
    return starting_tokenizer(run.config)


def starting_tokenizer(config: RunConfig) -> Tokenizer | None:
    """The tokenizer of the checkpoint the weights start from, or else of the teacher, or of the hub; None where none
    of them is named."""
    origin = starts_from(config) or _vocabulary_of(config)
    if origin is None:
        return hub_tokenizer(config.tokenizer, config.offline)
    published = hf_folder(origin, config.offline)
    folder = find(origin) if published is None else published.path
    return Tokenizer.load(folder, config.tokenizer.parse_special_tokens)


def _vocabulary_of(config: RunConfig) -> str | None:
    """The teacher whose vocabulary the run has; None where its files are named, and where there is no such teacher."""
    for path in config.distill.checkpoints[:1] if not isinstance(config.tokenizer, FolderConfig) else ():
        if config.distill.same_batches:
            return path
        teacher_tokenizer = TeacherSpec(path, saved_config(path, config.offline)).tokenizer
        if differing_tokenizer(config.tokenizer, teacher_tokenizer) is None:
            return path
    return None


def hub_tokenizer(config: TokenizerConfig, offline: bool) -> Tokenizer | None:
    """The tokenizer of a `tokenizer.path=hf://...`; None for any other."""
    if not isinstance(config, FolderConfig) or "://" not in config.path:
        return None
    return Tokenizer.load(tokenizer_folder(config.path, offline), config.parse_special_tokens)


def starts_from(config: RunConfig) -> str | None:
    """The checkpoint the weights start from; None for random ones."""
    return None if config.checkpoint in (None, "none") else config.checkpoint


def require_fit(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Every token needs its row of the embedding, and a vocabulary that came with its files the special tokens that
    are asked for. UserError before any text is read with it."""
    model = config.model
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, model.vocab_size={model.vocab_size:,} has fewer rows",
            f"model.vocab_size={tokenizer.vocab_size}, or a smaller tokenizer.vocab_size=",
        )
    roles = {*tokenizer.roles, *(["sentinel"] if tokenizer.sentinels else [])}
    parts = config.objective.parts() if isinstance(config, PretrainConfig) else ()
    tasks = config.task.parts() if isinstance(config, FinetuneConfig) else ()
    layouts: list[str | None] = [task.text_format(model) for task in tasks]
    around = [missing_token(tokens_around(model, layout), roles) for layout in layouts or [None]]
    for problem in (*around, *(missing_token(part.needs(), roles) for part in parts)):
        if problem is not None:
            have = ", ".join(sorted(roles)) or "none"
            raise UserError(
                f"the tokenizer {problem}; its special tokens are: {have}",
                "use a tokenizer that fits (tokenizer=auto, with checkpoint=none), or another objective",
            )


def start_weights(
    config: RunConfig, heads: Mapping[str, LoadedHead] | None = None, resumed_from: Path | None = None
) -> Weights | None:
    """The weights the run starts from, with what a tuning method added merged; None where they are random, or gone.

    heads: by task, its head in the weights. resumed_from: the run's own checkpoint; a complete one makes the weights
    unnecessary unless the run reads them throughout. UserError where they cannot be read, or have changed since the
    run was started.
    """
    origin = starts_from(config)
    if origin is None:
        return None
    base = None if resumed_from is None else saved_base(resumed_from)
    if resumed_from is not None and base is not None:
        weights = read_base(base, tensor_names(resumed_from), str(resumed_from), config.offline)
    else:
        try:
            weights = merged(read(origin, config.offline), saved_config(origin, config.offline))
        except UserError:
            if resumed_from is None or (isinstance(config, FinetuneConfig) and config.tuning.needs_start):
                raise
            return None
    for task, head in (heads or {}).items():
        weights = replace(weights, tensors=head.tensors(weights.tensors, task))
    return weights


def base_of(
    run: OpenRun, learner: BaseLearner, start: Weights | None, loaded: LoadReport | None, tokenizer: Tokenizer
) -> Base | None:
    """The tensors that a tuned run's checkpoints leave to its starting checkpoint; None if they are complete."""
    resumes = run.checkpoint
    if start is None or loaded is None or start.merged or (resumes is not None and saved_base(resumes) is None):
        return None
    names = left_to_base(learner, loaded)
    if not names:
        return None
    path = None if start.revision is not None else str(start.folder.expanduser().resolve())
    sha256 = digest({name: start.tensors[name] for name in names})
    parts = tuple(sorted({part_of(name) for name in names}))
    return Base(str(starts_from(run.config)), path, start.revision, parts, sha256, tokenizer.fingerprint, names)


def prior_weights(config: FinetuneConfig) -> list[Weights]:
    """The weights of the runs that the tuning method builds on. The run's own checkpoints have their own copy."""
    return [read(path, config.offline) for path in config.tuning.builds_on]
