"""Rows as prompts in packed batches: the texts where the template has them, answered rows beside them, and the places
that are predicted. What is too long is cut at the ends of its texts, never in the template.

Shape letters: E examples of a plan, N of them in a batch, K columns of a template, C classes, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Assembled, Template, assemble, ragged_ranges
from lmtool.data.formats import truncate_texts
from lmtool.data.plan import Plan
from lmtool.data.split import Rows
from lmtool.errors import UserError
from lmtool.tasks.kinds.labels import place
from lmtool.tasks.prompting.auxiliary import Auxiliary
from lmtool.tasks.prompting.demonstrations import EVALUATION, Demonstrations, text_keys
from lmtool.tasks.prompting.pattern import Pattern, PatternTexts, room_for_texts
from lmtool.tasks.prompting.template import SEPARATOR
from lmtool.types import Batch, Target

ANSWERS = "answer"
"""The column that is 1 at the place of an answer that is predicted."""


@dataclass(frozen=True)
class Wording:
    """How rows of a task are put to a model.

    pattern: the template. around: what the model's format puts around one text. mask: the token in the place of the
    answer; None for a decoder, which reads up to it. words: (C,) the token of each class.
    """

    pattern: Pattern
    around: Template
    mask: int | None
    words: Sequence[int]

    def template(self, demonstrations: bool) -> Template:
        """The tokens around the texts of a question and, with `demonstrations`, of an answered row of each class:
        behind the question, each closed as a text of its own; before it where it is continued."""
        first, last = (piece.tolist() for piece in self.around.pieces)
        before = SEPARATOR if self.mask is None and demonstrations else ""
        question, (run, at) = self.pattern.pieces(None if self.mask is None else [self.mask], before)
        answered = [
            self.pattern.pieces([word], SEPARATOR if self.mask is None and number else "")[0]
            for number, word in enumerate(self.words if demonstrations else ())
        ]
        if self.mask is None:
            runs = _joined([*answered, question])
        else:
            runs = _joined([[*own[:-1], own[-1] + last] for own in [question, *answered]])
            last = []
        runs[0], runs[-1] = first + runs[0], runs[-1] + last
        marks = [[0] * len(tokens) for tokens in runs]
        if self.mask is not None:
            marks[run][at + (len(first) if run == 0 else 0)] = 1
        columns = {name: [[values[0]] * len(tokens) for tokens in runs] for name, values in self._values.items()}
        return Template(
            tuple(np.array(tokens, dtype=np.int64) for tokens in runs),
            {
                name: tuple(np.array(own, dtype=np.int64) for own in column)
                for name, column in {**columns, ANSWERS: marks}.items()
            },
            {**{name: values * (len(runs) - 1) for name, values in self._values.items()}, ANSWERS: (0,) * len(runs)},
        )

    @property
    def _values(self) -> dict[str, tuple[int, ...]]:
        """Of a format's columns, that of a text."""
        return self.around.text_columns


class PromptedExamples:
    """A row is a prompt. demonstrations: what stands beside it, drawn anew every epoch of training; elsewhere a row has
    as many parts as there are draws. auxiliary: of training, masked texts beside the prompts, a second document of each
    example."""

    def __init__(
        self,
        rows: Rows,
        wording: Wording,
        max_length: int,
        term: str,
        split: str,
        demonstrations: Demonstrations | None = None,
        auxiliary: Auxiliary | None = None,
    ):
        if not len(rows):
            raise UserError(f"the {split} split has no rows", "give a table with rows: `lmtool show task.path`")
        self.rows, self.term, self.split, self.shown = rows, term, split, demonstrations
        self.auxiliary = auxiliary
        self.template = wording.template(demonstrations is not None)
        self.continued = wording.mask is None
        self._texts = PatternTexts(rows, wording.pattern)
        self._columns = len(self._texts.texts)
        self._own = None if demonstrations is None else demonstrations.own(rows)
        self._keys = None if demonstrations is None else text_keys(rows)
        self.room = room_for_texts(max_length, self.template.overhead, len(self.template.pieces) - 1)
        self._plans: dict[int, Plan] = {}
        self.truncated = 0
        self.plan(0)

    def plan(self, epoch: int) -> Plan:
        """The same every epoch, but for what is drawn in training."""
        drawn = self.split == "train" and (self.shown is not None or self.auxiliary is not None)
        epoch = epoch if drawn else 0
        if epoch not in self._plans:
            kept = {number: plan for number, plan in self._plans.items() if number in (0, epoch - 1)}
            self._plans = {**kept, epoch: self._planned(epoch)}
        return self._plans[epoch]

    def _planned(self, epoch: int) -> Plan:
        row = np.arange(len(self.rows))
        part = np.zeros_like(row)
        lengths = self._texts.lengths
        shown = np.zeros((len(row), 0), dtype=np.int64)
        if self.shown is not None and self._own is not None and self._keys is not None:
            train = self.split == "train"
            draws = 1 if train else self.shown.draws
            drawn = self.shown.drawn(self._own, self._keys, epoch + 1 if train else EVALUATION, draws)
            row, part = np.repeat(row, draws), np.tile(np.arange(draws), len(row))
            shown = drawn.reshape(len(row), -1)
            beside = [self.shown.texts.lengths[:, own] for own in shown.T]
            lengths = np.concatenate([lengths[:, row], *beside])
            if self.continued:
                lengths = np.roll(lengths, -self._columns, axis=0)
        kept = truncate_texts(lengths, self.room)
        if epoch == 0:
            self.truncated = len(np.unique(row[(kept < lengths).any(axis=0)]))
        packed = kept.sum(axis=0) + self.template.overhead
        if not packed.all():
            where = place(self.rows.origin[row[np.flatnonzero(packed == 0)[0]]])
            raise UserError(f"{where}: an empty text, and a prompt of nothing else", "take the row out")
        fields = [("row", "i8", ()), ("part", "i4", ()), ("shown", "i4", shown.shape[1:]), ("kept", "i4", (len(kept),))]
        records = np.zeros(len(row), dtype=[*fields, ("auxiliary", "i8", ())])
        records["row"], records["part"], records["shown"], records["kept"] = row, part, shown, kept.T
        if self.auxiliary is not None:
            records["auxiliary"] = self.auxiliary.drawn(row, epoch)
            packed = packed + self.auxiliary.lengths[records["auxiliary"]]
        return Plan(records, packed)

    def _assembled(self, rows: np.ndarray) -> Assembled:
        """The prompts of rows of the plan."""
        kept = list(rows["kept"].T.astype(np.int64))
        groups = [(self._texts, rows["row"])]
        if self.shown is not None:
            groups += [(self.shown.texts, own) for own in rows["shown"].T]
            groups = [*groups[1:], groups[0]] if self.continued else groups
        texts = [(text, numbers) for group, numbers in groups for text in group.texts]
        return assemble(
            self.template,
            [(text.read(numbers, own), own) for (text, numbers), own in zip(texts, kept, strict=True)],
        )

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        assembled = self._assembled(rows)
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        targets, parts = {}, torch.from_numpy(rows["part"].astype(np.int32))
        row_N = torch.from_numpy(rows["row"].astype(np.int64))
        if self.rows.labels is not None:
            targets[self.term] = Target(torch.from_numpy(np.asarray(self.rows.labels)[rows["row"]]))
        if self.auxiliary is not None:
            masked = self.auxiliary.masked(rows["auxiliary"], examples, epoch)
            assembled, order = _side_by_side(assembled, masked.texts)
            at = np.flatnonzero(np.isin(order, masked.at + len(order) - len(masked.texts.tokens)))
            targets[self.auxiliary.term] = Target(torch.from_numpy(masked.labels), at=torch.from_numpy(at))
            numbers, row_N = numbers.repeat_interleave(2), row_N.repeat_interleave(2)
            parts = torch.arange(2, dtype=torch.int32).repeat(len(rows))
        return Batch(assembled.packed(), targets, numbers, parts, None, row_N)

    def facts(self) -> dict[str, Any]:
        """Rows, tokens, how many rows were cut to fit, and the tokens of the prompt itself."""
        facts = {
            "split": self.split,
            **self.plan(0).facts(),
            "truncated": self.truncated,
            "truncated_fraction": self.truncated / len(self.rows),
            "prompt_tokens": self.template.overhead,
        }
        if self.shown is not None and self.split != "train":
            facts["demonstration_draws"] = self.shown.draws
        return facts


def _joined(texts: Sequence[list[list[int]]]) -> list[list[int]]:
    """Runs of tokens around the columns of several texts, the last run of one with the first of the next."""
    runs: list[list[int]] = [[]]
    for first, *others in texts:
        runs[-1] = runs[-1] + first
        runs += others
    return runs


def _side_by_side(first: Assembled, second: Assembled) -> tuple[Assembled, np.ndarray]:
    """The documents of both in turns, and (T,) where each token stood in the two laid end to end."""
    lengths = np.stack([first.lengths, second.lengths], axis=1).reshape(-1)
    starts = np.stack(
        [np.cumsum(first.lengths) - first.lengths, len(first.tokens) + np.cumsum(second.lengths) - second.lengths],
        axis=1,
    ).reshape(-1)
    order = ragged_ranges(starts, lengths)
    columns = {name: np.concatenate([column, second.columns[name]])[order] for name, column in first.columns.items()}
    return Assembled(np.concatenate([first.tokens, second.tokens])[order], lengths, columns), order
