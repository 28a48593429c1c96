"""`lmtool evaluate`: score a checkpoint on the data it was trained for, or on other data of the same kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmtool.commands.configs import EvaluateConfig, FinetuneConfig, PretrainConfig
from lmtool.commands.held_out import HeldOutSplits
from lmtool.commands.labelled import data_to_score
from lmtool.commands.trained import load_trained
from lmtool.config.tables import build
from lmtool.data.split import SplitData
from lmtool.data.store import open_store
from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.runs.files import write_rows
from lmtool.tasks.members import read_tasks, rows_of
from lmtool.tokenizers.tokenizer import Tokenizer


def run(config: EvaluateConfig, overrides: list[str]) -> dict[str, Any]:
    """Score, print, and write predictions where an output is named. Returns the metrics."""
    trained, output = load_trained(config), Output()
    before = trained.config
    if isinstance(before, FinetuneConfig):
        task, taken = data_to_score(config, trained, before)
        learner, data, title = trained.learner(task.config, taken), task.splits(), task.config.name
        if taken.note:
            output.line(f"labels: {taken.note}")
    else:
        learner = trained.learner()
        data, title = _text(config, before, trained.tokenizer)
    held_out = HeldOutSplits(learner, data, before.max_length, config.batch_tokens, before.seed)
    evaluations = held_out.score(trained.precision)
    if config.output is not None:
        write_output(config.output, evaluations.records())
    headings, constant = ["metric", "value"], {}
    if "train" in data:
        baseline = held_out.baseline(data["train"])
        headings, constant = [*headings, baseline["name"]], baseline["metrics"]
    metrics = evaluations.metrics()
    rows = [
        [name, f"{value:.4f}", *([_beside(constant.get(name))] if constant else [])] for name, value in metrics.items()
    ]
    print_table(output, headings, rows, heading=f"{config.checkpoint} · {title}")
    for warning in evaluations.warnings:
        output.line(f"warning: {warning}", "yellow")
    return metrics


def _text(config: EvaluateConfig, before: PretrainConfig, tokenizer: Tokenizer) -> tuple[dict[str, SplitData], str]:
    """The validation text of what the checkpoint was trained on, or of other data; and what to call it."""
    data = config.data or before.data
    source = build(data, config.cache_dir)
    _, tasks = read_tasks(before.objective, before.seed, config.cache_dir, config.offline)
    store = open_store(source, "validation", tokenizer, config.cache_dir, Output().stage)
    split = SplitData("validation", store, data.documents, rows_of(tasks, "validation"))
    return {"validation": split}, f"validation text of data={data.name}"


def write_output(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the file of an `output=`, a JSON line a row, masked. UserError naming the key where the disk refuses."""
    try:
        write_rows(Path(path).expanduser(), rows)
    except OSError as error:
        raise UserError(f"output={path}: {error.strerror}", "give another output=") from error


def _beside(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
