"""Whole commands on a CUDA device; run by `make gpu`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from tests.commands.conftest import finetune, pretrain

pytestmark = pytest.mark.gpu
ON_DEVICE = ("device=cuda", "precision=auto")


@pytest.mark.parametrize("model", ["bert_tiny", "gpt_tiny", "t5_tiny", "electra_tiny"])
def test_pretraining_on_cuda_reduces_loss(place: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pretrain("first", *ON_DEVICE, "max_steps=20", model=model)
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "done" and math.isfinite(result["value"]) and result["peak_memory_bytes"] > 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    assert losses[-1] < losses[0]
    assert json.loads((folder / "facts.json").read_text())["model"]["device"] == "cuda:0"
    screen = capsys.readouterr().out
    assert "flash" in screen and "bf16" in screen


@pytest.mark.parametrize(
    ("dropout", "words"), [("0.0", "variable-length flash"), ("0.1", "flash of jagged tensors, which has dropout")]
)
def test_finetune_evaluate_and_predict_run_on_cuda(place: Path, dropout: str, words: str) -> None:
    start = pretrain("start", *ON_DEVICE)
    folder = finetune("task", f"checkpoint={start}", f"model.attention_dropout={dropout}", *ON_DEVICE)
    assert json.loads((folder / "facts.json").read_text())["model"]["attention"] == words
    assert json.loads((folder / "result.json").read_text())["status"] == "done"
    assert cli.main(["evaluate", f"checkpoint={folder}", "device=cuda"]) == 0
    assert cli.main(["predict", f"checkpoint={folder}", "text=The happy cat saw the warm dog.", "device=cuda"]) == 0


@pytest.mark.parametrize("model", ["bert_tiny", "gpt_tiny", "t5_tiny"])
def test_compiled_losses_match_plain_losses_on_cuda(place: Path, model: str) -> None:
    losses = []
    for name in ("plain", "compiled"):
        words = (
            *ON_DEVICE,
            f"compile={str(name == 'compiled').lower()}",
            "model.dropout=0",
            "model.attention_dropout=0",
        )
        folder = pretrain(name, *words, "max_steps=10", model=model)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if row["split"] == "train"])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
