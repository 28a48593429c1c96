"""A prefix of keys and values in every family: equal to a model that has read as many tokens before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lmtool.errors import UserError
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.generate import GenerativeModel
from lmtool.learners.generation.scoring import CandidateScorer
from lmtool.models.heads.lm import lm_head
from lmtool.nn.cache import Cache
from lmtool.nn.context import EncoderState
from lmtool.nn.dropout import TokenRng, token_keys
from lmtool.nn.prefix import KeyPrefix
from lmtool.types import Packed, Segments
from tests.models.test_read import ATTENDING, LENGTHS, READ, SIZES, packed
from tests.models.test_taps import of_family
from tests.models.test_virtual_tokens import WRITTEN, part, spelled

COUNT = len(WRITTEN)
ENCODER_DECODERS = ["bart", "t5", "transformer"]
READ_BEFORE = Packed(torch.tensor(WRITTEN), (COUNT,))


def width_of(backbone):
    return backbone.config.key_value_heads * backbone.config.width_of_head


def set_prefix(stack, attribute, rows):
    """Sets a prefix of these keys and values: a pair of (P, W) for each layer."""
    prefix = KeyPrefix(COUNT, len(rows), rows[0][0].shape[1]).double()
    with torch.no_grad():
        prefix.weight.copy_(torch.cat([tensor for pair in rows for tensor in pair], 1))
    setattr(stack, attribute, prefix)


def random_prefixes(backbone, seed=0):
    """Sets a random prefix in every attention."""
    generator = torch.Generator().manual_seed(seed)
    stacks = [backbone] if hasattr(backbone, "layers") else [backbone.encoder, backbone.decoder]
    for stack in stacks:
        for attribute in ("prefix", *(["cross_prefix"] if hasattr(stack.layers[0], "cross_attn") else [])):
            drawn = torch.randn(
                len(list(stack.applied_layers())), 2, COUNT, width_of(backbone), generator=generator
            ).double()
            set_prefix(stack, attribute, [tuple(pair) for pair in drawn])


def projected(stack, read):
    """The keys and values of a stack's layers, recorded while `read` runs."""
    rows = []

    def record(module, given, output):
        if len(output) == COUNT:  # DeBERTa's projections read relative positions too
            rows.append(output.detach())

    hooks = [
        module.register_forward_hook(record)
        for layer in stack.layers
        for module in (layer.self_attn.k_proj, layer.self_attn.v_proj)
    ]
    read()
    for hook in hooks:
        hook.remove()
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    if not hasattr(stack, "embed"):
        return pairs
    position, heads = stack.embed.position, stack.layers[0].self_attn.heads
    turns = position.turns(torch.arange(COUNT), pairs[0][0].dtype)
    if turns is None:
        return pairs
    turned = [position.rotate(heads(key), heads(key), turns)[0].flatten(-2) for key, _ in pairs]
    return [(key, value) for key, (_, value) in zip(turned, pairs, strict=True)]


@pytest.mark.parametrize("kind", ["learned", "t5", "rotary", "alibi", "shaw", "sinusoidal"])
@pytest.mark.parametrize("family", ["gpt", "bart"])
def test_prefix_in_a_causal_stack_equals_cached_tokens(family, kind):
    """In causal stacks, with any positions; in a decoder with cross-attention in the first layer only, before tokens
    depend on the input."""
    depth = 2 if family == "gpt" else 1
    backbone, outputs = of_family(family, positions={"name": kind}, num_layers=depth)
    texts, own = spelled(packed(2), 0)
    cache, stack = Cache(depth, 1, COUNT), backbone.decoder if outputs else backbone
    with torch.no_grad():
        if outputs:
            wanted = backbone(packed(1), outputs=texts)[own]
            state = backbone.encode(part(packed(1), [0]))
            backbone.decode(state, READ_BEFORE, cache=cache)
        else:
            wanted = backbone(texts)[own]
            backbone(READ_BEFORE, cache=cache)
        kept = [(layer._keys_NCAD[0].flatten(-2), layer._values_NCAD[0].flatten(-2)) for layer in cache.layers]
        set_prefix(stack, "prefix", kept)
        got = backbone(packed(1), outputs=packed(2)) if outputs else backbone(packed(2))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", [name for name in ATTENDING if name not in ("gpt", "gpt1", "llama", "qwen2")])
def test_prefix_in_a_one_layer_encoder_equals_tokens(family):
    """Keys of the first layer do not depend on neighboring tokens."""
    # Tokens belong to blocks, a prefix does not: the results are equal only where the text is a single block.
    backbone, outputs = of_family(family, num_layers=1, **({"block_size": 64} if family == "bigbird" else {}))
    texts, own = spelled(packed(1), 0)
    stack, read = (backbone.encoder, backbone.read_inputs) if outputs else (backbone, backbone)
    with torch.no_grad():
        wanted = read(texts)[own]
        set_prefix(stack, "prefix", projected(stack, lambda: read(READ_BEFORE)))
        torch.testing.assert_close(read(packed(1)), wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(read(packed(1), read_M=READ), wanted[READ], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_cross_prefix_equals_encoder_states_before_the_input(family):
    backbone, _ = of_family(family)
    with torch.no_grad():
        state, extra = backbone.encode(packed(1)), torch.randn(COUNT, SIZES["hidden_size"]).double()
        parts = [torch.cat([extra, part]) for part in state.hidden_SH.split(LENGTHS)]
        longer = Segments.packed(tuple(length + COUNT for length in LENGTHS))
        wanted = backbone.decode(EncoderState(torch.cat(parts), longer), packed(2))
        attentions = [layer.cross_attn for layer in backbone.decoder.layers]
        rows = [(attention.k_proj(extra), attention.v_proj(extra)) for attention in attentions]
        set_prefix(backbone.decoder, "cross_prefix", rows)
        torch.testing.assert_close(backbone.decode(state, packed(2)), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ATTENDING)
def test_packed_matches_separate_texts_and_trains_every_prefix(family):
    backbone, outputs = of_family(family)
    random_prefixes(backbone)

    def hidden(documents):
        texts = [part(packed(seed), documents) for seed in (1, 2)]
        numbers = torch.tensor(documents)
        keys = [token_keys(0, 1, numbers, numbers * 0, text, outputs=side) for side, text in enumerate(texts)]
        return backbone(texts[0], TokenRng(*keys), **({"outputs": texts[1]} if outputs else {}))

    together = hidden([0, 1, 2, 3])
    for document, wanted in enumerate(together.split(LENGTHS)):
        torch.testing.assert_close(hidden([document]), wanted, rtol=0, atol=1e-12)
    together.square().sum().backward()
    for name, parameter in backbone.named_parameters():
        if "prefix" in name:
            assert (parameter.grad.unflatten(-1, (-1, width_of(backbone))).abs().amax((0, 2)) > 0).all()


def test_empty_document_has_no_prefix():
    backbone, _ = of_family("bert")
    random_prefixes(backbone)
    tokens = packed(1).tokens[:6]
    wanted = backbone(Packed(tokens, (5, 1)))
    torch.testing.assert_close(backbone(Packed(tokens, (5, 0, 1))), wanted, rtol=0, atol=1e-12)


def test_bidirectional_text_prefix_follows_the_key_prefix():
    """The bidirectional prefix of a text is counted from its first token, after the key prefix."""
    backbone, _ = of_family("gpt")
    random_prefixes(backbone)
    texts = packed(1)
    whole = backbone(replace(texts, prefixes=LENGTHS))
    plain = backbone(replace(texts, prefixes=(0,) * len(LENGTHS)))
    torch.testing.assert_close(plain, backbone(texts), rtol=0, atol=1e-12)
    backbone.causal = False
    torch.testing.assert_close(whole, backbone(texts), rtol=0, atol=1e-12)
    assert not torch.allclose(whole, plain)


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["gpt", *ENCODER_DECODERS])
def test_cached_generation_matches_uncached_with_prefix(family, beams):
    backbone, outputs = of_family(family)
    random_prefixes(backbone)
    head = lm_head(backbone).double()
    backbone.initialize(head, 0, "heads.lm.")
    prompts, table = [[3, 4, 5, 9], [7], [8, 6]], backbone.embed.token.weight
    config = GenerationConfig(max_new_tokens=6, beams=beams)
    written = GenerativeModel(backbone, head, start=0 if outputs else None).generate(prompts, config)
    scorer = CandidateScorer(backbone, head, start=0 if outputs else None)
    scores = scorer.score([], prompts, [[new, [1, 2, 3]] for new in written])
    for prompt, new, (score, _) in zip(prompts, written, scores, strict=True):
        inputs, read = Packed(torch.tensor(prompt), (len(prompt),)), [0, *new[:-1]] if outputs else [*prompt, *new[:-1]]
        texts = Packed(torch.tensor(read), (len(read),))
        hidden = (backbone(inputs, outputs=texts) if outputs else backbone(texts))[-len(new) :]
        logits = head(hidden, table)
        if beams == 1:
            assert logits.argmax(-1).tolist() == new
        likelihoods = logits.log_softmax(-1).gather(1, torch.tensor(new)[:, None])
        assert float(likelihoods.sum()) == pytest.approx(score, abs=1e-5)


def test_prefix_shortens_the_longest_text_of_absolute_positions():
    backbone, _ = of_family("bert")
    random_prefixes(backbone)
    assert backbone.longest_text == SIZES["max_positions"] - COUNT
    with pytest.raises(UserError, match="33 tokens, 3 of them virtual"):
        backbone(Packed(torch.zeros(30, dtype=torch.int64), (30,)))
    t5, _ = of_family("t5")
    random_prefixes(t5)
    assert t5.longest_text == t5.longest_answer == SIZES["max_positions"]
    bart, _ = of_family("bart")
    random_prefixes(bart)
    assert bart.longest_text == bart.longest_answer == SIZES["max_positions"] - COUNT
