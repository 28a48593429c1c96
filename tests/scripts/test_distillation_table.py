"""The table of what a student can learn from: a teacher and students of a tiny published folder."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from lmtool.cli import main as cli
from tests.commands.conftest import skip_reports, write_rows
from tests.weights.published_folders import make


@pytest.fixture
def table(script, monkeypatch, tmp_path):
    """The script, whose runs of lmtool stay in this process, and a tiny published folder."""
    monkeypatch.chdir(tmp_path)
    skip_reports(monkeypatch)
    write_rows(tmp_path / "glue")
    make("bert", tmp_path / "published")
    module = script("distillation_table")

    def finetuned(words, seed, folder):
        assert cli.main(["finetune", *words, f"seed={seed}", f"run_dir={folder}"]) == 0
        return json.loads((folder / "result.json").read_text())

    monkeypatch.setattr(module, "finetuned", finetuned)
    return module


def run(table, monkeypatch, *words):
    """The exit status of the script."""
    common = ["--checkpoint", "published", "--examples", "16", "--choose", "8", "--max-length", "32", "--output", "out"]
    epochs = ["--epochs", "1", "--teacher-epochs", "1", "--set", "device=cpu"]
    monkeypatch.setattr(sys, "argv", ["distillation_table.py", *common, *epochs, *words])
    try:
        table.main()
    except SystemExit as ended:
        return ended.code
    return 0


def test_students_of_one_start_learn_by_several_ways(table, monkeypatch, capfd, tmp_path):
    words = ["sst2=glue", "--layers", "2", "--ways", "gold,soft", "--seeds", "1,2"]
    assert run(table, monkeypatch, *words, "--set", "soft:distill.terms.soft.temperature=4") == 0
    printed = capfd.readouterr().out
    text = (tmp_path / "out/rows.jsonl").read_text()
    teacher, *students = map(json.loads, text.splitlines())
    assert [(row["way"], row["seed"]) for row in students] == [("gold", 1), ("soft", 1), ("gold", 2), ("soft", 2)]
    assert {row["steps"] for row in students} == {1} and all(row["scored"] == 40 for row in (teacher, *students))
    assert all(row["parameters"] < teacher["parameters"] for row in students)
    assert "distill.terms.soft.temperature" in (tmp_path / "out/settings.json").read_text()
    last = printed.splitlines()[-1].split()
    gains = [soft["value"] - gold["value"] for gold, soft in ((students[0], students[1]), (students[2], students[3]))]
    assert last[0] == "soft" and last[3] == f"{sum(gains) / 2:+.4f}"
    # Finished runs stay.
    assert run(table, monkeypatch, *words, "--set", "soft:distill.terms.soft.temperature=4") == 0
    assert (tmp_path / "out/rows.jsonl").read_text() == text


def test_the_student_has_the_layers_that_are_named(table, monkeypatch, tmp_path):
    whole = load_file(tmp_path / "published/model.safetensors")
    table.write_shortened(tmp_path / "published", [2], tmp_path / "short")
    short = load_file(tmp_path / "short/model.safetensors")
    assert json.loads((tmp_path / "short/config.json").read_text())["num_hidden_layers"] == 1
    name = next(name for name in short if "encoder.layer.0.attention.self.query.weight" in name)
    assert torch.equal(short[name], whole[name.replace("layer.0", "layer.1")])
    assert not any("layer.1." in name for name in short)
    with pytest.raises(SystemExit):
        table.write_shortened(tmp_path / "published", [9], tmp_path / "none")


def test_what_it_refuses(table, monkeypatch, capsys):
    assert run(table, monkeypatch, "sst2=glue", "--ways", "best") == 2
    assert "--ways best: one of gold, hard, soft" in capsys.readouterr().err
