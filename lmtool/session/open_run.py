"""An open run: its locked folder, its output and device, and the tokenizer and the weights that it starts from."""

from __future__ import annotations

import hashlib
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from lmtool import __version__
from lmtool.config import saved
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import build, command_line
from lmtool.distillation.teacher_configs import TeacherSpec, differing_tokenizer
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.configs import missing_token
from lmtool.learners.rules import format_roles
from lmtool.reporting.console import Output
from lmtool.reporting.trackers.base import RunMetadata
from lmtool.reporting.trackers.tracking import Trackers
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.resolver.decoding import with_defaults
from lmtool.runs.branches import phases_ended
from lmtool.runs.checkpoints import tensor_names
from lmtool.runs.finding import find, read_config, read_state
from lmtool.runs.identity import BUDGETS, FREE_KEYS, budgets, fingerprint, flatten, select_folder
from lmtool.runs.locks import discard
from lmtool.runs.run_folder import FollowedFolder, RunFolder
from lmtool.system.files import MANIFEST, RUNS, user_path
from lmtool.system.secrets import masked
from lmtool.system.signals import Interrupts, pop_late_signals, stop_error
from lmtool.tasks.labels import LoadedHead
from lmtool.tokenizers.configs import FolderConfig, TokenizerConfig
from lmtool.tokenizers.folders import has_tokenizer
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.compiling import require_compiler
from lmtool.training.group import ALONE, ProcessGroup, process_group, require_same
from lmtool.training.launching import note_run
from lmtool.training.precision import Precision, select_device, select_precision
from lmtool.weights.assemble import LoadReport
from lmtool.weights.base import Base, base_tensor_names, saved_base
from lmtool.weights.folders import hf_folder, tokenizer_folder
from lmtool.weights.reading import Weights, base_of_weights, read, read_base
from lmtool.weights.saved_model import merge_tuned, saved_config

_COMPARED_STEPS = 10_000  # maximum number of past steps, evenly spaced, whose learning rates are compared


def require_same_past(verb: str, config: RunConfig, folder: Path, point: Path) -> None:
    """Raises UserError unless the past steps of a run would have been the same with new budgets, so that it may be
    extended.

    verb: the command, for the hint, which says how to train another run further. config: the configuration with the new
    budgets. folder: the folder of the run. point: the checkpoint that it resumes from.
    """
    state, old_config = read_state(point), read_config(point)
    new_budgets = {key: getattr(config, key) for key in budgets(old_config)}
    new_budgets = {key: value for key, value in new_budgets.items() if value != old_config[key]}
    overrides = [f"{key}={'null' if value is None else value}" for key, value in new_budgets.items()]
    command = ["lmtool", verb, f"branch={folder}@{state['step']}", *overrides]
    if state.get("ended") == "patience":
        raise UserError(
            f"{folder} stopped early (patience) after step {state['step']}: a larger budget does not train it further",
            " ".join(map(shlex.quote, [*command, "patience=null", "name=NEW"])),
        )
    if phases_ended(state):
        raise UserError(
            f"{folder} cannot be extended: its phases are fractions of the budget, so with a larger budget phases that "
            f"ended before step {state['step']} would have been longer",
            f"start another run from its weights: the same command with checkpoint={folder} name=NEW",
        )
    old_horizon, new_horizon = _horizon(old_config, state), _new_horizon(config, old_config, state)
    schedule, steps_done = build(config.schedule), state["step"]
    for step in np.unique(np.linspace(1, steps_done, min(steps_done, _COMPARED_STEPS)).round()).astype(int).tolist():
        old_factor, new_factor = schedule(step, old_horizon), schedule(step, new_horizon)
        if old_factor != new_factor:
            changes = [f"{key} {old_config[key]:g} -> {value or math.inf:g}" for key, value in new_budgets.items()]
            peak = config.scaled_optimizer.lr
            old_rate, new_rate = old_factor * peak, new_factor * peak
            raise UserError(
                f"{folder} cannot be extended ({', '.join(changes)}): schedule={config.schedule.name} depends on the "
                f"end of the run. The learning rate of step {step} was {old_rate:.3g}; with the new budget it would "
                f"have been {new_rate:.3g}",
                " ".join(map(shlex.quote, [*command, "name=NEW"])),
            )


def _horizon(old_config: JsonMapping, state: JsonMapping) -> float:
    return state.get("total_steps") or old_config.get("max_steps") or math.inf


def _new_horizon(config: RunConfig, old_config: JsonMapping, state: JsonMapping) -> float:
    """In proportion to the budget in other units (epochs, tokens, minutes) that determined the old number."""
    steps = config.max_steps or math.inf
    budget = state.get("horizon")  # the key of the budget that determined the number of steps
    if budget not in BUDGETS or budget == "max_steps" or budget not in old_config:
        return steps
    new_budget = getattr(config, str(budget))
    if new_budget is None:
        return steps
    return min(steps, math.ceil(_horizon(old_config, state) * new_budget / old_config[budget]))


@dataclass
class OpenRun:
    """A run whose folder is open and locked. verb: the command, "pretrain" or "finetune". output: prints to the screen
    and to the run's log. started: when the command started, on the clock of `time.monotonic`. group: the processes that
    train the run together."""

    verb: str
    config: RunConfig
    folder: RunFolder
    output: Output
    precision: Precision
    trackers: Trackers
    started: float
    group: ProcessGroup = ALONE

    @cached_property
    def checkpoint(self) -> Path | None:
        """The intact checkpoint that the run resumes from; None for a new run. Prints a warning for each damaged one.

        All processes get the checkpoint that rank 0 found. Rank 0 sends it at the first access, so all processes must
        access it at the same point.
        """
        point = self.folder.resume_point(self.output.warn) if self.folder.writes else None
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
def open_run(verb: str, config: RunConfig, stem: str, started: float) -> Iterator[OpenRun]:
    """Opens and locks the folder of a run; within the context, the output is also written to its log. stem: the start
    of the name of a run without name=; a number is added to it. started: when the command started, on the clock of
    `time.monotonic`."""
    precision = select_precision(config.precision, select_device(config.device))
    require_compiler(config.compile, precision.device)
    pop_late_signals()  # discards an interrupt that came too late for the previous run in this process
    with Interrupts(), process_group(precision.device) as group:
        data = saved.save(config, verb)
        if group.size > 1:
            versions = {
                "lmtool version": __version__,
                "lmtool code": fingerprint(config.plugins),
                "torch version": str(torch.__version__),
            }
            values = flatten(saved.body(data))
            comparable = {key: value for key, value in values.items() if key.split(".")[0] not in FREE_KEYS}
            require_same(group, {**versions, **comparable})
        if group.rank > 0:
            path, result = group.first(("", None))
            folder, output = FollowedFolder(Path(path), data, result), Output()
            trackers = _trackers(verb, config, folder, output)
            yield OpenRun(verb, config, folder, output, precision, trackers, started, group)
            return
        with _open_in_first_rank(verb, config, stem, started, precision, group, data) as opened:
            yield opened


@contextmanager
def _open_in_first_rank(
    verb: str,
    config: RunConfig,
    stem: str,
    started: float,
    precision: Precision,
    group: ProcessGroup,
    data: JsonObject,
) -> Iterator[OpenRun]:
    runs_existed, folder = RUNS.exists(), None
    try:
        folder = select_folder(RUNS, config.name, config.run_dir, stem)
        check_extension = partial(require_same_past, verb, config)
        with RunFolder(folder, data, saved.to_yaml(data), check_extension, with_defaults) as run:
            output = Output(log=run.append_log)
            if run.extends:  # this checks that the run may be extended, before anything is written
                run.resume_point(output.warn)
            note_run(run.path)
            result = run.result()
            group.first((str(run.path), result))  # sent to the other ranks, which wait for it in open_run
            if result is None:
                device = precision.device
                name = {"accelerator": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
                run.write_environment(sys.argv, {"device": str(device), "devices": group.size, **name})
            with _trackers(verb, config, run, output) as trackers:
                yield OpenRun(verb, config, run, output, precision, trackers, started, group)
    except KeyboardInterrupt as interrupt:
        if folder is not None:  # the signal may have come between two instructions that create and hold the lock
            discard(folder / "LOCK")
            with suppress(OSError):
                folder.rmdir()  # succeeds only if nothing was written
        has_config = folder is not None and (folder / "config.yaml").exists()
        resume = command_line("resume", str(folder)) if has_config else None
        raise stop_error(interrupt, " while the run was prepared", resume) from interrupt
    except UserError:
        if not runs_existed:  # an error leaves no empty folder behind
            with suppress(OSError):
                RUNS.rmdir()
        raise


def _trackers(verb: str, config: RunConfig, run: RunFolder, output: Output) -> Trackers:
    path = run.path.resolve()
    is_job = (path / "job.json").is_file()  # the run is a job of a sweep, whose name groups its jobs
    run_metadata = partial(  # without the step, which is not known yet
        RunMetadata,
        str(path),
        masked(f"{path.parent.name}/{path.name}" if is_job else path.name),
        masked(path.parent.name) if is_job else None,
        verb,
        run.config,
        config.offline,
    )
    configs = config.logger if run.writes else {}
    return Trackers(configs, run_metadata, output.line, output.warn)


def saved_tokenizer(run: OpenRun) -> Tokenizer | None:
    """Returns the tokenizer in the run's own checkpoint if the run resumes, otherwise `starting_tokenizer`."""
    if run.checkpoint is not None:
        return Tokenizer.load(run.checkpoint, run.config.tokenizer.parse_special_tokens)
    return starting_tokenizer(run.config)


def tokenizer_at(checkpoint: str, offline: bool) -> Tokenizer:
    """Returns the tokenizer of a folder, a checkpoint or an address."""
    folder = user_path(checkpoint)
    if not has_tokenizer(folder):
        published = hf_folder(checkpoint, offline)
        folder = find(checkpoint) if published is None else published.path
    return Tokenizer.load(folder)


def starting_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Returns the tokenizer of the starting checkpoint, else of the teacher, else of `tokenizer.path=hf://...`.

    None means that the configuration names none of these, so that a tokenizer is read from a folder or trained.
    """
    origin = starts_from(config) or _teacher_with_tokenizer(config)
    if origin is None:
        return hub_tokenizer(config.tokenizer, config.offline)
    published = hf_folder(origin, config.offline)
    folder = find(origin) if published is None else published.path
    return Tokenizer.load(folder, config.tokenizer.parse_special_tokens)


def _teacher_with_tokenizer(config: RunConfig) -> str | None:
    for path in config.distill.checkpoints[:1] if not isinstance(config.tokenizer, FolderConfig) else ():
        if config.distill.same_batches:
            return path
        teacher_tokenizer = TeacherSpec(path, saved_config(path, config.offline)).tokenizer
        if differing_tokenizer(config.tokenizer, teacher_tokenizer) is None:
            return path
    return None


def hub_tokenizer(config: TokenizerConfig, offline: bool) -> Tokenizer | None:
    """Returns the tokenizer of `tokenizer.path=hf://...`, downloaded if necessary; None for other configurations."""
    if not isinstance(config, FolderConfig) or "://" not in config.path:
        return None
    return Tokenizer.load(tokenizer_folder(config.path, offline), config.parse_special_tokens)


def starts_from(config: RunConfig) -> str | None:
    """Returns the checkpoint that the run's weights start from; None for random weights."""
    return None if config.checkpoint in (None, "none") else config.checkpoint


def require_fit(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Checks, before any text is read, that a tokenizer fits the run's model and objective.

    Raises UserError if it has more tokens than the embedding has rows, or lacks special tokens that the run needs.
    """
    model = config.model
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, more than model.vocab_size={model.vocab_size:,}",
            f"set model.vocab_size={tokenizer.vocab_size}, or a smaller tokenizer.vocab_size=",
        )
    roles = {*tokenizer.roles, *(["sentinel"] if tokenizer.sentinels else [])}
    objectives = config.objective.member_configs() if isinstance(config, PretrainConfig) else ()
    tasks = config.task.member_configs() if isinstance(config, FinetuneConfig) else ()
    text_formats: list[str | None] = [task.text_format(model) for task in tasks]
    adds = f"model={model.name} adds to its texts"
    required: list[tuple[Sequence[str | tuple[str, ...]], str]]
    required = [(format_roles(model, text_format), adds) for text_format in text_formats or [None]]
    required += [(objective.roles, f"objective={objective.name} needs") for objective in objectives]
    for needed, reason in required:
        if (missing := missing_token(needed, roles)) is not None:
            known_roles = ", ".join(sorted(roles)) or "none"
            raise UserError(
                f"the tokenizer has no {missing}, which {reason}; its special tokens are: {known_roles}",
                "use a tokenizer that has the missing token (tokenizer=auto, checkpoint=none), or another "
                f"{'task' if tasks else 'objective'}",
            )


def unused_rows_warning(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Returns a warning if a table of random token vectors has over 1% more rows than the vocabulary has entries."""
    rows, entries = config.model.vocab_size, tokenizer.vocab_size
    if rows - entries <= rows // 100:
        return []
    return [
        f"{rows - entries:,} of the {rows:,} rows of the token table are never used: the vocabulary has {entries:,} "
        f"entries; model.vocab_size={entries} omits them"
    ]


def start_weights(
    config: RunConfig, heads: Mapping[str, LoadedHead] | None = None, resumed_from: Path | None = None
) -> Weights | None:
    """Reads the weights that a run starts from, with merged parameters of a tuning method; None for random weights, or
    if a resumed run does not need them and they cannot be read any more. heads: the heads in the weights, by task.
    resumed_from: the run's own checkpoint. Raises UserError if the weights cannot be read, or have changed since the
    run started."""
    origin = starts_from(config)
    if origin is None:
        return None
    base = None if resumed_from is None else saved_base(resumed_from)
    if resumed_from is not None and base is not None:
        weights = read_base(base, tensor_names(resumed_from), str(resumed_from), config.offline)
    else:
        try:
            weights = merge_tuned(read(origin, config.offline), saved_config(origin, config.offline))
        except UserError:
            if resumed_from is None or (isinstance(config, FinetuneConfig) and config.tuning.needs_initial_weights):
                raise
            return None
    for task, head in (heads or {}).items():
        weights = replace(weights, tensors=head.tensors(weights.tensors, task))
    return weights


def base_of(
    run: OpenRun, learner: BaseLearner, start: Weights | None, loaded: LoadReport | None, tokenizer: Tokenizer
) -> Base | None:
    """Returns the tensors that the checkpoints of a tuned run leave out, because its starting checkpoint has them; None
    if its checkpoints are complete. start: the weights that the run starts from. loaded: the parts of the learner that
    were loaded from them."""
    checkpoint = run.checkpoint
    if start is None or loaded is None or start.merged or (checkpoint is not None and saved_base(checkpoint) is None):
        return None
    names = base_tensor_names(learner, loaded.loaded)
    if not names:
        return None
    return base_of_weights(str(starts_from(run.config)), start, names, tokenizer)


def prior_weights(config: FinetuneConfig) -> list[Weights]:
    """Reads the weights of the finished runs that the tuning method combines.

    A resumed run does not need them: its own checkpoints contain a copy.
    """
    return [read(path, config.offline) for path in config.tuning.earlier_runs]
