"""Tuning schedules and regularization through the command: output, refusals, and exact resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.runs.checkpoints import read_tensors, read_weights
from lmtool.training import loop
from lmtool.training.step import apply_gradients
from tests.breadth import slow_but
from tests.commands.conftest import finetune, pretrain, work_in_copy, working_in


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with text, rows and runs/first, a masked language model of two layers."""
    place = tmp_path_factory.mktemp("pretrained")
    with working_in(place):
        pretrain("first", "max_steps=2", "model.num_layers=2")
    return place


@pytest.fixture
def place(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return work_in_copy(pretrained, tmp_path, monkeypatch)


FEW = ["checkpoint=runs/first", "schedule=constant", "max_epochs=null", "batch_examples=32", "checkpoint_every=1"]
ULMFIT = ["tuning.schedule=gradual_unfreezing", "optimizer.layer_decay=0.5", "optimizer.lr=0.001"]


SCHEMES = ["tuning.regularization=mixout", "tuning.regularization=l2_sp", "tuning=lora"]


@pytest.mark.parametrize("choice", slow_but(SCHEMES[:1], SCHEMES))
def test_gradual_unfreezing_resumes_bit_for_bit(place: Path, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """With three steps per epoch, layers become trainable in steps 4 and 7; one run stops after step 4 and resumes."""
    words = [*FEW, *ULMFIT, choice, "max_steps=8"]
    complete = finetune("complete", *words)
    steps = iter(range(5))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "apply_gradients", lambda *arguments: (next(steps), apply_gradients(*arguments))[1])
        finetune("resumed", *words, status=1)
    resumed = finetune("resumed", *words)
    last = "checkpoints/step_00000008/{}.safetensors"
    for kind in ("model", "optimizer"):
        assert (complete / last.format(kind)).read_bytes() == (resumed / last.format(kind)).read_bytes()


def test_frozen_layers_keep_weights_without_optimizer_state(place: Path) -> None:
    folder = finetune("frozen", *FEW, *ULMFIT, "max_steps=4")
    start = read_weights(Path("runs/first/checkpoints/step_00000002"))
    weights = read_weights(folder / "checkpoints/step_00000004")
    moved = {name for name, tensor in weights.items() if name in start and not tensor.equal(start[name])}
    assert {name.split(".")[2] for name in moved if name.startswith("backbone.")} == {"1"}
    optimizer = read_tensors(folder / "checkpoints/step_00000004", "optimizer.safetensors")
    state = {key.partition(".")[2] for key in optimizer}
    assert {name for name in state if name.startswith("backbone.")} == {
        name for name in weights if name.startswith("backbone.layers.1.")
    }


def test_learning_rates_are_printed_and_saved(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finetune("rates", *FEW, *ULMFIT, "max_steps=8")
    said = capsys.readouterr().out
    rows = json.loads((folder / "facts.json").read_text())["rates"]
    assert [(row["group"], row["learning_rate"], row["from_step"]) for row in rows] == [
        ("head", 0.001, 1), ("layer 2", 0.0005, 4), ("layer 1", 0.00025, 7), ("embeddings", 0.000125, None),
    ]  # fmt: skip
    assert sum(row["parameters"] for row in rows) == json.loads((folder / "result.json").read_text())["parameters"]
    # Without decay: the biases of six projections, and two norms.
    assert rows[1]["weight_decay"] == 0.01 and rows[1]["without_decay"] == 4 * 32 + 64 + 32 + 4 * 32
    assert " rates     head: " in said and "embeddings: " in said and "not in this run" in said
    assert "the run ends before these groups begin to be trained: embeddings" in said


def test_equal_learning_rates_are_one_row(place: Path) -> None:
    folder = finetune("alike", *FEW, "max_steps=1")
    rows = json.loads((folder / "facts.json").read_text())["rates"]
    assert [(row["group"], row["from_step"]) for row in rows] == [("all", 1)]


def test_mixout_needs_start_checkpoint_to_resume(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*FEW, "tuning.regularization=mixout"]
    finetune("mixed", *words, "max_steps=1")
    plain = finetune("plain", *FEW, "max_steps=1")
    shutil.rmtree("runs/first")
    for folder, status in ((plain, 0), (Path("runs/mixed"), 2)):
        (folder / "result.json").unlink()
        assert cli.main(["resume", str(folder)]) == status
    assert "runs/first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        (["tuning.regularization=l2_sp", "checkpoint=none"], "checkpoint=none has no", "tuning/regularization=none"),
        (["tuning=head", "tuning.regularization=l2_sp"], "the selected tuning has no regularization", "full|"),
        (["tuning=head", "tuning.schedule=gradual_unfreezing"], "the selected tuning has no schedule", "full|"),
        (["tuning.schedule=gradual"], "tuning/schedule=gradual is not one of", "gradual_unfreezing"),
        (
            ["model=albert_tiny", "checkpoint=none", "optimizer.layer_decay=0.5"],
            "the weights of all layers",
            "layer_decay=1.0",
        ),
        (["tuning.freeze_layers=3"], "model=bert has 2 layers", "freeze_layers=2 at most"),
    ],
)
def test_unsuitable_tuning_scheme_is_refused(
    place: Path, words: list[str], problem: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = [] if "checkpoint=none" in words else ["checkpoint=runs/first"]
    more = [] if any(word.startswith("model=") for word in words) or start else ["model=bert_tiny"]
    finetune("refused", *words, *start, *more, status=2)
    message = capsys.readouterr().err
    assert problem in message.partition("hint: ")[0] and hint in message.partition("hint: ")[2]
    assert not Path("runs/refused").exists()
