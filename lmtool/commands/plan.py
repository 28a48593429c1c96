"""`lmtool plan`: parameters, FLOPs, steps, tokens, epochs, memory, disk and time, before training.

The model is built on the meta device, and pretraining text is not read: windows are assumed to be full, and tokens are
estimated from bytes. A task's rows are counted, since its epochs depend on them. With measure=true, a few steps are
run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.costs.memory_of_run import TrainingConfig, too_large
from lmtool.costs.plan import devices_of, plan_in_phases, plan_of, what_fits
from lmtool.costs.rate import PlannedDevice, planned_device
from lmtool.data.examples import Rows
from lmtool.data.loader import PackedLoader
from lmtool.data.phases import PhasedLoader
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.costs import RunPlan, plan_rows
from lmtool.reporting.text import count, size
from lmtool.resolver.commands import FinetuneConfig, PlanKeys, PretrainConfig, RunConfig
from lmtool.runs.identity import BUDGETS, budgets
from lmtool.session.fit import temporary_session, train_few_steps
from lmtool.session.labeled import data_to_learn
from lmtool.session.preparation import PretrainPreparation
from lmtool.system.files import user_path
from lmtool.system.terminal import counted
from lmtool.tasks.configs.mixture import GlueConfig
from lmtool.training.loop import StopTraining
from lmtool.training.precision import select_device
from lmtool.training.progress import peak_memory
from lmtool.types import Step
from lmtool.weights.assemble import assemble

WARM_UP_STEPS, MEASURED_STEPS = 2, 5


@dataclass(frozen=True)
class Measurements:
    """Measurements of a few steps. step_seconds: median, without loading, evaluation and saving. tokens: per step.
    metadata: the loader's metadata. peak_bytes: the peak memory of the process, or of the device."""

    step_seconds: float
    tokens: float
    metadata: JsonObject
    peak_bytes: int


def measure(config: TrainingConfig) -> Measurements:
    """Builds the run as its command does and trains a few steps. Raises UserError if the overrides describe several
    runs or a branch."""
    if isinstance(config, FinetuneConfig) and isinstance(config.task, GlueConfig):
        message = f"measure=true measures one run, but task={config.task.name} trains a run for each of its tasks"
        raise UserError(message, "choose one of them: task=sst2")
    if config.branch is not None:
        raise UserError(
            "measure=true measures a new run, but a branch continues another one", "omit branch= or measure="
        )
    with temporary_session(config) as session:
        timed_loader = _TimedLoader(session.loader)
        train_few_steps(session, timed_loader, WARM_UP_STEPS + MEASURED_STEPS, log_every=1)
        return Measurements(
            statistics.median(timed_loader.seconds[WARM_UP_STEPS:]),
            statistics.mean(timed_loader.tokens[WARM_UP_STEPS:]),
            session.phases[0].loader.metadata(),
            peak_memory(session.run.precision.device),
        )


class _TimedLoader:
    def __init__(self, loader: PackedLoader | PhasedLoader):
        self._loader = loader
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def steps(self, cursor: dict[str, int] | None, rank: int = 0, ranks: int = 1) -> Iterator[Step]:
        for step in self._loader.steps(cursor, rank, ranks):
            started = time.perf_counter()
            yield step
            self.seconds.append(time.perf_counter() - started)
            self.tokens.append(sum(batch.tokens for batch in step.batches))
            if len(self.seconds) == WARM_UP_STEPS + MEASURED_STEPS:
                raise StopTraining


# Of English text in vocabularies of 30,000 to 50,000 tokens.
BYTES_PER_TOKEN = 4.0
_SPECIAL_TOKENS = 3  # of a row: at its start and after its texts
_SAMPLED_ROWS = 2000  # of a task, in which the mean length is estimated
# Bytes of a window in the plan of an epoch: its record and its length.
WINDOW_BYTES = 24


def run(config: TrainingConfig, verb: str, keys: PlanKeys) -> int:
    """Prints the plan of a run. Raises UserError if measure=true needs a device that is not available."""
    device, notes, training_rows = planned_device(config, keys.device), [], 0
    unresolved_config, length = config, float(config.max_length)
    if isinstance(config, FinetuneConfig):
        config, task, _ = data_to_learn(config)
        training_rows = sum(len(data.train) for data in task.members.values())
        length = _mean_length([data.train for data in task.members.values()], config.max_length)
    else:
        preparation = PretrainPreparation(config)
        config, tasks = preparation.config, preparation.tasks
        notes += [f"{counted(len(task.train), 'training row')} of the task {name}" for name, task in tasks.items()]
    with torch.device("meta"):
        learner, _ = assemble(config, None)
    problem = too_large(config, device.precision) if device.this_machine else None
    if problem is not None:
        notes += [problem.message, str(problem.hint)]
    measurement = None
    if keys.measure:
        if not device.this_machine:
            select_device(config.device)  # raises the same error as training
        measurement = measure(unresolved_config) if problem is None else None
    notes += [
        _length_note(config, training_rows, length)
        if measurement is None
        else f"measured: peak memory of the process {size(measurement.peak_bytes)}"
    ]
    if devices_of(config) > 1 and not device.cuda:
        notes.append(f"{devices_of(config)} processes share the cores of one machine")

    config, epoch_tokens = _with_known_epochs(
        config, training_rows, length, None if measurement is None else measurement.metadata, notes
    )

    def plan_with(config: RunConfig) -> RunPlan:
        if measurement is not None or length == config.max_length:
            metadata = None if measurement is None else measurement.metadata
            return _plan_of(config, learner, epoch_tokens, float(config.max_length), device, metadata)
        # The longest batch decides the memory, the mean length of the rows all other numbers.
        longest = _plan_of(config, learner, training_rows * config.max_length, float(config.max_length), device, None)
        mean = _plan_of(config, learner, epoch_tokens, length, device, None)
        return replace(mean, memory_bytes=longest.memory_bytes, advice=longest.advice)

    plan = replace(plan_with(config), store_bytes=_store_bytes(config), shared_bytes=_shared_bytes(config))
    plan = replace(plan, epoch_text=_epoch_text(config, training_rows, epoch_tokens, measurement is not None))
    if measurement is not None:
        step_seconds = measurement.step_seconds * plan.tokens_per_step / measurement.tokens
        plan = replace(
            plan,
            step_seconds=(step_seconds, step_seconds),
            time_source=f"measured over {MEASURED_STEPS} steps on {device.name}",
        )
    if not plan.fits:
        plan = replace(plan, advice=what_fits(config, plan_with))
    print_table(
        Output(),
        ["what", "how much"],
        plan_rows(replace(plan, notes=(*plan.notes, *notes))),
        heading=f"plan of lmtool {verb} · model={config.model.name} · {device.precision.name} on {device.name}",
    )
    return 0


def _with_known_epochs(
    config: TrainingConfig, rows: int, length: float, metadata: JsonMapping | None, notes: list[str]
) -> tuple[TrainingConfig, float | None]:
    """None for the tokens per epoch if unknown: max_epochs is then removed, with a note."""
    if metadata is not None:
        return config, float(metadata["tokens_per_epoch"])
    if isinstance(config, FinetuneConfig):
        return config, rows * length
    if config.max_words is not None:
        config = _without_unknown(config, "max_words", "the words of the text are unknown before it is read", notes)
    is_unknown = any(form.data != config.data for form in config.phase_configs)
    is_unknown |= any(member.counts_one_text for member in config.objective.member_configs())
    epoch_tokens = None if is_unknown else _text_tokens(config)
    if epoch_tokens is not None or config.max_epochs is None:
        return config, epoch_tokens
    reason = "the tokens of an epoch are unknown before the text is read"
    return _without_unknown(config, "max_epochs", reason, notes), None


def _without_unknown(config: PretrainConfig, key: str, reason: str, notes: list[str]) -> PretrainConfig:
    budget = f"{key}={getattr(config, key):g}"
    if set(budgets(config.model_dump(include=set(BUDGETS)))) == {key}:
        hint = "set measure=true, which reads the text, or set max_steps= or max_tokens= instead"
        raise UserError(f"{budget} cannot be planned: {reason}", hint)
    notes.append(f"{budget} is ignored: {reason}")
    return config.model_copy(update={key: None})


def _plan_of(
    config: RunConfig,
    learner: BaseLearner,
    epoch_tokens: float | None,
    length: float,
    device: PlannedDevice,
    metadata: JsonMapping | None,
) -> RunPlan:
    """Returns the plan. epoch_tokens: tokens of an epoch. length: mean tokens of a sequence. metadata: the metadata of
    a loader that has read the text."""
    if isinstance(config, PretrainConfig) and config.phases:
        by_phase = [
            _assumed_metadata(form, epoch_tokens, float(form.max_length), form.objective.predicted_fraction)
            for form in config.phase_configs
        ]
        plan = plan_in_phases(config, learner, by_phase, device)[0]
    else:
        predicted = config.objective.predicted_fraction if isinstance(config, PretrainConfig) else 0.0
        plan = plan_of(config, learner, metadata or _assumed_metadata(config, epoch_tokens, length, predicted), device)
    return replace(plan, epochs=None if epoch_tokens is None else plan.tokens / epoch_tokens)


def _epoch_text(config: TrainingConfig, rows: int, epoch_tokens: float | None, is_measured: bool) -> str:
    if isinstance(config, FinetuneConfig):
        return f" over {counted(rows, 'row')}"
    return f" over {'' if is_measured else 'about '}{count(float(f'{epoch_tokens or 0:.3g}'))} tokens"


def _text_tokens(config: PretrainConfig) -> float | None:
    text_bytes, path = getattr(config.data, "max_bytes", None), getattr(config.data, "path", None)
    if isinstance(path, str) and "://" not in path:
        source = user_path(path)
        files = source.rglob("*") if source.is_dir() else [source] if source.is_file() else map(Path, glob(str(source)))
        text_bytes = sum(file.stat().st_size for file in files if file.is_file())
    return text_bytes / BYTES_PER_TOKEN if text_bytes else None


def _store_bytes(config: TrainingConfig) -> int | None:
    tokens = _text_tokens(config) if isinstance(config, PretrainConfig) else None
    return None if tokens is None else round(tokens * (2 if config.model.vocab_size <= 1 << 16 else 4))


def _shared_bytes(config: TrainingConfig) -> int:
    """Returns the estimated bytes of the plan of an epoch, a file that several processes map: a record per window."""
    tokens = _text_tokens(config) if isinstance(config, PretrainConfig) and devices_of(config) > 1 else None
    return round((tokens or 0) / config.max_length * WINDOW_BYTES)


def _mean_length(splits: Sequence[Rows], max_length: int) -> float:
    lengths = []
    for rows in splits:
        stride = -(-len(rows) // _SAMPLED_ROWS) or 1
        for texts in islice(zip(*rows.columns.values(), strict=True), 0, None, stride):
            tokens = sum(len(str(text).encode()) for text in texts) / BYTES_PER_TOKEN + _SPECIAL_TOKENS
            lengths.append(min(tokens, float(max_length)))
    return statistics.mean(lengths)


def _length_note(config: TrainingConfig, rows: int, length: float) -> str:
    if isinstance(config, FinetuneConfig):
        mean = f"about {length:.0f} tokens on average, estimated from their bytes"
        return f"{counted(rows, 'training row')} of {mean}; the memory is that of max_length={config.max_length}"
    lengths = " or ".join(dict.fromkeys(str(form.max_length) for form in config.phase_configs))
    return f"the text is not read: every sequence is assumed to have max_length={lengths} tokens"


def _assumed_metadata(
    config: RunConfig, epoch_tokens: float | None, length: float, predicted: float
) -> dict[str, float]:
    """Metadata of a loader that is not built, if every sequence has `length` tokens."""
    tokens = config.batch_tokens or (config.batch_examples or 1) * length
    epoch_tokens = max(epoch_tokens or 0.0, tokens)
    return {
        "steps_per_epoch": epoch_tokens / tokens,
        "tokens_per_epoch": epoch_tokens,
        "mean_length": length,
        "predicted_fraction": predicted,
    }
