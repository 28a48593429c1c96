"""Diverging runs and checkpoints with NaN outputs exit with status 4 and print no score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lmtool.cli import main as cli
from lmtool.runs.checkpoints import MODEL, save_tensors
from lmtool.runs.finding import find
from lmtool.system.files import MANIFEST, write_manifest
from tests.commands.conftest import pretrain, work_in_copy, working_in

CLASSES = ("task=sst2",)
VALUES = ("task=custom", "task.kind=regression", "task.text=[sentence]", "task.label=label")


def finetune(name: str, task: tuple[str, ...], *more: str, status: int = 0) -> Path:
    """Runs `lmtool finetune` on the rows in small batches and returns the run folder."""
    words = ["finetune", *task, "task.path=rows", "cache_dir=cache", "batch_examples=4", "max_length=32"]
    machine = ["device=cpu", "precision=fp32", f"name={name}", "checkpoint=runs/words"]
    assert cli.main([*words, *machine, *more]) == status
    return Path("runs") / name


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, labeled rows and runs/words, a masked language model."""
    folder = tmp_path_factory.mktemp("words")
    with working_in(folder):
        pretrain("words", "max_steps=2")
    return folder


@pytest.fixture
def pretrained_copy(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return work_in_copy(pretrained, tmp_path, monkeypatch)


def write_nan(run: str, part: str) -> None:
    """Writes NaN into a part of a run's checkpoint and updates its manifest."""
    folder = find(f"runs/{run}")
    tensors = load_file(folder / MODEL)
    name = next(name for name in sorted(tensors) if name.startswith(part))
    tensors[name].view(-1)[0] = float("nan")
    save_tensors(tensors, folder / MODEL)
    metadata = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    write_manifest(folder, {"step": metadata["step"]})


@pytest.mark.parametrize("more", [("log_every=1",), ("log_every=1000", "evaluate_every=1000"), ("tuning=head",)])
@pytest.mark.parametrize("task", [CLASSES, pytest.param(VALUES, marks=pytest.mark.slow)], ids=["classes", "values"])
def test_too_high_learning_rate_ends_as_divergence(
    pretrained_copy: Path, capsys: pytest.CaptureFixture[str], task: tuple[str, ...], more: tuple[str, ...]
) -> None:
    run = finetune("labels", task, "max_steps=40", "optimizer.lr=50", *more, status=4)
    error, hint = capsys.readouterr().err.strip().splitlines()[-2:]
    assert error.startswith("error: the loss exploded to ") and "runs/labels/diverged/step_" in error
    assert hint.startswith("hint: use a lower optimizer.lr")
    assert list((run / "diverged").iterdir()) and not (run / "result.json").exists()


@pytest.mark.parametrize("lr", ["1e-1", pytest.param("1e-3", marks=pytest.mark.slow)])
def test_noisy_finetuning_is_not_divergence(pretrained_copy: Path, lr: str) -> None:
    for name, task in (("classes", CLASSES), ("values", VALUES)):
        finetune(name, task, "max_steps=60", f"optimizer.lr={lr}")


@pytest.mark.parametrize("task", [CLASSES, pytest.param(VALUES, marks=pytest.mark.slow)], ids=["classes", "values"])
def test_task_with_nan_predictions_exits_with_4(
    pretrained_copy: Path, capsys: pytest.CaptureFixture[str], task: tuple[str, ...]
) -> None:
    finetune("labels", task, "max_steps=2")
    write_nan("labels", "heads.")
    for words in (["evaluate", "checkpoint=runs/labels"], ["predict", "checkpoint=runs/labels", "text=A cat."]):
        capsys.readouterr()
        assert cli.main(words) == 4
        captured = capsys.readouterr()
        assert captured.err.startswith("error: the model's predictions are not finite\nhint: ") and not captured.out


@pytest.mark.parametrize(
    ("model", "objective", "text"),
    [("bert_tiny", "mlm", "A [MASK]."), ("gpt_tiny", "clm", "A cat"), ("t5_tiny", "span_corruption", "A cat")],
)
def test_language_model_with_nan_outputs_exits_with_4(
    place: Path, capsys: pytest.CaptureFixture[str], model: str, objective: str, text: str
) -> None:
    pretrain("words", f"objective={objective}", "max_steps=2", model=model)
    write_nan("words", "backbone.")
    capsys.readouterr()
    for words, outcome in ((["evaluate"], "losses"), (["predict", f"text={text}"], "predictions")):
        assert cli.main([words[0], "checkpoint=runs/words", *words[1:]]) == 4
        captured = capsys.readouterr()
        assert (
            captured.err.startswith(f"error: the model's {outcome} are not finite\nhint: ")
            and "loss" not in captured.out
        )
