"""`lmtool plan`: parameters, operations, steps, tokens, memory, disk and time, before anything is spent.

The model is built on the meta device, so nothing of it is in memory, and pretraining text is not read: its windows
are taken as full. A task's rows are counted, since its epochs depend on them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lmtool.commands.configs import FinetuneConfig, PretrainConfig
from lmtool.commands.labelled import data_to_learn
from lmtool.commands.planning import plan_in_phases, plan_of, too_large
from lmtool.commands.starting import with_tasks
from lmtool.reporting.console import Output
from lmtool.reporting.plan import plan_rows
from lmtool.reporting.table import print_table
from lmtool.training.precision import choose_device, choose_precision
from lmtool.weights.assemble import assemble


def _assumed(config: PretrainConfig | FinetuneConfig, rows: int, predicted: float) -> dict[str, float]:
    """A loader's facts without its data: every sequence is `max_length` long."""
    length = float(config.max_length)
    tokens = config.batch_tokens or (config.batch_examples or 1) * length
    return {
        "steps_per_epoch": max(1.0, rows * length / tokens),
        "tokens_per_epoch": max(rows * length, tokens),
        "mean_length": length,
        "predicted_fraction": predicted,
    }


def run(config: PretrainConfig | FinetuneConfig, verb: str) -> int:
    """Print the plan of a run."""
    precision = choose_precision(config.precision, choose_device(config.device))
    notes = []
    if isinstance(config, FinetuneConfig):
        config, task, _ = data_to_learn(config)
        rows, predicted = sum(len(data.train) for data in task.members.values()), 0.0
        notes.append(f"{rows:,} training rows, each taken as max_length={config.max_length} long; most are shorter")
    else:
        config, tasks = with_tasks(config)
        rows, predicted = 0, config.objective.predicted_fraction
        notes += [f"{len(task.train):,} training rows of the task {name}" for name, task in tasks.items()]
        lengths = " or ".join(dict.fromkeys(str(form.max_length) for form in config.forms))
        notes.append(f"every sequence is taken as max_length={lengths} long; the text is not read")
    with torch.device("meta"):
        learner, _ = assemble(config, None)
    problem = too_large(config, precision)
    if problem is not None:
        notes += [problem.message, str(problem.hint)]
    if isinstance(config, PretrainConfig) and config.phases:
        facts = [_assumed(form, rows, form.objective.predicted_fraction) for form in config.forms]
        plan, _ = plan_in_phases(config, learner, facts, precision)
    else:
        plan, _ = plan_of(config, learner, _assumed(config, rows, predicted), precision)
    print_table(
        Output(),
        ["what", "how much"],
        plan_rows(replace(plan, notes=(*plan.notes, *notes))),
        heading=f"plan of lmtool {verb} · model={config.model.name} · {precision.name} on {precision.device}",
    )
    return 0
