"""Prompts in packed batches: the texts within the template, demonstrations, and the predicted positions. Long texts are
truncated at their ends; the template never is.

Shape letters: E examples of a plan, N of them in a batch, K columns of a template, C classes, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmtool import random_streams
from lmtool.data.examples import Plan, Rows
from lmtool.data.formats import FormatTemplate, PackedArrays, assemble, ragged_ranges, truncate_texts
from lmtool.errors import UserError
from lmtool.objectives.configs import MlmConfig
from lmtool.objectives.corruption.masking import PackedTexts, Vocabulary, mask_tokens
from lmtool.random_streams import Permutation
from lmtool.tasks.kinds.labels import location
from lmtool.tasks.prompting.pattern import SEPARATOR, Pattern, PatternTexts, prompt_capacity
from lmtool.types import Batch, Target

TERM = "mlm"
"""The term of the auxiliary loss."""
# Random number index of the auxiliary text, beyond those of demonstrations.
_DRAW = 1 << 20


@dataclass(frozen=True)
class MaskedTexts:
    """texts: the inputs. at: (M,) flat positions, ascending. labels: (M,) original tokens."""

    texts: PackedArrays
    at: np.ndarray
    labels: np.ndarray


class Auxiliary:
    """Auxiliary masked language modeling over U texts, in the task's prompt; the answer's position is masked, and not
    predicted.

    template: the tokens around the texts. column: the template's column that marks predicted answers.
    """

    term = TERM

    def __init__(self, rows: Rows, pattern: Pattern, template: FormatTemplate, column: str, max_length: int, seed: int):
        marks = tuple(np.zeros_like(mark) for mark in template.piece_columns[column])
        self.template = FormatTemplate(
            template.pieces, {**template.piece_columns, column: marks}, template.text_columns
        )
        capacity = prompt_capacity(max_length, template.special_count, len(template.pieces) - 1)
        self._texts, self.seed = PatternTexts(rows, pattern), seed
        self._kept = truncate_texts(self._texts.lengths, capacity)
        self.lengths = self._kept.sum(axis=0) + template.special_count
        self._masking, self._vocabulary = MlmConfig(), Vocabulary.of(pattern.tokenizer)

    def drawn(self, row_E: np.ndarray, epoch: int) -> np.ndarray:
        """(E,) the auxiliary text of each row in an epoch."""
        draws = np.full(len(row_E), _DRAW)
        return (random_streams.uniform_at(self.seed, "sample", epoch + 1, row_E, draws) * len(self.lengths)).astype(
            np.int64
        )

    def masked(self, text_N: np.ndarray, examples_N: np.ndarray, epoch: int) -> MaskedTexts:
        """Masked texts; random numbers are keyed by (seed, epoch, example, position)."""
        texts = [
            (text.read(text_N, retained[text_N]), retained[text_N])
            for text, retained in zip(self._texts.texts, self._kept, strict=True)
        ]
        whole = assemble(self.template, texts)
        packed = PackedTexts(whole.tokens, whole.lengths, np.asarray(examples_N), self.seed, epoch)
        masked = mask_tokens(self._masking, self._vocabulary, packed)
        return MaskedTexts(PackedArrays(masked.tokens, whole.lengths, whole.columns), masked.at, masked.labels)


# Demonstrations: one labeled row of each class, sampled for every text (Gao et al. 2021, section 6). Samples are keyed
# by the text, so they do not depend on its batch.
# Shape letters: E rows, C classes, S samples of a row, P rows to sample from, K columns of a pattern.


AT_MOST = 16
"""Maximum rows of a class stored with a checkpoint, as in the paper's setting."""
# Counter of the sample stream for the stored rows.
_KEPT = 5
# Counters of the samples: the evaluation's, followed by one per epoch.
EVALUATION = 0


def sample_demonstration_rows(rows: Rows, labels: Sequence[str]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """By class, the texts of up to `AT_MOST` distinct training rows; the same sample for every run."""
    texts = list(zip(*rows.columns.values(), strict=True))
    numbers_E, retained = np.asarray(rows.labels), {}
    for number, label in enumerate(labels):
        own = list(dict.fromkeys(texts[row] for row in np.flatnonzero(numbers_E == number)))
        drawn = Permutation(len(own), 0, "sample", _KEPT)(np.arange(min(AT_MOST, len(own))))
        retained[label] = tuple(own[location] for location in np.sort(drawn))
    return retained


class Demonstrations:
    """Samples demonstrations. rows: by class, the `text` columns of the available rows. draws: S, samples of a
    predicted row."""

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
            for index, row in enumerate(own):
                self._places.setdefault(row, []).append((number, index))

    def own(self, rows: Rows) -> np.ndarray:
        """(E, C) the index of each row's own text within a class; the size of the class if absent."""
        own_EC = np.tile(self._counts_C, (len(rows), 1))
        for row, texts in enumerate(zip(*rows.columns.values(), strict=True)):
            for number, index in self._places.get(texts, ()):
                own_EC[row, number] = index
        return own_EC

    def drawn(self, own_EC: np.ndarray, keys_E: np.ndarray, counter: int, draws: int) -> np.ndarray:
        """Samples rows other than the text itself.

        Args:
            own_EC: See `own`.
            keys_E: Keys of the texts.
            counter: Counter of the sample stream.
            draws: Samples per row.

        Returns:
            (E, draws, C) indices of rows.

        Raises:
            UserError: If a class has no other row.
        """
        others_EC = self._counts_C - (own_EC < self._counts_C)
        lacking = np.flatnonzero((others_EC < 1).any(axis=0))
        if len(lacking):
            raise UserError(
                f"task.demonstrations: the class {self.labels[lacking[0]]} has no other row to show as a demonstration",
                "train on two rows of each class at least, or set task.demonstrations=0",
            )
        shape = (len(own_EC), draws, len(self.labels))
        uniform = random_streams.uniform(self.seed, "sample", counter, keys_E, draws * len(self.labels))
        location = (uniform.reshape(shape) * others_EC[:, None]).astype(np.int64)
        return self._starts_C + location + (location >= own_EC[:, None])


def text_keys(rows: Rows) -> np.ndarray:
    """(E,) int64 hash of each row's texts."""
    texts = ("\0".join(row).encode() for row in zip(*rows.columns.values(), strict=True))
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)


def _columns(text: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    return {name: [row[number] for row in rows] for number, name in enumerate(text)}


ANSWERS = "answer"
"""The column that is 1 at a predicted answer."""


@dataclass(frozen=True)
class Wording:
    """How rows are presented to a model.

    pattern: the template. around: the model's special tokens around one text. mask: the token at the answer's position;
    None for a decoder, which reads up to it. words: (C,) the token of each class.
    """

    pattern: Pattern
    around: FormatTemplate
    mask: int | None
    words: Sequence[int]

    def template(self, demonstrations: bool) -> FormatTemplate:
        """The tokens around a question's texts and, with `demonstrations`, of a labeled row per class: after the
        question, each closed as a text; before it for a decoder."""
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
        return FormatTemplate(
            tuple(np.array(tokens, dtype=np.int64) for tokens in runs),
            {
                name: tuple(np.array(own, dtype=np.int64) for own in column)
                for name, column in {**columns, ANSWERS: marks}.items()
            },
            {**{name: values * (len(runs) - 1) for name, values in self._values.items()}, ANSWERS: (0,) * len(runs)},
        )

    @property
    def _values(self) -> dict[str, tuple[int, ...]]:
        """The text columns of the format."""
        return self.around.text_columns


class PromptedExamples:
    """A row is a prompt. demonstrations: resampled every epoch of training; in evaluation, a row has one part per
    sample. auxiliary: in training, masked texts alongside the prompts, as a second document of each example."""

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
            raise UserError(f"the {split} split has no rows", "use a table with rows: `lmtool show task.path`")
        self.rows, self.term, self.split, self.shown = rows, term, split, demonstrations
        self.auxiliary = auxiliary
        self.template = wording.template(demonstrations is not None)
        self.continued = wording.mask is None
        self._texts = PatternTexts(rows, wording.pattern)
        self._columns = len(self._texts.texts)
        self._own = None if demonstrations is None else demonstrations.own(rows)
        self._keys = None if demonstrations is None else text_keys(rows)
        self.room = prompt_capacity(max_length, self.template.special_count, len(self.template.pieces) - 1)
        self._plans: dict[int, Plan] = {}
        self.truncated = 0
        self.plan(0)

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch; constant unless training samples anything."""
        drawn = self.split == "train" and (self.shown is not None or self.auxiliary is not None)
        epoch = epoch if drawn else 0
        if epoch not in self._plans:
            retained = {number: plan for number, plan in self._plans.items() if number in (0, epoch - 1)}
            self._plans = {**retained, epoch: self._planned(epoch)}
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
            demonstration_lengths = [self.shown.texts.lengths[:, own] for own in shown.T]
            lengths = np.concatenate([lengths[:, row], *demonstration_lengths])
            if self.continued:
                lengths = np.roll(lengths, -self._columns, axis=0)
        retained = truncate_texts(lengths, self.room)
        if epoch == 0:
            self.truncated = len(np.unique(row[(retained < lengths).any(axis=0)]))
        packed = retained.sum(axis=0) + self.template.special_count
        if not packed.all():
            where = location(self.rows.origin[row[np.flatnonzero(packed == 0)[0]]])
            raise UserError(f"{where}: an empty text in a prompt without other tokens", "remove the row")
        fields = [
            ("row", "i8", ()),
            ("part", "i4", ()),
            ("shown", "i4", shown.shape[1:]),
            ("kept", "i4", (len(retained),)),
        ]
        records = np.zeros(len(row), dtype=[*fields, ("auxiliary", "i8", ())])
        records["row"], records["part"], records["shown"], records["kept"] = row, part, shown, retained.T
        if self.auxiliary is not None:
            records["auxiliary"] = self.auxiliary.drawn(row, epoch)
            packed = packed + self.auxiliary.lengths[records["auxiliary"]]
        return Plan(records, packed)

    def _assembled(self, rows: np.ndarray) -> PackedArrays:
        """The prompts of rows of the plan."""
        retained = list(rows["kept"].T.astype(np.int64))
        groups = [(self._texts, rows["row"])]
        if self.shown is not None:
            groups += [(self.shown.texts, own) for own in rows["shown"].T]
            groups = [*groups[1:], groups[0]] if self.continued else groups
        texts = [(text, numbers) for group, numbers in groups for text in group.texts]
        return assemble(
            self.template,
            [(text.read(numbers, own), own) for (text, numbers), own in zip(texts, retained, strict=True)],
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

    def metadata(self) -> dict[str, Any]:
        """Counts of rows, tokens, truncated rows, and the prompt's own tokens."""
        metadata = {
            "split": self.split,
            **self.plan(0).metadata(),
            "truncated": self.truncated,
            "truncated_fraction": self.truncated / len(self.rows),
            "prompt_tokens": self.template.special_count,
        }
        if self.shown is not None and self.split != "train":
            metadata["demonstration_draws"] = self.shown.draws
        return metadata


def _joined(texts: Sequence[list[list[int]]]) -> list[list[int]]:
    """Concatenates runs of tokens: the last run of a text merges with the first of the next."""
    runs: list[list[int]] = [[]]
    for first, *others in texts:
        runs[-1] = runs[-1] + first
        runs += others
    return runs


def _side_by_side(first: PackedArrays, second: PackedArrays) -> tuple[PackedArrays, np.ndarray]:
    """Interleaves the documents of both; also returns (T,) the source index of each token in their concatenation."""
    lengths = np.stack([first.lengths, second.lengths], axis=1).reshape(-1)
    starts = np.stack(
        [np.cumsum(first.lengths) - first.lengths, len(first.tokens) + np.cumsum(second.lengths) - second.lengths],
        axis=1,
    ).reshape(-1)
    order = ragged_ranges(starts, lengths)
    columns = {name: np.concatenate([column, second.columns[name]])[order] for name, column in first.columns.items()}
    return PackedArrays(np.concatenate([first.tokens, second.tokens])[order], lengths, columns), order
