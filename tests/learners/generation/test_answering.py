"""Generation by encoder-decoders: cached decoding equals the full forward pass for every kind of positions."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.generate import GenerativeModel
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config, Transformer2017Config
from lmtool.models.heads.lm import lm_head
from lmtool.types import Packed

SIZES = {"vocab_size": 97, "num_layers": 2, "decoder_layers": 3, "hidden_size": 36, "num_heads": 3}
SIZES |= {"feedforward_size": 52, "max_positions": 40}
FAMILIES = {
    "t5": T5Config(**SIZES, head_size=10),
    "t5_v11": T5Config(**SIZES, head_size=10, feedforward="gated_gelu", tied=False),
    "bart": BartConfig(**SIZES, initializer_std=0.15),
    "transformer": Transformer2017Config(**SIZES),
}
START = 0


def build_model(config):
    model = build(config, 0).eval()
    head = lm_head(model)
    model.initialize(head, 0, "heads.lm.")
    return model, head


def random_tokens(lengths: tuple[int, ...], seed: int) -> Packed:
    return Packed(torch.randint(97, (sum(lengths),), generator=torch.Generator().manual_seed(seed)), lengths)


def with_positions(config, kind: str):
    return type(config).model_validate({**config.model_dump(), "positions": {"name": kind}})


@torch.no_grad()
@pytest.mark.parametrize("kind", ["t5", "learned", "sinusoidal", "shaw", "rotary", "alibi", "none"])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_cached_chunks_match_the_full_forward_pass(family, kind):
    model, _ = build_model(with_positions(FAMILIES[family], kind))
    inputs, outputs = random_tokens((7, 33, 18), 0), random_tokens((30, 17, 24), 1)
    wanted = model(inputs, None, outputs).split(outputs.lengths)
    tokens = outputs.tokens.split(outputs.lengths)
    state, cache, at = model.encode(inputs), model.new_cache(3, 40), [0, 0, 0]
    for step in ((5, 0, 12), (1, 1, 1), (20, 15, 1), (1, 1, 0), (3, 0, 10)):
        parts = [tokens[n][at[n] : at[n] + step[n]] for n in range(3)]
        got = model.decode(state, Packed(torch.cat(parts), step), cache=cache).split(step)
        for n in range(3):
            torch.testing.assert_close(got[n], wanted[n][at[n] : at[n] + step[n]], rtol=0, atol=1e-5)
            at[n] += step[n]
    assert tuple(cache.lengths) == outputs.lengths


def answers(model, head, inputs, count, seed=0, ends=(), **settings):
    config = GenerationConfig(max_new_tokens=count, **settings)
    return GenerativeModel(model, head, ends, START).generate(inputs, config, seed)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_matches_a_plain_loop(family):
    """Without repeated tokens, because the best token of an untrained model is the previous one."""
    model, head = build_model(FAMILIES[family])
    inputs, ids = random_tokens((12,), 2), [START]
    for _ in range(20):
        hidden = model(inputs, None, Packed(torch.tensor(ids), (len(ids),)))
        logits = head(hidden[-1:], model.embed.token.weight)[0]
        logits[ids] = -torch.inf
        ids.append(int(logits.argmax()))
    assert answers(model, head, [inputs.tokens.tolist(), [4, 5]], 20, no_repeat_ngram=1)[0] == ids[1:]


def test_encoder_runs_once_per_generation():
    model, head = build_model(FAMILIES["bart"])
    calls = []
    model.encoder.layers[0].register_forward_hook(lambda *_: calls.append("encoder"))
    model.decoder.layers[0].cross_attn.k_proj.register_forward_hook(lambda *_: calls.append("keys"))
    answers(model, head, [[3, 4, 5], [6]], 8)
    assert sorted(calls) == ["encoder", "keys"]


def test_generation_stops_at_max_positions_and_restores_the_mode():
    model, head = build_model(FAMILIES["bart"])
    model.train()
    assert len(answers(model, head, [[3, 4]], 100)[0]) == 40
    assert model.training
    with pytest.raises(UserError, match="no tokens"):
        answers(model, head, [[]], 5)
