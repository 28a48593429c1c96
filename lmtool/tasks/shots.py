"""A few training rows of each class, and as many others to choose the best checkpoint by: true few-shot learning, which
sees no larger development set (Gao et al. 2021, section 3).

Which rows is a function of the seed and the data: draws of the stream `sample`, a counter for each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lmtool.data.split import Rows
from lmtool.errors import UserError
from lmtool.streams import Permutation
from lmtool.tasks.kinds.base import TaskKind

# The counter of the sample stream of the first class; the others follow.
_SHOTS = 1 << 10


class Shots(NamedTuple):
    """train, development: the drawn rows, those of a class side by side. rest: the other training rows whose text is in
    neither."""

    train: Rows
    development: Rows
    rest: Rows


def draw_shots(kind: TaskKind, train: Rows, held_out: Sequence[Rows], shots: int, seed: int) -> Shots:
    """`shots` rows of each class and `shots` others, of different texts, none of which a held-out row has. UserError
    where a class has too few."""
    config = kind.config
    known = {repr(group) for rows in held_out for group in kind.groups(rows)}
    first: dict[str, int] = {}
    for row, group in enumerate(kind.groups(train)):
        first.setdefault(repr(group), row)
    free = np.array([row for group, row in first.items() if group not in known], dtype=np.int64)
    labels = np.asarray(train.labels)[free]
    drawn: list[np.ndarray] = []
    for number, name in enumerate(config.labels):
        own = free[labels == number]
        if len(own) < 2 * shots:
            raise UserError(
                f"task.shots_per_class={shots} takes {2 * shots} training rows of each class, of different texts; "
                f"{name} has {len(own)}",
                f"give task.shots_per_class={len(own) // 2} at most" if len(own) > 1 else "give more rows of the class",
            )
        drawn.append(own[Permutation(len(own), seed, "sample", _SHOTS + number)(np.arange(2 * shots))])
    chosen = np.concatenate([own[:shots] for own in drawn])
    others = np.concatenate([own[shots:] for own in drawn])
    rest = np.setdiff1d(free, np.concatenate([chosen, others]))
    return Shots(train.take(chosen), train.take(others), train.take(rest))
