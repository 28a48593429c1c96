"""Predictions of a file as the labels of training rows: those that `lmtool predict output=` writes, or a run's
predictions.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.config.tables import build
from lmtool.data.split import Rows, SplitData
from lmtool.data.tables import read_table
from lmtool.errors import UserError
from lmtool.schema.run import FinetuneConfig
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.kinds.labels import joined


def relabelled(
    config: FinetuneConfig, path: str, data: SplitData, teacher: str = "TEACHER"
) -> tuple[SplitData, dict[str, Any]]:
    """Training data whose rows have the labels of a file, and what the first screen says of it. UserError, with how
    many they are, where training rows have no prediction."""
    task = config.task
    rows, predictions = data.rows[task.name], predictions_of(task, path)
    of_both, of_text = _places(predictions)
    places = [of_both.get(key, of_text.get(key[1], -1)) for key in _keys(rows)]
    missing = [number for number, place in enumerate(places) if place < 0]
    if missing:
        file, line = rows.origin[missing[0]]
        raise UserError(
            f"distill.predictions={path} has a prediction for {len(rows) - len(missing):,} of {len(rows):,} training "
            f"rows; not for {file}:{line}: none has its texts",
            f"lmtool predict checkpoint={teacher} input={file} output={Path(path).stem}_train.jsonl",
        )
    labelled = replace(rows, labels=predictions.labels_at(np.array(places)))
    facts = {"predictions": f"{len(rows):,} of {path}"}
    others = len(predictions) - len(set(places))
    if others:
        facts["predictions of other rows"] = f"{others:,}, not read"
    return replace(data, rows={**data.rows, task.name: labelled}), facts


def predictions_of(task: TaskConfig, path: str) -> Rows:
    """A file of predictions as labelled rows of a task. UserError, naming file and line, where one is no label."""
    table = read_table(Path(path).expanduser())
    columns = {task.aliases.get(name, name): values for name, values in table.columns.items()}
    columns = joined(task, columns, table.origin)
    missing = [name for name in ("prediction", *task.reads) if name not in columns]
    if missing:
        raise UserError(
            f"distill.predictions={path} has no column {missing[0]}; it has {', '.join(columns)}",
            "give what lmtool predict output= writes of the task's rows",
        )
    kind: Any = build(task)
    labels = kind.labels_of_predictions(columns)
    kept = {name: values for name, values in columns.items() if name not in ("gold", "prediction", "score", "split")}
    return kind.rows({**kept, task.label: labels}, table.origin, labelled=True)


def _keys(rows: Rows) -> list[tuple[str, str]]:
    """Of each row its number, and all that is read of it."""
    texts = zip(*rows.columns.values(), strict=True)
    return [(str(number), json.dumps(own)) for number, own in zip(rows.ids, texts, strict=True)]


def _places(predictions: Rows) -> tuple[Mapping[tuple[str, str], int], Mapping[str, int]]:
    """The places of predictions by number and texts; and by texts alone, where no two of these differ."""
    keys = _keys(predictions)
    assert predictions.labels is not None
    labels = [repr(label) for label in predictions.labels]
    of_text: dict[str, int] = {}
    for place, (_, text) in enumerate(keys):
        first = of_text.setdefault(text, place)
        if first >= 0 and labels[first] != labels[place]:
            of_text[text] = -1
    return {key: place for place, key in enumerate(keys)}, of_text
