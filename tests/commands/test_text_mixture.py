"""`data=mixture`: several texts in one run, sampled by weight, scored together and separately, with exact resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lmtool.cli import main as cli
from lmtool.runs.finding import find as checkpoint_folder
from lmtool.training import loop
from tests.breadth import slow_but
from tests.commands.conftest import TINY, write_text

MEMBERS = "data.members=[text,{title: books, name: jsonl}]"
WORDS = [
    "data=mixture", MEMBERS, "data.validation_fraction=0.1", "data.with.text.path=text.txt",
    "data.members.books.path=books.jsonl",
]  # fmt: skip
RUN = ["data.weights=[1,3]", "objective=mlm", "max_steps=10", "evaluate_every=5", "checkpoint_every=1"]


def pretrain_mixture(name: str, *more: str, status: int = 0) -> Path:
    """Runs `lmtool pretrain` on both texts and returns the run folder."""
    words = ["pretrain", "model=bert_tiny", *TINY, *WORDS, "cache_dir=cache", "batch_tokens=256", "log_every=1"]
    assert cli.main([*words, f"name={name}", *more]) == status
    return Path("runs") / name


def write_books(path: Path) -> None:
    write_text(path.with_suffix(".txt"))
    texts = path.with_suffix(".txt").read_text().split("\n\n")[:40]
    path.write_text("".join(json.dumps({"text": f"Another {text}"}) + "\n" for text in texts))


def rows(run: Path) -> list[dict[str, Any]]:
    kept = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_second", "memory_bytes", "time")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in kept]


def test_text_mixture_samples_by_weight_and_resumes(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_books(place / "books.jsonl")
    run = pretrain_mixture("whole", *RUN)
    result = json.loads((run / "result.json").read_text())
    read = result["mixture"]
    assert [read[name]["planned"] for name in ("text", "books")] == [0.25, 0.75]
    assert read["books"]["share"] == pytest.approx(0.75, abs=0.1)
    metrics, held_out = result["metrics"], [row for row in rows(run) if row["split"] == "validation"]
    low, high = sorted((metrics["text_loss"], metrics["books_loss"]))
    assert low < metrics["loss"] < high and len(held_out) == 2 and "books_loss" in held_out[0]
    metadata = json.loads((run / "facts.json").read_text())["data"]
    assert metadata["tokenized"].keys() == {"text", "books"} and metadata["tokenized"]["text"]["bytes_per_second"] > 0
    assert (result["padding_fraction"], result["truncated_fraction"]) == (0, 0)
    assert "examples read: text" in (out := capsys.readouterr().out) and "truncated fraction 0%" in out
    assert cli.main(["evaluate", f"checkpoint={run}", "cache_dir=cache"]) == 0
    assert f"{metrics['books_loss']:.4f}" in capsys.readouterr().out

    save = loop.save

    def killed(keeper: Any, progress: Any, *more: Any) -> bool:
        saved = save(keeper, progress, *more)
        if progress.step == 7:
            raise KeyboardInterrupt
        return saved

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save", killed)
        pretrain_mixture("killed", *RUN, status=130)
    again = pretrain_mixture("killed", *RUN)
    assert "resumes from step 7" in capsys.readouterr().out and rows(again) == rows(run)
    ours, theirs = (load_file(checkpoint_folder(folder) / "model.safetensors") for folder in (again, run))
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
    assert json.loads((again / "result.json").read_text())["mixture"] == read


def test_mixtures_of_texts_and_objectives_combine(place: Path) -> None:
    write_books(place / "books.jsonl")
    objective = ["objective=mixture", "objective.members=[mlm,{name: span, pairs: none}]"]
    metrics = json.loads((pretrain_mixture("run", *objective, "max_steps=2") / "result.json").read_text())["metrics"]
    assert {"mlm_text_loss", "mlm_books_loss", "span_text_loss", "span_books_loss"} <= metrics.keys()


INVALID = {
    "data.members=[text]": "a mixture needs two or more set data=text",
    "data.members=[text,pydcos]": "data.members: pydcos is not one of .*did you mean pydocs?",
    "data.members=[text,text]": "text is named twice give one of them another title",
    "data.members=[text,pydocs] data.weights=[1]": "there must be a number above 0 for each of the 2 members",
    "data.members=[text,pydocs] data.weights=[1,-1]": "there must be a number above 0 for each of the 2 members",
    "data.members=[text,mixture]": "a mixture cannot be a member of another",
    "data.members=[jsonl,pydocs]": "jsonl lacks a value set data.with.jsonl.path=",
    "data.members=[text,pydocs] data.with.text.pth=x": "unknown key data.with.text.pth did you mean .*with.text.path?",
    "data.members=[text,pydocs] data.with.txt.path=x": "data.with.txt names no member.*did you mean data.with.text?",
    "data.members=[{title: mlm, name: text},pydocs]": "the title mlm cannot be used in the names of scores",
    "data.members=[{path: text.txt},pydocs]": "a section has no name",
    "data.members=[text,{title: more, name: text, path: text.txt}]": "text and more are the same text",
    "data.members=[text,pydocs] data.with.text.path=none.txt": "data.with.text.path=none.txt: no such file",
}


@pytest.mark.parametrize("words", slow_but([*INVALID][:4], INVALID))
def test_invalid_text_mixture_is_refused(place: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    typed = re.findall(r"\S+=(?:\[.*?\](?= |$)|\S+)", words)
    given = [] if "data.with.t" in words else ["data.with.text.path=text.txt"] if "[text" in words else []
    command = ["pretrain", "model=bert_tiny", *TINY, "data=mixture", *typed, *given, "cache_dir=cache", "max_steps=2"]
    assert cli.main([*command, "batch_tokens=256"]) == 2
    said = capsys.readouterr().err
    assert re.search(INVALID[words].replace("?", r"\?").replace("[", r"\["), said.replace("\nhint: ", " ")), said
    assert not (place / "runs").exists()
