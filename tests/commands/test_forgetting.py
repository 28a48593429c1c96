"""forgetting=: the pretraining loss before and after finetuning, and the distance that weights moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lmtool.cli import main as cli
from lmtool.session.forgetting import distances
from tests.commands.conftest import finetune, pretrain, work_in_copy, working_in


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pretrained")
    with working_in(place):
        (place / "held_out.txt").write_text((place / "text.txt").read_text()[:6000])
        pretrain("mlm", "objective=mlm", "max_steps=2", "model.num_layers=2")
        pretrain("clm", "max_steps=2", model="gpt_tiny")
        finetune("task", "checkpoint=runs/mlm", "max_steps=1")
    return place


@pytest.fixture
def place(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return work_in_copy(pretrained, tmp_path, monkeypatch)


FEW = ["forgetting=held_out.txt", "max_steps=3", "schedule=constant", "max_epochs=null"]


def forgetting_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())["forgetting"]


@pytest.mark.usefixtures("reports", "figures")
def test_full_finetuning_increases_pretraining_loss(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finetune("full", "checkpoint=runs/mlm", *FEW, "optimizer.lr=0.01")
    said, forgetting = capsys.readouterr().out, forgetting_of(folder)
    assert forgetting["after"]["loss"] > forgetting["before"]["loss"] + 0.01 and forgetting["objective"] == "mlm"
    assert list(forgetting["distance"]) == ["layer 2", "layer 1", "embeddings"]  # without the new task head
    assert all(0 < moved < 1 for moved in forgetting["distance"].values()) and forgetting["added"] == 0
    assert " forgets  mlm loss" in said and " moved    layer 2 " in said
    page = (folder / "report.html").read_text()
    assert "<h2>Forgetting</h2>" in page and "relative distance" in page and "<h2>Learning rates</h2>" in page
    words = ["checkpoint=runs/mlm", "data=text", "data.path=held_out.txt", "cache_dir=cache", "device=cpu"]
    capsys.readouterr()
    assert cli.main(["evaluate", *words, "precision=fp32"]) == 0
    assert f"{forgetting['before']['loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("checkpoint", ["mlm", "clm"])
def test_frozen_weights_keep_pretraining_loss(place: Path, checkpoint: str) -> None:
    forgetting = forgetting_of(finetune("head", f"checkpoint=runs/{checkpoint}", *FEW, "tuning=head"))
    assert forgetting["after"] == forgetting["before"] and set(forgetting["distance"].values()) == {0.0}


def test_added_weights_are_merged_or_counted(place: Path) -> None:
    lora = forgetting_of(finetune("lora", "checkpoint=runs/mlm", *FEW, "tuning=lora", "optimizer.lr=0.01"))
    assert lora["added"] == 0 and lora["distance"]["layer 1"] > 0 == lora["distance"]["embeddings"]
    assert lora["after"]["loss"] != lora["before"]["loss"]
    words = ["tuning=adapter", "tuning.bottleneck=2", "optimizer.lr=0.01"]
    adapter = forgetting_of(finetune("adapter", "checkpoint=runs/mlm", *FEW, *words))
    assert adapter["added"] == 2 * (2 * 2 * 32 + 2 + 32) and set(adapter["distance"].values()) == {0.0}
    assert adapter["after"]["loss"] != adapter["before"]["loss"]


def test_distances_are_relative_and_by_layer() -> None:
    """Decoder layers come before encoder layers, whatever their order in the file."""
    own = {
        "backbone.embed.b": torch.ones(4),
        "backbone.encoder.layers.0.a": torch.full((2, 2), 4.5),
        "backbone.decoder.layers.0.a": torch.full((2, 2), 1.0),
        "heads.lm.c": torch.ones(2),
    }
    start = {name: tensor / 1.5 if "encoder" in name else tensor for name, tensor in sorted(own.items())}
    moved = distances({**start, "heads.lm.c": torch.ones(1)}, own)
    assert list(moved.items()) == [
        ("decoder layer 1", 0.0), ("encoder layer 1", pytest.approx(0.5)), ("embeddings", 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["checkpoint=none", "model=bert_tiny"], "checkpoint=none was not pretrained"),
        (["checkpoint=runs/task"], "checkpoint=runs/task was finetuned and has no pretraining head"),
        (["checkpoint=runs/mlm", "forgetting=nowhere.txt"], "forgetting=nowhere.txt: no such file"),
    ],
)
def test_forgetting_without_pretraining_head_is_refused(
    place: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune("refused", *FEW, *words, status=2)
    message = capsys.readouterr().err
    assert problem in message and "hint: " in message and not Path("runs/refused").exists()
