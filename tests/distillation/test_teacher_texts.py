"""Sequence-level distillation: the student's targets are texts that the teacher generates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtool.cli import main as cli

SHORT = ["offline=true", "max_steps=2", "batch_examples=8", "evaluate_every=2", "max_epochs=null", "cache_dir=cache"]
TASK = ["task=seq2seq", "task.path=.", "task.target_tokens=8", "task.generation.max_new_tokens=6", "max_length=32"]
MODEL = ["model=t5_tiny", "checkpoint=none", "model.num_layers=1"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    rows = [{"source": f"say {'ab'[n % 2]} {n % 5}", "target": "abc"[n % 3] * 2} for n in range(24)]
    for split, part in (("train", rows[:16]), ("dev", rows[16:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    monkeypatch.chdir(tmp_path)


def finetune(name, *typed, status=0):
    assert cli.main(["finetune", *TASK, *MODEL, *SHORT, f"name={name}", *typed]) == status


def test_training_rows_have_texts_generated_by_the_teacher(capsys):
    finetune("teacher", "tokenizer.vocab_size=300", "task.metrics=[exact_match]", "task.metric=exact_match")
    scored = ["task.metrics=[exact_match]", "task.metric=exact_match", "distill.teacher=runs/teacher"]
    finetune("student", *scored, "distill=sequence", "tokenizer.vocab_size=280", "task.generation.beams=2")
    shown = capsys.readouterr().out
    assert "teacher outputs made" in shown and "rows 16" in shown
    finetune("again", *scored, "distill=sequence", "distill.targets=both", "task.generation.beams=2")
    assert "teacher outputs found" in capsys.readouterr().out
    (file,) = Path("cache/teachers").glob("*/texts.jsonl")
    assert len(file.read_text().splitlines()) == 16
    finetune("rates", *scored, "distill=sequence", "distill.gold=0", status=2)
    assert "set distill.gold=1" in capsys.readouterr().err
