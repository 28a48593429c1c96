"""Encoder-decoders: cached decoding is the full forward, whatever the positions, and answers are what they say."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.generation.sampling import answer
from lmtool.heads.lm import lm_head
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config, Transformer2017Config
from lmtool.streams import key
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


def made(config):
    model = build(config, 0).eval()
    head = lm_head(model)
    model.initialize(head, 0, "heads.lm.")
    return model, head


def drawn(lengths: tuple[int, ...], seed: int) -> Packed:
    return Packed(torch.randint(97, (sum(lengths),), generator=torch.Generator().manual_seed(seed)), lengths)


def with_positions(config, kind: str):
    return type(config).model_validate({**config.model_dump(), "positions": {"name": kind}})


@torch.no_grad()
@pytest.mark.parametrize("kind", ["t5", "learned", "sinusoidal", "shaw", "rotary", "alibi", "none"])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_cached_chunks_equal_the_full_forward(family, kind):
    model, _ = made(with_positions(FAMILIES[family], kind))
    inputs, outputs = drawn((7, 33, 18), 0), drawn((30, 17, 24), 1)
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


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_plain_loop(family):
    """Drawn, since an untrained model's best token is the last one again."""
    model, head = made(FAMILIES[family])
    inputs, ids, generator = drawn((12,), 2), [START], torch.Generator().manual_seed(key(5, "sample") & (2**63 - 1))
    for _ in range(20):
        hidden = model(inputs, None, Packed(torch.tensor(ids), (len(ids),)))
        best = head(hidden[-1:], model.embed.token.weight)[0].topk(97)
        ids.append(int(best.indices[torch.multinomial((best.values / 3).softmax(-1), 1, generator=generator)]))
    assert answer(model, head, inputs.tokens.tolist(), START, 20, temperature=3.0, seed=5) == ids[1:]
    assert len(set(ids)) > 3


def test_the_encoder_runs_once():
    model, head = made(FAMILIES["bart"])
    calls = []
    model.encoder.layers[0].register_forward_hook(lambda *_: calls.append("encoder"))
    model.decoder.layers[0].cross_attn.k_proj.register_forward_hook(lambda *_: calls.append("keys"))
    answer(model, head, [3, 4, 5], START, 8)
    assert sorted(calls) == ["encoder", "keys"]


def test_seed_stop_and_limit():
    model, head = made(FAMILIES["bart"])
    texts = [answer(model, head, [3, 4], START, 25, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    greedy = answer(model, head, [3, 4], START, 25, temperature=0.0)
    assert answer(model, head, [3, 4], START, 25, top_k=1) == greedy
    stopped = answer(model, head, [3, 4], START, 25, temperature=0.0, stop={greedy[4]})
    assert stopped == greedy[: greedy.index(greedy[4])]
    assert len(answer(model, head, [3, 4], START, 100)) == 40


def test_mode_is_restored_and_an_empty_input_is_refused():
    model, head = made(FAMILIES["transformer"])
    model.train()
    answer(model, head, [1], START, 2)
    assert model.training
    with pytest.raises(UserError, match="no tokens"):
        answer(model, head, [], START, 5)
