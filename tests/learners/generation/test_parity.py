"""Greedy and beam search against transformers' `generate` with the same random weights, fp32, token for token; batched
and single, with and without cache."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.generate import GenerativeModel
from lmtool.types import Packed
from tests.breadth import slow_but
from tests.learners.generation.test_scoring import built
from tests.models.parity import CASES, loaded

START = 5
PROMPTS = [[9, 8, 7], [50], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
FAMILIES = ("gpt", "bart", "t5")
NEW = 18

SETTINGS = {
    "greedy": {},
    "greedy_ngram": {"no_repeat_ngram": 2},
    "greedy_minimum": {"min_new_tokens": 9},
    "beam": {"beams": 4},
    "beam_short": {"beams": 3, "length_penalty": -1.0, "max_new_tokens": 12},
    "beam_long": {"beams": 4, "length_penalty": 2.0, "early_stopping": True},
    "beam_never": {"beams": 2, "length_penalty": 0.6, "early_stopping": "never"},
    "beam_ngram": {"beams": 3, "no_repeat_ngram": 3, "min_new_tokens": 5},
    "greedy_penalty": {"repetition_penalty": 1.4, "no_repeat_ngram": 3},
    "beam_penalty": {"beams": 4, "repetition_penalty": 1.1, "min_new_tokens": 4},
    "greedy_forced": {"forced_eos": True, "max_new_tokens": 7},
    "beam_forced": {"beams": 4, "forced_eos": True, "max_new_tokens": 7, "min_new_tokens": 7, "length_penalty": 0.5},
}
ROWS = 60
"""Size of the vocabulary in the test of an embedding table with more rows (97) than tokens."""


@cache
def pair(family):
    model = loaded(CASES[family].pair())
    model.theirs.eval()
    return model


@cache
def end(family):
    """The end token: one that greedy search generates after at least five others."""
    model, start = pair(family).ours, None if family == "gpt" else START
    config = GenerationConfig(max_new_tokens=NEW, no_repeat_ngram=2)
    texts = GenerativeModel(model.backbone, model.heads["lm"], start=start).generate(PROMPTS, config)
    return next(token for text in texts for token in text[5:] if token not in text[:5])


def ours(family, prompts=PROMPTS, vocabulary=None, **settings):
    model = pair(family).ours
    config = GenerationConfig(**{"max_new_tokens": NEW, **settings})
    start = None if family == "gpt" else START
    ends = [end(family)]
    return GenerativeModel(model.backbone, model.heads["lm"], ends, start, vocabulary).generate(prompts, config)


@cache
def texts_of(family, setting):
    return ours(family, **SETTINGS[setting])


def theirs(family, prompt, forced_eos=False, **settings):
    names = {"beams": "num_beams", "no_repeat_ngram": "no_repeat_ngram_size"}
    given = {names.get(name, name): value for name, value in {"max_new_tokens": NEW, **settings}.items()}
    more = {} if family == "gpt" else {"decoder_start_token_id": START}
    ids = torch.tensor([prompt])
    out = pair(family).theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=end(family), pad_token_id=0,
        bos_token_id=None, forced_eos_token_id=end(family) if forced_eos else None, **more, **given,
    )[0].tolist()  # fmt: skip
    new = out[len(prompt) if family == "gpt" else 1 :]
    return new[: new.index(end(family))] if end(family) in new else new


@pytest.mark.parametrize(
    ("family", "setting"),
    slow_but(
        [(family, setting) for family in FAMILIES for setting in ("greedy_ngram", "beam_ngram", "beam_forced")]
        + [("gpt", setting) for setting in SETTINGS if not setting.endswith(("ngram", "beam_forced"))],
        itertools.product(FAMILIES, SETTINGS),
    ),
)
def test_generated_tokens_match_transformers(family, setting):
    settings = SETTINGS[setting]
    got = texts_of(family, setting)
    assert got == [theirs(family, prompt, **settings) for prompt in PROMPTS]
    assert got == [ours(family, [prompt], **settings)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
def test_unused_vocabulary_rows_are_never_generated(family):
    """An embedding table may have more rows than the vocabulary has tokens. The unused rows keep their probability,
    which the scores of beams depend on."""
    settings = {"beams": 4, "length_penalty": 2.0, "max_new_tokens": 14}
    unused = list(range(ROWS, 97))
    got = ours(family, vocabulary=ROWS, **settings)
    assert got == [theirs(family, prompt, suppress_tokens=unused, **settings) for prompt in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_change_the_generated_texts(family):
    """The texts compared above differ between settings, and some reach the end token."""
    texts = {name: texts_of(family, name) for name in SETTINGS}
    assert len({str(text) for text in texts.values()}) >= 5
    assert any(len(text) < NEW for name in SETTINGS for text in texts[name] if name != "beam_short")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_greedy_matches_greedy_without_cache(family):
    model = pair(family).ours
    for prompt, text in zip(PROMPTS, ours(family), strict=True):
        written: list[int] = []
        while len(written) < NEW:
            ids = [*prompt, *written] if family == "gpt" else [START, *written]
            packed = Packed(torch.tensor(ids), (len(ids),))
            inputs = Packed(torch.tensor(prompt), (len(prompt),))
            hidden = model.backbone(packed) if family == "gpt" else model.backbone(inputs, None, packed)
            token = int(model.heads["lm"](hidden[-1:], model.backbone.embed.token.weight).argmax())
            if token == end(family):
                break
            written.append(token)
        assert written == text


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_depend_on_the_prompt_and_not_on_the_batch(family):
    drawn = {"temperature": 1.5, "top_k": 30, "top_p": 0.9}
    together = ours(family, **drawn)
    assert together == [ours(family, [prompt], **drawn)[0] for prompt in PROMPTS]
    assert together[::-1] == ours(family, PROMPTS[::-1], **drawn)
    twice = ours(family, [PROMPTS[0], PROMPTS[0]], **drawn)
    assert twice[0] == together[0] and twice[0] != twice[1]


@pytest.mark.parametrize("choice", [{"temperature": 2.0}, {"beams": 3}])
@pytest.mark.parametrize("family", ["gpt", "llama", "lstm"])
def test_common_beginning_of_prompts_is_read_once(family, choice, monkeypatch):
    model, head = built(family) if family == "lstm" else (pair(family).ours.backbone, pair(family).ours.heads["lm"])
    beginning = [5 + number % 40 for number in range(24)]
    prompts = [[*beginning, *rest] for rest in ([60, 61], [62], [60, 63, 64, 65], [66, 67, 68])]
    config = GenerationConfig(max_new_tokens=8, **choice)
    writer = GenerativeModel(model, head)
    alone = [writer.generate([prompt], config)[0] for prompt in prompts]
    forward, read = model.forward, []
    monkeypatch.setattr(model, "forward", lambda packed, **more: read.append(packed.lengths) or forward(packed, **more))
    assert writer.generate(prompts, config) == alone and len({str(text) for text in alone}) > 1
    assert read[:2] == [(24,), (1, 2, 3, 4)], "read by length"
    read.clear()
    writer.generate([prompt[20:] for prompt in prompts], config)
    assert read[0] == (5, 6, 7, 8), "too little to share"


def test_batch_tokens_does_not_change_beam_search():
    model = pair("gpt").ours
    config = GenerationConfig(max_new_tokens=NEW, beams=3)
    small = GenerativeModel(model.backbone, model.heads["lm"], [end("gpt")]).generate(PROMPTS, config, batch_tokens=1)
    assert small == ours("gpt", beams=3)
