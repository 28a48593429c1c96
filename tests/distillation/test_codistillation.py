"""Codistillation: the mutual losses, resuming, peers of another model, and the plan."""

from __future__ import annotations

import json
import re

import pytest
import torch

from lmtool.cli import main as cli
from lmtool.costs.memory_of_run import _needed_bytes
from lmtool.distillation.codistillation import Codistillation
from lmtool.distillation.configs.modes import CodistillationConfig
from tests.commands.conftest import working_in
from tests.config.test_yaml import compose_and_decode
from tests.distillation.runs import assert_resumes_bitwise, run, weights
from tests.tuning.tuning_fixtures import batch_for, model_config, tuned

CODISTILLATION = ["distill=codistillation", "distill.burn_in_steps=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("codistillation")
    with working_in(place):
        yield place


def divergence(weight, steps=8):
    """The mutual loss, step by step, of two learners that start with opposite predictions."""
    student, peer = (tuned(model_config("bert", dropout=0.0), None) for _ in range(2))
    with torch.no_grad():
        for learner, side in ((student, 3.0), (peer, -3.0)):
            learner.heads[learner.term].output.bias.copy_(torch.tensor([side, 0.0]))
    together = Codistillation(CodistillationConfig(weight=weight, burn_in_steps=2), student, [peer]).train()
    optimizer = torch.optim.SGD([each for group in together.parameter_groups() for _, each in group.parameters], 0.05)
    batch, apart = batch_for(student), []
    for step in range(1, steps + 1):
        together.on_step(step)
        output, counts = together(batch, step), together.counts(batch)
        assert output.sums.keys() == counts.keys()
        assert ("mutual" in counts and "peer_1_mutual" in counts) == (step > 2)
        optimizer.zero_grad()
        torch.stack(
            [output.loss_weights[name] * total / counts[name] for name, total in output.sums.items()]
        ).sum().backward()
        optimizer.step()
        apart += [float(output.sums["mutual"])] if "mutual" in counts else []
    return apart


def test_mutual_loss_decreases_after_burn_in():
    """A weight of 0 shows the effect of the data alone."""
    near, alone = divergence(2.0), divergence(0.0)
    assert near[0] == pytest.approx(alone[0], rel=1e-5)  # the burn-in is the same
    assert near[-1] < 0.5 * alone[-1]


def test_peers_are_trained_and_saved_with_the_student(folder):
    name = "backbone.layers.0.self_attn.q_proj.weight"
    moved = run("moved", *CODISTILLATION)
    rows = [json.loads(row) for row in (moved / "metrics.jsonl").read_text().splitlines()]
    shown = ["loss_mutual" in row and "loss_peer_1_mutual" in row for row in rows if row["split"] == "train"]
    assert shown == [False, True, True, True]
    models = json.loads((moved / "result.json").read_text())["distillation"]["models"]
    assert [model["name"] for model in models] == ["peer 1", "student"]
    tensors, start = weights(moved), weights(run("start", *CODISTILLATION, "max_steps=1", "optimizer.lr=1e-12"))
    for key in (name, f"distill.peer_1.{name}"):
        assert not torch.allclose(tensors[key], start[key], atol=1e-5)
    assert not torch.equal(start[name], start[f"distill.peer_1.{name}"])
    assert cli.main(["predict", f"checkpoint={moved}", "text=a bright cat"]) == 0


@pytest.mark.parametrize(
    "overrides",
    [["distill.refresh_steps=2"], pytest.param(["distill.learners=3", "tuning=bitfit"], marks=pytest.mark.slow)],
)
def test_interrupted_run_resumes_bitwise(folder, monkeypatch, overrides):
    name = overrides[0].partition("=")[2]
    assert_resumes_bitwise(monkeypatch, f"cut-{name}", *CODISTILLATION, *overrides)


def test_peer_sizes_may_differ_but_not_the_architecture(folder, capsys):
    peer = "{name: bert, num_layers: 2, hidden_size: 16, num_heads: 2, feedforward_size: 32, vocab_size: 400}"
    other = run("other", *CODISTILLATION, f"distill.model={peer}")
    tensors = weights(other)
    assert tensors["distill.peer_1.backbone.layers.1.self_attn.q_proj.weight"].shape == (16, 16)
    run("from-run", *CODISTILLATION, f"distill.checkpoint={other}")
    capsys.readouterr()
    run("wrong", *CODISTILLATION, "distill.model={name: gpt}", status=2)
    shown = capsys.readouterr().err
    assert "its architecture is decoder, not encoder" in shown and "distill.model.name=bert" in shown
    run("wrong", *CODISTILLATION, f"distill.model={peer}", f"distill.checkpoint={other}", status=2)
    assert "otherwise omit distill.model=" in capsys.readouterr().err


def test_objective_that_generates_inputs_is_refused(folder, capsys):
    typed = ["pretrain", "model=electra_tiny", "objective=rtd", "data=text", "data.path=text.txt"]
    assert cli.main([*typed, *CODISTILLATION]) == 2
    assert "generates part of its inputs" in capsys.readouterr().err


def test_plan_counts_memory_of_peers_and_their_copies(folder):
    typed = ["task=sst2", "task.path=rows", "model=bert_tiny", "checkpoint=none"]
    alone, together, stale = (
        _needed_bytes(compose_and_decode("finetune", *typed, *more), True)
        for more in ([], CODISTILLATION, [*CODISTILLATION, "distill.refresh_steps=2"])
    )
    assert together == 2 * alone
    # AdamW keeps two moments beside weights and gradients.
    assert stale - together == together / 4


def test_plan_counts_flops_of_peers(folder, capsys):
    typed = ["plan", "finetune", "task=sst2", "task.path=rows", "model=bert_tiny", "checkpoint=none", "max_steps=5"]
    flops = []
    for more in ([], ["distill=codistillation", "distill.learners=3"]):
        capsys.readouterr()
        assert cli.main([*typed, *more, "offline=true", "cache_dir=cache"]) == 0
        flops.append(float(re.search(r"([\d.]+) MFLOP per token", capsys.readouterr().out)[1]))
    assert flops[1] == pytest.approx(3 * flops[0], rel=0.01)
