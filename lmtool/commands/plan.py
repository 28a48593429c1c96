"""`lmtool plan`: parameters, operations, steps, tokens, epochs, memory, disk and time, before anything is spent.

The model is built on the meta device, so nothing of it is in memory, and pretraining text is not read: its windows
are taken as full, and its tokens are estimated from its bytes. A task's rows are counted, since its epochs depend on
them. With measure=true a few steps are run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any

import torch

from lmtool.costs.memory_of_run import TrainingConfig, too_large
from lmtool.costs.plan_of_run import devices_of, plan_in_phases, plan_of, what_fits
from lmtool.costs.rate import PlannedDevice, place_of
from lmtool.data.loader import PackedLoader
from lmtool.data.phases import PhasedLoader
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.reporting.console import Output
from lmtool.reporting.plan import RunPlan, plan_rows
from lmtool.reporting.table import print_table
from lmtool.reporting.text import count, size
from lmtool.resolver.schema.inspection import PlanKeys
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.runs.identity import BUDGETS, budgets
from lmtool.session.fit import temporary_session, train_few_steps
from lmtool.session.labelled import data_to_learn
from lmtool.session.pretraining import Pretraining
from lmtool.system.terminal import counted
from lmtool.tasks.configs import GlueConfig
from lmtool.training.profiling import StopTraining
from lmtool.training.results import peak_memory
from lmtool.types import Step
from lmtool.weights.assemble import assemble

WARM_UP, STEPS = 2, 5


@dataclass(frozen=True)
class Measured:
    """step_seconds: the median of a few steps, loading, evaluation and saving left out; tokens: in these, a step.
    facts: of the loader. peak_bytes: of the process, or of the device."""

    step_seconds: float
    tokens: float
    facts: dict[str, Any]
    peak_bytes: int


def measured(config: PretrainConfig | FinetuneConfig) -> Measured:
    """Build the run as its command does and train a few steps of it. UserError where the words are several runs or none
    of their own."""
    if isinstance(config, FinetuneConfig) and isinstance(config.task, GlueConfig):
        raise UserError(f"measure=true: task={config.task.name} is a run of every task in it", "give one: task=sst2")
    if config.branch is not None:
        raise UserError("measure=true: a branch continues another run", "leave out branch=, or measure=")
    with temporary_session(config) as session:
        timed = _TimedLoader(session.loader)
        train_few_steps(session, timed, WARM_UP + STEPS, log_every=1)
        return Measured(
            statistics.median(timed.seconds[WARM_UP:]),
            statistics.mean(timed.tokens[WARM_UP:]),
            session.phases[0].loader.facts(),
            peak_memory(session.run.precision.device),
        )


class _TimedLoader:
    """A loader that ends the training after a few steps, and knows how long each was, from when it was given on."""

    def __init__(self, loader: PackedLoader | PhasedLoader):
        self._loader = loader
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def steps(self, *arguments: Any) -> Iterator[Step]:
        for step in self._loader.steps(*arguments):
            began = time.perf_counter()
            yield step
            self.seconds.append(time.perf_counter() - began)
            self.tokens.append(sum(batch.tokens for batch in step.batches))
            if len(self.seconds) == WARM_UP + STEPS:
                raise StopTraining


# English text in vocabularies of 30,000 to 50,000 tokens.
BYTES_A_TOKEN = 4.0


def run(config: TrainingConfig, verb: str, keys: PlanKeys) -> int:
    """Print the plan of a run. UserError where steps are to be measured on a device that is not here."""
    place, notes, rows = place_of(config, keys.device), [], 0
    typed = config
    if isinstance(config, FinetuneConfig):
        config, task, _ = data_to_learn(config)
        rows = sum(len(data.train) for data in task.members.values())
    else:
        preparation = Pretraining(config)
        config, tasks = preparation.config, preparation.tasks
        notes += [f"{counted(len(task.train), 'training row')} of the task {name}" for name, task in tasks.items()]
    with torch.device("meta"):
        learner, _ = assemble(config, None)
    problem = too_large(config, place.precision) if place.here else None
    if problem is not None:
        notes += [problem.message, str(problem.hint)]
    seen = _measured(typed, place, problem is None) if keys.measure else None
    notes += [_read(config, rows) if seen is None else f"measured: peak memory of the process {size(seen.peak_bytes)}"]
    if devices_of(config) > 1 and not place.cuda:
        notes.append(f"{devices_of(config)} processes share the cores of one machine")

    config, of_pass = _with_known_passes(config, rows, None if seen is None else seen.facts, notes)

    def planned(config: RunConfig) -> RunPlan:
        return _planned(config, learner, of_pass, place, None if seen is None else seen.facts)

    plan = replace(planned(config), store_bytes=_store_bytes(config))
    plan = replace(plan, epoch_text=_of_a_pass(config, rows, of_pass, seen is not None))
    if seen is not None:
        each = seen.step_seconds * plan.tokens_per_step / seen.tokens
        plan = replace(plan, step_seconds=(each, each), rate=f"measured over {STEPS} steps on {place.name}")
    if not plan.fits:
        plan = replace(plan, advice=what_fits(config, planned))
    print_table(
        Output(),
        ["what", "how much"],
        plan_rows(replace(plan, notes=(*plan.notes, *notes))),
        heading=f"plan of lmtool {verb} · model={config.model.name} · {place.precision.name} on {place.name}",
    )
    return 0


def _measured(config: TrainingConfig, place: PlannedDevice, fits: bool) -> Measured | None:
    """A few steps; none of a run that cannot be held."""
    if not place.here:
        # Says what is missing, as training would.
        from lmtool.training.precision import choose_device

        choose_device(config.device)
    return measured(config) if fits else None


def _with_known_passes(
    config: TrainingConfig, rows: int, facts: Mapping[str, Any] | None, notes: list[str]
) -> tuple[TrainingConfig, float | None]:
    """The configuration, without a budget of passes where nobody knows how long one is, which is noted; and the tokens
    of a pass, None where they are not known. UserError where it has no other budget."""
    if facts is not None:
        return config, float(facts["tokens_per_epoch"])
    if isinstance(config, FinetuneConfig):
        return config, float(rows * config.max_length)
    of_pass = None if any(form.data != config.data for form in config.forms) else _text_tokens(config)
    if of_pass is not None or config.max_epochs is None:
        return config, of_pass
    given, reason = f"max_epochs={config.max_epochs:g}", "the tokens of a pass are not known before the text is read"
    if set(budgets(config.model_dump(include=set(BUDGETS)))) == {"max_epochs"}:
        hint = "measure=true reads it; or give max_steps= or max_tokens= in its place"
        raise UserError(f"{given} cannot be planned: {reason}", hint)
    notes.append(f"{given} is left out here: {reason}")
    return config.model_copy(update={"max_epochs": None}), None


def _planned(
    config: RunConfig,
    learner: BaseLearner,
    of_pass: float | None,
    place: PlannedDevice,
    facts: Mapping[str, Any] | None,
) -> RunPlan:
    """of_pass: the tokens of a pass; facts: of a loader that read it."""
    if isinstance(config, PretrainConfig) and config.phases:
        of_forms = [_assumed(form, of_pass, form.objective.predicted_fraction) for form in config.forms]
        plan = plan_in_phases(config, learner, of_forms, place)[0]
    else:
        predicted = config.objective.predicted_fraction if isinstance(config, PretrainConfig) else 0.0
        plan = plan_of(config, learner, facts or _assumed(config, of_pass, predicted), place)
    return replace(plan, epochs=None if of_pass is None else plan.tokens / of_pass)


def _of_a_pass(config: TrainingConfig, rows: int, of_pass: float | None, measured: bool) -> str:
    """What a pass is over."""
    if isinstance(config, FinetuneConfig):
        return f" over {counted(rows, 'row')}"
    return f" over {'' if measured else 'about '}{count(float(f'{of_pass or 0:.3g}'))} tokens"


def _text_tokens(config: PretrainConfig) -> float | None:
    """Estimated tokens of the training text: in files that are here, by their size; of text that is collected or
    downloaded up to a size, as many as that. None where nobody knows."""
    most, path = getattr(config.data, "max_bytes", None), getattr(config.data, "path", None)
    if isinstance(path, str) and "://" not in path:
        place = Path(path).expanduser()
        files = place.rglob("*") if place.is_dir() else [place] if place.is_file() else map(Path, glob(str(place)))
        most = sum(file.stat().st_size for file in files if file.is_file())
    return most / BYTES_A_TOKEN if most else None


def _store_bytes(config: TrainingConfig) -> int | None:
    """Of the token stores of text, estimated; None of a task's rows, and where nobody knows."""
    tokens = _text_tokens(config) if isinstance(config, PretrainConfig) else None
    return None if tokens is None else round(tokens * (2 if config.model.vocab_size <= 1 << 16 else 4))


def _read(config: TrainingConfig, rows: int) -> str:
    """What is assumed of data that are not read."""
    if isinstance(config, FinetuneConfig):
        return f"{counted(rows, 'training row')}, each taken as max_length={config.max_length} long; most are shorter"
    lengths = " or ".join(dict.fromkeys(str(form.max_length) for form in config.forms))
    return f"every sequence is taken as max_length={lengths} long; the text is not read"


def _assumed(config: RunConfig, of_pass: float | None, predicted: float) -> dict[str, float]:
    """A loader's facts without its data: every sequence is `max_length` long. of_pass: the tokens of a pass, None where
    they are not known."""
    length = float(config.max_length)
    tokens = config.batch_tokens or (config.batch_examples or 1) * length
    of_pass = max(of_pass or 0.0, tokens)
    return {
        "steps_per_epoch": of_pass / tokens,
        "tokens_per_epoch": of_pass,
        "mean_length": length,
        "predicted_fraction": predicted,
    }
