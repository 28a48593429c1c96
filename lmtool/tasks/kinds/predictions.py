"""The predictions of a split, stored as one array for each field rather than as one object for each row.

Shape letters: N rows, C classes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np

Label: TypeAlias = Any
"""A label, input or predicted value of one row, or the output for a part of a row. Its type depends on the task kind: a
class number, a value, (C,) binary labels, a list of tags, a span, answers, or a text."""


class Prediction(NamedTuple):
    """The prediction of a row. score: the probability of the value; for kinds without probabilities, the value itself.
    probabilities: (C,) in class order, if the kind has classes. text: the generated text from which the value was
    parsed, if any."""

    value: Label
    score: float
    probabilities: np.ndarray | None = None
    text: str | None = None


class _Numbers:
    def __init__(self, values: np.ndarray, kind: type):
        self.values, self.kind = values, kind

    @classmethod
    def of(cls, count: int, first: int | float | np.ndarray) -> _Numbers:
        return cls(np.zeros((count, *np.shape(first)), dtype=np.asarray(first).dtype), type(first))

    def fits(self, value: object) -> bool:
        if self.kind is np.ndarray and type(value) is np.ndarray:
            return bool(value.shape == self.values.shape[1:] and value.dtype == self.values.dtype)
        return type(value) is self.kind

    def put(self, row: int, value: Label) -> None:
        self.values[row] = value

    def get(self, row: int) -> Label:
        return self.values[row] if self.kind is np.ndarray else self.values[row].item()

    def all(self) -> np.ndarray:
        return self.values


class _Lists(Sequence[list[int]]):
    def __init__(self, flat: array[int], starts: np.ndarray, lengths: np.ndarray):
        self.flat, self.starts, self.lengths = flat, starts, lengths

    def fits(self, value: object) -> bool:
        return _are_integers(value)

    def put(self, row: int, value: list[int]) -> None:
        self.starts[row], self.lengths[row] = len(self.flat), len(value)
        self.flat.extend(value)

    def get(self, row: int) -> list[int]:
        start = int(self.starts[row])
        return self.flat[start : start + int(self.lengths[row])].tolist()

    def all(self) -> Sequence[list[int]]:
        return self

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: Any) -> Any:
        return self.get(range(len(self))[row])


class _Objects:
    """A column of any other values. Equal texts are stored once."""

    def __init__(self, values: list[object]):
        self.values = values
        self.texts: dict[str, str] = {}

    def fits(self, value: object) -> bool:
        return True

    def put(self, row: int, value: Label) -> None:
        self.values[row] = self.texts.setdefault(value, value) if type(value) is str else value

    def get(self, row: int) -> Label:
        return self.values[row]

    def all(self) -> list[object]:
        return self.values


def _column(count: int, first: Label) -> _Numbers | _Lists | _Objects:
    if type(first) in (int, float, np.ndarray):
        return _Numbers.of(count, first)
    if _are_integers(first):
        return _Lists(array("q"), np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int32))
    return _Objects([None] * count)


def _are_integers(value: object) -> bool:
    return type(value) is list and all(type(number) is int for number in value)


class PredictionColumns(Sequence[Prediction]):
    """N predictions, which are set row by row in any order. Each field is stored in a column for its type of values."""

    def __init__(self, count: int):
        self._count, self._filled = count, np.zeros(count, dtype=bool)
        self._columns: dict[str, _Numbers | _Lists | _Objects] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def missing(self) -> int:
        """The number of rows without a prediction."""
        return self._count - int(self._filled.sum())

    def holds(self, row: int) -> bool:
        """Whether a row has a prediction."""
        return bool(self._filled[row])

    def put(self, row: int, prediction: Prediction) -> None:
        """Sets the prediction of a row."""
        for name, value in zip(Prediction._fields, prediction, strict=True):
            if value is None and name not in self._columns:
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _column(self._count, value)
            if not column.fits(value):
                column = self._columns[name] = self._as_objects(column)
            column.put(row, value)
        self._filled[row] = True

    def _as_objects(self, column: _Numbers | _Lists | _Objects) -> _Objects:
        objects: list[object] = [None] * self._count
        for row in np.flatnonzero(self._filled).tolist():
            objects[row] = column.get(row)
        return _Objects(objects)

    @overload
    def __getitem__(self, row: int) -> Prediction: ...
    @overload
    def __getitem__(self, row: slice) -> list[Prediction]: ...
    def __getitem__(self, row: int | slice) -> Prediction | list[Prediction]:
        if isinstance(row, slice):
            return [self[number] for number in range(self._count)[row]]
        number = range(self._count)[row]
        fields: dict[str, Label] = {name: column.get(number) for name, column in self._columns.items()}
        return Prediction(**fields)

    def __iter__(self) -> Iterator[Prediction]:
        return (self[row] for row in range(self._count))

    def column(self, name: str) -> Label:
        """Returns the values of a field for all rows: an array of numbers or a sequence; None if no row has a value."""
        return self._columns[name].all() if name in self._columns else None


def column_of(predictions: Sequence[Prediction], name: str) -> Label:
    """Returns the values of a field for all rows (`PredictionColumns.column`)."""
    if isinstance(predictions, PredictionColumns):
        return predictions.column(name)
    return [getattr(prediction, name) for prediction in predictions]


def values_of(predictions: Sequence[Prediction]) -> Label:
    """Returns the predicted values of all rows: an array of numbers or a sequence."""
    return column_of(predictions, "value")
