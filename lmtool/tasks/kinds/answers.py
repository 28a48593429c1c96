"""The column of the answers: read in the layouts that people have, and checked against the contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lmtool.errors import UserError
from lmtool.tasks.configs import ExtractiveQaConfig
from lmtool.tasks.kinds.labels import place

_FORM = 'write {"text": [...], "answer_start": [...]}, or a list of {"text": ..., "answer_start": ...}'
_SHOWN = 60


class Answer(NamedTuple):
    """A gold answer. start: its first character in the context."""

    text: str
    start: int


def gold_answers(value: Any, where: tuple[str, int]) -> tuple[Answer, ...]:
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
    return tuple(Answer(text, int(start)) for text, start in pairs)


def problem_of(config: ExtractiveQaConfig, context: str, answers: Sequence[Answer]) -> tuple[str, str] | None:
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
