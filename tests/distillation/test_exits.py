"""Self-distillation, and prediction at an early exit."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from lmtool.cli import main as cli
from lmtool.distillation.configs.modes import SelfConfig
from lmtool.distillation.self_distillation import SelfDistillation
from lmtool.errors import UserError
from lmtool.learners.model import add_exits, at_exit, select_documents
from lmtool.tuning.configs.methods import HeadConfig
from tests.commands.conftest import working_in
from tests.distillation.runs import assert_resumes_bitwise, run, weights
from tests.distillation.test_every_kind import KINDS, READ
from tests.distillation.test_every_kind import tokens as tokens
from tests.tuning.tuning_fixtures import batch_for, model_config, outputs_of, tuned

SELF = ["distill=self", "model.num_layers=3"]


def with_exits(family, depths, layers=3):
    learner = tuned(model_config(family, num_layers=layers), None)
    add_exits(learner, depths)
    return learner


@pytest.mark.parametrize("family", ["bert", "gpt", "albert"])
def test_exit_equals_the_model_without_the_layers_above(family):
    """With the heads of the last layer, an exit equals a model of that many layers."""
    learner = with_exits(family, (2,))
    learner.heads["exit_2"].load_state_dict({
        name: tensor for name, tensor in learner.heads.state_dict().items() if not name.startswith("exit_")
    })  # fmt: skip
    short = tuned(model_config(family, num_layers=2), None)
    short.load_state_dict({
        name: tensor
        for name, tensor in learner.state_dict().items()
        if name in short.state_dict()
    })  # fmt: skip
    view = at_exit(learner.eval(), 2)
    assert torch.equal(outputs_of(view), outputs_of(short))
    assert len(learner.state_dict()) == len(with_exits(family, (2,)).state_dict())


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_last_layer_has_gradients_of_the_labels_only(family):
    """Above the exits its gradients are those of a model without exits; below, the exits' losses add to them."""
    learner, plain = with_exits(family, (1, 2)), tuned(model_config(family, num_layers=3), None)
    own = {name: tensor for name, tensor in learner.state_dict().items() if "exit_" not in name}
    plain.load_state_dict(own)
    distilled = SelfDistillation(SelfConfig(), learner).train()
    batch = batch_for(learner)
    output, counts = distilled(batch, 1), distilled.counts(batch)
    expected = plain.train()(batch, 1).sums[plain.term]
    assert torch.equal(output.sums[learner.term], expected)
    assert output.sums.keys() == counts.keys() == distilled.loss_weights.keys()
    sum(output.loss_weights[name] * total / counts[name] for name, total in output.sums.items()).backward()
    (expected / counts[plain.term]).backward()
    gradients = {name: parameter.grad for name, parameter in learner.named_parameters()}
    for name, parameter in plain.named_parameters():
        same = torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-8)
        if ".layers.2." in name or name.startswith("heads.") or name.endswith("v_proj.weight"):
            assert same == (".layers.2." in name or name.startswith("heads.")), name
    assert all(gradients[name].abs().sum() > 0 for name in gradients if "exit_" in name)


def test_exit_equal_to_the_last_layer_has_zero_soft_loss():
    """The layers above the exit are the identity, and the heads are the same."""
    learner = with_exits("gpt", (1,), layers=2)
    for name, parameter in learner.backbone.layers[1].named_parameters():
        if name.startswith(("self_attn.out_proj", "ffn.fc_out")):
            torch.nn.init.zeros_(parameter)
    learner.heads["exit_1"].load_state_dict({
        name: tensor for name, tensor in learner.heads.state_dict().items() if not name.startswith("exit_")
    })  # fmt: skip
    distilled = SelfDistillation(SelfConfig(), learner).eval()
    sums = distilled(batch_for(learner), 1).sums
    assert float(sums["exit_1_states"]) == 0 and abs(float(sums["exit_1_soft"])) < 1e-5
    assert torch.allclose(sums[f"exit_1_{learner.term}"], sums[learner.term])


def test_selected_documents_have_unchanged_outputs():
    learner = tuned(model_config("bert"), None)
    batch = batch_for(learner)
    kept = torch.tensor([True, False, True, True])
    assert torch.allclose(outputs_of(learner, select_documents(batch, kept)), outputs_of(learner)[kept], atol=1e-6)


OF_ROWS = [*READ, "auxiliary_lm", "multiple_choice"]


@pytest.mark.parametrize("kind", OF_ROWS)
def test_exit_loss_of_every_kind_equals_the_truncated_model(kind, tokens, tmp_path):
    """The training loss of an exit is the loss of the model without the layers above."""
    learner, examples = KINDS[kind](tmp_path, tokens)
    rows = examples.plan(0).rows[:6]
    batch = examples.batch(rows, np.arange(len(rows)), 0)
    backbone = learner.backbone
    backbone.layers.append(copy.deepcopy(backbone.layers[0]))
    backbone.config = backbone.config.model_copy(update={"num_layers": 2})
    add_exits(learner, (1,))
    distilled = SelfDistillation(SelfConfig(), learner.eval()).eval()
    output, counts = distilled(batch, 1), distilled.counts(batch)
    assert output.sums.keys() == counts.keys() == distilled.loss_weights.keys()
    alone = at_exit(learner, 1)(batch, 1).sums
    for term, total in alone.items():
        assert torch.allclose(output.sums[f"exit_1_{term}"], total, rtol=1e-4), term
        assert not torch.equal(output.sums[term], total)
    assert output.sums["exit_1_states"] > 0
    sum(output.sums.values()).backward()
    assert all(parameter.grad is not None for parameter in learner.heads["exit_1"].parameters())


def test_head_over_several_layers_is_refused_with_a_hint():
    learner = tuned(model_config("bert", num_layers=3), {"name": "head", "layers": "scalar_mix"})
    add_exits(learner, (2,))
    with pytest.raises(UserError, match="with this tuning method the heads read several") as refused:
        SelfDistillation(SelfConfig(), learner)
    key, _, value = refused.value.hint.split()[1].rstrip(",").partition("=")
    assert key == "tuning.layers" and HeadConfig(layers=value).layers == "last"


def test_uncertainty_of_a_text_is_the_maximum_over_tokens(tokens, tmp_path):
    learner, examples = KINDS["tokens"](tmp_path, tokens)
    rows = examples.plan(0).rows[:4]
    batch, learner = examples.batch(rows, np.arange(4), 0), learner.eval()
    outputs, kept = learner.outputs(batch, 0), torch.tensor([False, True, True, False])
    shares = outputs.softmax(-1)
    unsure = -(shares * shares.log()).sum(-1) / torch.tensor(float(outputs.shape[-1])).log()
    documents = batch.inputs.documents[batch.targets[learner.term].at]
    expected = torch.stack([unsure[documents == number].max() for number in range(4)])
    assert torch.allclose(learner.uncertainty(outputs, batch), expected, atol=1e-6)
    some = select_documents(batch, kept)
    assert torch.allclose(learner.outputs(some, 0), outputs[kept[documents]], atol=1e-5)
    assert torch.equal(learner.labels(some), learner.labels(batch)[kept[documents]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("exits")
    with working_in(place):
        run("exits", *SELF, "max_steps=16", "optimizer.lr=0.01")
        yield place


def predicted(*typed):
    assert cli.main(["predict", "checkpoint=runs/exits", "input=rows/dev.tsv", "output=out.jsonl", *typed]) == 0
    with open("out.jsonl") as lines:
        return [json.loads(line) for line in lines]


def test_run_scores_exits_and_predicts_at_exits(folder, capsys):
    result = json.loads((folder / "runs/exits/result.json").read_text())
    models = {model["name"]: model for model in result["distillation"]["models"]}
    assert [*models] == ["exit 1", "exit 2", "student"]
    tensors = weights("runs/exits")
    assert {"heads.exit_1.sst2.output.weight", "heads.exit_2.pooler.dense.weight"} <= tensors.keys()
    first, last = predicted("exit=1"), predicted()
    assert {row["exit"] for row in first} == {1} and "exit" not in last[0]
    named = {"0": "negative", "1": "positive"}
    right = sum(row["prediction"] == named[str(row["label"])] for row in first) / len(first)
    assert right == pytest.approx(models["exit 1"]["score"])
    # At entropy 0 no row leaves early, at 1 all rows leave at the first exit; between, each row equals its exit's.
    assert [row["prediction"] for row in predicted("exit_entropy=0")] == [row["prediction"] for row in last]
    assert [row["score"] for row in predicted("exit_entropy=1")] == [row["score"] for row in first]
    by_depth = {1: first, 2: predicted("exit=2"), 3: last}
    unsure = sorted(entropy(row["score"]) for row in first)
    mixed = predicted(f"exit_entropy={unsure[len(unsure) // 2]}")
    assert len({row["exit"] for row in mixed}) > 1
    for number, row in enumerate(mixed):
        assert row["score"] == pytest.approx(by_depth[row["exit"]][number]["score"], abs=1e-5)
    capsys.readouterr()
    assert cli.main(["evaluate", "checkpoint=runs/exits", "exit_entropy=1"]) == 0
    assert "40 after layer 1" in capsys.readouterr().out
    assert cli.main(["predict", "checkpoint=runs/exits", "text=a cat", "exit=3"]) == 2
    assert "set exit=2" in capsys.readouterr().err


def entropy(probability):
    both = torch.tensor([probability, 1 - probability], dtype=torch.float64)
    return float(-(both * both.log()).sum() / torch.tensor(2.0).log())


def test_models_without_exits_are_refused(folder, capsys):
    refused = {
        "distill.exits=[1,3]": "may follow layers 1 to 2",
        "model.num_layers=1": "there is no layer before the last",
        "model=t5_tiny": "two stacks",
    }
    for typed, shown in refused.items():
        run("wrong", "distill=self", *([] if "layers" in typed else ["model.num_layers=3"]), typed, status=2)
        assert shown in capsys.readouterr().err


def test_interrupted_run_resumes_bitwise(folder, monkeypatch):
    assert_resumes_bitwise(monkeypatch, "cut", *SELF, "distill.exits=[2]")
