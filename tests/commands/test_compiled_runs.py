"""Runs with compile=true have the losses and weight names of plain runs, and plain runs resume them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from lmtool.training import compiling, loop
from tests.commands.conftest import finetune, pretrain


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def aot_eager(monkeypatch):
    """Compiles with a fast backend, and fails if a graph is recompiled after the first step."""
    gradients = loop.gradients

    def warmed_up(engine, data, step, *rest):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            return gradients(engine, data, step, *rest)

    monkeypatch.setattr(loop, "gradients", warmed_up)
    monkeypatch.setattr(loop, "compiled", lambda on: compiling.compiled(on, "aot_eager"))
    torch._dynamo.reset()
    counters.clear()


def test_compiled_run_matches_plain_run(place: Path, aot_eager: None, capsys: pytest.CaptureFixture[str]) -> None:
    plain = pretrain("plain", "max_steps=3")
    assert not counters["stats"]["unique_graphs"]
    folder = pretrain("compiled", "max_steps=3", "compile=true")
    assert "compiled yes (as asked)" in " ".join(capsys.readouterr().out.split())
    assert json.loads((folder / "result.json").read_text())["compiled"] is True
    assert counters["stats"]["unique_graphs"] > 0
    for row, other in zip(rows(plain), rows(folder), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-6)
    weights, others = (load_file(run / "checkpoints/step_00000003/model.safetensors") for run in (plain, folder))
    assert weights.keys() == others.keys()
    pretrain("compiled", "max_steps=3")  # the same run, already finished


@pytest.mark.slow
@pytest.mark.parametrize(
    "tuning",
    [
        "full",
        "lora tuning.dropout=0.2",
        "adapter",
        "prefix",
        "prompt",
        "bitfit",
        "full gradient_checkpointing=true",
    ],
)
def test_compiled_tuning_matches_plain_run(place: Path, aot_eager: None, tuning: str) -> None:
    words = [f"tuning={tuning.split()[0]}", *tuning.split()[1:], "model=bert_tiny", "max_epochs=1", "log_every=1"]
    plain, folder = finetune("plain", *words), finetune("compiled", *words, "compile=true")
    assert counters["stats"]["unique_graphs"] > 0
    for row, other in zip(rows(plain), rows(folder), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "bert_tiny objective=mlm_nsp", "electra_tiny objective=rtd", "bart_tiny", "gpt_tiny model/positions=rotary",
        "deberta_v3_tiny", "bert_tiny max_epochs=2", "bert_tiny distill=soft distill.teacher=runs/teacher",
    ],
)  # fmt: skip
def test_compiled_pretraining_matches_plain_run(place: Path, aot_eager: None, words: str) -> None:
    model, *more = words.split()
    if "distill" in words:
        pretrain("teacher", "max_steps=2")
    plain, folder = pretrain("plain", *more, model=model), pretrain("compiled", *more, "compile=true", model=model)
    assert counters["stats"]["unique_graphs"] > 0
    for row, other in zip(rows(plain), rows(folder), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_folder")
@pytest.mark.parametrize("model", ["bert_tiny", "gpt_tiny", "t5_tiny"])
def test_inductor_matches_plain_run(place: Path, model: str) -> None:
    plain = pretrain("plain", "max_steps=3", model=model)
    folder = pretrain("compiled", "max_steps=3", "compile=true", model=model)
    for row, other in zip(rows(plain), rows(folder), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)
