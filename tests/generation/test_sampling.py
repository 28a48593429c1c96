"""Cached decoding is the full forward, and sampling is what it says."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.generation.sampling import generate
from lmtool.heads.lm import LMHead
from lmtool.models.configs import GptConfig
from lmtool.types import Packed


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": 97, "num_layers": 3, "hidden_size": 36, "num_heads": 3, "feedforward_size": 52}
    made = build(GptConfig(**sizes, max_positions=40, initializer_std=0.3), 0)
    return made.eval()


def plain_greedy(model, ids, count):
    ids = list(ids)
    for _ in range(count):
        hidden = model(Packed(torch.tensor(ids), (len(ids),)))
        ids.append(int((hidden[-1] @ model.embed.token.weight.T).argmax()))
    return ids[-count:]


@torch.no_grad()
def test_cached_chunks_equal_the_full_forward(model):
    tokens = torch.randint(97, (3, 30), generator=torch.Generator().manual_seed(0))
    lengths = (30, 17, 24)
    full = model(Packed(torch.cat([row[:n] for row, n in zip(tokens, lengths, strict=True)]), lengths))
    wanted = full.split(lengths)
    cache, at = model.new_cache(3, 40), [0, 0, 0]
    for step in ((5, 0, 12), (1, 1, 1), (20, 15, 1), (1, 1, 0), (3, 0, 10)):
        parts = [tokens[n, at[n] : at[n] + step[n]] for n in range(3)]
        out = model(Packed(torch.cat(parts), step), cache=cache).split(step)
        for n in range(3):
            torch.testing.assert_close(out[n], wanted[n][at[n] : at[n] + step[n]], rtol=0, atol=1e-5)
            at[n] += step[n]
    assert tuple(cache.lengths) == lengths


def test_greedy_equals_the_plain_loop(model):
    prompt = [3, 50, 7]
    assert generate(model, LMHead(), prompt, 20, temperature=0.0) == plain_greedy(model, prompt, 20)


def test_seed_decides_the_text(model):
    texts = [generate(model, LMHead(), [3], 25, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_one_is_greedy(model):
    assert generate(model, LMHead(), [3, 4], 12, top_k=1) == generate(model, LMHead(), [3, 4], 12, temperature=0.0)


def test_draws_follow_the_distribution(model):
    logits = model(Packed(torch.tensor([5]), (1,)))[0] @ model.embed.token.weight.T
    best = logits.topk(3)
    wanted = (best.values / 4.0).softmax(-1)
    drawn = [generate(model, LMHead(), [5], 1, temperature=4.0, top_k=3, seed=seed)[0] for seed in range(400)]
    shares = torch.tensor([drawn.count(int(one)) / 400 for one in best.indices])
    assert sum(shares) == 1 and (shares - wanted).abs().max() < 4 * 0.5 / 20


def test_it_stops_at_a_stop_token(model):
    text = generate(model, LMHead(), [3, 4], 12, temperature=0.0)
    assert generate(model, LMHead(), [3, 4], 12, temperature=0.0, stop={text[4]}) == text[: text.index(text[4])]


def test_it_goes_on_beyond_the_window(model):
    assert len(generate(model, LMHead(), list(range(60)), 70, temperature=0.0)) == 70


def test_mode_is_restored_and_dropout_stays_out(model):
    model.train()
    generate(model, LMHead(), [1], 2)
    assert model.training
    model.eval()


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(UserError, match="no tokens"):
        generate(model, LMHead(), [], 5)
