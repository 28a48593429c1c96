"""Generation by decoders: cached decoding equals the full forward pass, and samples follow the distribution."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.decoding import Decoding
from lmtool.learners.generation.generate import GenerativeModel
from lmtool.models.configs import GptConfig
from lmtool.models.heads.lm import LMHead
from lmtool.types import Packed


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": 97, "num_layers": 3, "hidden_size": 36, "num_heads": 3, "feedforward_size": 52}
    model = build(GptConfig(**sizes, max_positions=40, initializer_std=0.3), 0)
    return model.eval()


def plain_greedy(model, ids, count):
    ids = list(ids)
    for _ in range(count):
        hidden = model(Packed(torch.tensor(ids), (len(ids),)))
        ids.append(int((hidden[-1] @ model.embed.token.weight.T).argmax()))
    return ids[-count:]


@torch.no_grad()
def test_cached_chunks_match_the_full_forward_pass(model):
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


def generate_ids(model, prompt, count, seed=0, ends=(), **settings):
    config = GenerationConfig(max_new_tokens=count, **settings)
    return GenerativeModel(model, LMHead(), ends).generate([prompt], config, seed)[0]


def test_greedy_matches_a_plain_loop(model):
    prompt = [3, 50, 7]
    assert generate_ids(model, prompt, 20) == plain_greedy(model, prompt, 20)


def test_single_candidate_is_greedy_and_seed_changes_samples(model):
    assert generate_ids(model, [5], 15, temperature=2.0, top_k=1) == generate_ids(model, [5], 15)
    assert generate_ids(model, [5], 15, temperature=2.0, top_p=1e-9) == generate_ids(model, [5], 15)
    drawn = [generate_ids(model, [5], 15, seed, temperature=2.0) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.2}, {"top_k": 4, "top_p": 0.7}])
def test_samples_follow_the_truncated_distribution(model, settings):
    """The expected distribution: the top_k best tokens, then the fewest of these that reach top_p."""
    logits = model(Packed(torch.tensor([5]), (1,)))[0] @ model.embed.token.weight.T / 4.0
    best = logits.topk(settings.get("top_k", 97))
    fractions = best.values.softmax(-1).tolist()
    wanted, reached = {}, 0.0
    for token, fraction in zip(best.indices.tolist(), fractions, strict=True):
        if reached < settings.get("top_p", 1.0):
            wanted[token] = fraction
        reached += fraction
    assert 1 < len(wanted) < 97
    config, generative = (
        GenerationConfig(max_new_tokens=1, temperature=4.0, **settings),
        GenerativeModel(model, LMHead()),
    )
    drawn = [new[0] for seed in range(30) for new in generative.generate([[5]] * 10, config, seed)]
    for token in {*wanted, *drawn}:
        assert abs(drawn.count(token) / 300 - wanted[token] / sum(wanted.values())) < 4 * 0.5 / 300**0.5


def test_generation_stops_at_eos_after_min_new_tokens(model):
    tokens = generate_ids(model, [3, 4], 12)
    end = tokens[4]
    assert generate_ids(model, [3, 4], 12, ends={end}) == tokens[: tokens.index(end)]
    assert len(generate_ids(model, [3, 4], 12, ends={end}, min_new_tokens=9)) >= 9


def test_no_repeat_ngram_prevents_repeated_pairs(model):
    tokens = [3, 4, *generate_ids(model, [3, 4], 30, no_repeat_ngram=2)]
    pairs = list(zip(tokens, tokens[1:], strict=False))
    assert len(set(pairs)) == len(pairs)


def test_generation_stops_at_max_positions(model):
    assert len(generate_ids(model, list(range(30)), 70)) == 10
    assert len(generate_ids(model, list(range(30)), 70, beams=2)) == 10
    with pytest.raises(UserError, match="40 tokens, more than the maximum of 39"):
        generate_ids(model, list(range(40)), 1)


def test_generation_restores_training_mode(model):
    model.train()
    generate_ids(model, [1], 2)
    assert model.training
    model.eval()


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "no_repeat_ngram": 2}, {"forced_eos": True}])
@pytest.mark.parametrize("steps", [3, 8])
def test_tokens_read_several_steps_later_are_the_same(model, monkeypatch, steps, settings):
    prompts = [[3, 4], [5], [7, 9, 60], list(range(33))]
    config = GenerationConfig(max_new_tokens=14, **settings)
    free = GenerativeModel(model, LMHead()).generate(prompts, config)
    generative = GenerativeModel(model, LMHead(), {free[0][4], free[2][9]})  # texts end at different steps
    wanted = generative.generate(prompts, config)
    assert len(set(map(len, wanted))) > 2
    monkeypatch.setattr(Decoding, "steps_at_once", steps)
    assert generative.generate(prompts, config) == wanted


def test_watch_reports_each_token_in_order(model):
    seen = []
    config = GenerationConfig(max_new_tokens=3)
    texts = GenerativeModel(model, LMHead()).generate(
        [[4, 5, 6], [7]], config, watch=lambda number, token: seen.append((number, token))
    )
    assert seen == [(number, texts[number][step]) for step in range(3) for number in (1, 0)]


def test_empty_prompt_is_refused(model):
    with pytest.raises(UserError, match="no tokens"):
        generate_ids(model, [], 5)


@pytest.mark.parametrize(
    "settings", [{"top_k": 3}, {"beams": 2, "temperature": 1.0}, {"length_penalty": 2.0}, {"min_new_tokens": 99}]
)
def test_conflicting_generation_settings_are_refused(settings):
    with pytest.raises(ValidationError, match="set |more than"):
        GenerationConfig(**settings)
