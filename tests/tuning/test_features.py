"""tuning=head over several layers: scalar mixes and concatenations match their definitions, with every head kind."""

from __future__ import annotations

import json

import pytest
import torch
from tuning_fixtures import (
    FAMILIES,
    TASK,
    batch_for,
    first_conflict,
    model_config,
    outputs_of,
    side,
    train,
    tuned,
    tuning_config,
)

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.models.heads.features import LAYERS
from lmtool.nn.stack import Tap
from lmtool.tasks.configs.mixture import MixtureTaskConfig
from lmtool.tasks.configs.texts import ExtractiveQaConfig, SpanClassificationConfig, TokenClassificationConfig

LABELS = ("no", "yes")
WORDS = TokenClassificationConfig(labels=LABELS, scheme="none", metrics=("accuracy",), metric="accuracy")


class RecordingTap(Tap):
    def __init__(self):
        self.states = {"inputs": [], "outputs": []}

    def __call__(self, place, x_TH):
        self.states[place.side].append(x_TH)
        return x_TH


def states_of(learner, batch):
    """Hidden states of every layer of the head's side, the last one after the final norm."""
    tap, backbone = RecordingTap(), learner.backbone
    if batch.outputs is None:
        last = backbone(batch.inputs, tap=tap)
    else:
        last = backbone(batch.inputs, None, batch.outputs, tap=tap)
    return [*tap.states[learner.head_side][:-1], last]


@pytest.mark.parametrize("family", FAMILIES)
def test_scalar_mix_matches_elmo(family):
    learner = tuned(model_config(family), {"name": "head", "layers": "scalar_mix"}).eval()
    batch = batch_for(learner)
    mix = learner.heads[LAYERS]
    assert learner.added_names == {"heads.layers.weight", "heads.layers.gamma"} and len(mix.weight) == 3
    with torch.no_grad():
        states = states_of(learner, batch)
        # Equal weights at the start.
        torch.testing.assert_close(learner.hidden_of(batch, None), torch.stack(states).mean(0))
        mix.weight.copy_(torch.tensor([0.5, -1.0, 2.0])), mix.gamma.fill_(1.7)
        fractions = torch.tensor([0.5, -1.0, 2.0]).softmax(0)
        expected = 1.7 * sum(share * state for share, state in zip(fractions, states, strict=True))
        read = torch.tensor([0, 5, 8])
        torch.testing.assert_close(learner.hidden_of(batch, None, read), expected[read])


@pytest.mark.parametrize("family", FAMILIES)
def test_concat_last_4_matches_concatenated_layers(family):
    learner = tuned(model_config(family, num_layers=5), {"name": "head", "layers": "concat_last_4"}).eval()
    batch = batch_for(learner)
    with torch.no_grad():
        torch.testing.assert_close(learner.hidden_of(batch, None), torch.cat(states_of(learner, batch)[-4:], -1))
    assert outputs_of(learner).shape == (4, 2)


@pytest.mark.parametrize("layers", ["last", "scalar_mix", "concat_last_4"])
def test_backbone_is_frozen_without_dropout(layers):
    """The backbone has no dropout and no gradient, and its weights are unchanged."""
    learner = tuned(model_config("bert", num_layers=4), {"name": "head", "layers": layers})
    batch = batch_for(learner)
    learner.train()
    rng = learner.dropout_rng(batch, 1)
    assert torch.equal(learner.hidden_of(batch, rng), learner.hidden_of(batch, None))
    assert learner.hidden_of(batch, rng).requires_grad == (layers == "scalar_mix")
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    train(learner)
    moved = {name for name, tensor in learner.state_dict().items() if not torch.equal(tensor, before[name])}
    expected = {name for name in before if name.startswith("heads.") and (layers != "last" or "pooler" not in name)}
    assert moved == expected


@pytest.mark.parametrize(
    "task",
    [
        WORDS,
        ExtractiveQaConfig(),
        SpanClassificationConfig(text=("text", "span1"), labels=LABELS),
        TASK.model_copy(update={"pooling": "mean", "head_layers": 2}),
        TASK.model_copy(update={"pooling": "max"}),
    ],
    ids=lambda task: f"{task.kind}-{getattr(task, 'pooling', '')}",
)
def test_every_head_kind_accepts_concatenated_layers(task):
    learner = tuned(model_config("bert", num_layers=4), {"name": "head", "layers": "concat_last_4"}, None, task)
    reads = next(part for part in learner.heads[learner.term].modules() if isinstance(part, torch.nn.Linear))
    assert reads.in_features % 64 == 0
    hidden = learner.hidden(side())
    assert hidden.shape == (27, 64)


def test_t5_tagging_mixes_encoder_layers():
    learner = tuned(model_config("t5", decoder_layers=3), {"name": "head", "layers": "scalar_mix"}, None, WORDS)
    assert len(learner.heads[LAYERS].weight) == 3  # the embedding and two encoder layers
    assert learner.hidden(side()).shape == (27, 16)


def test_scalar_mix_cannot_be_merged():
    learner = tuned(model_config("bert"), {"name": "head", "layers": "scalar_mix"})
    with pytest.raises(UserError, match="the head reads several layers"):
        learner.tuning.merge(learner)


def test_gpt1_tokens_keep_width_under_concatenation():
    config = model_config("gpt1", num_layers=4)
    learner = tuned(config, {"name": "head", "layers": "concat_last_4"})
    assert learner.heads[TASK.name].tokens.weight.shape[1] == 16
    assert learner.heads[TASK.name].output.in_features == 64
    assert build(TASK) is not None


def member(name, **fields):
    section = {"kind": "classification", "name": name, "text": ["text"], "label": "label", "labels": list(LABELS)}
    return {**section, **fields}


def mixture(*members):
    rows = [8] * len(members)
    return MixtureTaskConfig.model_validate_json(json.dumps({"members": members, "rows": rows}))


@pytest.mark.parametrize("layers", ["scalar_mix", "concat_last_4"])
def test_mixture_members_share_layer_mix(layers):
    task = mixture(member("first"), member("second"))
    learner = tuned(model_config("bert", num_layers=4), {"name": "head", "layers": layers}, None, task)
    first, second = (part for _, part in learner.named_members())
    assert first.heads[LAYERS] is second.heads[LAYERS] is learner.heads[LAYERS]
    whole = first.hidden(side())
    assert whole.shape == (27, 64 if layers == "concat_last_4" else 16)
    assert torch.equal(second.hidden(side()), whole)
    names = {name for name, _ in learner.named_parameters() if LAYERS + "." in name and "heads." in name}
    assert names == ({"heads.layers.weight", "heads.layers.gamma"} if layers == "scalar_mix" else set())


def test_members_on_different_stacks_are_refused():
    words = {**WORDS.model_dump(mode="json"), "name": "words"}
    task, t5 = mixture(member("first"), words), model_config("t5")
    for tuning in ({"name": "head", "layers": "scalar_mix"}, {"name": "last_n"}):
        assert "different stacks" in first_conflict(tuning_config(**tuning), t5, task).message
        assert first_conflict(tuning_config(**tuning), t5, mixture(words, {**words, "name": "more"})) is None
    written = mixture(member("first"), member("second", head="text_to_text"))
    assert (
        "reads only the last layer"
        in first_conflict(tuning_config(name="head", layers="scalar_mix"), t5, written).message
    )
    assert first_conflict(tuning_config(name="head"), t5, written) is None
