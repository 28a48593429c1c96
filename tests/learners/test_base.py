"""The base class of learners: heads, parameter groups, dropout."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.registry import build
from lmtool.learners.base import BaseLearner
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.heads.sequence import Pooler, SequenceHead, summary, summary_index
from lmtool.types import Batch, Packed

SIZES = {"vocab_size": 60, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "feedforward_size": 32}


class Plain(BaseLearner):
    """A learner without an objective."""

    counts = examples = score = predictors = None

    def forward(self, batch, step):
        return self.backbone(batch.inputs)


def batch_of(lengths=(3, 6), examples=(4, 9)) -> Batch:
    packed = Packed(torch.arange(sum(lengths)) + 1, lengths)
    return Batch(packed, {}, torch.tensor(examples), torch.zeros(len(lengths), dtype=torch.int32))


def test_heads_are_named_and_initialized_by_seed():
    def learner(seed):
        plain = Plain(None, build(BertConfig(**SIZES), seed), None, seed)
        plain.add_head("pooler", Pooler(16))
        plain.add_head("sst2", SequenceHead(16, 2, 0.1))
        return plain

    first, again, other = learner(1), learner(1), learner(2)
    assert {name for name in first.state_dict() if name.startswith("heads.")} == {
        "heads.pooler.dense.weight",
        "heads.pooler.dense.bias",
        "heads.sst2.output.weight",
        "heads.sst2.output.bias",
    }
    key = "heads.sst2.output.weight"
    assert torch.equal(first.state_dict()[key], again.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], other.state_dict()[key])
    assert first.state_dict()[key].abs().max() <= 0.04 and not first.state_dict()["heads.sst2.output.bias"].any()


def test_parameter_groups_hold_each_trainable_tensor_once():
    learner = Plain(None, build(GptConfig(**SIZES), 0), None, 0)
    learner.backbone.embed.token.weight.requires_grad_(False)
    decay, rest = learner.parameter_groups()
    names = [name for group in (decay, rest) for name, _ in group.parameters]
    assert sorted(names) == sorted(name for name, parameter in learner.named_parameters() if parameter.requires_grad)
    assert "backbone.embed.token.weight" not in names and len(names) == len(set(names))
    assert {tensor.ndim for _, tensor in decay.parameters} == {2} and {
        tensor.ndim for _, tensor in rest.parameters
    } == {1}
    assert (decay.weight_decay_scale, rest.weight_decay_scale) == (1.0, 0.0)
    assert learner.penalties() == {} and learner.on_step(1) is None


def test_dropout_keys_exist_in_training_and_depend_on_the_example():
    learner = Plain(None, build(BertConfig(**SIZES), 0), None, 0)
    assert learner.eval().dropout_rng(batch_of(), 1) is None
    learner.train()
    keys = learner.dropout_rng(batch_of(), 1).keys_T
    assert torch.equal(keys[3:], learner.dropout_rng(batch_of((6,), (9,)), 1).keys_T)
    assert not torch.equal(keys, learner.dropout_rng(batch_of(), 2).keys_T)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
def test_gradient_with_dropout_does_not_depend_on_micro_batches(attention_dropout):
    learner = Plain(None, build(BertConfig(**SIZES, attention_dropout=attention_dropout, dropout=0.2), 0), None, 0)
    learner.add_head("sst2", SequenceHead(16, 2, 0.3))
    learner.double().train()

    def step(batch):
        rng = learner.dropout_rng(batch, 7)
        hidden = learner.backbone(batch.inputs, rng)
        rows = rng.rows(summary_index(batch.inputs, "first"))
        learner.heads["sst2"](summary(hidden, batch.inputs, "first"), rows).square().sum().backward()

    step(batch_of((3, 6, 20), (4, 9, 2)))
    whole = {name: parameter.grad.clone() for name, parameter in learner.named_parameters()}
    learner.zero_grad()
    tokens = torch.arange(29) + 1
    for part, example in ((tokens[9:], 2), (tokens[:3], 4), (tokens[3:9], 9)):
        packed = Packed(part, (len(part),))
        step(Batch(packed, {}, torch.tensor([example]), torch.zeros(1, dtype=torch.int32)))
    for name, parameter in learner.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=0, atol=1e-12)
