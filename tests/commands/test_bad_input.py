"""Invalid texts and checkpoints on the command line give a clear error, or are skipped, counted and reported."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from tests.breadth import slow_but
from tests.commands.conftest import TINY, finetune, merge_overrides
from tests.weights.published_folders import make

MODELS = {
    "mlm_nsp": "bert_tiny", "span": "bert_tiny", "rtd": "electra_tiny", "span_corruption": "t5_tiny",
    "denoising": "bart_tiny", "clm": "gpt_tiny", "plm": "xlnet_tiny",
}  # fmt: skip
SENTENCE = "The happy cat saw the warm ship near the river."


def pretrain_on(content: bytes, objective: str, *more: str) -> int:
    """Runs `lmtool pretrain` on a file of this content."""
    Path("bad.txt").write_bytes(content)
    words = ["pretrain", f"model={MODELS[objective]}", f"objective={objective}", *TINY, "data=text"]
    words += ["data.path=bad.txt", "cache_dir=cache", "batch_tokens=256", "max_steps=1", "name=bad"]
    return cli.main(merge_overrides(words, more))


def inspect_on(content: bytes, objective: str, *more: str) -> int:
    """Runs `lmtool inspect pretrain` on a file of this content."""
    Path("bad.txt").write_bytes(content)
    words = ["inspect", "pretrain", f"model={MODELS[objective]}", f"objective={objective}", *TINY, "data=text"]
    return cli.main(merge_overrides([*words, "data.path=bad.txt", "cache_dir=cache", "n=1", "tokens=2000"], more))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad.txt is empty: there is no text"),
        (b"\n \n\t\r\n\n" * 50, "bad.txt is only white space: there is no text"),
        (b"text\nmore \xff text", "bad.txt:2:6: byte 0xff is not utf-8"),
        (b"text\nmore \x00 text", "bad.txt:2:6: a NUL byte"),
        ("text".encode("utf-16"), "bad.txt:1:1: UTF-16, not UTF-8"),
        (b"a" * 2_000_000, "one document of one word, so nothing can be held out"),
    ],
)
@pytest.mark.parametrize("objective", ["mlm_nsp", "clm"])
def test_unreadable_text_is_refused(
    content: bytes, message: str, objective: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain_on(content, objective) == 2
    error = capsys.readouterr().err
    assert f"error: {message}" in error.replace("data.path: ", "").replace("the text is ", "") and "hint: " in error
    assert not Path("runs").exists()


@pytest.mark.parametrize("objective", slow_but({"clm", "span_corruption"}, MODELS))
def test_line_ends_and_byte_order_mark_keep_examples(
    objective: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("text.txt").read_bytes()
    shown = []
    for content in (text, text.replace(b"\n", b"\r\n"), text.replace(b"\n", b"\r"), b"\xef\xbb\xbf" + text):
        assert inspect_on(content, objective, "output=seen.jsonl") == 0
        shown.append(Path("seen.jsonl").read_text())
    assert len(set(shown)) == 1


@pytest.mark.parametrize(
    "objective",
    ["clm", "denoising", *(pytest.param(name, marks=pytest.mark.slow) for name in ("span", "span_corruption"))],
)
def test_very_long_line_is_read_completely(objective: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = (f"{SENTENCE} " * 25_000).encode()
    assert len(line) > 1_000_000 and inspect_on(line, objective) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"all \d+ checks hold: .*zero, as required: .*fraction of text in no example", printed)


def test_long_lines_are_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_on((f"{SENTENCE} " * 25_000).encode(), "clm") == 0
    assert "long lines 1" in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["rtd", "span_corruption", "denoising", "clm", "plm"])
@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_texts_too_short_to_corrupt_are_counted(
    objective: str, documents: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts of one or two tokens are corrupted if possible, otherwise dropped and counted."""
    content = "\n\n".join(["A.", "No", "I", "It is."] * 40).encode()
    assert inspect_on(content, objective, f"data.documents={documents}") == 0
    out = capsys.readouterr().out
    assert "DOES NOT HOLD" not in out and "fraction of text in no example" in out


def test_documents_of_one_sentence_need_sop_or_no_pairs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lone = "\n\n".join([SENTENCE] * 120)
    assert pretrain_on(lone.encode(), "mlm_nsp") == 2
    error = capsys.readouterr().err
    assert "no document has two sentences" in error and "objective.pairs=none or sop" in error
    assert pretrain_on(lone.encode(), "mlm_nsp", "objective.pairs=sop") == 0
    capsys.readouterr()
    some = lone + "\n\n" + "\n\n".join([f"{SENTENCE} {SENTENCE}"] * 80)
    assert pretrain_on(some.encode(), "mlm_nsp", "name=some") == 0
    assert "documents of one sentence 1" in capsys.readouterr().out


def test_too_few_documents_for_pairs_names_the_split(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = "\n\n".join([f"{SENTENCE} {SENTENCE}"] * 20)
    assert pretrain_on(few.encode(), "mlm_nsp") == 2
    error = capsys.readouterr().err
    assert "the validation text has one" in error and "data.validation_fraction=" in error
    assert pretrain_on(few.encode(), "mlm_nsp", "data.validation_fraction=0.2") == 0


def test_tokenizer_without_required_tokens_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("gpt", place / "gpt")
    make("bert", place / "bert")
    text = Path("text.txt").read_bytes()
    for objective, tokenizer, message in (
        ("rtd", "gpt", "has no cls token, which model=electra adds to its texts"),
        ("clm", "bert", "has no eos token, which model=gpt adds to its texts"),
        ("span_corruption", "gpt", "has no sentinel token, which objective=span_corruption needs"),
    ):
        assert pretrain_on(text, objective, "tokenizer=folder", f"tokenizer.path={tokenizer}") == 2
        assert message in capsys.readouterr().err


def test_unsuitable_or_truncated_checkpoint_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("bert", place / "bert")
    text = Path("text.txt").read_bytes()
    assert pretrain_on(text, "clm", "checkpoint=bert") == 2
    error = capsys.readouterr().err
    assert "model.name=gpt, but the checkpoint has model.name=bert" in error and "model=auto takes it from" in error
    weights = Path("bert/model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    words = ["pretrain", "model=auto", "checkpoint=bert", "objective=mlm", "data=text", "data.path=text.txt"]
    words += ["cache_dir=cache", "max_length=32", "batch_tokens=256", "max_steps=1", "device=cpu", "precision=fp32"]
    assert cli.main(words) == 2
    assert "bert/model.safetensors is not a complete safetensors file" in capsys.readouterr().err
    weights.write_bytes(whole)
    config = Path("bert/config.json")
    strange = {"auto_map": {"AutoModel": "stranger.Model"}, "foo": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | strange))
    Path("bert/stranger.py").write_text("raise SystemExit(9)")
    assert cli.main(words) == 0
    assert "config.json: auto_map, foo; files: stranger.py" in capsys.readouterr().out


def test_each_line_of_input_is_one_row(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = finetune("tuned", "model=bert_tiny", *TINY, "checkpoint=none", "max_steps=1", "max_epochs=null")
    words = ["predict", f"checkpoint={checkpoint}", "device=cpu", "precision=fp32", "output=out.jsonl"]
    lines = ["a\u2028b", "c\x0cd", "e\x85f", "g\x1ch\x0bi", "\ufeffj"]
    for end in ("\n", "\r\n", "\r"):
        Path("lines.txt").write_bytes(("\ufeff" + end.join(lines) + end).encode())
        assert cli.main([*words, "input=lines.txt"]) == 0
        assert [json.loads(row)["sentence"] for row in Path("out.jsonl").read_text().split("\n") if row] == lines
        for wrong, message in ((b"\xff", "byte 0xff is not utf-8"), (b"\0", "a NUL byte")):
            content = end.join(["one", "two", "th"]).encode() + wrong + end.encode()
            Path("lines.txt").write_bytes(content)
            capsys.readouterr()
            assert cli.main([*words, "input=lines.txt"]) == 2
            assert f"error: lines.txt:3:3: {message}" in capsys.readouterr().err
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))  # type: ignore[arg-type]
            assert cli.main([*words, "input=-"]) == 2
            assert f"error: -:3:3: {message}" in capsys.readouterr().err
    os.mkfifo("pipe.txt")
    os.mkfifo("pipe.tsv")
    for name in ("pipe.txt", "pipe.tsv"):
        assert cli.main([*words, f"input={name}"]) == 2
        assert f"error: input={name} is a special file, not a regular file" in capsys.readouterr().err
