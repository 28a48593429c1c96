"""File layouts: CoNLL columns, CoNLL-U, parquet and delimited tables."""

from __future__ import annotations

import json
from typing import ClassVar

import pyarrow
import pyarrow.parquet
import pytest

from lmtool.data.tables import LINES
from lmtool.errors import UserError
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.files import layout_of, read_file


class WordsConfig(TaskConfig):
    layouts: ClassVar[tuple[str, ...]] = ("conll", "conllu", "table", "parquet")


def words(**fields):
    given = {"kind": "words", "name": "words", "text": ("tokens",), "label": "tags", "metrics": ("f1",), "metric": "f1"}
    return WordsConfig(**{**given, **fields})


def texts(**fields):
    return TaskConfig(kind="texts", name="texts", metrics=("f1",), metric="f1", **fields)


def read(tmp_path, name, content, config):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_file(path, config)


CONLL = "-DOCSTART- -X- O O\n\nEU NNP B-ORG\nrejects\tVBZ O\n \t\n\n-DOCSTART- -X- O O\nPeter NNP B-PER"


def test_conll_columns_are_read(tmp_path):
    rows = read(tmp_path, "train.conll", CONLL, words())
    assert rows.columns["tokens"] == [["EU", "rejects"], ["Peter"]]
    assert rows.columns["column_2"] == [["NNP", "VBZ"], ["NNP"]]
    assert rows.columns["tags"] == [["B-ORG", "O"], ["B-PER"]]
    assert rows.columns[LINES] == [[3, 4], [8]] and [line for _, line in rows.origin] == [3, 8]
    assert rows.metadata == {"document_lines": 2} and rows.skipped == 0
    named = read(tmp_path, "train.conll", CONLL, words(header=("tokens", "tags", "ner")))
    assert named.columns["tags"] == [["NNP", "VBZ"], ["NNP"]] and named.columns["ner"][1] == ["B-PER"]


def test_tab_separated_words_may_contain_spaces_and_hashes(tmp_path):
    rows = read(tmp_path, "a.tsv", "\ufeff#now\tO\r\n1 000\tB-X\r\n\t\r\n\u3000\tO\r\n", words())
    assert rows.columns["tokens"][0] == ["#now", "1 000"] and rows.columns["tags"] == [["O", "B-X"], ["O"]]
    assert read(tmp_path, "a.txt", "only\nwords\n", words()).columns.keys() == {"tokens", LINES}


CONLLU = (
    "# sent_id = a-1\n# text = don't\n1-2\tdon't" + "\t_" * 8 + "\n1\tdo\tdo\tAUX\tVBP" + "\t_" * 5 + "\n"
    "2\tn't\tnot\tPART\tRB" + "\t_" * 5 + "\n2.1\tgo" + "\t_" * 8 + "\n\n"
    "# sent_id = a-2\n1\t#\t#\tSYM\tNN" + "\t_" * 5 + "\n"
)


def test_conllu_is_read(tmp_path):
    rows = read(tmp_path, "en-ud-dev.conllu", CONLLU, words())
    assert rows.columns["tokens"] == [["do", "n't"], ["#"]] and rows.columns["upos"] == [["AUX", "PART"], ["SYM"]]
    assert rows.columns["xpos"][1] == ["NN"] and rows.columns["id"] == ["a-1", "a-2"]
    assert rows.columns[LINES] == [[4, 5], [9]] and rows.metadata == {"ranges_and_empty_nodes": 2}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.conll", "a\tO\nb\n", r"a.conll:2: 1 column, 2 expected \(tokens, tags\)"),
        ("a.conll", "a O\nb O O\n", r"a.conll:2: 3 columns, 2 expected"),
        ("a.conll", "a\tO\n\tO\n", r"a.conll:2: an empty word"),
        ("a.conll", "\n \n-DOCSTART- O\n", r"a.conll: no sentences"),
        ("a.conllu", CONLLU.replace("2\tn't", "3\tn't"), r"a.conllu:5: the word's number is 3, 2 expected"),
        ("a.conllu", "1\tdo\tdo\n", r"a.conllu:1: 3 columns, 10 expected"),
        ("a.parquet", b"PAR1", r"a.parquet: not readable as parquet"),
        ("a.xlsx", b"PK", r"task.kind=words reads \.conll, .*, not \.xlsx"),
    ],
)
def test_layout_errors_name_file_and_line(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, name, content, words())
    assert caught.value.hint


def test_ragged_sentences_are_skipped_and_counted(tmp_path):
    rows = read(tmp_path, "a.conll", "a O\nb\nc O\n\nd O\n", words(ragged_rows="skip"))
    assert rows.columns["tokens"] == [["d"]] and rows.skipped == 1


def test_layout_of_suffix_depends_on_task_kind(tmp_path):
    assert layout_of(tmp_path / "a.tsv", words()) == "conll" and layout_of(tmp_path / "a.tsv", texts()) == "table"
    assert layout_of(tmp_path / "a.conll", texts()) is None
    with pytest.raises(UserError, match=r"task.kind=texts reads .*, not \.conll"):
        read(tmp_path, "a.conll", "a\tO\n", texts())


@pytest.mark.parametrize(
    ("content", "delimiter"),
    [
        ('text;label\n"a; b, c";1\n', "semicolon"), ("text\tlabel\na\t1\n", "tab"), ("text|label\na|1\n", "pipe"),
        ("text,label\na,1\n", None), ('"text";"label, or not"\na;1\n', "semicolon"), ("te;xt,la|bel\na,1\n", None),
    ],
)  # fmt: skip
def test_csv_delimiter_is_detected_from_first_line(tmp_path, content, delimiter):
    rows = read(tmp_path, "a.csv", content, texts())
    assert len(rows.columns) == 2 and rows.metadata == ({"delimiter": delimiter} if delimiter else {})


def test_csv_delimiter_without_header_is_detected(tmp_path):
    rows = read(tmp_path, "a.csv", "good, very; good;1\n", texts(header=("text", "more", "label")))
    assert rows.columns["label"] == ["1"] and rows.metadata == {"delimiter": "semicolon"}


def test_parquet_class_numbers_become_names(tmp_path):
    table = pyarrow.table({"tokens": [["a", "b"], ["c"]], "tags": [[0, 1], [-1]], "label": [1, None]})
    classes = {"names": ["O", "B-X"], "_type": "ClassLabel"}
    features = {"tags": {"feature": classes, "_type": "List"}, "label": classes}
    written = json.dumps({"info": {"features": features}}).encode()
    pyarrow.parquet.write_table(table.replace_schema_metadata({b"huggingface": written}), tmp_path / "a.parquet")
    rows = read_file(tmp_path / "a.parquet", texts())
    assert rows.columns == {"tokens": [["a", "b"], ["c"]], "tags": [["O", "B-X"], [""]], "label": ["B-X", ""]}
    assert rows.origin[1] == (str(tmp_path / "a.parquet"), 2)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [(b'{"info": ' + b"9" * 5000 + b"}", "not readable JSON: Exceeds the limit"), (b"[]", "does not describe columns")],
)
def test_unreadable_hub_metadata_of_parquet_is_refused(tmp_path, metadata, message):
    table = pyarrow.table({"text": ["a"], "label": [1]}).replace_schema_metadata({b"huggingface": metadata})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=f"a.parquet: .*{message}") as caught:
        read_file(tmp_path / "a.parquet", texts())
    assert caught.value.hint is not None
