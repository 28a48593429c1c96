"""Runs with terms between layers, through the command line: every preset, resuming, and refused combinations."""

from __future__ import annotations

import json

import pytest
import torch

from lmtool.cli import main as cli
from tests.commands.conftest import TINY, working_in
from tests.distillation.runs import assert_resumes_bitwise, run, weights

WIDE = ("states", "hidden", "patience", "embeddings")
TEACHER = "distill.teacher=runs/teacher"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("layers")
    with working_in(place):
        run("teacher", "max_steps=1", "model.num_layers=3")
        yield place


def rows(path):
    return [json.loads(row) for row in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("preset", ["states", "hidden", "distilbert", "tinybert", "pkd", "minilm"])
def test_preset_trains_and_the_run_predicts(folder, preset, capsys):
    done = run(preset, f"distill={preset}", TEACHER, "model.num_layers=2", "evaluate_every=1", "max_steps=3")
    shown = capsys.readouterr().out
    assert ("layers" in shown.split("model ")[0]) == (preset != "states")
    trained = [row for row in rows(done) if row["split"] == "train"]
    assert all(value >= 0 for row in trained for key, value in row.items() if key.startswith("loss"))
    taught = preset not in ("tinybert", "minilm")
    assert ("metrics mean nothing" in shown) != taught
    if not taught:  # the best checkpoint is the last one
        assert (done / "checkpoints/best").read_text() == (done / "checkpoints/last").read_text()
    assert not any(name.startswith("distill.") for name in weights(done))
    assert cli.main(["predict", f"checkpoint={done}", "text=a bright cat"]) == 0


def test_narrower_student_resumes_bitwise(folder, monkeypatch):
    """Projections are part of the checkpoint and not of the model that predicts."""
    typed = [
        "distill=standard",
        TEACHER,
        *(f"distill.terms.{name}.weight=1" for name in WIDE),
        "distill.terms.soft.weight=1",
        "model.hidden_size=16",
    ]
    assert_resumes_bitwise(monkeypatch, "narrow", *typed)
    projections = {name for name in weights("runs/narrow") if name.startswith("distill.")}
    assert projections == {f"distill.{name}.projection.weight" for name in WIDE}
    learned, drawn = weights("runs/narrow"), weights(run("drawn", *typed, "max_steps=1", "optimizer.lr=1e-12"))
    assert not any(torch.equal(learned[name], drawn[name]) for name in projections)
    assert cli.main(["predict", "checkpoint=runs/narrow", "text=a bright cat"]) == 0


def test_student_initialized_from_layers_resumes_bitwise(folder, monkeypatch):
    """With a layer map, whose keys are strings in a saved configuration."""
    layers = ["model.num_layers=1", "distill.terms.hidden.weight=1", "distill.layers={1: 3}"]
    assert_resumes_bitwise(monkeypatch, "started", "distill=distilbert", TEACHER, *layers)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["distill=hidden", "distill.layers={3: 1}"], "distill.layers maps layer 3 to layer 1"),
        (["distill=minilm", "model.num_heads=4"], "the student has 4 attention heads per layer, the teacher 2"),
        (["distill=distilbert", "model.hidden_size=16"], "the student has model.hidden_size=16, its teacher"),
        (["distill=distilbert", "checkpoint=runs/teacher"], "both set the initial weights of the student"),
        (["distill=tinybert", "patience=2"], "heads are not trained"),
        (
            ["distill=hidden", "tuning=head"],
            "compares the student's layers with the teacher's, but all of them are frozen",
        ),
        (["distill=tinybert", "tuning=prompt", "tuning.length=2", "max_length=24"], "the tuning method adds keys"),
    ],
)
def test_incompatible_settings_are_refused_before_training(folder, capsys, typed, message):
    run("refused", *typed, TEACHER, status=2)
    assert message in capsys.readouterr().err
    assert not list((folder / "runs").glob("refused/checkpoints/step_*"))


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("distilbert", "bf16"),
        ("t5", "fp32"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("roberta", "fp32"), ("gpt", "bf16"))),
    ],
)
def test_all_terms_pretrain_every_architecture(folder, capsys, family, precision):
    """DistilBERT has a BERT teacher, with segments; the others a deeper and wider teacher of their family."""
    sizes = [word for word in TINY if not word.startswith(("model.num_layers", "model.hidden_size", "precision"))]
    shared = [*sizes, "data=text", "data.path=text.txt", "cache_dir=cache", "offline=true", "batch_tokens=200"]
    teacher, its = {"distilbert": "bert"}.get(family, family), ["model.num_layers=3", "model.hidden_size=48"]
    own = ["model.num_layers=2", "model.hidden_size=32"]
    typed = [*shared, f"precision={precision}", "log_every=1", "max_steps=2"]

    def pretrain(name, model, *more):
        assert cli.main(["pretrain", f"model={model}_tiny", *typed, f"name={name}", *more]) == 0

    pretrain(f"{family}-teacher", teacher, *its)
    before = weights(f"runs/{family}-teacher")
    terms = [f"distill.terms.{name}.weight=1" for name in (*WIDE, "attention", "relations", "soft")]
    pretrain(f"{family}-student", family, *own, "distill=standard", f"distill.teacher=runs/{family}-teacher", *terms)
    assert "1 <- 2, 2 <- 3" in capsys.readouterr().out
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(f"runs/{family}-teacher").items())
    for row in rows(folder / "runs" / f"{family}-student")[:1]:
        lost = {key: value for key, value in row.items() if key.startswith("loss_")}
        assert len(lost) == 8 and all(value > 0 for value in lost.values())
