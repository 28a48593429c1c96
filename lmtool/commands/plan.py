"""`lmtool plan`: parameters, operations, steps, tokens, memory, disk and time, before anything is spent.

The model is built on the meta device, so nothing of it is in memory, and pretraining text is not read: its windows
are taken as full. A task's rows are counted, since its epochs depend on them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lmtool.commands import session as shared
from lmtool.commands.configs import FinetuneConfig, PretrainConfig
from lmtool.config.tables import build
from lmtool.reporting.console import Output
from lmtool.reporting.plan import plan_rows
from lmtool.reporting.table import print_table
from lmtool.tasks.loading import load_task
from lmtool.training.precision import choose_device, choose_precision


class _Assumed:
    """A loader's facts without its data: every sequence is `length` long."""

    def __init__(self, config: PretrainConfig | FinetuneConfig, length: float, rows: int, predicted: float):
        tokens = config.batch_tokens or (config.batch_examples or 1) * length
        self._facts = {
            "steps_per_epoch": max(1.0, rows * length / tokens),
            "tokens_per_epoch": max(rows * length, tokens),
            "mean_length": length,
            "predicted_fraction": predicted,
        }

    def facts(self) -> dict[str, Any]:
        return self._facts


def run(config: PretrainConfig | FinetuneConfig, verb: str) -> int:
    """Print the plan of a run."""
    precision = choose_precision(config.precision, choose_device(config.device))
    notes = []
    if isinstance(config, FinetuneConfig):
        task = load_task(config.task, config.seed, config.cache_dir, config.offline)
        learns, rows, predicted = task.config, len(task.train), 0.0
        notes.append(f"{rows:,} training rows; every one is taken as max_length={config.max_length} long, most are shorter")
    else:
        learns, rows, predicted = config.objective, 0, config.objective.predicted_fraction
        notes.append(f"every sequence is taken as max_length={config.max_length} long; the text is not read")
    with torch.device("meta"):
        learner = build(learns, build(config.model, config.seed), None, config.seed)
        if isinstance(config, FinetuneConfig):
            build(config.tuning).apply(learner)
    loader = _Assumed(config, float(config.max_length), rows, predicted)
    plan, _ = shared.plan_of(config, learner, loader, precision)
    print_table(
        Output(),
        ["what", "how much"],
        plan_rows(replace(plan, notes=(*plan.notes, *notes))),
        heading=f"plan of lmtool {verb} · model={config.model.name} · {precision.name} on {precision.device}",
    )
    return 0
