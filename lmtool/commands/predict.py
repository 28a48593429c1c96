"""`lmtool predict`: label texts with a finetuned checkpoint, fill masks or complete a text with a pretrained one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from lmtool.commands.configs import PredictConfig
from lmtool.commands.evaluate import write_output
from lmtool.commands.trained import load_trained
from lmtool.data.split import Rows
from lmtool.data.tables import read_table
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.reporting.console import Output

TABLES = (".tsv", ".csv", ".jsonl", ".json")


def run(config: PredictConfig, overrides: list[str]) -> None:
    """Read, predict, print or write one JSON line a text."""
    trained = load_trained(config)
    learner = trained.learner
    rows = _rows(config, learner)
    records = learner.respond(rows, trained.config.max_length, config.batch_tokens, trained.precision)
    if config.output is not None:
        write_output(config.output, records)
        return
    output = Output()
    for record in records:
        output.line(learner.line(record))


def _rows(config: PredictConfig, learner: BaseLearner) -> Rows:
    """What is asked about: the rows of a table, or texts."""
    if config.input is not None and Path(config.input).suffix.lower() in TABLES:
        table = read_table(config.input)
        return learner.read_rows(dict(table.columns), table.origin)
    texts = _texts(config)
    columns = {learner.reads[0]: texts}
    if len(learner.reads) == 2:
        if config.pair is None:
            raise UserError(
                f"task={learner.config.name} reads pairs: {', '.join(learner.reads)}",
                'give text="..." pair="...", or input=FILE with both columns',
            )
        columns[learner.reads[1]] = [config.pair]
    return learner.read_rows(columns, [("text", line + 1) for line in range(len(texts))])


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
