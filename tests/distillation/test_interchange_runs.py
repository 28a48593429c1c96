"""Pretraining with interchange interventions through the command line: every architecture, and resuming."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lmtool.cli import main as cli

TINY = [
    "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.feedforward_size=48",
    "tokenizer.vocab_size=320", "max_length=32", "batch_tokens=400", "data=text", "data.path=text", "offline=true",
    "device=cpu", "precision=fp32", "cache_dir=cache", "log_every=1", "evaluate_every=4",
]  # fmt: skip
CASES = {"distilbert": "diito", "gpt": "interchange", "t5": "interchange"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interchange")
    (folder / "text").mkdir()
    words = ["the", "old", "cat", "sat", "near", "a", "quiet", "river", "while", "two", "dogs", "watched", "birds", "."]
    texts = [" ".join(words[(n * step) % 14] for step in range(1, 4 + n % 9)) for n in range(1, 400)]
    (folder / "text" / "text.txt").write_text("\n\n".join(texts))
    return folder


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


def pretrain(name, family, *typed):
    assert cli.main(["pretrain", f"model={family}_tiny", *TINY, f"name={name}", *typed]) == 0
    return Path("runs") / name


@pytest.mark.parametrize(
    "family", [name if name == "t5" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_student_of_each_architecture_trains_and_resumes_bitwise(family, capsys):
    pretrain(f"{family}-teacher", family, "max_steps=2")
    steps = ["max_steps=4", "checkpoint_every=2", "keep_optimizer=all"]
    preset = [f"distill={CASES[family]}", f"distill.teacher=runs/{family}-teacher"]
    run = pretrain(family, family, *steps, *preset)
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    lost = [row["loss_interchange"] for row in rows if row["split"] == "train"]
    assert len(lost) == 4 and all(value > 0 for value in lost)
    summary = json.loads((run / "result.json").read_text())["distillation"]
    sides = {cell["side"] for cell in summary["interchange_accuracy"]["cells"]}
    assert sides == ({"inputs", "outputs"} if family == "t5" else {"inputs"})
    assert summary["interchange_accuracy"]["n"] > 0 and "1 <- 1, 2 <- 2" in capsys.readouterr().out

    last = run / "checkpoints/step_00000004/model.safetensors"
    complete = last.read_bytes()
    shutil.rmtree(last.parent)
    (run / "result.json").unlink()
    pretrain(family, family, *steps, *preset)
    assert last.read_bytes() == complete
    assert json.loads((run / "result.json").read_text())["distillation"]["fidelity"] == summary["fidelity"]


def test_micro_batch_of_one_text_is_refused(capsys):
    """Before training, because an intervention needs a forward pass over several texts."""
    pretrain("alone-teacher", "gpt", "max_steps=1")
    typed = ["pretrain", "model=gpt_tiny", *TINY, "max_steps=2", "distill=interchange", "name=alone"]
    assert cli.main([*typed, "distill.teacher=runs/alone-teacher", "micro_batch_tokens=32", "max_length=32"]) == 2
    shown = capsys.readouterr().err
    assert "swaps states between two texts" in shown and "or micro_batch_tokens=" in shown
