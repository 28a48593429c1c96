"""The data of one split, as a learner takes it: text, labelled rows, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lmtool.data.store import TokenStore


@dataclass(frozen=True)
class Rows:
    """Decoded rows of a table, labelled or not.

    ids: a row's own number in its file where it has one, else its place from 0. columns: by name and in the order in
    which a task reads them, one value a row: texts, lists of words, whatever its kind reads. labels: what is
    predicted, one a row in the form of its kind ((N,) int64 classes, (N,) float64 values, a list of anything else);
    None where the split is unlabelled. origin: (file, line) of each row.
    """

    ids: list[str | int]
    columns: dict[str, list[Any]]
    labels: np.ndarray | Sequence[Any] | None
    origin: list[tuple[str, int]]

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of_texts(cls, **columns: list[str]) -> Rows:
        """Unlabelled rows of texts by column that came from no file."""
        count = len(next(iter(columns.values())))
        return cls(list(range(count)), dict(columns), None, [("text", line + 1) for line in range(count)])

    def take(self, indices: np.ndarray) -> Rows:
        """The rows at these places, in this order."""
        places = np.asarray(indices).tolist()
        return Rows(
            [self.ids[place] for place in places],
            {name: [values[place] for place in places] for name, values in self.columns.items()},
            self.labels_at(indices),
            [self.origin[place] for place in places],
        )

    def labels_at(self, indices: np.ndarray) -> np.ndarray | Sequence[Any] | None:
        """The labels of the rows at these places, in this order."""
        labels = self.labels
        if labels is None or isinstance(labels, np.ndarray):
            return None if labels is None else labels[indices]
        return [labels[place] for place in np.asarray(indices).tolist()]


def unlabelled(task: str) -> str:
    """The name of a task's rows whose labels are not read."""
    return f"{task} unlabelled"


@dataclass(frozen=True)
class SplitData:
    """What a learner learns from, or is scored on.

    split: train, validation, or the name a data set gives it. store: the text, and `documents` whether an example may
    span several of its documents. rows: labelled rows by the name of their task, and `unlabelled` ones. stride: tokens
    between the starts of the windows of held-out text, of a learner that `slides`; None: windows as in training.
    members: of several texts, those of each, by their titles; `shares` of their examples, None for as many as it has.
    """

    split: str
    store: TokenStore | None = None
    documents: Literal["separate", "joined"] = "joined"
    rows: Mapping[str, Rows] = field(default_factory=dict)
    stride: int | None = None
    members: Mapping[str, SplitData] = field(default_factory=dict)
    shares: tuple[float, ...] | None = None

    @property
    def text(self) -> TokenStore:
        """The store of a split that has text."""
        if self.store is None:
            raise ValueError(f"the split {self.split} has no text")
        return self.store
