from __future__ import annotations

import os
import random

import numpy as np
import pytest

from lmtool.data import files, sources
from lmtool.data import text as text_module
from lmtool.data.configs import TextConfig
from lmtool.data.files import check_encoding, read_chunks, read_lines
from lmtool.data.sources import Source, held_out, split_offset
from lmtool.data.text import TextSource
from lmtool.errors import UserError

from .data_fixtures import documents, texts

BOOK = "\n\n".join(documents(120)) + "\n"


def source(path, **keys) -> TextSource:
    return TextSource(TextConfig(path=path if isinstance(path, tuple) else str(path), **keys))


def write(path, content) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def all_texts(given: Source) -> list[str]:
    return [*texts(given, "train"), *texts(given, "validation")]


def assert_refused(path, match: str, **keys) -> UserError:
    with pytest.raises(UserError, match=match) as caught:
        source(path, **keys)
    assert caught.value.hint and "\n" not in caught.value.message
    return caught.value


def test_documents_are_blocks_files_or_lines(tmp_path):
    text = "one\ntwo\n\n\n  \nthree\n\nfour\n"
    write(tmp_path / "a.txt", text)
    write(tmp_path / "b.txt", "five\n")
    assert sorted(all_texts(source(tmp_path))) == ["five", "four", "one\ntwo", "three"]
    assert sorted(all_texts(source(tmp_path, document="line"))) == ["five", "four", "one", "three", "two"]
    assert sorted(all_texts(source(tmp_path, document="file"))) == ["five", "one\ntwo\n\n\n  \nthree\n\nfour"]


def test_files_folders_patterns_and_lists_are_read(tmp_path):
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "sub" / "a.txt", "a")
    write(tmp_path / ".hidden" / "x.txt", "x")
    write(tmp_path / "c.md", "c")
    both = {"a", "b"}
    assert set(all_texts(source(tmp_path))) == both
    assert set(all_texts(source(tmp_path / "*.*"))) == {"b", "c"}
    assert set(all_texts(source(tmp_path / "**" / "*.txt"))) >= both
    listed = (str(tmp_path), str(tmp_path / "c.md"), str(tmp_path / "b.txt"))
    assert sorted(all_texts(source(listed))) == ["a", "b", "c"]


def test_missing_path_is_refused_with_hint(tmp_path):
    write(tmp_path / "books" / "emma.txt", "x")
    error = assert_refused(tmp_path / "boks" / "emma.txt", "boks/emma.txt: no such file")
    assert error.hint == f"did you mean {tmp_path / 'books'}?"
    assert assert_refused(tmp_path / "books" / "ema.txt", "no such file").hint.endswith("emma.txt?")
    assert_refused(tmp_path / "*.csv", "matches no file")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "is empty")
    write(tmp_path / "notes" / "a.md", "x")
    assert "*.md" in assert_refused(tmp_path / "notes", "contains no .txt file, but 1 .md").hint
    assert_refused("/dev/null", "is not a regular file")


def test_irregular_files_of_a_pattern_are_refused(tmp_path):
    write(tmp_path / "a.txt", "one\n\ntwo")
    for make in (os.mkfifo, lambda path: path.symlink_to("nowhere.txt")):
        make(tmp_path / "b.txt")
        for path in (tmp_path, tmp_path / "*.txt", tmp_path / "**" / "b.*"):
            assert_refused(path, "b.txt is not a regular file")
        (tmp_path / "b.txt").unlink()
    (tmp_path / "b.txt").mkdir()
    assert sorted(all_texts(source(tmp_path / "*.txt"))) == ["one", "two"]


def test_unreadable_file_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    write(path, "text")
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path.chmod(0)
    assert_refused(path, "cannot be read")


def test_validation_fraction_holds_out_whole_documents(tmp_path):
    write(tmp_path / "a.txt", BOOK)
    opened = source(tmp_path / "a.txt", validation_fraction=0.1)
    train, validation = list(texts(opened, "train")), list(texts(opened, "validation"))
    assert (len(train), len(validation)) == (opened.count("train"), opened.count("validation")) == (108, 12)
    blocks = BOOK.strip().split("\n\n")
    assert sorted(train + validation) == sorted(blocks)
    assert [text for text in blocks if text in set(train)] == train  # order kept
    again = source(tmp_path / "a.txt", validation_fraction=0.1)
    assert list(texts(again, "validation")) == validation and again.fingerprint == opened.fingerprint
    assert isinstance(opened, Source)


def test_few_documents_give_both_splits(tmp_path):
    for count in (2, 3, 10, 49):
        path = tmp_path / f"{count}.txt"
        write(path, "\n\n".join(documents(count)))
        opened = source(path)
        assert opened.count("validation") == 1 and opened.count("train") == count - 1
    sizes = np.array([10_000, 200, 9_000, 5_000])
    assert held_out(sizes, 0.02).tolist() == [False, True, False, False]
    assert not held_out(np.array([5, 5]), 0.99).all()


def test_single_document_is_split_at_paragraph_or_sentence(tmp_path):
    write(tmp_path / "a.txt", BOOK)
    opened = source(tmp_path / "a.txt", document="file")
    (train,), (validation,) = texts(opened, "train"), texts(opened, "validation")
    assert train + "\n\n" + validation == BOOK.strip()
    assert 0.005 < len(validation) / len(BOOK) < 0.08
    assert opened.count("train") == opened.count("validation") == 1
    for text, fraction, first in (
        ("One is. Two is here. Three.", 0.2, "One is. Two is here."),
        ("aaa bbb", 0.02, "aaa"),
    ):
        assert split_offset(lambda start, end, text=text: text[start:end], len(text), fraction) == len(first)
    write(tmp_path / "word.txt", "word")
    assert_refused(tmp_path / "word.txt", "one document of one word")


def split(text: str, fraction: float) -> tuple[str, str]:
    place = split_offset(lambda start, end: text[start:end], len(text), fraction)
    return text[:place], text[place:]


def test_long_document_is_split_without_reading_it_all(monkeypatch):
    text = "".join(f"Word number {number} here.{chr(10) * (1 + number % 3)}" for number in range(3000))
    whole = split(text, 0.1)
    monkeypatch.setattr(sources, "PART", 500)  # less than a twentieth of the text
    asked = []

    def read(start: int, end: int) -> str:
        asked.append(end - start)
        return text[start:end]

    place = split_offset(read, len(text), 0.1)
    assert (text[:place], text[place:]) == whole and whole[1].startswith("\n\n") and asked == [1000]


def test_held_out_documents_do_not_depend_on_block_size(monkeypatch):
    whole = held_out(np.ones(1000), 0.1)
    monkeypatch.setattr(sources, "_BLOCK", 64)
    assert np.array_equal(held_out(np.ones(1000), 0.1), whole) and whole.sum() == 100


def test_separate_validation_file_is_read(tmp_path):
    write(tmp_path / "train.txt", BOOK)
    write(tmp_path / "dev.txt", "other text\n\nmore")
    opened = source(tmp_path / "train.txt", validation=str(tmp_path / "dev.txt"))
    assert list(texts(opened, "validation")) == ["other text", "more"] and opened.count("train") == 120
    assert_refused(tmp_path / "train.txt", "data.validation=.*: no such", validation=str(tmp_path / "no.txt"))
    assert_refused(tmp_path, "training text too", validation=str(tmp_path / "dev.txt"))


def test_byte_order_mark_and_line_ends_keep_fingerprint(tmp_path):
    write(tmp_path / "plain.txt", BOOK)
    plain = source(tmp_path / "plain.txt")
    for name, content in {
        "bom": b"\xef\xbb\xbf" + BOOK.encode(),
        "crlf": BOOK.replace("\n", "\r\n").encode(),
        "cr": BOOK.replace("\n", "\r").encode(),
        "both": b"\xef\xbb\xbf" + BOOK.replace("\n", "\r\n").encode(),
        "open": BOOK.rstrip().encode(),
    }.items():
        write(tmp_path / f"{name}.txt", content)
        opened = source(tmp_path / f"{name}.txt")
        assert all_texts(opened) == all_texts(plain) and opened.fingerprint == plain.fingerprint, name


def test_encodings_are_read_or_refused(tmp_path):
    text = "Über\nÄpfel\n\nÖl\n"
    write(tmp_path / "utf8.txt", text)
    for encoding in ("latin-1", "utf-16", "utf-32", "cp1252"):
        write(tmp_path / "a.txt", text.encode(encoding))
        opened = source(tmp_path / "a.txt", encoding=encoding)
        assert opened.fingerprint == source(tmp_path / "utf8.txt").fingerprint, encoding
    assert_refused(tmp_path / "utf8.txt", "data.encoding=utf-9 is not a text encoding", encoding="utf-9")
    assert_refused(tmp_path / "utf8.txt", "not a text encoding", encoding="rot13")
    with pytest.raises(UserError) as caught:
        check_encoding("data.encoding", "rot13")
    assert "rot13?" not in (caught.value.hint or ""), "a hint does not repeat the refused value"
    write(tmp_path / "wide.txt", text.encode("utf-16"))
    assert "data.encoding=utf-16" in assert_refused(tmp_path / "wide.txt", r"wide.txt:1:1: UTF-16").hint
    write(tmp_path / "odd.txt", text.encode("utf-16")[:-1])
    assert_refused(tmp_path / "odd.txt", "not utf-16", encoding="utf-16")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_invalid_bytes_are_refused_with_position(tmp_path, end):
    lines = [f"line {number} of text" for number in range(1, 40)]
    content = end.join(lines).encode()
    at = content.index(b"17 of") + 3
    write(tmp_path / "a.txt", content[:at] + b"\xe9" + content[at:])
    assert "data.encoding=latin-1" in assert_refused(tmp_path / "a.txt", r"a.txt:17:9: byte 0xe9 is not utf-8").hint
    write(tmp_path / "a.txt", content[:at] + b"\0" + content[at:])
    assert_refused(tmp_path / "a.txt", r"a.txt:17:9: a NUL byte")


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x1f\x8b\x08", "gzip"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "parquet"),
        (b"%PDF-1.4", "PDF"),
        (b"\x7fELF", "ELF"),
    ],
)
def test_binary_files_are_refused_by_format(tmp_path, head, kind):
    write(tmp_path / "a.txt", head + b"\x00\x01" * 50)
    assert_refused(tmp_path / "a.txt", f"a {kind} file, not text")


def test_empty_files_are_refused_or_counted(tmp_path):
    for content, problem in (("", "empty"), ("\n\n  \n", "only white space"), ("\ufeff", "only white space")):
        write(tmp_path / "a.txt", content)
        assert_refused(tmp_path / "a.txt", f"a.txt is {problem}: there is no text")
    write(tmp_path / "b.txt", BOOK)
    assert source(tmp_path).metadata()["empty_files"] == 1
    write(tmp_path / "b.txt", "")
    assert_refused(tmp_path, "all 2 files are only white space")


def test_long_lines_and_control_characters_are_counted(tmp_path):
    write(tmp_path / "a.txt", "word " * 400_000 + "\n\nshort\n\nbell \x07 here\n")
    metadata = source(tmp_path / "a.txt").metadata()
    assert metadata["long_lines"] == 1 and metadata["lines_with_control_characters"] == 1
    assert metadata["documents"] + metadata["validation_documents"] == 3


def test_file_changed_during_reading_is_refused(tmp_path):
    write(tmp_path / "a.txt", BOOK)
    opened = source(tmp_path / "a.txt")
    write(tmp_path / "a.txt", BOOK + "more")
    with pytest.raises(UserError, match="has changed since it was first read"):
        list(texts(opened, "train"))


def test_fingerprint_depends_on_content_and_settings(tmp_path):
    write(tmp_path / "a.txt", BOOK)
    prints = {source(tmp_path / "a.txt", **keys).fingerprint for keys in ({}, {"document": "line"})}
    prints.add(source(tmp_path / "a.txt", validation_fraction=0.1).fingerprint)
    write(tmp_path / "a.txt", BOOK.replace("cat", "dog", 1))
    prints.add(source(tmp_path / "a.txt").fingerprint)
    assert len(prints) == 4


def test_read_lines_numbers_lines(tmp_path):
    write(tmp_path / "a.txt", "a\r\nb\rc\n\nd")
    assert list(read_lines(tmp_path / "a.txt")) == [(1, "a"), (2, "b"), (3, "c"), (4, ""), (5, "d")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "shift_jis"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_long_lines_are_read_in_chunks(tmp_path, monkeypatch, encoding, end):
    drawn = random.Random(3)
    lines = [
        "".join(drawn.choice("ab 猫é" if encoding != "shift_jis" else "ab 猫ね") for _ in range(n)) for n in range(60)
    ]
    for last in (end, ""):
        write(tmp_path / "a.txt", (end.join(lines) + last).encode(encoding))
        for size in (5, 16, 64):
            monkeypatch.setattr(files, "PIECE", size)
            pieces = list(read_chunks(tmp_path / "a.txt", encoding))
            assert max(len(text) for _, text, _ in pieces) <= 2 * size + 4
            assert [line for _, line in read_lines(tmp_path / "a.txt", encoding)] == lines
            assert [number for number, _, end in pieces if end is not None] == list(range(1, 61))
            kept = read_lines(tmp_path / "a.txt", encoding, keep_ends=True)
            assert [line for _, line in kept] == [line + end for line in lines[:-1]] + [lines[-1] + last]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_invalid_bytes_of_long_lines_have_same_position(tmp_path, monkeypatch, end):
    content = end.join(["läne " * number + "end" for number in range(1, 30)]).encode()
    at = content.index(b"l\xc3\xa4ne " * 17) + 50
    for bad in (b"\xe9", b"\0", b"\xe9\x80"):
        write(tmp_path / "a.txt", content[:at] + bad + content[at:])
        monkeypatch.setattr(files, "PIECE", 1 << 20)
        whole = assert_refused(tmp_path / "a.txt", r"a.txt:17:\d+: ").message
        for size in (4, 13, 64):
            monkeypatch.setattr(files, "PIECE", size)
            assert assert_refused(tmp_path / "a.txt", "a.txt").message == whole
    write(tmp_path / "a.txt", b"ab" * 16 + b"\xc3")  # the file ends inside a character
    monkeypatch.setattr(files, "PIECE", 11)
    assert_refused(tmp_path / "a.txt", r"a.txt:1:33: byte 0xc3")


@pytest.mark.parametrize("document", ["block", "line", "file"])
@pytest.mark.parametrize("piece", [16, 1 << 20])
def test_documents_do_not_depend_on_part_size(tmp_path, monkeypatch, document, piece):
    drawn, parts = random.Random(5), 0
    for number in range(12):
        choices = ["a", "B. ", "word ", "some words more ", "\n", "\n\n", " ", "\r\n", "x!\n", "  \n"]
        content = "".join(drawn.choice(choices) for _ in range(drawn.randrange(60, 400)))
        for name in ("a.txt", "b.txt")[: 1 + number % 2]:  # one or two documents with document=file
            write(tmp_path / str(number) / name, content)
        monkeypatch.setattr(files, "PIECE", 1 << 20)
        monkeypatch.setattr(text_module, "PART", 10**6)
        whole = source(tmp_path / str(number), document=document, validation_fraction=0.2)
        expected = [(split, list(texts(whole, split))) for split in ("train", "validation")]
        monkeypatch.setattr(files, "PIECE", piece)
        monkeypatch.setattr(text_module, "PART", 20)
        parted = source(tmp_path / str(number), document=document, validation_fraction=0.2)
        for split, of_split in expected:
            assert list(texts(parted, split)) == of_split
            assert parted.count(split) == len(of_split)
            parts += len(list(parted.parts(split))) - len(of_split)
            assert max(len(text) for text, _ in parted.parts(split)) <= max(20 + 400, piece)
        assert parted.characters("train") == sum(map(len, expected[0][1]))
    assert parts > 20 or (document == "line" and piece > 1000)  # a line read at once is one part


def test_mutated_files_give_text_or_errors_with_line(tmp_path):
    drawn = random.Random(7)
    whole = ("Füße sind naß.\r\n\n" + BOOK)[:3000].encode()
    planted = reported = 0
    for _ in range(120):
        content = bytearray(whole)
        for _ in range(drawn.randrange(1, 4)):
            at = drawn.randrange(len(content))
            match drawn.randrange(4):
                case 0:
                    content[at] = drawn.randrange(256)
                case 1:
                    del content[at : at + drawn.randrange(200)]
                case 2:
                    content[at:at] = bytes(drawn.randrange(256) for _ in range(3))
                case _:
                    content[at:at] = drawn.choice([b"\0", b"\xff", b"\r", b"\n\n", b"\xef\xbb\xbf"])
            content = content or bytearray(b"x")
        path = write(tmp_path / "a.txt", bytes(content))
        normal = bytes(content).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        bad = [number for number, line in enumerate(normal, 1) if not readable(line)]
        try:
            all_texts(source(path, document=drawn.choice(["block", "line", "file"])))
            assert not bad
        except UserError as error:
            if bad:
                planted += 1
                reported += f"a.txt:{bad[0]}:" in error.message or "not text" in error.message
    assert planted > 40 and reported == planted


def readable(line: bytes) -> bool:
    try:
        return "\0" not in line.decode()
    except UnicodeDecodeError:
        return False
