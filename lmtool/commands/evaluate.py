"""`lmtool evaluate`: score a checkpoint on the data it was trained for, or on other data of the same kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmtool.commands.configs import EvaluateConfig, FinetuneConfig, PretrainConfig
from lmtool.commands.labelled import data_to_score
from lmtool.commands.trained import Trained, load_trained
from lmtool.config.tables import build
from lmtool.data.loader import PackedLoader
from lmtool.data.store import open_store
from lmtool.errors import UserError
from lmtool.objectives.evaluation import evaluate as evaluate_text
from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.tasks.evaluation import baseline, evaluate, predictions, report
from lmtool.tasks.objective import read_tasks, rows_of
from lmtool.training.files import write_rows


def run(config: EvaluateConfig, overrides: list[str]) -> dict[str, Any]:
    """Score, print, and write predictions where an output is named. Returns the metrics."""
    trained = load_trained(config)
    if isinstance(trained.config, FinetuneConfig):
        return _task(config, trained, trained.config)
    return _text(config, trained, trained.config)


def _task(config: EvaluateConfig, trained: Trained, before: FinetuneConfig) -> dict[str, Any]:
    output = Output()
    data, taken = data_to_score(config, trained, before)
    task, learner = data.config, trained.learner(data.config, taken)
    if taken.note:
        output.line(f"labels: {taken.note}")
    splits = {}
    for split, rows in data.validation.items():
        loader = PackedLoader(
            learner.examples(rows, before.max_length, split), 0, None, config.batch_tokens, shuffle=False
        )
        splits[split] = evaluate(
            learner, rows, loader.epoch_batches(), trained.precision.device, trained.precision.autocast
        )
    whole = report(task, splits)
    if config.output is not None:
        predicted = (
            row
            for split, one in splits.items()
            for row in predictions(task, data.validation[split], one.predicted, split)
        )
        write_output(config.output, predicted)
    constant = baseline(task, data.train, next(iter(data.validation.values())))
    table = [[name, f"{value:.4f}", _beside(constant["metrics"].get(name))] for name, value in whole.metrics.items()]
    print_table(output, ["metric", "value", constant["name"]], table, heading=f"{config.checkpoint} · {task.name}")
    for warning in whole.warnings:
        output.line(f"warning: {warning}", "yellow")
    return whole.metrics


def _text(config: EvaluateConfig, trained: Trained, before: PretrainConfig) -> dict[str, Any]:
    data = config.data or before.data
    source = build(data, config.cache_dir)
    _, tasks = read_tasks(before.objective, before.seed, config.cache_dir, config.offline)
    store = open_store(source, "validation", trained.tokenizer, config.cache_dir, Output().stage)
    store = replace(store, rows=rows_of(tasks, "validation"))
    learner = trained.learner()
    examples = learner.examples(store, before.max_length, data.documents, "validation")
    loader = PackedLoader(examples, before.seed, None, max(config.batch_tokens, before.max_length), shuffle=False)
    found = evaluate_text(
        learner, loader.epoch_batches(), trained.precision.device, trained.precision.autocast
    ).metrics()
    print_table(
        Output(),
        ["metric", "value"],
        [[name, f"{value:.4f}"] for name, value in found.items()],
        heading=f"{config.checkpoint} · validation text of data={data.name}",
    )
    return found


def write_output(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the file of an `output=`, a JSON line a row, masked. UserError naming the key where the disk refuses."""
    try:
        write_rows(Path(path).expanduser(), rows)
    except OSError as error:
        raise UserError(f"output={path}: {error.strerror}", "give another output=") from error


def _beside(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
