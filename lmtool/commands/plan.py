"""`lmtool plan`: parameters, operations, steps, tokens, memory, disk and time, before anything is spent.

The model is built on the meta device, so nothing of it is in memory, and pretraining text is not read: its windows
are taken as full. A task's rows are counted, since its epochs depend on them. With measure=true a few steps are run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import torch

from lmtool.commands.plan_measured import STEPS, Measured, measured
from lmtool.costs.memory_of_run import TrainingConfig, too_large
from lmtool.costs.plan_fitting import what_fits
from lmtool.costs.plan_of_run import devices_of, plan_in_phases, plan_of
from lmtool.costs.planned_place import Place, place_of
from lmtool.learners.base import BaseLearner
from lmtool.reporting.console import Output
from lmtool.reporting.plan import RunPlan, plan_rows
from lmtool.reporting.table import print_table
from lmtool.reporting.text import size
from lmtool.schema.plan import PlanKeys
from lmtool.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.session.labelled import data_to_learn
from lmtool.session.pretraining import Pretraining
from lmtool.weights.assemble import assemble

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
        notes += [f"{len(task.train):,} training rows of the task {name}" for name, task in tasks.items()]
    with torch.device("meta"):
        learner, _ = assemble(config, None)
    problem = too_large(config, place.precision) if place.here else None
    if problem is not None:
        notes += [problem.message, str(problem.hint)]
    seen = _measured(typed, place, problem is None) if keys.measure else None
    notes += [_read(config, rows) if seen is None else f"measured: peak memory of the process {size(seen.peak_bytes)}"]
    if devices_of(config) > 1 and not place.cuda:
        notes.append(f"{devices_of(config)} processes share the cores of one machine")

    def planned(config: RunConfig) -> RunPlan:
        return _planned(config, learner, rows, place, None if seen is None else seen.facts)

    plan = replace(planned(config), store_bytes=_store_bytes(config))
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


def _measured(config: TrainingConfig, place: Place, fits: bool) -> Measured | None:
    """A few steps; none of a run that cannot be held."""
    if not place.here:
        # Says what is missing, as training would.
        from lmtool.training.precision import choose_device

        choose_device(config.device)
    return measured(config) if fits else None


def _planned(
    config: RunConfig, learner: BaseLearner, rows: int, place: Place, facts: Mapping[str, Any] | None
) -> RunPlan:
    if isinstance(config, PretrainConfig) and config.phases:
        of_forms = [_assumed(form, rows, form.objective.predicted_fraction) for form in config.forms]
        return plan_in_phases(config, learner, of_forms, place)[0]
    predicted = config.objective.predicted_fraction if isinstance(config, PretrainConfig) else 0.0
    return plan_of(config, learner, facts or _assumed(config, rows, predicted), place)[0]


def _store_bytes(config: RunConfig) -> int | None:
    """Of the token stores of text in files that are here: a token for about BYTES_A_TOKEN of it; None of other text."""
    path = getattr(getattr(config, "data", None), "path", None)
    if not isinstance(path, str) or "://" in path:
        return None
    place = Path(path).expanduser()
    files = place.rglob("*") if place.is_dir() else [place] if place.is_file() else map(Path, glob(str(place)))
    tokens = sum(file.stat().st_size for file in files if file.is_file()) / BYTES_A_TOKEN
    return round(tokens * (2 if config.model.vocab_size <= 1 << 16 else 4)) or None


def _read(config: TrainingConfig, rows: int) -> str:
    """What is assumed of data that are not read."""
    if isinstance(config, FinetuneConfig):
        return f"{rows:,} training rows, each taken as max_length={config.max_length} long; most are shorter"
    lengths = " or ".join(dict.fromkeys(str(form.max_length) for form in config.forms))
    return f"every sequence is taken as max_length={lengths} long; the text is not read"


def _assumed(config: RunConfig, rows: int, predicted: float) -> dict[str, float]:
    """A loader's facts without its data: every sequence is `max_length` long."""
    length = float(config.max_length)
    tokens = config.batch_tokens or (config.batch_examples or 1) * length
    return {
        "steps_per_epoch": max(1.0, rows * length / tokens),
        "tokens_per_epoch": max(rows * length, tokens),
        "mean_length": length,
        "predicted_fraction": predicted,
    }
