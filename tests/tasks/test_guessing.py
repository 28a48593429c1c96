"""The task of a user's file, guessed from its columns."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
from pathlib import Path

import pytest

from lmtool.errors import UserError
from lmtool.tasks.guessing import Guess, guess, is_path

TEXTS = [f"a review of the thing number {number}" for number in range(60)]


def table(folder, name="reviews.csv", **columns):
    path = folder / name
    if path.suffix == ".jsonl":
        rows = zip(*columns.values(), strict=True)
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    return str(path)


CASES = {
    "classes": ({"review": TEXTS, "stars": [1, 2, 3] * 20}, Guess("classification", ("review",), "stars")),
    "named classes": ({"text": TEXTS, "mood": ["good", "bad"] * 30}, Guess("classification", ("text",), "mood")),
    "text pair": (
        {"id": list(range(60)), "a": TEXTS, "b": TEXTS[::-1], "label": ["x", "y"] * 30},
        Guess("classification", ("a", "b"), "label"),
    ),
    "values": (
        {"text": TEXTS, "score": [number / 7 for number in range(60)]}, Guess("regression", ("text",), "score")
    ),
    "label and another column": (
        {"text": TEXTS, "year": [1990, 1991] * 30, "label": ["x", "y"] * 30},
        Guess("classification", ("text",), "label"),
    ),
    "several labels per cell": (
        {"text": TEXTS, "labels": ["a", "b,a", "c, b", "", "c", "a"] * 10}, Guess("multi_label", ("text",), "labels")
    ),
    "labels separated by bars": (
        {"text": TEXTS, "genres": ["a", "b|a", "c|b"] * 20}, Guess("multi_label", ("text",), "genres", "|")
    ),
    "one label per cell": (
        {"text": TEXTS, "labels": ["a", "b", "c"] * 20}, Guess("classification", ("text",), "labels")
    ),
    "decimal commas": (
        {"text": TEXTS, "score": [f"{number // 7},{number % 7}" for number in range(60)]},
        Guess("regression", ("text",), "score"),
    ),
    "numbered columns of pandas": ({"0": TEXTS, "1": [0, 1] * 30}, Guess("classification", ("0",), "1")),
    "value equal to its column name": (
        {"word": ["word", *(f"w{number}" for number in range(59))], "label": ["x", "y"] * 30},
        Guess("classification", ("word",), "label"),
    ),
    "source and target": ({"source": TEXTS, "target": TEXTS}, Guess("seq2seq", ("source",), "target")),
}  # fmt: skip
LISTS = {
    "tags": (
        {"tokens": [["a", "b", "c"], ["d"]] * 5, "tags": [["O", "B", "I"], ["O"]] * 5},
        Guess("token_classification", ("tokens",), "tags"),
    ),
    "labels": (
        {"text": TEXTS[:4], "topics": [["a"], [], ["a", "b"], ["b"]]}, Guess("multi_label", ("text",), "topics")
    ),
    "answers": (
        {"question": TEXTS[:2], "context": TEXTS[:2], "answers": [{"text": [], "answer_start": []}] * 2},
        Guess("extractive_qa", ("question", "context"), "answers"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_task_kind_is_guessed_from_columns(name, tmp_path):
    columns, wanted = CASES[name]
    assert guess(table(tmp_path, **columns), {}) == wanted


@pytest.mark.parametrize("name", LISTS)
def test_task_kind_is_guessed_from_lists(name, tmp_path):
    columns, wanted = LISTS[name]
    assert guess(table(tmp_path, "rows.jsonl", **columns), {}) == wanted


def test_task_kind_is_guessed_from_folder_and_conll(tmp_path):
    table(tmp_path, "train.csv", text=TEXTS, label=["x", "y"] * 30)
    assert guess(str(tmp_path), {}) == Guess("classification", ("text",), "label")
    (tmp_path / "x.tsv").write_text("a\tB-X\nb\tO\n\nc\tO\n")
    tags = Guess("token_classification", ("tokens",), "tags")
    assert guess(str(tmp_path / "x.tsv"), {}) == guess(str(tmp_path / "x.tsv"), {"kind": tags.kind}) == tags
    (tmp_path / "x.conll").write_text("a O\n")
    assert guess(str(tmp_path / "x.conll"), {}).kind == "token_classification"


@pytest.mark.parametrize(
    ("columns", "message", "forms"),
    [
        ({"text": TEXTS, "score": [number % 5 / 2 for number in range(60)]}, "which task is meant",
         ["task.kind=classification", "task.kind=regression"]),
        ({"text": TEXTS, "label": ["a", "b,a", "c"] * 20}, "which task is meant",
         ["task.kind=multi_label", "task.kind=classification"]),
        ({"text": TEXTS, "mood": ["a", "b"] * 30, "tone": ["c", "d"] * 30}, "which column is the label",
         ["task.label=mood", "task.label=tone"]),
        ({"a": TEXTS, "b": TEXTS, "c": TEXTS, "label": ["x", "y"] * 30}, "which task is meant",
         ["task.text=[a]", "task.text=[b]"]),
        ({"mr": TEXTS, "ref": TEXTS[::-1]}, "mr and ref hold texts, and no column holds labels",
         ["task.kind=seq2seq", "'task.text=[mr]' task.label=ref", "'task.text=[ref]' task.label=mr"]),
        ({"Tom had a cat.": TEXTS, "Tom hatte eine Katze.": TEXTS[::-1]}, "the first column and the second hold texts",
         ["task.header=[source,target]"]),
    ],
)  # fmt: skip
def test_ambiguous_file_is_refused_with_alternatives(columns, message, forms, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        guess(table(tmp_path, **columns), {})
    assert all(form in caught.value.hint for form in forms)


@pytest.mark.parametrize(
    ("columns", "shown", "header"),
    [
        ([TEXTS, ["good", "bad"] * 30], "'good' is also a value of its column (29 of 59 rows)", "[text,label]"),
        ([["yes", "no"] * 30, TEXTS, TEXTS[::-1]], "'yes' is also a value", "[label,text_1,text_2]"),
        ([TEXTS, [0, 1] * 30], "'0' is a number, like all other values", "[text,label]"),
        ([TEXTS, [number / 7 for number in range(60)]], "'0.0' is a number", "[text,label]"),
        ([range(60), TEXTS, ["good", "bad"] * 30], "'0' is a number", "[column_1,column_2,column_3]"),
        ([[*TEXTS, TEXTS[0]], range(200, 261)], "'a review of the thing number 0' is also a value", "[text,label]"),
    ],
)
def test_table_without_header_is_refused(columns, shown, header, tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(zip(*columns, strict=True))
    with pytest.raises(UserError, match="its first line is a row, not the names of its columns: ") as caught:
        guess(str(path), {})
    assert (
        shown in caught.value.message
        and f"name them: {shlex.quote(f'task={path}')} 'task.header={header}'" in caught.value.hint
    )
    if "label" in header:  # the hint works
        form = guess(str(path), {"header": header})
        assert form.label == "label" and {*form.text} == {*header[1:-1].split(",")} - {"label"}


def test_named_header_is_accepted(tmp_path):
    path = table(tmp_path, text=TEXTS, good=["good", "bad"] * 30)
    with pytest.raises(UserError, match="its first line is a row") as caught:
        guess(path, {})
    assert "if it is a header: task=custom task.kind=classification" in caught.value.hint
    assert guess(path, {"text": "[text]", "label": "good"}) == Guess("classification", ("text",), "good")
    assert guess(path, {"header": "[text,good]"}) == Guess("classification", ("text",), "good")


def test_typed_settings_are_not_guessed(tmp_path):
    path = table(tmp_path, text=TEXTS, mood=["a", "b"] * 30, tone=["c", "d"] * 30)
    assert guess(path, {"label": "tone"}) == Guess("classification", ("text",), "tone")
    assert guess(path, {"kind": "multi_label", "label": "mood"}).kind == "multi_label"
    with pytest.raises(UserError, match="no column nope; there are text, mood, tone"):
        guess(path, {"label": "nope"})


@pytest.mark.parametrize("label", [["pos"] * 60, [1] * 60])
def test_constant_label_is_refused(label, tmp_path):
    """No other column is guessed as the label instead."""
    with pytest.raises(UserError, match="all rows have the same label"):
        guess(table(tmp_path, text=["a", "b"] * 30, label=label), {})


@pytest.mark.parametrize("columns", [{"text": TEXTS}, {"number": list(range(60))}])
def test_file_without_label_or_text_is_refused(columns, tmp_path):
    with pytest.raises(UserError, match="holds"):
        guess(table(tmp_path, **columns), {})


def test_paths_are_distinguished_from_task_names(tmp_path):
    assert is_path("x.csv", []) and is_path(str(tmp_path), []) and not is_path("sst2", ["sst2"])
    assert not is_path("unknown", []) and not is_path("a.csv,b.csv", [])
    with pytest.raises(UserError, match="no such file"):
        guess("gone.csv", {})
    words = Guess("classification", ("Review Text",), "a,b").words("my file.csv")
    assert words[2:] == ["task.path='my file.csv'", "task.text=['Review Text']", "task.label='a,b'"]


@pytest.mark.parametrize("name", ["review_title", None, "id"])
def test_index_of_data_frame_is_not_text(name, tmp_path):
    """The index is a column of the file, read only if task.text= names it."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": TEXTS, "label": ["x", "y"] * 30})
    titles = pandas.Index([f"the title of number {number}" for number in range(60)], name=name)
    for index, ending in ((titles, "titles"), (frame.index, "numbers")):
        frame.set_index(index).to_parquet(tmp_path / f"{ending}.parquet")
        assert guess(str(tmp_path / f"{ending}.parquet"), {}) == Guess("classification", ("text",), "label")
    column = name or "__index_level_0__"
    typed = {"text": f"[{column},text]"}
    if column != "id":
        path = str(tmp_path / "titles.parquet")
        assert guess(path, typed) == Guess("classification", (column, "text"), "label")
    frame.set_index(titles).reset_index(names="title").to_parquet(tmp_path / "column.parquet", index=False)
    assert guess(str(tmp_path / "column.parquet"), {}).text == ("title", "text")


def test_compressed_files_are_guessed_like_plain_files(tmp_path):
    for name in ("reviews.csv", "train.jsonl"):
        path = table(tmp_path, name, text=TEXTS, mood=["good", "bad"] * 30)
        compressed = tmp_path / "folder" / f"{name}.gz"
        compressed.parent.mkdir(exist_ok=True)
        compressed.write_bytes(gzip.compress(Path(path).read_bytes()))
        assert is_path(str(compressed), []) and guess(str(compressed), {}) == guess(path, {})
    assert guess(str(tmp_path / "folder"), {}) == guess(str(tmp_path / "train.jsonl"), {})
