"""Answers in a context: their column, the search for the best one, and what a row is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtool.errors import UserError
from lmtool.tasks.configs import ExtractiveQaConfig
from lmtool.tasks.kinds.labels import place
from lmtool.types import Packed

# The column of the answers: read in the layouts that people have, and checked against the contexts.


_FORM = 'write {"text": [...], "answer_start": [...]}, or a list of {"text": ..., "answer_start": ...}'
_SHOWN = 60


class GoldAnswer(NamedTuple):
    """A gold answer. start: its first character in the context."""

    text: str
    start: int


def gold_answers(value: Any, where: tuple[str, int]) -> tuple[GoldAnswer, ...]:
    """The answers of a row, from lists side by side (as on the hub) or a list of objects (as in SQuAD's files). None
    at all: there is no answer. UserError with file:line where it is neither."""
    if value is None:
        return ()
    pairs: list[tuple[Any, Any]] | None = None
    if isinstance(value, dict) and value.keys() >= {"text", "answer_start"}:
        texts, starts = value["text"], value["answer_start"]
        if isinstance(texts, str):
            texts, starts = [texts], [starts]
        if _is_list(texts) and _is_list(starts) and len(texts) == len(starts):
            pairs = list(zip(texts, starts, strict=True))
    elif _is_list(value) and all(isinstance(item, dict) for item in value):
        pairs = [(item.get("text"), item.get("answer_start")) for item in value]
    if pairs is None or not all(isinstance(text, str) and _is_number(start) for text, start in pairs):
        raise UserError(f"{place(where)}: answers that are not understood: {_cut(repr(value))}", _FORM)
    return tuple(GoldAnswer(text, int(start)) for text, start in pairs)


def problem_of(config: ExtractiveQaConfig, context: str, answers: Sequence[GoldAnswer]) -> tuple[str, str] | None:
    """What is wrong with the answers of a row, and what to do; None where nothing is."""
    if not answers and not config.unanswerable:
        return (
            "a question without an answer",
            "give task.unanswerable=true (task=squad_v2 has it), or take the row out; task.bad_answers=skip skips "
            "and counts such rows",
        )
    for text, start in answers:
        if not text.strip():
            return "an answer without a character", "give its text, or no answer at all; task.bad_answers=skip skips it"
        if start >= 0 and context.startswith(text, start):
            continue
        there = context.find(text)
        skip = "task.bad_answers=skip skips and counts such rows"
        if there < 0:
            return f"the answer {_cut(text)!r} is not in its context", f"correct the row; {skip}"
        stands = context[max(start, 0) : max(start, 0) + len(text)]
        return (
            f"answer_start={start} does not point at the answer {_cut(text)!r}: there stands {_cut(stands)!r}",
            f"answer_start counts characters from 0 (it is at {there}); {skip}",
        )
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or type(value).__name__ == "ndarray"


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


# The best answers of windows, from the scores of their tokens.
#
# Shape letters: T tokens, N windows, L tokens of the longest, A tokens of an answer at most, K answers that are kept.


def padded(values_T: Tensor, packed: Packed, fill: float) -> Tensor:
    """(N, L) the values of each document in a row, `fill` behind them."""
    table_NL = values_T.new_full((len(packed.lengths), max(packed.lengths, default=0)), fill)
    return table_NL.index_put((packed.documents, packed.positions), values_T)


def best_spans(
    starts_NL: Tensor, ends_NL: Tensor, allowed_NL: Tensor, longest: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, K) scores of the best spans, falling, and their first and last tokens; -inf where there are no more.

    A span's score is that of its start and of its end (Devlin et al. 2019, section 4.2). Every span of allowed ends and
    `longest` tokens at most is looked at, not only those of the best starts and ends.
    """
    off = -torch.inf
    starts_NL = starts_NL.float().masked_fill(~allowed_NL, off)
    ends_NL = ends_NL.float().masked_fill(~allowed_NL, off)
    length = starts_NL.shape[1]
    reach = min(longest, length)
    ends_NLA = torch.nn.functional.pad(ends_NL, (0, reach - 1), value=off).unfold(1, reach, 1)
    scores = (starts_NL[:, :, None] + ends_NLA).flatten(1)
    best_NK, flat_NK = scores.topk(min(count, scores.shape[1]), dim=1)
    first_NK = flat_NK // reach
    return best_NK, first_NK, first_NK + flat_NK % reach


# Pieces of a context as answers: what a window says, and what a row is predicted, in arrays.
#
# Shape letters: K answers that are kept.


class Span(NamedTuple):
    """Characters [start, end) of the context, and the score of its start and its end; characters 0 to 0 stand for no
    answer."""

    start: int
    end: int
    score: float


SPANS = np.dtype([("start", "i4"), ("end", "i4"), ("score", "f4")])
"""Of an array with a `Span` in each place: of every row so many are kept that objects would fill the memory."""


class WindowAnswers(NamedTuple):
    """What a window says: its best spans, (K,) SPANS, falling, and the score of no answer."""

    best: np.ndarray
    null: float


@dataclass(frozen=True, slots=True)
class PredictedAnswer:
    """What a row is predicted. kept: (K,) SPANS, falling by score; empty where the context has no text. null: the score
    of no answer, the lowest of the windows. given: whether the best span is the answer."""

    kept: np.ndarray
    null: float
    given: bool = True

    @property
    def best(self) -> tuple[Span, ...]:
        """The spans that are kept."""
        return tuple(map(Span._make, self.kept.tolist()))

    @property
    def null_difference(self) -> float:
        """How much better no answer is than the best span."""
        return self.null - float(self.kept[0]["score"]) if len(self.kept) else np.inf

    @property
    def span(self) -> tuple[int, int]:
        """The characters of the answer that is given."""
        return self.first if self.given else (0, 0)

    @property
    def first(self) -> tuple[int, int]:
        """The characters of the best span, given or not."""
        return (int(self.kept[0]["start"]), int(self.kept[0]["end"])) if len(self.kept) else (0, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PredictedAnswer) and self.span == other.span

    __hash__ = None  # type: ignore[assignment]
