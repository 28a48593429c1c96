"""SQuAD's JSON: articles, their paragraphs, and questions about each (Rajpurkar et al. 2016), as rows of a table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtool.data.tables import Table
from lmtool.errors import UserError

_BEGINNING = re.compile(r'\s*\{\s*"(version|data)"\s*:')
_FORM = 'give {"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [...]}]}]}]}'


def begins_squad(beginning: str) -> bool:
    """Whether a file that begins so is one: an object of `version` and `data`."""
    return _BEGINNING.match(beginning) is not None


def read_squad(path: Path) -> Table:
    """A row a question: `id`, `question`, `context` and, where the file has any, `answers`: a list of objects of `text`
    and `answer_start`, empty where `is_impossible`. The origin is the line on which the question's id stands.

    UserError with the line, or the place within the object, of what is not as it should be.
    """
    text = _text_of(path)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as problem:
        where = f"{path}:{problem.lineno}:{problem.colno}"
        raise UserError(f"{where}: not JSON: {problem.msg}", "copy the file again") from problem
    except (RecursionError, ValueError) as problem:
        raise UserError(f"{path}: not readable JSON: {problem}", "copy the file again") from problem
    table = Table({name: [] for name in ("id", "question", "context", "answers")})
    place, line, labelled = 0, 1, 0
    for where, context, question in _questions(path, content):
        number = str(question["id"])
        position = text.find(json.dumps(number), place)
        if position >= 0:
            line, place = line + text.count("\n", place, position), position
        labelled += "answers" in question
        answers = [] if question.get("is_impossible") else question.get("answers")
        for name, value in (("question", question["question"]), ("context", context)):
            _require_text(f"{path}:{line}: {where}", name, value)
        values = (question["id"], question["question"], context, answers)
        for column, value in zip(table.columns.values(), values, strict=True):
            column.append(value)
        table.origin.append((str(path), line))
    if not table:
        raise UserError(f"{path}: no questions in it", _FORM)
    if not labelled:
        del table.columns["answers"]
    elif labelled < len(table):
        raise UserError(
            f"{path}: {len(table) - labelled:,} of {len(table):,} questions have no answers",
            "give all, or none, answers",
        )
    return table


def _questions(path: Path, content: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Where each question stands, its context, and the question. UserError where a level is not as it should be."""
    for article, data in enumerate(_list(f"{path}", content, "data"), start=1):
        where = f"{path}: article {article}"
        for number, paragraph in enumerate(_list(where, data, "paragraphs"), start=1):
            inside = f"{where}, paragraph {number}"
            for question in _list(inside, paragraph, "qas"):
                missing = [name for name in ("id", "question") if name not in (question or ())]
                if "context" not in paragraph or missing:
                    name = missing[0] if missing else "context"
                    raise UserError(f"{inside}: no key {name}", _FORM)
                yield f"question {question['id']}", paragraph["context"], question


def _list(where: str, content: Any, key: str) -> list[Any]:
    value = content.get(key) if isinstance(content, dict) else None
    if not isinstance(value, list):
        raise UserError(f"{where}: no list {key}", _FORM)
    return value


def _require_text(where: str, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} is {type(value).__name__}, not a text", "correct the question")
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        half = ascii(value[problem.start])[1:-1]
        raise UserError(
            f"{where}: {name} holds {half}, half of a character (a lone surrogate)", "write \\ufffd in its place"
        ) from problem


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise UserError(
            f"{path}: byte {problem.start} is not UTF-8", f"iconv -f windows-1252 -t utf-8 {path}, if it is that"
        ) from problem
