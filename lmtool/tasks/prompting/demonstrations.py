"""Which answered rows stand beside a text in its prompt: one of each class, drawn for every text by itself (Gao et al.
2021, section 6). A draw is keyed by the text, and so the same in whatever company the text is read.

Shape letters: E rows, C classes, S draws of a row, P rows that are drawn from, K columns of a pattern.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from lmtool import streams
from lmtool.data.split import Rows
from lmtool.errors import UserError
from lmtool.streams import Permutation
from lmtool.tasks.prompting.pattern import Pattern, PatternTexts

AT_MOST = 16
"""Rows of a class that are kept with a checkpoint to be drawn from: as many as there are in the published setting."""
# A counter of the sample stream: which rows are kept.
_KEPT = 5
# Counters of the draws themselves: those of an evaluation, and from the next one on those of an epoch.
EVALUATION = 0


def kept_rows(rows: Rows, labels: Sequence[str]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """By class, the texts of different training rows, `AT_MOST` of each; the same draw for every run."""
    texts = list(zip(*rows.columns.values(), strict=True))
    numbers_E, kept = np.asarray(rows.labels), {}
    for number, label in enumerate(labels):
        own = list(dict.fromkeys(texts[row] for row in np.flatnonzero(numbers_E == number)))
        drawn = Permutation(len(own), 0, "sample", _KEPT)(np.arange(min(AT_MOST, len(own))))
        kept[label] = tuple(own[place] for place in np.sort(drawn))
    return kept


class Demonstrations:
    """rows: by class, the texts of the columns `text` in each row that may be drawn. draws: S, of a row that is
    predicted."""

    def __init__(
        self,
        rows: Mapping[str, Sequence[Sequence[str]]],
        labels: Sequence[str],
        text: Sequence[str],
        pattern: Pattern,
        draws: int,
        seed: int,
    ):
        self.labels, self.draws, self.seed = tuple(labels), draws, seed
        by_class = [[tuple(row) for row in rows.get(label, ())] for label in labels]
        self._counts_C = np.array([len(own) for own in by_class], dtype=np.int64)
        self._starts_C = np.cumsum(self._counts_C) - self._counts_C
        pool = [row for own in by_class for row in own]
        self.texts = PatternTexts(Rows.of_texts(**_columns(text, pool)), pattern)
        self._places: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for number, own in enumerate(by_class):
            for place, row in enumerate(own):
                self._places.setdefault(row, []).append((number, place))

    def own(self, rows: Rows) -> np.ndarray:
        """(E, C) the place of each row's own text among those of a class; their number where it is none of them."""
        own_EC = np.tile(self._counts_C, (len(rows), 1))
        for row, texts in enumerate(zip(*rows.columns.values(), strict=True)):
            for number, place in self._places.get(texts, ()):
                own_EC[row, number] = place
        return own_EC

    def drawn(self, own_EC: np.ndarray, keys_E: np.ndarray, counter: int, draws: int) -> np.ndarray:
        """(E, draws, C) rows of the pool, none of them the text itself. keys: of the texts. counter: of the stream.
        UserError where a class has no other."""
        others_EC = self._counts_C - (own_EC < self._counts_C)
        lacking = np.flatnonzero((others_EC < 1).any(axis=0))
        if len(lacking):
            raise UserError(
                f"task.demonstrations: no other row of the class {self.labels[lacking[0]]} is there to show beside one",
                "train on two rows of each class at least, or give task.demonstrations=0",
            )
        shape = (len(own_EC), draws, len(self.labels))
        uniform = streams.uniform(self.seed, "sample", counter, keys_E, draws * len(self.labels))
        place = (uniform.reshape(shape) * others_EC[:, None]).astype(np.int64)
        return self._starts_C + place + (place >= own_EC[:, None])


def text_keys(rows: Rows) -> np.ndarray:
    """(E,) int64: a number of each row's texts, by which it is known wherever it stands."""
    texts = ("\0".join(row).encode() for row in zip(*rows.columns.values(), strict=True))
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)


def _columns(text: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    return {name: [row[number] for row in rows] for number, name in enumerate(text)}
