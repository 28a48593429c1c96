"""`data=FILE` expands to full overrides before the configuration is composed, and trains."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.errors import UserError
from lmtool.resolver.shorthands import CommandLine, expand_arguments


def words_of(words: list[str]) -> list[str]:
    return list(expand_arguments(CommandLine("pretrain", tuple(words))).words)


TEXTS = [f"the cat number {number} sat on the mat and saw a dog" for number in range(40)]


@pytest.fixture(autouse=True)
def input_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("\n\n".join(TEXTS))
    Path("my.csv").write_text("id;body\n" + "".join(f"{n};{text}\n" for n, text in enumerate(TEXTS)))
    lines = "".join(json.dumps({"text": text, "title": "the title of it"}) + "\n" for text in TEXTS)
    Path("my.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    lines_of_objects = (json.dumps({"id": n, "meta": {"body": text}}) + "\n" for n, text in enumerate(TEXTS))
    Path("nested.jsonl").write_text("".join(lines_of_objects))
    Path("nohead.csv").write_text("".join(f"{text},good\n" for text in TEXTS))
    Path("two.csv").write_text("headline,body\n" + "".join(f"{text},{text}\n" for text in TEXTS))
    Path("ids.tsv").write_text("a\tb\n" + "".join(f"{n}\t{n}\n" for n in range(30)))
    Path("notes.md").write_text("notes")
    for folder in ("splits", "mixed", "empty", "plain"):
        Path(folder).mkdir()
    for name in ("train-0.jsonl", "train-1.jsonl", "valid.jsonl", "test.jsonl"):
        Path("splits", name).write_text(lines)
    Path("mixed/a.txt").write_text("x")
    Path("mixed/a.csv").write_text("text\nx\n")
    Path("plain/train.txt").write_text("\n\n".join(TEXTS))
    Path("plain/other.txt").write_text("\n\n".join(TEXTS))


@pytest.mark.parametrize(
    ("typed", "full"),
    [
        ("data=my.txt", ["data=text", "data.path=my.txt"]),
        ("data=my.csv", ["data=csv", "data.path=my.csv", "data.text=body"]),
        ("data=my.jsonl.gz", ["data=jsonl", "data.path=my.jsonl.gz"]),
        ("data=nested.jsonl", ["data=jsonl", "data.path=nested.jsonl", "data.text=meta.body"]),
        ("data=plain", ["data=text", "data.path=plain"]),
        ("data=splits", ["data=jsonl", "data.path='splits/train*.jsonl'", "data.validation='splits/valid*.jsonl'"]),
        ("data=absent.parquet", None),
        ("data=text", ["data=text"]),
        ("data=task:sst2", ["data=task", "data.task.name=sst2"]),
    ],
)
def test_data_file_expands_to_full_overrides(typed: str, full: list[str] | None) -> None:
    if full is None:
        with pytest.raises(UserError, match="no such file"):
            words_of([typed])
    else:
        assert words_of(["seed=1", typed, "name=x"]) == ["seed=1", *full, "name=x"]


def test_invalid_row_does_not_stop_expansion() -> None:
    Path("bad.jsonl").write_text('{"body": "some text here"}\nno\n{"body": "more text here", "n": 1}\n')
    assert words_of(["data=bad.jsonl"]) == ["data=jsonl", "data.path=bad.jsonl", "data.text=body"]
    Path("bad.csv").write_bytes(b"body,n\nsome text here,1\n\xff,2\n")
    assert words_of(["data=bad.csv"]) == ["data=csv", "data.path=bad.csv", "data.text=body"]


def test_data_file_keeps_typed_overrides() -> None:
    assert words_of(["data=two.csv", "data.text=body"]) == ["data=csv", "data.path=two.csv", "data.text=body"]
    typed = words_of(["data=splits", "data.validation=my.jsonl.gz"])
    assert typed == ["data=jsonl", "data.path='splits/train*.jsonl'", "data.validation=my.jsonl.gz"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("data=two.csv", "several columns contain text: headline, body"),
        ("data=nohead.csv", "its first line is a row, not the names of its columns: 'good'"),
        ("data=ids.tsv", "no column contains text; the columns are a, b"),
        ("data=mixed", "files of several types: 1 of "),
        ("data=empty", "the folder has no .txt"),
        ("data=notes.md", "its type cannot be inferred from its name"),
        ("data=my.txt data.path=x", "both set data.path"),
    ],
)
def test_unsuitable_data_file_is_refused(typed: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        words_of(typed.split())
    assert caught.value.hint and "data=" in caught.value.hint


def test_inferred_format_is_on_the_start_screen(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model=bert_tiny", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "max_length=32"]
    budget = [
        "objective.pairs=none",
        "max_steps=1",
        "batch_tokens=128",
        "device=cpu",
        "cache_dir=cache",
        "tokenizer.vocab_size=120",
    ]
    assert cli.main(["pretrain", "data=my.csv", *small, *budget, "name=run"]) == 0
    shown = capsys.readouterr()
    assert "data=my.csv is read as: data=csv data.path=my.csv data.text=body" in shown.err
    first = " ".join(shown.out.split())
    assert "csv" in first and "semicolon" in first and "body" in first
    metadata = json.loads(Path("runs/run/facts.json").read_text())["data"]
    assert (metadata["source"], metadata["delimiter"], metadata["text"]) == ("csv", "semicolon", "body")
