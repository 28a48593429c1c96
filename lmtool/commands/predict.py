"""`lmtool predict`: label texts with a finetuned checkpoint, fill masks or go on with a text with a pretrained one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.commands.configs import FinetuneConfig, PredictConfig
from lmtool.commands.evaluate import write_output
from lmtool.commands.trained import Trained, load_trained
from lmtool.data.loader import PackedLoader
from lmtool.data.tables import Rows, read_table
from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.tasks.configs import ClassificationConfig, TaskConfig
from lmtool.tasks.evaluation import predict, predictions
from lmtool.tasks.labels import TakenHead
from lmtool.tasks.rows import TaskRows, task_rows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.heads import PAIR_HEADS

TABLES = (".tsv", ".csv", ".jsonl", ".json")
# The columns of a table where no task names others: the keys of the command.
TEXT, PAIR = "text", "pair"


def run(config: PredictConfig, overrides: list[str]) -> None:
    """Read, predict, print or write one JSON line a text."""
    trained, output, table = load_trained(config), Output(), _table(config)
    if isinstance(trained.config, FinetuneConfig):
        task, rows = _rows(config, table, trained.config.task, trained.foreign)
        found = _labels(config, trained, trained.learner(), task, rows, output)
    elif config.pair is not None or (table is not None and PAIR in table.columns):
        found = _pairs(config, trained, table, output)
    else:
        texts = _texts(config) if table is None else _columns(config, table, (TEXT,), {})[TEXT]
        found = trained.learner().complete(texts, trained.precision.autocast)
    if config.output is not None:
        write_output(config.output, found)
        return
    for row in found:
        output.line(_line(row))


def _labels(
    config: PredictConfig, trained: Trained, learner: Any, task: TaskConfig, rows: TaskRows, output: Output
) -> Iterator[dict[str, Any]]:
    longest = trained.longest
    examples = learner.examples(rows, longest, "input")
    if examples.truncated:
        output.line(f"warning: {examples.truncated:,} of {len(rows):,} texts are cut to {longest} tokens", "yellow")
    loader = PackedLoader(examples, 0, None, max(config.batch_tokens, longest), shuffle=False)
    predicted, _ = predict(
        learner, len(rows), loader.epoch_batches(), trained.precision.device, trained.precision.autocast
    )
    return predictions(task, rows, predicted, "input")


def _pairs(config: PredictConfig, trained: Trained, table: Rows | None, output: Output) -> Iterator[dict[str, Any]]:
    """What a pretrained model's head over pairs says: it is a classification. UserError where there is none."""
    name = next((one for one in PAIR_HEADS if f"heads.{one}.output.weight" in trained.weights.tensors), None)
    if name is None:
        raise UserError(
            f"checkpoint={config.checkpoint} has no head over pairs of texts ({' or '.join(PAIR_HEADS)})",
            "leave the second text out, or finetune the checkpoint on a task over pairs",
        )
    task = ClassificationConfig(name=name, text=(TEXT, PAIR), labels=PAIR_HEADS[name])
    _, rows = _rows(config, table, task, False)
    # What looks like a mask in its texts is one, as in those that are filled.
    trained = replace(trained, tokenizer=Tokenizer.load(trained.weights.folder, parse_special_tokens=True))
    return _labels(config, trained, trained.learner(task, TakenHead(name, None)), task, rows, output)


def _rows(config: PredictConfig, table: Rows | None, task: TaskConfig, foreign: bool) -> tuple[TaskConfig, TaskRows]:
    """What is asked about, as rows of the task, and the task with the columns that are read. foreign: it reads one text
    or two, as they are given."""
    paired = config.pair is not None if table is None else PAIR in table.columns
    if foreign:
        task = task.model_copy(update={"text": (TEXT, PAIR) if paired else (TEXT,)})
    if table is not None:
        columns = _columns(config, table, task.text, task.aliases)
        return task, task_rows(task, getattr(task, "labels", None), columns, table.origin, labelled=False)
    texts = _texts(config)
    if len(task.text) == 1:
        if paired:
            raise UserError(f"task={task.name} reads one text, {task.text[0]}; pair is a second one", "leave pair= out")
        origin = [("text", line + 1) for line in range(len(texts))]
        return task, TaskRows(list(range(len(texts))), (texts,), None, origin)
    if config.pair is None:
        raise UserError(
            f"task={task.name} reads pairs: {', '.join(task.text)}",
            'give text="..." pair="...", or input=FILE with both columns',
        )
    return task, TaskRows([0], (texts, [config.pair]), None, [("text", 1)])


def _table(config: PredictConfig) -> Rows | None:
    """The table that is asked about; None for plain texts."""
    if config.input is None or Path(config.input).suffix.lower() not in TABLES:
        return None
    return read_table(config.input)


def _columns(config: PredictConfig, table: Rows, names: Sequence[str], aliases: Mapping[str, str]) -> dict[str, list]:
    """The columns that are read. UserError where one is missing."""
    columns = {aliases.get(name, name): values for name, values in table.columns.items()}
    missing = [name for name in names if name not in columns]
    if missing:
        raise UserError(
            f"{config.input}: no column {missing[0]} to read; there are {', '.join(table.columns)}",
            f"name its text columns {', '.join(names)}",
        )
    return {name: columns[name] for name in names}


def _texts(config: PredictConfig) -> list[str]:
    """The texts asked about: `text`, or the lines of `input`."""
    if config.text is not None:
        return [config.text]
    if config.input is None:
        raise UserError("nothing to predict", 'give text="..." or input=FILE (- reads standard input)')
    try:
        content = sys.stdin.buffer.read() if config.input == "-" else Path(config.input).expanduser().read_bytes()
        lines = [line for line in content.decode("utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"input={config.input}: {error.strerror}", "give a file of one text a line") from error
    except UnicodeDecodeError as error:
        at = np.frombuffer(content[: error.start], dtype=np.uint8)
        line = int((at == ord("\n")).sum()) + 1
        raise UserError(
            f"{config.input}:{line}: not UTF-8 (byte {error.start})", "convert the file to UTF-8"
        ) from error
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
