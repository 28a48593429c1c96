"""SQuAD's JSON is read as rows; invalid files are refused with the position of the error."""

from __future__ import annotations

import json

import pytest

from lmtool.data.tables import begins_squad, read_squad
from lmtool.errors import UserError

ANSWERS = [{"text": "Å ran", "answer_start": 4}]


def question(number="q1", **fields):
    return {"id": number, "question": "who?", "answers": ANSWERS, **fields}


def squad(path, *questions, context="Why Å ran", **paragraph):
    data = {
        "version": "x",
        "data": [{"title": "t", "paragraphs": [{"context": context, "qas": [*questions]} | paragraph]}],
    }
    path.write_text(json.dumps(data, indent=1), encoding="utf-8-sig")
    return path


def test_squad_rows_have_context_and_line(tmp_path):
    path = squad(tmp_path / "dev.json", question(), question("q2", is_impossible=True))
    rows = read_squad(path)
    assert rows.columns == {
        "id": ["q1", "q2"], "question": ["who?"] * 2, "context": ["Why Å ran"] * 2, "answers": [ANSWERS, []],
    }  # fmt: skip
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    assert all(f'"{number}"' in lines[line - 1] for number, (_, line) in zip(("q1", "q2"), rows.origin, strict=True))
    assert begins_squad(path.read_text(encoding="utf-8-sig")) and not begins_squad('{"question": "who?"}')


def test_squad_test_file_has_no_answers(tmp_path):
    bare = {"id": "q", "question": "who?"}
    assert "answers" not in read_squad(squad(tmp_path / "test.json", bare)).columns
    with pytest.raises(UserError, match='1 of 2 questions have no field "answers"'):
        read_squad(squad(tmp_path / "test.json", bare, question()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [}', r"dev.json:1:11: not JSON"),
        ('{"data": ' + "9" * 5000 + "}", "not readable JSON: Exceeds the limit"),
        ('{"data": {}}', "no list under the key data"),
        ('{"data": [{"title": 1}]}', "article 1: no list under the key paragraphs"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "article 1, paragraph 1: no list under the key qas"),
        ('{"data": [{"paragraphs": [{"context": "x", "qas": [{"id": 1}]}]}]}', "paragraph 1: no key question"),
        ('{"data": [{"paragraphs": [{"qas": [{"id": 1, "question": "x"}]}]}]}', "paragraph 1: no key context"),
        ('{"data": []}', "no questions"),
        ('{"data": [{"paragraphs": [{"context": "\\ud800", "qas": [{"id": 1, "question": "x"}]}]}]}', "surrogate"),
        ('{"data": [{"paragraphs": [{"context": 7, "qas": [{"id": 1, "question": "x"}]}]}]}', "context is int"),
    ],
)
def test_invalid_squad_file_is_refused(tmp_path, content, message):
    path = tmp_path / "dev.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_squad(path)
