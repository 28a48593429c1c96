"""Demonstrations and questions as tokens: what a model reads in front of an answer, and how much of it fits.

Each demonstration, and each question, is cut into tokens by itself, with what separates it from the one before: the
tokens of the demonstrations are then the same for every question, and are read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmtool.data.split import Rows
from lmtool.errors import UserError
from lmtool.learners.writing import Writer
from lmtool.streams import Permutation
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.labels import place
from lmtool.tasks.prompting.template import SEPARATOR, Template

# A counter of the sample stream: which training rows are demonstrations.
_DEMONSTRATIONS = 3


def demonstrations(kind: TaskKind, train: Rows, held_out: Sequence[Rows], shots: int, seed: int) -> Rows:
    """A seeded draw of training rows, in the order in which they are shown; none of them has the text of a held-out
    row. UserError where there are too few."""
    if not shots:
        return train.take(np.zeros(0, dtype=np.int64))
    known = {repr(group) for rows in held_out for group in kind.groups(rows)}
    free = np.array([number for number, group in enumerate(kind.groups(train)) if repr(group) not in known])
    if len(free) < shots:
        raise UserError(
            f"shots={shots} is more than the {len(free)} training rows of task={kind.config.name}"
            + (" whose text is in no held-out row" if len(free) < len(train) else ""),
            f"give shots={len(free)} at most, or a folder with a train file",
        )
    return train.take(free[Permutation(len(free), seed, "sample", _DEMONSTRATIONS)(np.arange(shots))])


def values_of(kind: TaskKind, rows: Rows) -> list[dict[str, str]]:
    """Of each row, its columns as a template shows them."""
    columns = kind.worded(rows)
    return [dict(zip(columns, texts, strict=True)) for texts in zip(*columns.values(), strict=True)]


@dataclass(frozen=True)
class Question:
    """What is read in front of an answer. kept: how many demonstrations, the last ones. shared: their tokens. own:
    those of the row."""

    kept: int
    shared: tuple[int, ...]
    own: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [*self.shared, *self.own]


class Prompts:
    """shown: the demonstrations. longest: tokens that the model reads at a time."""

    def __init__(self, kind: TaskKind, template: Template, writer: Writer, shown: Rows, longest: int):
        self.template, self.writer, self.longest = template, writer, longest
        texts = [
            template.example(answer, values)
            for answer, values in zip(kind.right_answers(shown), values_of(kind, shown), strict=True)
        ]
        self._texts = texts
        firsts = [tuple(writer.encode(text).tolist()) for text in texts]
        later = [tuple(writer.encode(SEPARATOR + text).tolist()) for text in texts]
        self._shared = [
            tuple(token for part in (*firsts[at : at + 1], *later[at + 1 :]) for token in part)
            for at in range(len(texts), -1, -1)
        ]
        probe = np.zeros(2, dtype=np.int64)
        self._around = len(writer.laid_out(probe)) - len(probe)
        # Of an encoder-decoder the answer is read by another stack.
        self._one_stack = writer.space.start is None

    @property
    def shots(self) -> int:
        return len(self._texts)

    def text(self, values: Mapping[str, str]) -> str:
        """A prompt with all demonstrations, to be read by a person."""
        return SEPARATOR.join([*self._texts, self.template.before(values)])

    def question(self, values: Mapping[str, str], answer: int, where: tuple[str, int]) -> Question:
        """A row behind as many demonstrations as fit, the oldest left out. answer: tokens of the longest answer that
        must fit too. where: file and line. UserError where not even the row fits."""
        room = self.longest - (answer if self._one_stack else 0)
        alone, behind = self._own(values, False), self._own(values, True) if self.shots else ()
        for kept in range(self.shots, -1, -1):
            own = behind if kept else alone
            if len(self._shared[kept]) + len(own) + self._around <= room:
                return self._laid_out(kept, own)
        more = f" and {answer} of the answer" if self._one_stack and answer else ""
        needed, most = len(alone) + self._around + (answer if self._one_stack else 0), self.writer.backbone.longest_text
        longer = f"give max_length={needed} or more, " if needed <= most else f"the model reads {most} at most: give "
        raise UserError(
            f"{place(where)}: {len(alone) + self._around} tokens{more}, without a demonstration; {self.longest} are "
            "read at a time",
            f"{longer}a shorter task.prompt.template=, or take the row out",
        )

    def with_kept(self, values: Mapping[str, str], kept: int) -> Question:
        """A row behind that many demonstrations."""
        return self._laid_out(kept, self._own(values, kept > 0))

    def _own(self, values: Mapping[str, str], behind: bool) -> tuple[int, ...]:
        """The tokens of a row, with what separates it from the demonstration before it."""
        text = (SEPARATOR if behind else "") + self.template.before(values)
        return tuple(self.writer.encode(text).tolist()) if text else ()

    def _laid_out(self, kept: int, own: tuple[int, ...]) -> Question:
        """Where the model has special tokens around a text nothing is shared."""
        question = Question(kept, self._shared[kept], own)
        if question.tokens and not self._around:
            return question
        return Question(kept, (), tuple(self.writer.laid_out(np.array(question.tokens, dtype=np.int64)).tolist()))
