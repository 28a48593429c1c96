"""Compiled regions: what a model computes with them is what it computes without, and one graph serves all sizes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.utils import counters

from lmtool.config.tables import build, entries
from lmtool.nn.dropout import TokenDraws, token_keys
from lmtool.training.compiling import compiled
from lmtool.types import Packed
from tests.models.test_read import FAMILIES, SIZES

BATCHES = ((5, 1, 12, 7), (3, 3), (30,), (2, 9, 4, 4, 11), (1, 2))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def texts(lengths, seed):
    tokens = torch.randint(0, 40, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return Packed(tokens, lengths, {"segment": torch.zeros_like(tokens)})


def model_of(family, **fields):
    config = next(entry.config for entry in entries("model") if entry.name == family)(**SIZES | fields)
    return build(config, 0).train()


def outcome(model, lengths, number, device_draws=False):
    """Hidden states of some tokens, and all gradients."""
    sides = [texts(lengths, number)]
    if model.config.architecture == "encoder_decoder":
        sides.append(texts(tuple(length % 7 + 1 for length in lengths), number + 50))
    examples = torch.arange(len(lengths))
    keys = [token_keys(0, number, examples, 0 * examples, side, at > 0) for at, side in enumerate(sides)]
    draws = TokenDraws(keys[0], keys[-1])
    model.zero_grad()
    read_M = torch.arange(0, len(sides[-1].tokens), 2)
    hidden_MH = model(sides[0], draws, *sides[1:], read_M=read_M)
    if hidden_MH.requires_grad:
        hidden_MH.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"hidden": hidden_MH.detach()} | gradients


def assert_same(model, backend="aot_eager", tolerance=1e-6, warm=1):
    """Compiled as eager, over batches of all sizes, as a share of the largest number; the first `warm` make the graphs.
    Returns how many."""
    counters.clear()
    plain = [outcome(model, lengths, number) for number, lengths in enumerate(BATCHES)]
    assert not counters["stats"]["unique_graphs"]
    with compiled(True, backend):
        for number, lengths in enumerate(BATCHES):
            with torch._dynamo.config.patch(error_on_recompile=True) if number >= warm else nullcontext():
                own = outcome(model, lengths, number)
            assert own.keys() == plain[number].keys() and own["hidden"].abs().max() > 0.1
            for name, wanted in plain[number].items():
                torch.testing.assert_close(own[name], wanted, rtol=0, atol=tolerance * (1 + wanted.abs().max().item()))
    return counters["stats"]["unique_graphs"]


# A layer that reads an encoder has a region more.
@pytest.mark.parametrize(
    "family",
    [family if family == "gpt" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
)
def test_one_graph_a_region_serves_all_layers_and_sizes(family):
    graphs = 4 if family in ("bart", "t5", "transformer") else 2
    assert assert_same(model_of(family)) == graphs
