from __future__ import annotations

import csv
import gzip
import io
import json
import random

import pytest

from lmtool.data.tables import Table, read_table
from lmtool.errors import UserError
from lmtool.runs.files import write_delimited
from tests.mutations import mutated


def table(tmp_path, name: str, content: str | bytes, **keys) -> Table:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_table(path, **keys)


def assert_refused(tmp_path, name: str, content: str | bytes, match: str, **keys) -> UserError:
    with pytest.raises(UserError, match=match) as caught:
        table(tmp_path, name, content, **keys)
    assert caught.value.hint and "\n" not in caught.value.message
    return caught.value


def test_tsv_has_no_quotes(tmp_path):
    rows = table(tmp_path, "a.tsv", 'text\tlabel\nsay "hi\t1\nNA\tnull\n\n \t\n')
    assert rows.columns == {"text": ['say "hi', "NA", " "], "label": ["1", "null", ""]}
    assert [line for _, line in rows.origin] == [2, 3, 5] and len(rows) == 3


def test_csv_quotes_are_parsed(tmp_path):
    rows = table(tmp_path, "a.csv", 'text,label\n"a, ""b""\nc",1\nNA,\n5" tall,2\n')
    assert rows.columns == {"text": ['a, "b"\nc', "NA", '5" tall'], "label": ["1", "", "2"]}
    assert [line for _, line in rows.origin] == [2, 4, 5]


def test_jsonl_keeps_types(tmp_path):
    rows = table(
        tmp_path, "a.jsonl", '{"t": "a", "n": 1, "b": true, "x": null}\n\n{"b": false, "n": 2.5, "t": "b", "x": "y"}\n'
    )
    assert rows.columns == {"t": ["a", "b"], "n": [1, 2.5], "b": [True, False], "x": [None, "y"]}
    assert [line for _, line in rows.origin] == [1, 3]


@pytest.mark.parametrize(("name", "content"), [
    ("a.tsv", "text\tlabel\na\t1\nb\t2\n"), ("a.csv", 'text,label\n"a",1\nb,2\n'),
    ("a.jsonl", '{"text": "a", "label": "1"}\n{"text": "b", "label": "2"}\n'),
])  # fmt: skip
def test_byte_order_mark_and_line_ends_keep_rows(tmp_path, name, content):
    plain = table(tmp_path, name, content)
    assert plain.columns == {"text": ["a", "b"], "label": ["1", "2"]}
    for other in ("\ufeff" + content, content.replace("\n", "\r\n"), content.replace("\n", "\r"), content[:-1]):
        assert table(tmp_path, name, other) == plain


def test_header_is_added_to_files_without_one(tmp_path):
    rows = table(tmp_path, "a.tsv", "x\t1\ny\t2\n", header=("text", "label"))
    assert rows.columns == {"text": ["x", "y"], "label": ["1", "2"]} and rows.origin[0][1] == 1
    assert_refused(tmp_path, "a.tsv", "x\t1\n", r"a.tsv:1: 2 columns, 3 expected \(a, b, c\)", header=("a", "b", "c"))


def test_ragged_lines_are_refused_or_skipped(tmp_path):
    for name, content in {
        "a.csv": "text,label\nhi,1\nhi,1,9\nx\n",
        "a.tsv": "text\tlabel\nhi\t1\nhi\t1\t9\nx\n",
    }.items():
        assert_refused(tmp_path, name, content, rf"{name}:3: 3 columns, 2 expected \(text, label\)")
        rows = table(tmp_path, name, content, skip_ragged=True)
        assert len(rows) == 1 and rows.skipped == 2
        assert_refused(
            tmp_path, name, content.replace("hi,1\n", "").replace("hi\t1\n", ""), "no row of 2", skip_ragged=True
        )


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.csv", 'a,b\n1,2\n"3,4\n5,6\n', r"a.csv:3: a quote is never closed"),
        ("a.csv", 'a,b\n1,"2"x\n', r"a.csv:2: .*expected after"),
        ("a.csv", 'a,b\n1,2\n"x,3\n4,"y",5\n', r"a.csv:3: .*continues to line 4"),
        ("a.csv", "a,a\n1,2\n", r"a.csv:1: the column 'a' is named twice"),
        ("a.tsv", "a\tb\n1\t\0\n", r"a.tsv:2:3: a NUL byte"),
        ("a.tsv", b"a\tb\n1\t2\n\xe9\t2\n", r"a.tsv:3:1: byte 0xe9 is not utf-8"),
        ("a.tsv", b"\x1f\x8b\x08 text", r"a gzip file, not text"),
        ("a.tsv", "a\tb\n".encode("utf-16"), r"a.tsv:1:1: UTF-16"),
        ("a.tsv", "", r"a.tsv is empty"),
        ("a.csv", "\n\n", r"a.csv is empty"),
        ("a.csv", "a,b\n", r"a.csv: no rows"),
        ("a.jsonl", "", r"a.jsonl: no rows"),
        ("a.jsonl", '{"a": 1}\n{"a": 1,}\n', r"a.jsonl:2:\d+: not JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', r"a.jsonl:2: list instead of an object"),
        ("a.jsonl", '{"a": 1}\n{"a": 1, "a": 2}\n', r"a.jsonl:2: the key a is given twice"),
        ("a.jsonl", '{"a": 1}\n{"b": 1}\n', r"a.jsonl:2: the object lacks the key a, unlike line 1"),
        ("a.jsonl", '{"a": 1}\n{"a": 1, "b": 1}\n', r"a.jsonl:2: the object has the additional key b"),
        ("a.jsonl", '{"a": "x"}\n{"a": null}\n{"a": 3}\n', r"a.jsonl:3: a is a number, but text on line 1"),
        ("a.jsonl", '{"a": 1}\n{"a": true}\n', r"a.jsonl:2: a is a truth value, but a number on line 1"),
        ("a.jsonl", '{"a": "x"}\n{"a": "x \\ud800 y"}\n', r"a.jsonl:2: a contains \\ud800, half of a character"),
        ("a.jsonl", '{"a": ["x", "\\uDC00"]}\n', r"a.jsonl:1: a contains \\udc00, half of a character"),
        ("a.jsonl", '{"la\\udfffbel": 1}\n', r"a.jsonl:1: la.bel contains \\udfff, half of a character"),
        ("a.jsonl", '{"a": NaN}\n', r"a.jsonl:1: NaN is not a number"),
        ("a.jsonl", '{"a": ' + "[" * 100_000 + "\n", r"a.jsonl:1: not readable JSON"),
        ("a.jsonl", '{"a": ' + "1" * 10_000 + "}\n", r"a.jsonl:1: not readable JSON"),
        ("a.parquet", "PAR1", r"\.parquet is not one of"),
    ],
)
def test_invalid_table_is_refused_with_line(tmp_path, name, content, match):
    assert_refused(tmp_path, name, content, match)


def test_missing_file_suggests_the_nearest(tmp_path):
    (tmp_path / "train.tsv").write_text("a\n1\n")
    with pytest.raises(UserError, match="no such file") as caught:
        read_table(tmp_path / "trian.tsv")
    assert caught.value.hint == f"did you mean {tmp_path / 'train.tsv'}?"


def test_take_selects_rows(tmp_path):
    rows = table(tmp_path, "a.csv", "a,b\n1,2\n3,4\n5,6\n").take([2, 0])
    assert rows.columns == {"a": ["5", "1"], "b": ["6", "2"]} and [line for _, line in rows.origin] == [4, 2]


TEXTS = ["plain", "", "a, b", 'quo"te', "NA", "naïve — 中文", "  spaced ", "null", "1", "-0", "=cmd", "long " * 50]


def test_csv_rows_survive_round_trip(tmp_path):
    drawn = random.Random(3)
    for _ in range(40):
        records = [[drawn.choice([*TEXTS, "two\nlines"]) for _ in range(3)] for _ in range(drawn.randrange(1, 20))]
        records = [record for record in records if any(record)] or [["x", "", ""]]
        written = io.StringIO()
        csv.writer(written, lineterminator=drawn.choice(["\n", "\r\n"])).writerows([["a", "b", "c"], *records])
        rows = table(tmp_path, "a.csv", written.getvalue())
        assert [list(row) for row in zip(*rows.columns.values(), strict=True)] == records


def content_of(kind: str, drawn: random.Random) -> list[str]:
    """The lines of a valid file: a header and 30 rows."""
    rows = [[drawn.choice(TEXTS), drawn.choice(["yes", "no"])] for _ in range(30)]
    if kind == "jsonl":
        return [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows]
    if kind == "tsv":
        return ["text\tlabel", *("\t".join(row) for row in rows)]
    quoted = ['"' + text.replace('"', '""') + f'",{label}' for text, label in rows]
    return ["text,label", *quoted]


FAULTS = {
    "tsv": [lambda line: line + "\tmore", lambda line: line.replace("\t", " "), lambda line: line + "\0"],
    "csv": [lambda line: line + ",more", lambda line: line.rpartition(",")[0], lambda line: line + "\0",
            lambda line: line.replace('"', '"x"y"', 1)],
    "jsonl": [lambda line: line[:-1], lambda line: line + "}", lambda line: line.replace('"text"', '"txt"'),
              lambda line: line.replace('"label": "', '"label": 7, "x": "'), lambda line: f"[{line}]"],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl"])
def test_planted_faults_are_reported_at_their_line(tmp_path, kind):
    drawn = random.Random(11)
    for _ in range(60):
        lines = content_of(kind, drawn)
        assert len(table(tmp_path, f"a.{kind}", "\n".join(lines))) == 30
        number = drawn.randrange(1, len(lines))
        fault = drawn.choice([*FAULTS[kind], None])
        damaged = [line.encode() for line in lines]
        damaged[number] = damaged[number] + b"\xff" if fault is None else fault(lines[number]).encode()
        assert_refused(
            tmp_path, f"a.{kind}", drawn.choice([b"\n", b"\r\n"]).join(damaged), rf"a\.{kind}:{number + 1}[: ]"
        )


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl"])
def test_mutated_files_give_errors_or_complete_rows(tmp_path, kind):
    drawn = random.Random(23)
    refusals = 0
    for _ in range(100):
        content = mutated("\n".join(content_of(kind, drawn)).encode(), drawn)
        try:
            rows = table(tmp_path, f"a.{kind}", content, skip_ragged=drawn.random() < 0.2)
            assert len({*map(len, rows.columns.values()), len(rows)}) == 1
        except UserError as error:
            refusals += 1
            assert error.hint and f"a.{kind}" in error.message
    assert refusals > 30


CELL_PARTS = [*" ,;\t|\"'\n\r\x0b\x0c\x1c\x85\u2028é猫-\\#1", "a", "b c", "\r\n", "=1", "NA"]


def random_cell(draw):
    return "".join(draw.choices(CELL_PARTS, k=draw.choice([0, 1, 1, 2, 5])))


def read_by_csv_and_pandas(path, delimiter=","):
    """The header and rows of a file as read by csv and pandas, which must agree."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        header, *rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    frame = pytest.importorskip("pandas").read_csv(
        path, sep=delimiter, dtype=str, keep_default_na=False, na_filter=False
    )
    assert [*frame.columns] == header and frame.values.tolist() == rows
    return header, rows


def test_quoted_cells_match_csv_and_pandas(tmp_path):
    """150 tables of generated cells, written with all quoting rules and line ends."""
    draw, path = random.Random(1), tmp_path / "a.csv"
    for number in range(150):
        rows = [[f"x{random_cell(draw)}", random_cell(draw), random_cell(draw)] for _ in range(draw.randint(1, 6))]
        end, delimiter = draw.choice(["\n", "\r\n"]), draw.choice(",;|\t")
        with path.open("w", encoding="utf-8", newline="") as file:
            quoting = csv.QUOTE_ALL if number % 3 else csv.QUOTE_NONNUMERIC
            writer = csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=quoting)
            writer.writerows([["text", "pair", "label"], *rows])
        assert read_by_csv_and_pandas(path, delimiter) == (["text", "pair", "label"], rows)
        columns = read_table(path).columns
        assert [list(row) for row in zip(*columns.values(), strict=True)] == rows


def test_written_tables_are_read_back(tmp_path):
    draw, path = random.Random(2), tmp_path / "a.csv"
    for _ in range(150):
        names = draw.sample(["text", "a\rb", 'say "x"', "two\r\nlines", "a,b", "n"], draw.randint(2, 4))
        rows = [[random_cell(draw) for _ in names] for _ in range(draw.randint(1, 6))]
        write_delimited(path, (dict(zip(names, row, strict=True)) for row in rows), ",")
        assert read_by_csv_and_pandas(path) == (names, rows)
        assert path.read_bytes().endswith(b"\n") and not path.read_bytes().endswith(b"\r\n")
        columns = read_table(path, known=names).columns
        assert [*columns] == names and [list(row) for row in zip(*columns.values(), strict=True)] == rows


@pytest.mark.parametrize("cell", ["a\rb", "a\nb", "a\r\nb", "a\tb"])
def test_tsv_output_refuses_tabs_and_line_ends(cell, tmp_path):
    with pytest.raises(UserError, match="a cell contains a tab or a line end"):
        write_delimited(tmp_path / "a.tsv", [{"text": "x"}, {"text": cell}], "\t")
    assert not (tmp_path / "a.tsv").exists()


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "SEP=;"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_excel_sep_line_sets_delimiter(first, end, tmp_path):
    """Excel's line has precedence over the expected columns, and line numbers count it."""
    content = f'text;a,b,c{end}"x; ""y""";1{end}z, w;2{end}'
    rows = table(tmp_path, "b.csv", f"\ufeff{first}{end}{content}", known=["a", "b", "c"])
    assert rows.columns == {"text": ['x; "y"', "z, w"], "a,b,c": ["1", "2"]}
    assert [line for _, line in rows.origin] == [3, 4] and rows.metadata == {"delimiter": "semicolon"}
    assert_refused(tmp_path, "c.csv", f"{first}{end}text;label{end}x;1;2{end}", r"c.csv:3: 3 columns, 2 expected")
    assert table(tmp_path, "d.csv", f"{first}{end}x;1{end}", header=["text", "label"]).columns["text"] == ["x"]


def test_unsuitable_excel_sep_line_is_refused(tmp_path):
    assert_refused(tmp_path, "a.csv", "sep=:\na:b\n1:2\n", "a.csv:1: ':' is not one of the delimiters comma")
    assert_refused(tmp_path, "a.tsv", "sep=;\na;b\n1;2\n", "a.tsv:1: the line names the delimiter semicolon")
    assert table(tmp_path, "b.tsv", "sep=\t\na\tb\n1\t2\n").columns == {"a": ["1"], "b": ["2"]}
    assert table(tmp_path, "b.csv", "sep\nsep=;\n").columns == {"sep": ["sep=;"]}


def test_quoted_tsv_cells_are_reported(tmp_path):
    """In 200 tables written by pandas, quoted cells are reported; literal quotes never are."""
    pandas, draw, reported = pytest.importorskip("pandas"), random.Random(4), 0
    words = ["a", "b c", '"', '"d"', ",", "é", "''", '5" tall']
    for _ in range(200):
        rows = [["x" + "".join(draw.choices(words, k=3)), draw.choice("12")] for _ in range(draw.randint(1, 5))]
        frame = pandas.DataFrame(rows, columns=["text", "label"])
        frame.to_csv(tmp_path / "a.tsv", sep="\t", index=False)
        place = read_table(tmp_path / "a.tsv").metadata.get("quoted_cell")
        quoted = [number for number, (text, _) in enumerate(rows) if '"' in text]
        assert place == (f"{tmp_path}/a.tsv:{quoted[0] + 2}" if quoted else None)
        reported += place is not None
        (tmp_path / "b.csv").write_bytes((tmp_path / "a.tsv").read_bytes())
        assert [list(row) for row in zip(*read_table(tmp_path / "b.csv").columns.values(), strict=True)] == rows
        literal = "".join("\t".join(row) + "\n" for row in [["text", "label"], *rows])
        assert "quoted_cell" not in table(tmp_path, "c.tsv", literal).metadata
    assert 50 < reported < 190


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_compressed_tables_equal_uncompressed_ones(end, tmp_path):
    contents = {
        "a.csv": 'sep=;\ntext;label\n"a\r\nb";1\n',
        "a.tsv": "text\tlabel\na\t1\n",
        "a.jsonl": '{"text": "a", "label": 1}\n',
    }
    for name, content in contents.items():
        raw = content.encode()
        packed = (
            gzip.compress(raw) if end == ".gz" else pytest.importorskip("pyarrow").compress(raw, "zstd", asbytes=True)
        )
        plain = table(tmp_path, name, content)
        rows = table(tmp_path, name + end, packed)
        assert rows.columns == plain.columns and rows.metadata == plain.metadata
        assert_refused(tmp_path, name + end, packed[: len(packed) // 2], "truncated|not readable")
