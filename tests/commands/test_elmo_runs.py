"""ELMo through the commands: pretraining, resume, perplexity, `inspect`, scalar mix in a task, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmtool.cli import main as cli
from tests.commands.conftest import finetune, pretrain, tiny, working_in

WORDS = ["objective.negatives=16", "schedule=constant", "max_length=24"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a run of six steps, and one that stopped after three and was resumed."""
    place = tmp_path_factory.mktemp("elmo")
    with working_in(place):
        pretrain("whole", *WORDS, "max_steps=6", model="elmo_tiny")
        pretrain("parted", *WORDS, "max_steps=3", model="elmo_tiny")
        pretrain("parted", *WORDS, "max_steps=6", model="elmo_tiny")
    return place


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints/step_00000006/model.safetensors")


def test_resumed_elmo_run_equals_uninterrupted_run(runs):
    whole, parted = (weights(runs / "runs" / name) for name in ("whole", "parted"))
    assert whole.keys() == parted.keys() and all(torch.equal(whole[name], parted[name]) for name in whole)
    assert {"heads.lm.output.weight", "backbone.embed.characters.weight"} <= whole.keys()
    assert not [name for name in whole if "spell" in name], "the tokenizer stores spellings"


def test_perplexities_follow_from_both_directions(runs):
    metrics = json.loads((runs / "runs/whole/result.json").read_text())["metrics"]
    mean = (metrics["forward_loss"] + metrics["backward_loss"]) / 2
    assert math.isclose(metrics["perplexity"], math.exp(mean), rel_tol=1e-6)
    assert math.isclose(metrics["backward_perplexity"], math.exp(metrics["backward_loss"]), rel_tol=1e-6)
    assert metrics["forward_count"] == metrics["backward_count"] > 0


def test_task_learns_scalar_mix_of_frozen_elmo(runs, monkeypatch):
    monkeypatch.chdir(runs)
    words = ["checkpoint=runs/whole", "max_steps=4", "optimizer.lr=0.05"]
    run = finetune("mixed", *words, "tuning=head", "tuning.layers=scalar_mix")
    tuned = load_file(run / "checkpoints/step_00000004/model.safetensors")
    assert all(name.startswith("heads.") for name in tuned)
    assert tuned["heads.layers.weight"].shape == (2,) and tuned["heads.layers.weight"].unique().numel() > 1


def test_inspect_shows_characters_and_both_directions(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    sizes = [word for word in tiny("elmo_tiny") if not word.startswith(("device", "precision", "max_length"))]
    words = ["inspect", "pretrain", "model=elmo_tiny", *sizes, *WORDS, "data=text", "data.path=text.txt"]
    assert cli.main([*words, "cache_dir=cache", "n=1", "tokens=2000"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "<W> t h e </W>" in shown and "→" in shown and "←" in shown
    for name in (
        "fraction of words predicted as unknown",
        "fraction of words truncated to",
        "forward labels that are not the next word",
    ):
        assert name in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pretrain", "model=elmo_tiny", "objective=mlm"], "objective=mlm trains an encoder; model=elmo is a"),
        (["pretrain", "model=bert_tiny", "objective=bilm"], "objective=bilm trains a bidirectional-lm"),
        (["pretrain", "model=elmo_tiny", "model.filters=[[60,4]]"], "a width of 60 exceeds model.word_length=20"),
        (["export", "checkpoint=runs/whole", "output=out"], "model=elmo has no counterpart in transformers"),
        (
            ["finetune", "task=sst2", "task.path=rows", "checkpoint=runs/whole", "tuning=lora"],
            "model=elmo is not a transformer",
        ),
        (
            ["finetune", "task=sst2", "task.path=rows", "checkpoint=runs/whole", "task.head=prompt"],
            "one side of the context",
        ),
        (["finetune", "task=sst2", "task.path=rows", "checkpoint=runs/whole", "task.head=text_to_text"], "no decoder"),
        (["predict", "checkpoint=runs/whole", "text=x"], "a model trained on bilm has no predictions for texts"),
    ],
)
def test_unsuitable_options_for_elmo_are_refused(runs, monkeypatch, capsys, words, message):
    monkeypatch.chdir(runs)
    assert cli.main(words) == 2
    shown = capsys.readouterr().err
    assert message in shown and "hint: " in shown
