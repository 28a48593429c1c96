"""Dropout sites of every family: each call in a forward pass has a distinct site, the same in every pass."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.registry import build
from lmtool.nn.dropout import TokenRng, token_keys
from lmtool.types import Packed
from tests.models.test_read import FAMILIES, LENGTHS, config_of, packed


class Recording(TokenRng):
    """A keyed generator that records the site and the side of each call."""

    seen: list[tuple[int, int]]

    def _of(self, other: TokenRng) -> Recording:
        own = Recording(other.keys_T, other._output_keys_T, other._location)
        own.seen = self.seen
        return own

    def at(self, site):
        return self._of(super().at(site))

    def rows(self, index_N):
        return self

    def for_outputs(self):
        return self._of(super().for_outputs())

    def drop(self, x_TH, rate):
        self.seen.append((self._location, int(self.keys_T[0])))
        return x_TH

    def drop_weights(self, weights_RALS, query_RL, rate):
        # One call of attention has several tiles, which share a site.
        if self.seen[-1:] != [(self._location, -1)]:
            self.seen.append((self._location, -1))
        return weights_RALS

    def weight_masks(self, *given):
        self.seen.append((self._location, -1))
        return super().weight_masks(*given)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_dropout_call_has_a_distinct_site(family):
    config = config_of(family)
    backbone = build(config, 0)
    inputs, outputs = packed(1), packed(2) if config.architecture == "encoder_decoder" else None

    def places(tokens: Packed) -> list[tuple[int, int]]:
        examples = torch.arange(len(LENGTHS))
        sides = [token_keys(0, 1, examples, examples * 0, tokens, outputs=side) for side in (False, True)]
        rng = Recording(*sides)
        rng.seen = []
        backbone(*((tokens, rng) if outputs is None else (tokens, rng, outputs)))
        return rng.seen

    seen = places(inputs)
    # The embedding, and the attention and both sublayers of each layer; in ModernBERT the first sublayer only.
    layers = config.num_layers
    least = {"modernbert": 2 * layers, "lstm": 1 + layers, "elmo": 1 + layers, "rnn_attention": 3 + layers}
    assert len(seen) >= least.get(family, 1 + 3 * config.num_layers)
    assert len(set(seen)) == len(seen)
    assert [place for place, _ in places(packed(3))] == [place for place, _ in seen]
