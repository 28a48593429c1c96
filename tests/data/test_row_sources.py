"""Sources of text in rows: JSON lines, CSV, TSV and parquet, compressed or not."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lmtool.config.registry import build, lookup
from lmtool.data import compressed, file_source
from lmtool.data.file_source import FileSource
from lmtool.data.files import LINE, collect_errors
from lmtool.errors import UserError
from tests.mutations import mutated

from .data_fixtures import documents, texts

ODD = [
    "NA",
    "null",
    "nan",
    "None",
    "true",
    "1",
    'say "hi"',
    "a, b; c|d",
    "=1+1",
    "naïve — 中文 😀",
    "  spaced  ",
    "x" * 3000,
]
TEXTS = [*ODD, *documents(40)]
LINES = ["two\nlines", "a\ttab", 'a "quote"\n\nand a blank line']  # not representable in TSV


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def delimited(delimiter: str) -> Callable[[list[str]], bytes]:
    def write(rows: list[str]) -> bytes:
        out = io.StringIO()
        csv.writer(out, delimiter=delimiter).writerows([["id", "text"], *enumerate(rows)])
        return out.getvalue().encode()

    return write


def jsonl(rows: list[str]) -> bytes:
    objects = ({"text": text, "meta": {"n": n} if n % 2 else None} for n, text in enumerate(rows))
    return "".join(json.dumps(row, ensure_ascii=n % 2 == 0) + "\n" for n, row in enumerate(objects)).encode()


def tsv(rows: list[str]) -> bytes:
    return "".join(["id\ttext\n", *(f"{n}\t{text}\n" for n, text in enumerate(rows))]).encode()


def parquet(rows: list[str], group: int = 7) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, "n": list(range(len(rows)))}), sink, row_group_size=group)
    return sink.getvalue().to_pybytes()


WRITERS: dict[str, Callable[[list[str]], bytes]] = {
    "a.jsonl": jsonl,
    "a.json.gz": lambda rows: gzip.compress(jsonl(rows)),
    "a.jsonl.zst": lambda rows: zstd(jsonl(rows)),
    "a.csv": delimited(","),
    "b.csv": delimited(";"),
    "c.csv.gz": lambda rows: gzip.compress(delimited("\t")(rows)),
    "d.CSV": delimited("|"),
    "a.tsv": tsv,
    "a.tsv.zst": lambda rows: zstd(tsv(rows)),
    "a.parquet": parquet,
}


def kind(name: str) -> str:
    return next(kind for kind in ("jsonl", "json", "csv", "tsv", "parquet", "txt") if f".{kind}" in name.lower())


def source(path: Path, **keys: Any) -> FileSource[Any]:
    name = {"json": "jsonl", "tsv": "csv", "txt": "text"}.get(kind(path.name), kind(path.name))
    entry = lookup("data", name)
    assert entry is not None
    return build(entry.config(path=str(path), **keys))


def write(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def all_texts(opened: FileSource[Any]) -> list[str]:
    return list(texts(opened.complete(), "validation"))


def assert_refused(path: Path, match: str, **keys: Any) -> UserError:
    with pytest.raises(UserError, match=match) as caught:
        source(path, **keys)
    assert caught.value.hint and "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_read_as_written(tmp_path: Path, name: str) -> None:
    rows = TEXTS + (LINES if kind(name) != "tsv" else [])
    opened = source(write(tmp_path, name, WRITERS[name](rows)), validation_fraction=0.1)
    assert all_texts(opened) == rows
    train, held_out = list(texts(opened, "train")), list(texts(opened, "validation"))
    assert sorted(train + held_out) == sorted(rows) and len(held_out) == opened.count("validation") > 1
    assert opened.metadata()["document"] == "row" and opened.metadata()["text"] == "text"


def test_fingerprint_does_not_depend_on_file_format(tmp_path: Path) -> None:
    prints = {source(write(tmp_path, name, make(TEXTS))).fingerprint for name, make in WRITERS.items()}
    assert len(prints) == 1


def test_folder_is_read_as_files_of_one_format(tmp_path: Path) -> None:
    for number, end in enumerate((".jsonl", ".jsonl.gz", ".json.zst", ".ndjson")):
        content = jsonl([f"text {number}"])
        write(
            tmp_path,
            f"{number}{end}",
            gzip.compress(content) if "gz" in end else zstd(content) if "zst" in end else content,
        )
    entry = lookup("data", "jsonl")
    assert entry is not None
    opened = build(entry.config(path=str(tmp_path), validation=None))
    assert sorted(all_texts(opened)) == [f"text {number}" for number in range(4)]
    write(tmp_path, "0.jsonl.gz", gzip.compress(jsonl(["text 0"])))
    with pytest.raises(UserError, match=r"contains both 0.jsonl and 0.jsonl.gz, perhaps the same text"):
        build(entry.config(path=str(tmp_path)))
    with pytest.raises(UserError, match="contains no .txt file, but") as caught:
        build(lookup("data", "text").config(path=str(tmp_path)))  # type: ignore[union-attr]
    assert caught.value.hint.startswith("data=jsonl reads them: data=jsonl data.path=")


def test_text_columns_are_selected_by_name(tmp_path: Path) -> None:
    table = "title,body\nA,first\n,second\nC,\n,\n"
    path = write(tmp_path, "a.csv", table)
    assert all_texts(source(path, text=("title", "body"))) == ["A\nfirst", "second", "C"]
    opened = source(path, text="body")
    assert all_texts(opened) == ["first", "second"] and opened.metadata()["rows_without_text"] == 2
    assert (
        assert_refused(path, r"a.csv:1: no column text; there are title, body").hint
        == "name the column: data.text=COLUMN"
    )
    assert assert_refused(path, "no column titel", text="titel").hint == "did you mean data.text=title?"
    lines = '{"title": "A", "body": "first"}\n{"title": null, "body": "second"}\n'
    assert all_texts(source(write(tmp_path, "a.jsonl", lines), text=("title", "body"))) == ["A\nfirst", "second"]
    sink = pyarrow.BufferOutputStream()
    columns = {"text": ["a", None, "b"], "n": [1, 2, 3], "raw": [b"x", b"y", b"z"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    path = write(tmp_path, "a.parquet", sink.getvalue().to_pybytes())
    opened = source(path)
    assert all_texts(opened) == ["a", "b"] and opened.metadata()["rows_without_text"] == 1
    assert assert_refused(path, "the column n contains int64", text="n").hint == "name a column of text: data.text=text"
    assert_refused(path, "the column raw contains binary, not text", text="raw")
    assert (
        assert_refused(path, r"no column tex; there are text, n, raw", text="tex").hint
        == "did you mean data.text=text?"
    )


def test_nested_keys_are_selected_by_dotted_name(tmp_path: Path) -> None:
    lines = ['{"meta": {"text": "a", "by": {"name": "x"}}}', '{"meta": {"text": "b", "by": null}}', '{"meta": null}']
    path = write(tmp_path, "a.jsonl", "\n".join([*lines, '{"meta.text": "c", "meta": {"text": "d", "by": null}}']))
    assert all_texts(source(path, text="meta.text")) == ["a", "b", "c"]  # a key that contains the dot has precedence
    assert all_texts(source(path, text=("meta.text", "meta.by.name"))) == ["a\nx", "b", "c"]
    error = assert_refused(path, r"a.jsonl:1: no column meta.txt; there are meta.text, meta.by.name", text="meta.txt")
    assert error.hint == "did you mean data.text=meta.text?"
    assert_refused(path, r"a.jsonl:1: no column meta.text.a", text="meta.text.a")
    assert_refused(path, r"a.jsonl:1: meta is an object, not text", text="meta")


def test_delimiters_and_encodings_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "id;text\n1;a, b\n2;c\n")
    assert all_texts(source(path)) == ["a, b", "c"] and source(path).metadata()["delimiter"] == "semicolon"
    assert_refused(path, "no column text; there are id;text", delimiter="comma")
    quoted = write(tmp_path, "a.tsv", 'id\ttext\n1\t"a\tb"\n2\tc\n')
    assert_refused(quoted, r"a.tsv:2: 3 columns, 2 expected")  # TSV has no quotes
    assert all_texts(source(quoted, delimiter="tab")) == ["a\tb", "c"]
    latin = write(tmp_path, "l.csv", "text\nnaïve\nÖl\n".encode("latin-1"))
    assert "data.encoding=latin-1" in assert_refused(latin, r"l.csv:2:3: byte 0xef is not utf-8").hint
    assert all_texts(source(latin, encoding="latin-1")) == ["naïve", "Öl"]
    wide = write(tmp_path, "w.csv", "text;n\nnaïve;1\nÖl;2\n".encode("utf-16"))
    assert all_texts(source(wide, encoding="utf-16")) == ["naïve", "Öl"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv"])
def test_byte_order_mark_and_line_ends_keep_fingerprint(tmp_path: Path, name: str) -> None:
    clean = WRITERS[name](TEXTS).replace(b"\r\n", b"\n")
    wanted = source(write(tmp_path, name, clean)).fingerprint
    for other in (b"\xef\xbb\xbf" + clean, clean.replace(b"\n", b"\r\n"), clean.replace(b"\n", b"\r"), clean[:-1]):
        assert source(write(tmp_path, name, other)).fingerprint == wanted


CASES = [
    ("a.csv", "text,n\na,1\nb,2,3\n", r"a.csv:3: 3 columns, 2 expected \(text, n\)"),
    ("a.csv", "text,n\na,1\nb\n", r"a.csv:3: 1 column, 2 expected"),
    ("a.csv", 'text,n\na,1\n"b,2\nc,3\n', r"a.csv:3: a quote is never closed"),
    ("a.csv", 'text,n\na,1\n"b"c,2\n', r"a.csv:3: .* expected after"),
    ("a.csv", "text,text\na,1\n", r"a.csv:1: the column 'text' is named twice"),
    ("a.csv", "", r"a.csv is empty"),
    ("a.csv", "text,n\n", r"a.csv is without rows that contain text"),
    ("a.csv", "text\na\0b\n", r"a.csv:2:2: a NUL byte"),
    ("a.tsv", "text\tn\na\tb\tc\n", r"a.tsv:2: 3 columns"),
    ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', r"a.jsonl:2:\d+: not JSON"),
    ("a.jsonl", '{"text": "a"}\n{"text": 3}\n', r"a.jsonl:2: text is a number, not text"),
    ("a.jsonl", '{"text": "a"}\n{"text": ["b"]}\n', r"a.jsonl:2: text is a list, not text"),
    ("a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', r"a.jsonl:2: no column text; there are txt"),
    ("a.jsonl", '{"text": "a", "text": "b"}\n', r"a.jsonl:1: the key text is given twice"),
    ("a.jsonl", '{"text": "a"}\n{"text": "\\ud800"}\n', r"a.jsonl:2: text contains \\ud800, half of a character"),
    ("a.jsonl", '[\n{"text": "a"}\n]\n', r"a.jsonl:1:\d+: not JSON"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl:2:11: byte 0xff is not utf-8"),
    ("a.parquet", "PAR1 and more", r"a.parquet: not readable as parquet"),
    ("a.parquet", '{"text": "a"}\n', r"a.parquet: not readable as parquet"),
    ("a.jsonl", parquet(["a"]), r"a.jsonl: a parquet file, not text"),
]


def test_hint_names_format_of_file(tmp_path: Path) -> None:
    for name, content, kind in (("a.csv", "text\na\n", "jsonl"), ("a.jsonl", jsonl(["a"]), "csv")):
        path = write(tmp_path, name, content)
        entry = lookup("data", kind)
        assert entry is not None
        with pytest.raises(UserError, match=rf"{name}:1") as caught:
            build(entry.config(path=str(path)))
        assert f"use data={'csv' if kind == 'jsonl' else 'jsonl'}" in str(caught.value.hint)


@pytest.mark.parametrize(("name", "content", "match"), CASES)
def test_invalid_file_is_refused_with_line(tmp_path: Path, name: str, content: bytes | str, match: str) -> None:
    assert_refused(write(tmp_path, name, content), match)


def test_collect_errors_collects_all_errors(tmp_path: Path) -> None:
    content = '{"text": "a"}\n{"text": 3}\nno\n{"txt": "b"}\n{"text": "c"}\n'
    with collect_errors() as problems:
        opened = source(write(tmp_path, "a.jsonl", content))
    lines = [problem.message.split(": ")[0].rpartition("/")[2] for problem in problems]
    assert lines == ["a.jsonl:2", "a.jsonl:3:1", "a.jsonl:4"]
    assert opened.count("train") + opened.count("validation") == 2
    with collect_errors() as problems:
        source(write(tmp_path, "a.csv", "text,n\na,1\nb\nc,2,3\nd,4\n"))
    assert [":3: 1 col" in problems[0].message, ":4: 3 col" in problems[1].message, len(problems)] == [True, True, 2]
    for name in ("a", "b"):  # an error ends a file, and the next file is read
        write(tmp_path, f"{name}.txt", "one\n\ntwo\n\n" + ("three\nand\0" if name == "a" else "four"))
    with collect_errors() as problems:
        opened = source(tmp_path / "*.txt")
        assert len([*texts(opened, "train"), *texts(opened, "validation")]) == 5
    assert {problem.message.rpartition("/")[2] for problem in problems} == {"a.txt:6:4: a NUL byte: not a text file"}


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gz", "zst"])
def test_damaged_compressed_files_are_refused(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    drawn = random.Random(3)
    rows = [drawn.randbytes(60).hex() for _ in range(3000)]
    end, content = ("gz" if pack is gzip.compress else "zst"), pack(jsonl(rows))
    path = write(tmp_path, f"a.jsonl.{end}", content[: len(content) // 2])
    error = assert_refused(path, r"a.jsonl.\w+:\d+: the \w+ stream is truncated")
    assert 0 < int(error.message.split(":")[1]) <= 3000
    assert_refused(write(tmp_path, f"a.jsonl.{end}", content + b"junk"), r"a.jsonl.\w+:\d+: not readable as")
    assert_refused(write(tmp_path, f"a.jsonl.{end}", jsonl(rows[:3])), r"a.jsonl.\w+:1: not readable as .* Not|Unknown")
    assert (
        all_texts(source(write(tmp_path, f"a.jsonl.{end}", pack(jsonl(rows[:2])) + pack(jsonl(rows[2:4]))))) == rows[:4]
    )
    assert all_texts(source(write(tmp_path, f"a.txt.{end}", pack(b"one\r\n\r\ntwo\n")))) == ["one", "two"]


def test_unchanged_large_files_are_not_rescanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_source, "LARGE", 1)
    path = write(tmp_path, "a.csv", delimited(";")(["", *TEXTS]))
    entry = lookup("data", "csv")
    assert entry is not None

    def opened(**keys: Any) -> FileSource[Any]:
        return build(entry.config(path=str(path), **keys), tmp_path / "cache")

    first = opened()
    before = list(texts(first, "train"))
    assert not (tmp_path / "cache").exists()  # files written just now are not cached
    os.utime(path, (1, 1))
    opened()
    (kept,) = (tmp_path / "cache" / "scans").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(FileSource, "_scan", lambda *_: pytest.fail("read again"))
        again = opened()
    assert again.metadata() == first.metadata() and list(texts(again, "train")) == before
    assert opened(text="id").fingerprint != first.fingerprint
    content = bytearray(kept.read_bytes())
    content[60] ^= 1
    kept.write_bytes(content)
    assert opened().metadata() == first.metadata()
    os.utime(path, (2, 2))
    opened()
    assert len(list(kept.parent.iterdir())) == 3


@pytest.mark.parametrize("name", ["a.csv", "a.json.gz"])
def test_memory_does_not_grow_with_file_size(tmp_path: Path, name: str) -> None:
    peaks: list[int] = []
    for rows in (100, 800):
        path = write(tmp_path, name, WRITERS[name](["some words of a text " * 100] * rows))
        tracemalloc.start()
        opened = source(path)
        assert sum(len(text) for text in texts(opened, "train")) > 2000 * rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 400_000, peaks  # for 1.5 MB more text: eight bytes per document


def test_decompression_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "HARMLESS", 1 << 19)
    content = b"word " * (1 << 18)
    for name, packed in (("a.txt.gz", gzip.compress(content)), ("b.jsonl.zst", zstd(b'{"text": "' + content))):
        assert_refused(write(tmp_path, name, packed), r":1: expands to more than 100 times its size")
    rows = ["word " * 1000] * 2000  # dictionary encoding stores the text once
    assert_refused(
        write(tmp_path, "c.parquet", parquet(rows, len(rows))),
        r"c.parquet:\d+: expands to more than 100 times its size",
    )
    monkeypatch.setattr(compressed, "RATIO", 10**9)
    monkeypatch.setattr(compressed, "MAX_BYTES", 1 << 20)
    assert_refused(tmp_path / "a.txt.gz", r":1: expands to more than 0 GB")


def test_too_long_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtool.data.files.PIECE", 1 << 10)
    monkeypatch.setattr("lmtool.data.files.LINE", 1 << 14)
    assert LINE > 1 << 20
    assert_refused(write(tmp_path, "a.jsonl", jsonl(["a", "b" * (1 << 15)])), r"a.jsonl:2: the line has more than")


# --- fuzzing --------------------------------------------------------------------------------------------------------


def with_fault(drawn: random.Random, form: str, line: bytes) -> bytes:
    """The line with one fault added."""
    faults: dict[str, list[Callable[[], bytes]]] = {
        "any": [
            lambda: line[:3] + b"\0" + line[3:],
            lambda: line[:3] + b"\xff" + line[3:],
            lambda: line[:3] + b"\xe2\x82" + line[3:],
        ],
        "jsonl": [
            lambda: line[:-2],
            lambda: line + b"}",
            lambda: b"[" + line + b"]",
            lambda: line.replace(b'"text"', b'"tekst"', 1),
            lambda: line.replace(b'"text": ', b'"text": 7, "x": ', 1),
            lambda: line[:-1] + b', "text": "again"}',
            lambda: line.replace(b'"text": "', b'"text": "\\udc00', 1),
            lambda: line.replace(b'"text": "', b'"text": NaN, "x": "', 1),
        ],
        "csv": [
            lambda: line + b",more",
            lambda: line.partition(b",")[0],
            lambda: line.partition(b",")[0] + b',"never closed',
            lambda: line.partition(b",")[0] + b',"a" b',
        ],
        "tsv": [lambda: line + b"\tmore", lambda: line.replace(b"\t", b" ")],
    }
    return drawn.choice([*faults["any"], *faults[form], *faults[form]])()


def fuzzed(drawn: random.Random, count: int) -> Iterator[tuple[str, bytes, int | None]]:
    """Names and contents of files with one fault, and its line; None if bytes were mutated anywhere."""
    plain = [text for text in TEXTS if "\n" not in text]
    for number in range(count):
        rows = drawn.sample(plain, 12)
        form = ("jsonl", "csv", "tsv", "parquet", "txt")[number % 5]
        make = {"jsonl": jsonl, "csv": delimited(","), "tsv": tsv, "parquet": parquet}.get(
            form, lambda rows: "\n\n".join(rows).encode()
        )
        content, pack, end = make(rows), *drawn.choice([(bytes, ""), (gzip.compress, ".gz"), (zstd, ".zst")])
        if form in ("jsonl", "csv", "tsv") and drawn.random() < 0.6:
            lines = content.replace(b"\r\n", b"\n").split(b"\n")
            at = drawn.randrange(form != "jsonl", len(lines) - 1)
            lines[at] = with_fault(drawn, form, lines[at])
            yield f"a.{form}{end}", pack(drawn.choice([b"\n", b"\r\n"]).join(lines)), at + 1
            continue
        content = mutated(content if form == "parquet" else pack(content), drawn)
        yield f"a.{form}{'' if form == 'parquet' else end}", content, None


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_fuzzed_files_are_read_or_refused_with_line(tmp_path: Path, count: int) -> None:
    """Every planted fault is reported with its line, and mutated bytes give no traceback."""
    with_line = refusals = 0
    for name, content, line in fuzzed(random.Random(17), count):
        path = write(tmp_path, name, content)
        try:
            all_texts(source(path))
            assert line is None, f"read silently: {name}:{line}"
        except UserError as error:
            refusals += 1
            assert error.hint and "\n" not in error.message
            if line is not None:
                with_line += 1
                assert f"{name}:{line}:" in error.message, error.message
    assert with_line > count / 4 and refusals > with_line
