"""Answers in a context: the column of answers in a file, contexts as packed windows, and the search for the best
answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtool.config.saved import JsonObject
from lmtool.data.configs import FORMATS
from lmtool.data.examples import Rows
from lmtool.data.formats import assemble, ragged_ranges
from lmtool.errors import UserError
from lmtool.tasks.configs import ExtractiveQaConfig
from lmtool.tasks.kinds.labels import location
from lmtool.tasks.kinds.predictions import Label
from lmtool.tasks.kinds.texts import AlignedTexts, InputFormat, TaskExamples, windows
from lmtool.types import Batch, Packed, Target

# Parses the answer column in its common layouts and checks the answers against the contexts.


_ANSWER_HINT = 'write {"text": [...], "answer_start": [...]}, or a list of {"text": ..., "answer_start": ...}'
_MAX_SHOWN_CHARACTERS = 60


class GoldAnswer(NamedTuple):
    """A gold answer. start: the index of its first character in the context."""

    text: str
    start: int


def gold_answers(value: Label, place: tuple[str, int]) -> tuple[GoldAnswer, ...]:
    """Returns the answers of a row, given as parallel lists (on the hub) or as a list of objects (in SQuAD's files). An
    empty cell means no answer. Raises UserError with file:line for any other layout."""
    if value is None:
        return ()
    pairs: list[tuple[Label, Label]] | None = None
    if isinstance(value, dict) and value.keys() >= {"text", "answer_start"}:
        texts, starts = value["text"], value["answer_start"]
        if isinstance(texts, str):
            texts, starts = [texts], [starts]
        if _is_list(texts) and _is_list(starts) and len(texts) == len(starts):
            pairs = list(zip(texts, starts, strict=True))
    elif _is_list(value) and all(isinstance(item, dict) for item in value):
        pairs = [(item.get("text"), item.get("answer_start")) for item in value]
    if pairs is None or not all(isinstance(text, str) and _is_number(start) for text, start in pairs):
        raise UserError(f"{location(place)}: unknown layout of answers: {_truncate(repr(value))}", _ANSWER_HINT)
    return tuple(GoldAnswer(text, int(start)) for text, start in pairs)


def problem_of(config: ExtractiveQaConfig, context: str, answers: Sequence[GoldAnswer]) -> tuple[str, str] | None:
    """Returns the message and the hint for invalid answers of a row; None if they are valid."""
    if not answers and not config.unanswerable:
        return (
            "a question without an answer",
            "set task.unanswerable=true (task=squad_v2 has it), or remove the row; task.bad_answers=skip skips "
            "and counts such rows",
        )
    for text, start in answers:
        if not text.strip():
            return "an empty answer", "give its text, or an empty list; task.bad_answers=skip skips it"
        if start >= 0 and context.startswith(text, start):
            continue
        index = context.find(text)
        skip = "task.bad_answers=skip skips and counts such rows"
        if index < 0:
            return f"the answer {_truncate(text)!r} is not in its context", f"correct the row; {skip}"
        found = context[max(start, 0) : max(start, 0) + len(text)]
        return (
            f"answer_start={start} does not point at the answer {_truncate(text)!r}: the context has "
            f"{_truncate(found)!r} there",
            f"answer_start counts characters from 0 (it is at {index}); {skip}",
        )
    return None


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) or type(value).__name__ == "ndarray"


def _is_number(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."


# The search for the best answers in windows, given scores of their tokens.
# Shape letters: T tokens, N windows, L tokens of the longest window, A maximum tokens of an answer, K reported answers.


def pad(values_T: Tensor, packed: Packed, fill: float) -> Tensor:
    """Returns (N, L): the values of each document as a row, padded with `fill`."""
    table_NL = values_T.new_full((len(packed.lengths), max(packed.lengths, default=0)), fill)
    return table_NL.index_put((packed.documents, packed.positions), values_T)


def best_spans(
    starts_NL: Tensor, ends_NL: Tensor, allowed_NL: Tensor, longest: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the best spans.

    A span's score is the sum of its start and end scores (Devlin et al. 2019, section 4.2). Every span with allowed
    boundaries and at most `longest` tokens is considered, not only those of the best starts and ends.

    Returns:
        (N, K) scores in descending order, and the first and last tokens; -inf after the last span.
    """
    excluded = -torch.inf
    starts_NL = starts_NL.float().masked_fill(~allowed_NL, excluded)
    ends_NL = ends_NL.float().masked_fill(~allowed_NL, excluded)
    length = starts_NL.shape[1]
    longest_span = min(longest, length)
    ends_NLA = torch.nn.functional.pad(ends_NL, (0, longest_span - 1), value=excluded).unfold(1, longest_span, 1)
    scores = (starts_NL[:, :, None] + ends_NLA).flatten(1)
    best_NK, flat_NK = scores.topk(min(count, scores.shape[1]), dim=1)
    first_NK = flat_NK // longest_span
    return best_NK, first_NK, first_NK + flat_NK % longest_span


# Answers as spans of a context. The predictions for a window and for a row are arrays.
# Shape letters: K reported answers.


class Span(NamedTuple):
    """The characters [start, end) of the context, and the sum of their start and end scores. [0, 0) means no answer."""

    start: int
    end: int
    score: float


SPANS = np.dtype([("start", "i4"), ("end", "i4"), ("score", "f4")])
"""The dtype of a `Span` in an array. One object for each span would exhaust the memory."""


class WindowAnswers(NamedTuple):
    """The best spans of a window, (K,) of dtype `SPANS` in descending order of score, and the score of no answer."""

    best: np.ndarray
    null: float


@dataclass(frozen=True, slots=True)
class PredictedAnswer:
    """The prediction of a row. spans_K: (K,) the best spans, of dtype `SPANS`, in descending order of score; empty if
    the context is empty. null: the score of no answer, which is the lowest of all windows. answered: whether the best
    span is predicted, rather than no answer."""

    spans_K: np.ndarray
    null: float
    answered: bool = True

    @property
    def best_spans(self) -> tuple[Span, ...]:
        """The reported spans, in descending order of score."""
        return tuple(map(Span._make, self.spans_K.tolist()))

    @property
    def null_difference(self) -> float:
        """The score of no answer minus the score of the best span."""
        return self.null - float(self.spans_K[0]["score"]) if len(self.spans_K) else np.inf

    @property
    def span(self) -> tuple[int, int]:
        """The characters of the predicted answer."""
        return self.best_span if self.answered else (0, 0)

    @property
    def best_span(self) -> tuple[int, int]:
        """The characters of the best span, even if no answer is predicted."""
        return (int(self.spans_K[0]["start"]), int(self.spans_K[0]["end"])) if len(self.spans_K) else (0, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PredictedAnswer) and self.span == other.span

    __hash__ = None  # type: ignore[assignment]


# Questions and windows of their contexts as packed batches: a context that does not fit next to its question is read in
# overlapping windows, each laid out as a pair of the question and the window.
# Shape letters: E rows, W windows, N windows of a batch, T tokens.


CHARACTERS = ("character_start", "character_end")
"""Columns of a batch's inputs: the first character of each token in the context and the one after its last; both 0 for
tokens outside the context."""


def null_first(format_name: str) -> bool:
    """Whether no answer is represented by the first token, a class token; otherwise by the last token, which ends a
    text."""
    return FORMATS[format_name].layouts[0].startswith("cls")


class QuestionWindows(TaskExamples):
    """Examples of a question and a window of its context. Adjacent windows share `InputFormat.stride` tokens."""

    def __init__(self, config: ExtractiveQaConfig, rows: Rows, input_format: InputFormat, split: str):
        super().__init__(rows, config.name, split, input_format.start)
        self.max_length, self.null_first = input_format.max_length, null_first(input_format.format_name)
        self.template = input_format.template(2, min_tokens=2)
        self._questions, self._contexts = (
            AlignedTexts(rows.columns[name], input_format.tokenizer) for name in config.text
        )
        capacity = input_format.max_length - self.template.special_count
        # At least half of the capacity belongs to the context.
        question_E = np.minimum(self._questions.lengths_E, min(config.question_tokens, capacity // 2))
        self.cut_questions = int(np.sum(question_E < self._questions.lengths_E))
        context_E = capacity - question_E
        context_windows = windows(
            self._contexts.lengths_E, context_E, np.minimum(input_format.stride or 0, context_E // 2)
        )
        self._require_all_tokens(context_windows.text, context_windows.start, context_windows.end)
        question_W = question_E[context_windows.text]
        packed_W = question_W + context_windows.lengths + self.template.special_count
        self._plan = self.build_plan(
            packed_W,
            row=context_windows.text,
            part=context_windows.part,
            start=context_windows.start,
            end=context_windows.end,
            question=question_W,
        )
        self._spans_E = None if rows.labels is None else self._answer_tokens(rows.labels)

    def _require_all_tokens(self, rows_W: np.ndarray, starts_W: np.ndarray, ends_W: np.ndarray) -> None:
        """Asserts that the windows of a row start at its first token, leave no gap, and end at its last token."""
        lengths_W = self._contexts.lengths_E[rows_W]
        first, last = np.append(True, np.diff(rows_W) > 0), np.append(np.diff(rows_W) > 0, True)
        gaps = ~first[1:] & (starts_W[1:] > ends_W[:-1])
        if starts_W[first].any() or (ends_W != lengths_W)[last].any() or gaps.any() or first.sum() != len(self.rows):
            raise RuntimeError(f"the windows of the {self.split} split do not cover a context")

    def _answer_tokens(self, labels: Sequence[tuple[GoldAnswer, ...]] | np.ndarray) -> np.ndarray:
        """Returns (E, 2): the first and the last token of each row's first answer; -1 if there is no answer."""
        spans_E = np.full((len(self.rows), 2), -1, dtype=np.int64)
        for row, answers in enumerate(labels):
            if answers:
                text, start = answers[0]
                first, last = self._contexts.tokens_of(row, start, start + len(text))
                if first <= last:
                    spans_E[row] = first, last
        return spans_E

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        row_N, question_N, length_N = rows["row"], rows["question"], rows["end"] - rows["start"]
        read_T = ragged_ranges(self._contexts.starts_E[row_N] + rows["start"], length_N)
        question_ids = self._questions.ids[ragged_ranges(self._questions.starts_E[row_N], question_N)]
        assembled = assemble(self.template, [(question_ids, question_N), (self._contexts.ids[read_T], length_N)])
        inputs = assembled.packed()
        first_N = np.cumsum(assembled.lengths) - assembled.lengths
        context_at = torch.from_numpy(ragged_ranges(first_N + self._before(rows), length_N))
        for side, name in enumerate(CHARACTERS):
            column = torch.zeros_like(inputs.tokens)
            column[context_at] = torch.from_numpy(self._contexts.spans[read_T, side])
            inputs.columns[name] = column
        target = None if self._spans_E is None else Target(torch.from_numpy(self.labels(rows)))
        return self.batch_of(inputs, target, rows, examples)

    def labels(self, rows: np.ndarray) -> np.ndarray:
        """Returns (N, 2): the positions of the answer's first and last token in each window. If a window does not
        contain the whole answer, both are the position that means no answer. rows: (N,) records of the plan,
        labeled."""
        assert self._spans_E is not None
        spans_N2, before_N = self._spans_E[rows["row"]], self._before(rows)
        positions_N2 = spans_N2 - rows["start"][:, None] + before_N[:, None]
        last_N = before_N + rows["end"] - rows["start"] + len(self.template.pieces[2]) - 1
        null_N = np.zeros_like(last_N) if self.null_first else last_N
        return np.where(self._holds_answer(rows)[:, None], positions_N2, null_N[:, None])

    def _before(self, rows: np.ndarray) -> np.ndarray:
        """Returns (N,): the number of tokens before the context."""
        return len(self.template.pieces[0]) + rows["question"] + len(self.template.pieces[1])

    def _holds_answer(self, rows: np.ndarray) -> np.ndarray:
        """Returns (N,) bool, whether each window contains the whole answer."""
        assert self._spans_E is not None
        first_N, last_N = self._spans_E[rows["row"]].T
        return (first_N >= 0) & (first_N >= rows["start"]) & (last_N < rows["end"])

    def metadata(self) -> JsonObject:
        """Adds the numbers of questions, of truncated questions, and of answers that no window contains."""
        metadata = {**super().metadata(), "questions": len(self.rows), "cut_questions": self.cut_questions}
        if self._spans_E is not None:
            rows = self._plan.rows
            answered = np.unique(rows["row"][self._holds_answer(rows)])
            metadata["answers_in_no_window"] = int(np.sum(self._spans_E[:, 0] >= 0) - len(answered))
        return metadata
