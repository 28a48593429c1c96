"""Prompts in packed batches: the template filled with texts, demonstrations, and the positions of the answers. Long
texts are truncated at the end; the template is never truncated.

Shape letters: E rows or examples, N examples of a batch, K columns of a template, C classes, S samples of a row, P rows
to sample from, T tokens, M predicting positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from lmtool import random_streams
from lmtool.config.base import JsonObject
from lmtool.data.examples import Plan, Rows
from lmtool.data.formats import FormatTemplate, PackedArrays, assemble, ragged_ranges, truncate_texts
from lmtool.errors import UserError
from lmtool.objectives.configs import MlmConfig
from lmtool.objectives.corruption.masking import PackedTexts, Vocabulary, mask_tokens
from lmtool.random_streams import Permutation
from lmtool.tasks.kinds.labels import location
from lmtool.tasks.kinds.texts import TaskExamples
from lmtool.tasks.prompting.pattern import SEPARATOR, Pattern, PatternTexts, prompt_capacity
from lmtool.types import Batch, Target

AUXILIARY_TERM = "mlm"
"""The term of the auxiliary loss."""
ANSWERS = "answer"
"""The column of a batch's inputs that is 1 at a predicted answer."""
MAX_STORED_ROWS = 16
"""Maximum rows of a class stored with a checkpoint, as in the setting of Gao et al. 2021."""
# Counter of the sample stream for the stored rows.
_STORED_COUNTER = 5
# Counter of the sample stream for evaluation, followed by one per epoch.
_EVALUATION_COUNTER = 0
# Random number index of the auxiliary text, beyond those of demonstrations.
_AUXILIARY_INDEX = 1 << 20


class Auxiliary:
    """Examples of auxiliary masked language modeling: texts in the task's prompt. The answer is masked too, but it is
    not predicted. template: the tokens around the texts."""

    def __init__(self, rows: Rows, pattern: Pattern, template: FormatTemplate, max_length: int, seed: int):
        marks = tuple(np.zeros_like(mark) for mark in template.piece_columns[ANSWERS])
        columns = {**template.piece_columns, ANSWERS: marks}
        self.template = FormatTemplate(template.pieces, columns, template.text_columns)
        capacity = prompt_capacity(max_length, template.special_count, len(template.pieces) - 1)
        self._texts, self.seed = PatternTexts(rows, pattern), seed
        self._retained = truncate_texts(self._texts.lengths, capacity, "bert")
        self.lengths = self._retained.sum(axis=0) + template.special_count
        self._masking, self._vocabulary = MlmConfig(), Vocabulary.from_tokenizer(pattern.tokenizer)

    def sampled(self, row_E: np.ndarray, epoch: int) -> np.ndarray:
        """Returns (E,): the index of the auxiliary text that accompanies each row in an epoch."""
        uniform_E = random_streams.uniform_at(
            self.seed, "sample", epoch + 1, row_E, np.full(len(row_E), _AUXILIARY_INDEX)
        )
        return (uniform_E * len(self.lengths)).astype(np.int64)

    def masked(
        self, text_N: np.ndarray, examples_N: np.ndarray, epoch: int
    ) -> tuple[PackedArrays, np.ndarray, np.ndarray]:
        """Builds and masks texts. Returns the inputs, (M,) flat positions of the masked tokens, ascending, and (M,)
        their original tokens. Random numbers are keyed by (seed, epoch, example, position)."""
        filled = assemble(self.template, self._texts.cells(text_N, self._retained[:, text_N]))
        packed = PackedTexts(filled.tokens, filled.lengths, np.asarray(examples_N), self.seed, epoch)
        masked = mask_tokens(self._masking, self._vocabulary, packed)
        return PackedArrays(masked.tokens, filled.lengths, filled.columns), masked.at, masked.labels


def sample_demonstration_rows(rows: Rows, labels: Sequence[str]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Returns, by class, the texts of up to `MAX_STORED_ROWS` distinct training rows. The sample does not depend on the
    seed."""
    texts = list(zip(*rows.columns.values(), strict=True))
    numbers_E, sample = np.asarray(rows.labels), {}
    for number, label in enumerate(labels):
        distinct = list(dict.fromkeys(texts[row] for row in np.flatnonzero(numbers_E == number)))
        order = Permutation(len(distinct), 0, "sample", _STORED_COUNTER)
        sample[label] = tuple(distinct[row] for row in np.sort(order(np.arange(min(MAX_STORED_ROWS, len(distinct))))))
    return sample


class Demonstrations:
    """Samples demonstrations: for every text, one labeled row of each class (Gao et al. 2021, section 6). Samples are
    keyed by the text, so they do not depend on the batch.

    rows: by class, the texts of the available rows. text: the names of their columns. samples: S, the number of samples
    for each row in evaluation.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[Sequence[str]]],
        labels: Sequence[str],
        text: Sequence[str],
        pattern: Pattern,
        samples: int,
        seed: int,
    ):
        self.labels, self.samples, self.seed = tuple(labels), samples, seed
        by_class = [[tuple(row) for row in rows.get(label, ())] for label in labels]
        self._counts_C = np.array([len(members) for members in by_class], dtype=np.int64)
        self._starts_C = np.cumsum(self._counts_C) - self._counts_C
        pool = [row for members in by_class for row in members]
        columns = {name: [row[number] for row in pool] for number, name in enumerate(text)}
        self.texts = PatternTexts(Rows.of_texts(**columns), pattern)
        self._indices: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for number, members in enumerate(by_class):
            for index, row in enumerate(members):
                self._indices.setdefault(row, []).append((number, index))

    def own_indices(self, rows: Rows) -> np.ndarray:
        """Returns (E, C): the index of each row's own text among the available rows of each class; the size of the
        class if the text is not among them."""
        own_EC = np.tile(self._counts_C, (len(rows), 1))
        for row, texts in enumerate(zip(*rows.columns.values(), strict=True)):
            for number, index in self._indices.get(texts, ()):
                own_EC[row, number] = index
        return own_EC

    def sampled(self, own_EC: np.ndarray, keys_E: np.ndarray, counter: int, samples: int) -> np.ndarray:
        """Returns (E, samples, C): the indices of sampled demonstrations, which are never the text itself. own_EC: see
        `own_indices`. keys_E: see `text_keys`. counter: of the sample stream. samples: their number for each text.
        Raises UserError if a class has no other row."""
        others_EC = self._counts_C - (own_EC < self._counts_C)
        lacking = np.flatnonzero((others_EC < 1).any(axis=0))
        if len(lacking):
            raise UserError(
                f"task.demonstrations: the class {self.labels[lacking[0]]} has no other row to show as a demonstration",
                "train on two rows of each class at least, or set task.demonstrations=0",
            )
        shape = (len(own_EC), samples, len(self.labels))
        uniform = random_streams.uniform(self.seed, "sample", counter, keys_E, samples * len(self.labels))
        index = (uniform.reshape(shape) * others_EC[:, None]).astype(np.int64)
        return self._starts_C + index + (index >= own_EC[:, None])


def text_keys(rows: Rows) -> np.ndarray:
    """Returns (E,) int64 hash of each row's texts."""
    texts = ("\0".join(row).encode() for row in zip(*rows.columns.values(), strict=True))
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)


@dataclass(frozen=True)
class Wording:
    """How rows are presented to a model.

    pattern: the prompt's template. text_template: the model's special tokens around one text. mask: the mask token,
    which stands at the answer's position; None for a decoder, which reads only the text before the answer. words: (C,)
    the token that stands for each class.
    """

    pattern: Pattern
    text_template: FormatTemplate
    mask: int | None
    words: Sequence[int]

    def template(self, demonstrations: bool) -> FormatTemplate:
        """Returns the tokens around the texts of a question. demonstrations: adds those around the texts of a labeled
        row of each class: before the question for a decoder, otherwise after it, each closed like a text of its own."""
        first, last = (piece.tolist() for piece in self.text_template.pieces)
        before = SEPARATOR if self.mask is None and demonstrations else ""
        question, (run, index) = self.pattern.pieces(None if self.mask is None else [self.mask], before)
        answered = [
            self.pattern.pieces([word], SEPARATOR if self.mask is None and number else "")[0]
            for number, word in enumerate(self.words if demonstrations else ())
        ]
        if self.mask is None:
            runs = _join([*answered, question])
        else:
            runs = _join([[*pieces[:-1], pieces[-1] + last] for pieces in [question, *answered]])
            last = []
        runs[0], runs[-1] = first + runs[0], runs[-1] + last
        marks = [[0] * len(tokens) for tokens in runs]
        if self.mask is not None:
            marks[run][index + (len(first) if run == 0 else 0)] = 1
        values = self.text_template.text_columns
        columns = {name: [[column[0]] * len(tokens) for tokens in runs] for name, column in values.items()}
        return FormatTemplate(
            tuple(np.array(tokens, dtype=np.int64) for tokens in runs),
            {
                name: tuple(np.array(run_values, dtype=np.int64) for run_values in column)
                for name, column in {**columns, ANSWERS: marks}.items()
            },
            {**{name: column * (len(runs) - 1) for name, column in values.items()}, ANSWERS: (0,) * len(runs)},
        )


class PromptedExamples(TaskExamples):
    """Examples whose rows are prompts. demonstrations: resampled in every epoch of training; in evaluation, a row has
    one part for each sample. auxiliary: in training, adds a masked text to each example, as a second document."""

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
        super().__init__(rows, term, split)
        self.demonstrations, self.auxiliary = demonstrations, auxiliary
        self.template = wording.template(demonstrations is not None)
        self.question_last = wording.mask is None
        self._texts = PatternTexts(rows, wording.pattern)
        if demonstrations is not None:
            self._own_EC, self._keys_E = demonstrations.own_indices(rows), text_keys(rows)
        self.capacity = prompt_capacity(max_length, self.template.special_count, len(self.template.pieces) - 1)
        self._plans: dict[int, Plan] = {}
        self.truncated = 0
        self.plan(0)

    def plan(self, epoch: int) -> Plan:
        """Returns the plan of an epoch. Plans differ only in training with sampled demonstrations or auxiliary
        texts."""
        sampled = self.split == "train" and (self.demonstrations is not None or self.auxiliary is not None)
        epoch = epoch if sampled else 0
        if epoch not in self._plans:
            recent = {number: plan for number, plan in self._plans.items() if number in (0, epoch - 1)}
            self._plans = {**recent, epoch: self._build_epoch_plan(epoch)}
        return self._plans[epoch]

    def _build_epoch_plan(self, epoch: int) -> Plan:
        row, lengths = np.arange(len(self.rows)), self._texts.lengths
        part, shown = np.zeros_like(row), np.zeros((len(row), 0), dtype=np.int64)
        if self.demonstrations is not None:
            train = self.split == "train"
            samples, counter = (1, epoch + 1) if train else (self.demonstrations.samples, _EVALUATION_COUNTER)
            sampled = self.demonstrations.sampled(self._own_EC, self._keys_E, counter, samples)
            row, part = np.repeat(row, samples), np.tile(np.arange(samples), len(row))
            shown = sampled.reshape(len(row), -1)
            lengths = np.concatenate(
                [lengths[:, row], *(self.demonstrations.texts.lengths[:, column] for column in shown.T)]
            )
            if self.question_last:
                lengths = np.roll(lengths, -len(self._texts.lengths), axis=0)
        retained = truncate_texts(lengths, self.capacity, "bert")
        if epoch == 0:
            self.truncated = len(np.unique(row[(retained < lengths).any(axis=0)]))
        packed = retained.sum(axis=0) + self.template.special_count
        if not packed.all():
            place = location(self.rows.origin[row[np.argmin(packed)]])
            raise UserError(f"{place}: the texts are empty, and the prompt adds no tokens", "remove the row")
        columns = {"row": row, "part": part, "shown": shown, "retained": retained.T}
        if self.auxiliary is not None:
            columns["auxiliary"] = self.auxiliary.sampled(row, epoch)
            packed = packed + self.auxiliary.lengths[columns["auxiliary"]]
        return self.build_plan(packed, **columns)

    def _assembled(self, rows: np.ndarray) -> PackedArrays:
        groups = [(self._texts, rows["row"])]
        if self.demonstrations is not None:
            groups += [(self.demonstrations.texts, column) for column in rows["shown"].T]
            groups = [*groups[1:], groups[0]] if self.question_last else groups
        retained = np.split(rows["retained"].T.astype(np.int64), len(groups))
        cells = (texts.cells(numbers, lengths) for (texts, numbers), lengths in zip(groups, retained, strict=True))
        return assemble(self.template, list(chain.from_iterable(cells)))

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        assembled = self._assembled(rows)
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        targets, parts = {}, torch.from_numpy(rows["part"].astype(np.int32))
        row_N = torch.from_numpy(rows["row"].astype(np.int64))
        labels = self.labels_at(rows["row"])
        if labels is not None:
            targets[self.term] = Target(labels)
        if self.auxiliary is not None:
            texts, masked_M, labels_M = self.auxiliary.masked(rows["auxiliary"], examples, epoch)
            assembled, order = _side_by_side(assembled, texts)
            indices = np.flatnonzero(np.isin(order, masked_M + len(order) - len(texts.tokens)))
            targets[AUXILIARY_TERM] = Target(torch.from_numpy(labels_M), at=torch.from_numpy(indices))
            numbers, row_N = numbers.repeat_interleave(2), row_N.repeat_interleave(2)
            parts = torch.arange(2, dtype=torch.int32).repeat(len(rows))
        return Batch(assembled.packed(), targets, numbers, parts, None, row_N)

    def metadata(self) -> JsonObject:
        """Adds the numbers of truncated rows and of tokens in the template."""
        metadata = {
            "split": self.split,
            **self.plan(0).metadata(),
            "truncated": self.truncated,
            "truncated_fraction": self.truncated / len(self.rows),
            "prompt_tokens": self.template.special_count,
        }
        if self.demonstrations is not None and self.split != "train":
            metadata["demonstration_draws"] = self.demonstrations.samples
        return metadata


def _join(texts: Sequence[list[list[int]]]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for first, *rest in texts:
        runs[-1] = runs[-1] + first
        runs += rest
    return runs


def _side_by_side(first: PackedArrays, second: PackedArrays) -> tuple[PackedArrays, np.ndarray]:
    """Also returns, for each token, its index in the concatenation of both batches."""
    lengths = np.concatenate([first.lengths, second.lengths])
    order_D = np.arange(len(lengths)).reshape(2, -1).T.reshape(-1)
    starts = np.cumsum(lengths) - lengths
    order = ragged_ranges(starts[order_D], lengths[order_D])
    columns = {name: np.concatenate([column, second.columns[name]])[order] for name, column in first.columns.items()}
    return PackedArrays(np.concatenate([first.tokens, second.tokens])[order], lengths[order_D], columns), order
