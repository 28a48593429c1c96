"""Adapters: neutral at the start, trained alone, and applied in packed, single and cached forwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tuning_fixtures import (
    FAMILIES,
    LENGTHS,
    TASK,
    batch_for,
    first_conflict,
    hashes,
    model_config,
    outputs_of,
    side,
    train,
    tuned,
    tuning_config,
)

from lmtool.config.registry import build
from lmtool.costs.memory_of_run import trainable_by_role
from lmtool.errors import UserError
from lmtool.models.configs import BertConfig
from lmtool.nn.dropout import TokenRng, token_keys
from lmtool.nn.stack import TapPoint
from lmtool.tuning.configs.adapter import TrainedAdapter
from lmtool.types import Packed
from lmtool.weights.assemble import assemble
from lmtool.weights.reading import Weights
from tests.models.test_taps import Changed

READ = torch.tensor([0, 3, 5, 6, 16, 18, 24])
HEAD = f"heads.{TASK.name}."
PLACEMENTS = ("houlsby", "pfeiffer", "parallel")
PAIRS = pytest.mark.parametrize(("family", "placement"), [(family, name) for family in FAMILIES for name in PLACEMENTS])


TRAINED = TrainedAdapter(
    path="runs/a", placement="parallel", bottleneck=3, activation="relu", scale=4.0, hidden_size=16, num_layers=2
)


def adapter_learner(family: str, **fields: Any) -> Any:
    return tuned(model_config(family), {"name": "adapter", "bottleneck": 3, **fields})


def random_adapter_learner(family: str, **fields: Any) -> Any:
    """A learner with random adapters, in double precision."""
    learner, generator = adapter_learner(family, **fields).double(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if name in learner.added_names:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return learner


def hidden(learner: Any, **more: Any) -> torch.Tensor:
    """Hidden states of a batch, with dropout."""
    examples, sides = torch.arange(len(LENGTHS)), [side(), side(seed=2)]
    rng = TokenRng(*[token_keys(0, 1, examples, examples * 0, tokens) for tokens in sides])
    outputs = {"outputs": sides[1]} if learner.backbone.config.architecture == "encoder_decoder" else {}
    return learner.backbone(sides[0], rng, **outputs, **more)


@PAIRS
def test_adapters_start_neutral_and_train_alone(family: str, placement: str) -> None:
    config = model_config(family)
    plain, learner = tuned(config, None), adapter_learner(family, placement=placement)
    assert torch.equal(outputs_of(learner), outputs_of(plain))
    before = hashes(learner)
    assert {name: before[name] for name in hashes(plain)} == hashes(plain)
    assert learner.added_names == {name for name in before if "_adapter." in name}
    layers = {"albert": 1, "t5": 4, "bart": 4}.get(family, 2)
    assert len(learner.added_names) == 4 * layers * (2 if placement == "houlsby" else 1)
    norms = {name for name in hashes(plain) if ".norm" in name and "embed" not in name or ".final_norm" in name}
    optimizer = train(learner)
    moved = {name for name, sha in hashes(learner).items() if sha != before[name]}
    learns = {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
    assert norms and learns == learner.added_names | {name for name in before if name.startswith(HEAD)} | (
        norms if placement == "houlsby" else set()
    )
    # Adam changes every parameter with a gradient; those after a ReLU may have none.
    assert moved <= learns and {name for name in learns - moved} <= {name for name in learns if ".down." in name}
    assert learner.tuning.delta_names(learner) == learns
    assert {id(parameter) for parameter in optimizer.state} <= {
        id(parameter) for parameter in learner.parameters() if parameter.requires_grad
    }
    assert not torch.equal(outputs_of(learner), outputs_of(plain))


BUILT = {
    "houlsby": {"name": "adapter", "placement": "houlsby", "bottleneck": 3, "scale": "learned"},
    "stacked": {"name": "adapter", "placement": "parallel", "stack_on": [TRAINED.model_dump()]},
    "fused": {"name": "adapter_fusion", "adapters": [TRAINED.model_dump()] * 2},
}


@pytest.mark.parametrize("fields", BUILT.values(), ids=BUILT)
@pytest.mark.parametrize("family", FAMILIES)
def test_reassembled_model_has_same_outputs(family: str, fields: dict[str, Any]) -> None:
    config = model_config(family)
    learner = tuned(config, fields)
    frozen = {name for name, parameter in learner.named_parameters() if not parameter.requires_grad}
    before = hashes(learner)
    train(learner)
    assert {name for name, sha in hashes(learner).items() if sha != before[name]}.isdisjoint(frozen)
    assert any("_adapter." in name for name in frozen) == (fields["name"] == "adapter_fusion" or "stack_on" in fields)
    blueprint = SimpleNamespace(
        model=config, seed=0, learner_config=build(TASK), tuning_config=tuning_config(**fields), exits=()
    )
    tensors = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    again, _ = assemble(blueprint, None, trained=Weights(tensors, Path("here"), "here"))
    assert torch.equal(outputs_of(again), outputs_of(learner)) and again.added_names == learner.added_names


@PAIRS
def test_selected_tokens_and_taps_match_full_forward(family: str, placement: str) -> None:
    learner = random_adapter_learner(family, placement=placement)
    whole = hidden(learner)
    for tap in (None, Changed(TapPoint(1), lambda x_TH: x_TH)):
        torch.testing.assert_close(hidden(learner, read_M=READ, tap=tap), whole[READ], rtol=1e-10, atol=1e-12)
    learner.eval()
    together = learner.outputs(batch_for(learner), 0)
    torch.testing.assert_close(learner.outputs(batch_for(learner, [2, 0]), 0), together[[2, 0]], rtol=1e-10, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["gpt", "t5", "bart"])
def test_cached_decoding_matches_full_forward(family: str, placement: str) -> None:
    backbone, texts = random_adapter_learner(family, placement=placement).backbone, side()
    cache = backbone.new_cache(len(LENGTHS), max(LENGTHS))
    if family == "gpt":
        whole, step = backbone(texts), lambda tokens: backbone(tokens, cache=cache)
    else:
        encoded = backbone.encode(side(seed=2))
        whole = backbone(side(seed=2), outputs=texts)
        step = lambda tokens: backbone.decode(encoded, tokens, cache=cache)  # noqa: E731
    shortest = min(LENGTHS)
    starts = torch.tensor(texts.starts)
    for at in range(shortest):
        states = step(Packed(texts.tokens[starts + at], (1,) * len(LENGTHS)))
        torch.testing.assert_close(states, whole[starts + at], rtol=1e-9, atol=1e-11)


def test_adapter_settings_set_width_scale_and_init() -> None:
    def first(**fields: Any) -> Any:
        return tuned(model_config("bert"), {"name": "adapter", **fields}).backbone.layers[0].ffn_adapter

    slots = {placement: first(placement=placement) for placement in PLACEMENTS}
    assert {name: (len(slot.down.weight), slot.scale, slot.activation.__name__) for name, slot in slots.items()} == {
        "houlsby": (64, 1.0, "gelu"), "pfeiffer": (1, 1.0, "relu"), "parallel": (8, 4.0, "relu"),
    }  # fmt: skip
    assert not any(slot.up.weight.any() for slot in slots.values())
    assert len(first(reduction=2.5).down.weight) == 6
    drawn = first(bottleneck=5, scale="learned", init_std=0.01, activation="gelu")
    assert drawn.scale.item() == 1.0 and drawn.scale.requires_grad and drawn.activation.__name__ == "gelu"
    assert 0 < drawn.up.weight.abs().max() <= 0.02 and 0 < drawn.down.weight.abs().max() <= 0.02
    near = outputs_of(adapter_learner("bert", init_std=0.01)) - outputs_of(tuned(model_config("bert"), None))
    assert 0 < near.abs().max() < 1e-3
    assert torch.equal(
        outputs_of(adapter_learner("bert", init_std=0.01)), outputs_of(adapter_learner("bert", init_std=0.01))
    )


def test_fusion_trains_only_attention_over_adapters() -> None:
    fields = {"name": "adapter_fusion", "adapters": [TRAINED.model_dump()] * 2}
    learner = tuned(model_config("bert"), fields)
    learns = {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
    maps = ("query.weight", "query.bias", "key.weight", "key.bias", "value.weight")
    own = {f"backbone.layers.{layer}.ffn_adapter.{name}" for layer in range(2) for name in maps}
    assert learns == own | {name for name, _ in learner.named_parameters() if name.startswith(HEAD)}
    assert learner.tuning.delta_names(learner) == learns | learner.added_names and len(learner.added_names) == 2 * (
        5 + 2 * 4
    )
    (penalty,) = learner.penalties().values()
    assert penalty.item() == pytest.approx(0.01 * 2 * 16 * 15 * 1e-12, rel=1e-3)
    with torch.no_grad():
        learner.backbone.layers[0].ffn_adapter.value.weight[0, 0] += 2.0
    assert learner.penalties()["value_penalty"].item() == pytest.approx(0.04)
    silent = tuned(model_config("bert"), {**fields, "value_penalty": 0.0})
    assert silent.penalties() == {}


def test_incompatible_adapter_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="bottleneck=4 and reduction=2 both"):
        tuning_config(name="adapter", bottleneck=4, reduction=2.0)
    model, wide = model_config("bert"), TRAINED.model_copy(update={"hidden_size": 32})
    other, again = (TRAINED.model_copy(update={"path": path}) for path in ("runs/other", f"./{TRAINED.path}/"))
    for name, fields, expected_message in (
        ("adapter", {"reduction": 100.0}, "hidden_size=16 is smaller, so an adapter would have no width"),
        ("adapter", {"stack_on": [TRAINED]}, "placement=parallel instead of pfeiffer"),
        ("adapter_fusion", {}, "names 0 runs; a fusion mixes 2 or more"),
        ("adapter_fusion", {"adapters": [TRAINED]}, "names 1 run;"),
        ("adapter_fusion", {"adapters": [wide, other]}, "hidden_size=32, but this model has 16"),
        ("adapter_fusion", {"adapters": [TRAINED, other, again]}, f"a run more than once ({TRAINED.path}, ./"),
    ):
        data = {
            key: [part.model_dump() for part in value] if isinstance(value, list) else value
            for key, value in fields.items()
        }
        problem = first_conflict(tuning_config(name=name, **data), model, TASK)
        assert expected_message in problem.message and problem.hint
    two = [adapter.model_dump() for adapter in (TRAINED, other)]
    assert first_conflict(tuning_config(name="adapter_fusion", adapters=two), model, TASK) is None
    learner = tuned(model, None)
    learner.backbone.layers[1] = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="no empty slot for an adapter"):
        learner.tune(build(tuning_config(name="adapter")))


def test_fusion_parameter_count_matches_formula() -> None:
    """Per layer, two linear maps with biases and one without; the fused adapters are frozen."""
    below = {**TRAINED.model_dump(), "placement": "pfeiffer", "bottleneck": 48, "hidden_size": 768, "num_layers": 12}
    with torch.device("meta"):
        learner = tuned(BertConfig(), {"name": "adapter_fusion", "adapters": [below] * 2})
    counts = trainable_by_role(learner)["method"]
    assert counts == {"trainable": 12 * (3 * 768 * 768 + 2 * 768), "total": 21_252_096 + 2 * 894_528}
