"""Adapters start as the model they stand in, learn alone, and are what was published in number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmtool.config.tables import build, entries
from lmtool.errors import UserError
from lmtool.heads.sequence import SequenceHead
from lmtool.learners.base import BaseLearner
from lmtool.models.configs import BertConfig
from lmtool.nn.dropout import TokenDraws, token_keys
from lmtool.nn.stack import Place
from lmtool.tuning.configs import AdapterConfig, AdapterFusionConfig
from lmtool.tuning.configs.adapter import TrainedAdapter
from tests.models.test_read import LENGTHS, READ, SIZES, packed
from tests.models.test_taps import Changed

PLACEMENTS = ("houlsby", "pfeiffer", "parallel")
# Post-norm, shared layers, pre-norm, and both stacks of either kind of norm.
FAMILIES = ("bert", "albert", "gpt", "t5", "bart")


class Plain(BaseLearner):
    counts = examples = score = predictors = None
    weights = {"task": 1.0}

    def forward(self, batch, step):
        return self.backbone(batch)


def learner_of(family: str, **fields: Any) -> Plain:
    config = next(entry.config for entry in entries("model") if entry.name == family)(**SIZES | fields)
    learner = Plain(None, build(config, 0).double(), None, 3)
    learner.add_head("task", SequenceHead(config.hidden_size, 2, 0.1).double())
    return learner


def hidden(learner: Plain, train: bool = False, **more: Any) -> torch.Tensor:
    """Of a batch, with dropout where it trains."""
    examples = torch.arange(len(LENGTHS))
    sides = [packed(1), packed(2)]
    draws = TokenDraws(*[token_keys(0, 1, examples, examples * 0, side) for side in sides]) if train else None
    outputs = {"outputs": sides[1]} if learner.backbone.config.architecture == "encoder_decoder" else {}
    return learner.backbone(sides[0], draws, **outputs, **more)


def tuned(family: str, **fields: Any) -> Plain:
    learner = learner_of(family)
    learner.tune(build(AdapterConfig(bottleneck=3, **fields)), {"heads.task"})
    return learner.double()


def disturb(learner: Plain, match: str = "_adapter") -> None:
    """Adapters that do something."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if match in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_start_as_the_model_and_learn_alone(family: str, placement: str) -> None:
    base, learner = learner_of(family), tuned(family, placement=placement)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    assert all(torch.equal(learner.state_dict()[name], tensor) for name, tensor in before.items())
    with torch.no_grad():  # torch's attention and norms round otherwise where something learns
        assert all(torch.equal(hidden(base, train), hidden(learner, train)) for train in (False, True))
    added = {name for name, _ in learner.named_parameters() if "_adapter." in name}
    assert learner.added == added and added
    layers = learner.backbone.config.num_layers
    count = {"albert": 1, "t5": 2 * layers, "bart": 2 * layers}.get(family, layers)
    assert len(added) == 4 * count * (2 if placement == "houlsby" else 1)
    learns = {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
    norms = {name for name in before if ".norm" in name and "embed" not in name or "final_norm" in name}
    assert norms
    assert learns == added | {"heads.task.output.weight", "heads.task.output.bias"} | (
        norms if placement == "houlsby" else set()
    )
    disturb(learner)
    assert not torch.allclose(hidden(base), hidden(learner))
    hidden(learner, True).square().sum().backward()
    for name, parameter in learner.named_parameters():
        in_backbone = name in learns and name.startswith("backbone.")
        assert (parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)) == in_backbone, name


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_are_read_alone_and_taps(family: str, placement: str) -> None:
    learner = tuned(family, placement=placement)
    disturb(learner)
    whole = hidden(learner, True)
    torch.testing.assert_close(hidden(learner, True, read_M=READ), whole[READ], rtol=1e-10, atol=1e-12)
    tap = Changed(Place(1), lambda x_TH: x_TH)
    torch.testing.assert_close(hidden(learner, True, read_M=READ, tap=tap), whole[READ], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_generation_with_a_cache(family: str, placement: str) -> None:
    """Tokens written step by step with a cache are those of the whole text read at once."""
    learner = tuned(family, placement=placement)
    disturb(learner)
    backbone, texts = learner.backbone, packed(1)
    whole = hidden(learner)
    if family == "gpt":
        cache = backbone.new_cache(1, LENGTHS[0])
        steps = [backbone(part(texts, at), cache=cache) for at in range(LENGTHS[0])]
    else:
        encoded = backbone.encode(first(texts)).in_rows()
        cache = backbone.new_cache(1, LENGTHS[0])
        steps = [backbone.decode(encoded, part(packed(2), at), cache=cache) for at in range(LENGTHS[0])]
    torch.testing.assert_close(torch.cat(steps), whole[: LENGTHS[0]], rtol=1e-9, atol=1e-11)


def first(texts: Any) -> Any:
    return type(texts)(texts.tokens[: LENGTHS[0]], LENGTHS[:1])


def part(texts: Any, at: int) -> Any:
    return type(texts)(texts.tokens[at : at + 1], (1,))


@pytest.mark.parametrize(
    ("placement", "adapters", "norms"),
    [("houlsby", 2_379_264, 36_864), ("pfeiffer", 894_528, 0), ("parallel", 7_091_712, 0)],
)
def test_published_numbers_at_base_size(placement: str, adapters: int, norms: int) -> None:
    with torch.device("meta"):
        learner = Plain(None, build(BertConfig(), 0), None, 0)
        learner.tune(build(AdapterConfig(placement=placement)), set())
    learns = {name: tensor.numel() for name, tensor in learner.named_parameters() if tensor.requires_grad}
    own = sum(count for name, count in learns.items() if name in learner.added)
    assert (own, sum(learns.values()) - own) == (adapters, norms)


def test_values_of_the_configuration() -> None:
    def shapes(**fields: Any) -> tuple[Any, ...]:
        learner = learner_of("bert")
        learner.tune(build(AdapterConfig(**fields)))
        slot = learner.backbone.layers[0].ffn_adapter
        return len(slot.down.weight), slot.scale, slot.up.weight.abs().sum().item() > 0

    assert shapes(placement="houlsby") == (64, 1.0, False)
    assert shapes() == (1, 1.0, False)
    assert shapes(placement="parallel") == (8, 4.0, False)
    assert shapes(reduction=2.5) == (6, 1.0, False)
    width, scale, drawn = shapes(bottleneck=5, scale="learned", init_std=0.01)
    assert (width, scale.item(), drawn) == (5, 1.0, True) and scale.requires_grad
    learner = tuned("bert", init_std=0.01)
    assert 0 < (hidden(learner) - hidden(learner_of("bert"))).abs().max() < 1e-2
    again = tuned("bert", init_std=0.01)
    assert torch.equal(hidden(again), hidden(learner))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="bottleneck=4 and reduction=2 both"):
        AdapterConfig(bottleneck=4, reduction=2.0)
    misfit = AdapterConfig(reduction=100.0).misfit(BertConfig(**SIZES), None)
    assert misfit.key == "tuning.reduction" and "hidden_size=16" in misfit.message
    trained = TrainedAdapter(
        path="runs/a", placement="parallel", bottleneck=3, activation="relu", scale=4.0, hidden_size=16, num_layers=2
    )
    model = BertConfig(**SIZES)
    assert "placement=parallel, not pfeiffer" in AdapterConfig(stack_on=(trained,)).misfit(model, None).message
    wide = trained.model_copy(update={"hidden_size": 32})
    assert AdapterFusionConfig(adapters=(trained, trained)).misfit(model, None) is None
    for runs, said in (((), "no run;"), ((trained,), "1 run;"), ((wide, trained), "=32, and this one has 16")):
        assert said in AdapterFusionConfig(adapters=runs).misfit(model, None).message
    with pytest.raises(UserError, match="no slot for adapters"):
        learner = learner_of("bert")
        learner.backbone.layers[1] = torch.nn.Linear(2, 2)
        learner.tune(build(AdapterConfig()))
