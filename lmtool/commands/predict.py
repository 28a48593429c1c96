"""`lmtool predict`: label texts with a finetuned checkpoint, fill masks or go on with a text with a pretrained one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtool.commands.configs import FinetuneConfig, PredictConfig
from lmtool.commands.evaluate import write_output
from lmtool.commands.trained import Trained, load_trained
from lmtool.data.files import STANDARD_INPUT, read_lines, regular_file
from lmtool.data.loader import PackedLoader
from lmtool.data.tables import read_table
from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.tasks.evaluation import predict, predictions
from lmtool.tasks.rows import TaskRows, task_rows

TABLES = (".tsv", ".csv", ".jsonl", ".json")


def run(config: PredictConfig, overrides: list[str]) -> None:
    """Read, predict, print or write one JSON line a text."""
    trained = load_trained(config)
    if isinstance(trained.config, FinetuneConfig):
        found = _labels(config, trained, trained.config)
    else:
        found = trained.learner.complete(_texts(config), trained.precision.autocast)
    if config.output is not None:
        write_output(config.output, found)
        return
    output = Output()
    for row in found:
        output.line(_line(row))


def _labels(config: PredictConfig, trained: Trained, before: FinetuneConfig) -> Iterator[dict[str, Any]]:
    rows = _rows(config, before)
    examples = trained.learner.examples(rows, before.max_length, "input")
    loader = PackedLoader(examples, 0, None, max(config.batch_tokens, before.max_length), shuffle=False)
    predicted, _ = predict(
        trained.learner, len(rows), loader.epoch_batches(), trained.precision.device, trained.precision.autocast
    )
    return predictions(before.task, rows, predicted, "input")


def _rows(config: PredictConfig, before: FinetuneConfig) -> TaskRows:
    """What is asked about, as rows of the task."""
    task = before.task
    if config.input is not None and Path(config.input).suffix.lower() in TABLES:
        table = read_table(regular_file("input", config.input))
        columns = {task.aliases.get(name, name): values for name, values in table.columns.items()}
        missing = [name for name in task.text if name not in columns]
        if missing:
            raise UserError(
                f"{config.input}: no column {missing[0]} to read; there are {', '.join(table.columns)}",
                f"name its text columns {', '.join(task.text)}",
            )
        return task_rows(
            task,
            getattr(task, "labels", None),
            {name: columns[name] for name in task.text},
            table.origin,
            labelled=False,
        )
    texts = _texts(config)
    if len(task.text) == 2:
        if config.pair is None:
            raise UserError(
                f"task={task.name} reads pairs: {', '.join(task.text)}",
                'give text="..." pair="...", or input=FILE with both columns',
            )
        return TaskRows([0], (texts, [config.pair]), None, [("text", 1)])
    return TaskRows(list(range(len(texts))), (texts,), None, [("text", line + 1) for line in range(len(texts))])


def _texts(config: PredictConfig) -> list[str]:
    """The texts asked about: `text`, or the lines of `input`."""
    if config.text is not None:
        return [config.text]
    if config.input is None:
        raise UserError("nothing to predict", 'give text="..." or input=FILE (- reads standard input)')
    path = STANDARD_INPUT if config.input == "-" else regular_file("input", config.input)
    lines = [line for _, line in read_lines(path) if line.strip()]
    if not lines:
        raise UserError(f"input={config.input}: no lines of text in it", "give one text a line")
    return lines


def _line(row: dict[str, Any]) -> str:
    """A row for the screen: the prediction first."""
    if "prediction" in row:
        value = row["prediction"]
        shown = f"{value:.3f}" if isinstance(value, float) else f"{value} {row['score']:.2f}"
        text = " | ".join(str(row[name]) for name in row if name not in ("id", "split", "gold", "prediction", "score"))
        return f"{shown}  {text}"
    if "masks" in row:
        guesses = "; ".join(
            ", ".join(f"{piece} {share:.2f}" for piece, share in one["guesses"]) for one in row["masks"]
        )
        return f"{row['filled']}  ({guesses})"
    return f"{row['text']}{row['continuation']}"
