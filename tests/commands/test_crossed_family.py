"""`lmtool import model=` converts a checkpoint to another family."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import lmtool
from lmtool.cli import main as cli
from lmtool.runs.finding import verify
from tests.weights.published_folders import make, make_classifier


def run(*words: str, status: int = 0) -> None:
    assert cli.main(["import", *words, "offline=true"]) == status


def test_import_into_other_family_reports_each_weight(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    make("bert", tmp_path / "published")
    run("checkpoint=published", "model=roberta", "output=crossed")
    verify(tmp_path / "crossed")
    printed = capfd.readouterr().out
    assert "crossed · model=roberta with the weights of model=bert" in printed and "left out" in printed
    report = json.loads((tmp_path / "crossed" / "crossed.json").read_text())
    before, after = lmtool.load("published"), lmtool.load("crossed")
    assert after.config.name == "roberta" and after.tokenizer is not None
    names = {*report["taken"], *report["resized"], *report["new"]}
    assert names == after.model.parts.state_dict().keys() and report["masks"] is None
    ids = torch.arange(8)[None] + 5
    with torch.no_grad():
        torch.testing.assert_close(after.model(ids).logits, before.model(ids).logits)


def test_import_into_incompatible_family_is_refused(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    make("bert", tmp_path / "published")
    for words, message in (
        (["model=gpt"], "error: model=gpt does not compute the same function as model=bert: "),
        (["model=roberta", "tokenizer=published"], "error: model=roberta and tokenizer=published cannot be combined"),
        (["model=robert"], "hint: did you mean model=roberta?"),
    ):
        run("checkpoint=published", *words, "output=crossed", status=2)
        assert message in capfd.readouterr().err
    make_classifier("bert", tmp_path / "classifier")
    run("checkpoint=classifier", "model=roberta", "output=crossed", status=2)
    assert "checkpoint=classifier was finetuned" in capfd.readouterr().err
    assert not (tmp_path / "crossed").exists()
