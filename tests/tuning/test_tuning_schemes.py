"""Gradual unfreezing, L2-SP, mixout and frozen layers on a learner of two layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tuning_fixtures import first_conflict

from lmtool.config.registry import build
from lmtool.models.configs import BertConfig
from lmtool.models.encoder_configs import AlbertConfig
from lmtool.models.encoder_decoder_configs import BartConfig
from lmtool.nn.dropout import matrix_factors
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.training.optimizers import levels, training_groups
from lmtool.tuning.configs.adapter import AdapterConfig
from lmtool.tuning.configs.base import GradualUnfreezingConfig, L2SpConfig, MixoutConfig
from lmtool.tuning.configs.methods import BitFitConfig, FullConfig, Ia3Config, LastLayersConfig, LoraConfig
from lmtool.tuning.schemes import MixedLinear, first_step, mix_weights
from tests.tasks.task_fixtures import SIZES, backbone

HEADS = frozenset({"heads.sst2", "heads.pooler"})


def tuned(new=HEADS, config=None, **fields):
    config = config or FullConfig(**fields)
    task = ClassificationConfig(name="sst2", path="x", labels=("bad", "good"))
    learner = task.learner(backbone(), None, 0).train()
    learner.tune(build(config), new, [build(scheme) for scheme in config.schemes])
    return learner


def learning(learner):
    """The trained levels; each level is trained or frozen as a whole."""
    named = dict(learner.named_parameters())
    kinds_of = {level: {named[name].requires_grad for name in names} for level, names in levels(named).items()}
    assert all(len(kinds) == 1 for kinds in kinds_of.values())
    return [level for level, kinds in kinds_of.items() if kinds == {True}]


ORDER = ["head", "layer 2", "layer 1", "embeddings"]


def test_gradual_unfreezing_follows_epochs():
    learner = tuned(schedule=GradualUnfreezingConfig())
    for scheme in learner.schemes:
        scheme.set_steps_in_epoch(lambda epoch: [3, 2, 4][epoch])  # the fourth is never reached
    expected = {1: 1, 3: 1, 4: 2, 5: 2, 6: 3, 9: 3, 10: 4}
    # In any order, because trained levels are a function of the step.
    for step in (10, 1, 4, 9, 3, 6, 5, 1):
        learner.on_step(step)
        assert learning(learner) == ORDER[: expected[step]]
    learner.on_step(1)
    everything = {name for name, _ in learner.named_parameters()}
    assert learner.trainable_names == everything
    grouped = {
        name for group in tuned(schedule=GradualUnfreezingConfig()).parameter_groups() for name, _ in group.parameters
    }
    assert grouped == everything  # the optimizer has all parameters before the first step


def test_gradual_unfreezing_follows_every_steps():
    learner = tuned(schedule=GradualUnfreezingConfig(every_steps=5), freeze_embeddings=True)
    for step, count in ((5, 1), (6, 2), (10, 2), (11, 3), (100, 3)):
        learner.on_step(step)
        assert learning(learner) == ORDER[:count]
    firsts = {name: first_step(learner, name, 10) for name in learner.trainable_names}
    assert firsts["heads.sst2.output.weight"] == 1 and firsts["backbone.layers.1.norm1.weight"] == 6
    assert firsts["backbone.layers.0.norm1.weight"] is None
    assert not any("embed" in name for name in learner.trainable_names)


@pytest.mark.parametrize(
    ("config", "below_the_head"),
    [
        (LoraConfig(schedule=GradualUnfreezingConfig(every_steps=1)), ORDER[1:3]),
        (Ia3Config(schedule=GradualUnfreezingConfig(every_steps=1)), ORDER[1:3]),
        (AdapterConfig(schedule=GradualUnfreezingConfig(every_steps=1), bottleneck=4), ORDER[1:3]),
        (BitFitConfig(schedule=GradualUnfreezingConfig(every_steps=1)), ORDER[1:]),
        (LastLayersConfig(schedule=GradualUnfreezingConfig(every_steps=1), layers=1), ORDER[1:2]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_gradual_unfreezing_of_methods_starts_at_top(config, below_the_head):
    learner = tuned(config=config)
    by_level = levels(name for name, _ in learner.named_parameters())
    for step in range(1, 6):
        learner.on_step(step)
        learns = {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
        reached = ["head", *below_the_head][:step]
        assert learns == {name for level in reached for name in by_level[level] if name in learner.trainable_names}
    assert {level for level in ORDER if learner.trainable_names & {*by_level[level]}} == {"head", *below_the_head}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ORDER),
        ({"freeze_embeddings": True}, ORDER[:3]),
        ({"freeze_embeddings": True, "freeze_layers": 1}, ORDER[:2]),
        ({"freeze_layers": 2}, ["head", "embeddings"]),
    ],
)
def test_frozen_embeddings_and_layers_are_not_trained(fields, expected):
    assert learning(tuned(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "model", "problem"),
    [
        ({"freeze_layers": 3}, BertConfig(**SIZES), "has 2 layers"),
        ({"freeze_layers": 5}, BartConfig(**SIZES), "has 4 layers"),
        ({"freeze_layers": 1}, AlbertConfig(**SIZES), "one layer, applied at every depth"),
        ({"schedule": GradualUnfreezingConfig()}, AlbertConfig(**SIZES), "one layer, applied at every depth"),
    ],
)
def test_freezing_missing_layers_is_refused(fields, model, problem):
    conflict = first_conflict(FullConfig(**fields), model, None)
    assert problem in conflict.message and conflict.hint.startswith("set tuning")


def test_valid_freezing_is_accepted():
    assert (
        first_conflict(FullConfig(freeze_layers=4, schedule=GradualUnfreezingConfig()), BartConfig(**SIZES), None)
        is None
    )
    assert first_conflict(FullConfig(regularization=MixoutConfig()), AlbertConfig(**SIZES), None) is None


def test_l2_sp_penalizes_distance_from_start():
    learner = tuned(regularization=L2SpConfig(alpha=0.2, beta=0.5))
    named = dict(learner.named_parameters())
    heads = [tensor for name, tensor in named.items() if name.startswith("heads.")]
    penalty = learner.penalties()["l2_sp"]
    penalty.backward()
    assert penalty.item() == pytest.approx(0.25 * sum(tensor.square().sum().item() for tensor in heads))
    for name, tensor in named.items():
        expected = 0.5 * tensor if name.startswith("heads.") else torch.zeros_like(tensor)
        assert torch.equal(tensor.grad, expected), name
    assert {group.weight_decay_scale for group in learner.parameter_groups()} == {0.0}
    with torch.no_grad():
        named["backbone.layers.0.norm1.bias"].add_(3.0)
    moved = learner.penalties()["l2_sp"] - penalty
    assert moved.item() == pytest.approx(0.1 * 9 * SIZES["hidden_size"], rel=1e-4)
    assert learner.state_dict().keys() == tuned().state_dict().keys()


def test_mixout_matches_definition_in_distribution():
    torch.manual_seed(0)
    weight, start = torch.randn(64, 36), torch.randn(64, 36)
    assert torch.equal(mix_weights(weight, start, 0.0, 7), weight)
    assert torch.equal(mix_weights(weight, start, 1.0, 7), start)
    draws = torch.stack([mix_weights(weight, start, 0.7, draw) for draw in range(2000)])
    # A sample is the start, or scaled so that the mean is the weight: a deviation of 1.53 times the distance.
    assert ((draws - start).abs() < 1e-6).float().mean().item() == pytest.approx(0.7, abs=0.002)
    z = (draws.mean(0) - weight) / ((weight - start).abs() * (0.7 / 0.3) ** 0.5 / 2000**0.5)
    assert z.abs().max() < 5 and z.square().mean().item() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(draws[3], mix_weights(weight, start, 0.7, 3)) and not torch.equal(draws[3], draws[4])
    assert not torch.equal(matrix_factors(weight, 3, 0.7)[0], matrix_factors(weight, 3, 0.7)[1])


def test_mixout_mixes_pretrained_weights_in_training():
    learner = tuned(regularization=MixoutConfig(probability=0.5), new=frozenset({"heads.sst2"}))
    maps = {name: part for name, part in learner.named_modules() if isinstance(part, MixedLinear)}
    plain = {name for name, part in learner.named_modules() if type(part) is nn.Linear}
    assert len(maps) == 2 * 6 + 1 and "heads.pooler.dense" in maps and plain == {"heads.sst2.output"}
    assert learner.state_dict().keys() == tuned().state_dict().keys()
    assert [name for name, _ in learner.named_parameters()] == [name for name, _ in tuned().named_parameters()]
    linear = maps["backbone.layers.0.ffn.fc_in"]
    x_TC = torch.randn(3, SIZES["hidden_size"])
    with torch.no_grad():
        linear.weight.add_(torch.randn_like(linear.weight))

    def at(step):
        learner.on_step(step)
        return linear(x_TC)

    assert torch.equal(at(1), at(1)) and not torch.equal(at(1), at(2))
    other = maps["backbone.layers.1.ffn.fc_in"]
    assert linear.draw != other.draw
    at(1).sum().backward()
    factors = matrix_factors(linear.weight, linear.draw, 0.5)
    assert torch.allclose(linear.weight.grad, factors * x_TC.sum(0)) and factors.eq(0).any()
    learner.eval()
    assert torch.equal(linear(x_TC), nn.functional.linear(x_TC, linear.weight, linear.bias))


def test_schemes_are_inactive_for_trained_checkpoint():
    """A trained checkpoint is assembled without its starting weights."""
    learner = tuned(new=None, regularization=MixoutConfig())
    assert not any(isinstance(part, MixedLinear) for part in learner.modules())
    assert tuned(new=None, regularization=L2SpConfig()).penalties() == {}


def test_layer_decay_combines_with_schemes():
    learner = tuned(schedule=GradualUnfreezingConfig(every_steps=2), regularization=L2SpConfig())
    groups = training_groups(learner, 0.5)
    assert sum(len(group.parameters) for group in groups) == len(list(learner.parameters()))
    assert {group.learning_rate_scale for group in groups} == {1.0, 0.5, 0.25, 0.125}
