"""Virtual tokens in every family: equal to a model that reads real tokens at the same positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lmtool.errors import UserError
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.generate import GenerativeModel
from lmtool.models.heads.lm import lm_head
from lmtool.nn.dropout import DeviceRng, TokenRng, token_keys
from lmtool.nn.prefix import VirtualTokens
from lmtool.nn.stack import TapPoint
from lmtool.types import Packed
from tests.models.test_read import FAMILIES, LENGTHS, READ, SIZES, packed
from tests.models.test_taps import Changed, Seen, of_family

WRITTEN = (7, 31, 2)
"""The real tokens whose embeddings the virtual tokens of these tests have."""


def spelled(texts: Packed, after: int) -> tuple[Packed, torch.Tensor]:
    """The texts with the real tokens inserted, and the indices of the original tokens."""
    tokens, own, lengths = [], [], []
    for text in texts.tokens.split(texts.lengths):
        start = sum(lengths)
        tokens += [text[:after], torch.tensor(WRITTEN), text[after:]]
        lengths.append(len(text) + len(WRITTEN))
        own += [start + place for place in range(lengths[-1]) if not after <= place < after + len(WRITTEN)]
    joined = torch.cat(tokens)
    columns = {"segment": torch.zeros_like(joined)} if texts.columns else {}
    return Packed(joined, tuple(lengths), columns), torch.tensor(own)


def add_virtual(backbone, embed, after):
    """Adds virtual tokens with the vectors of the real ones, from the backbone's token table."""
    vectors = backbone.embed.tokens(torch.tensor(WRITTEN)).detach()
    embed.virtual = VirtualTokens(len(WRITTEN), vectors.shape[1], after).double()
    with torch.no_grad():
        embed.virtual.weight.copy_(vectors)


@pytest.mark.parametrize("after", [0, 1])
# ELMo reads characters and has no token table.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "elmo"])
def test_virtual_tokens_equal_real_tokens(family, after):
    backbone, outputs = of_family(family)
    texts, own = spelled(packed(1), after)
    wanted = backbone(texts, **outputs)
    add_virtual(backbone, backbone.embed, after)
    got = backbone(packed(1), **outputs)
    torch.testing.assert_close(got, wanted if outputs else wanted[own], rtol=0, atol=1e-12)
    read = backbone(packed(1), **outputs, read_M=READ)
    torch.testing.assert_close(read, got[READ], rtol=0, atol=1e-12)
    read.square().sum().backward()
    assert backbone.embed.virtual.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("family", ["t5", "bart", "transformer"])
def test_decoder_virtual_tokens_equal_real_tokens(family):
    backbone, _ = of_family(family)
    texts, own = spelled(packed(2), 1)
    wanted = backbone(packed(1), outputs=texts)[own]
    add_virtual(backbone, backbone.decoder.embed, 1)
    torch.testing.assert_close(backbone(packed(1), outputs=packed(2)), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["bert", "albert", "gpt", "t5"])
def test_packed_matches_separate_texts_with_dropout(family):
    backbone, outputs = of_family(family)
    add_virtual(backbone, backbone.embed, 0)
    if outputs:
        add_virtual(backbone, backbone.decoder.embed, 0)

    def hidden(documents):
        texts = [part(packed(seed), documents) for seed in (1, 2)]
        numbers = torch.tensor(documents)
        keys = [token_keys(0, 1, numbers, numbers * 0, text, outputs=side) for side, text in enumerate(texts)]
        return backbone(texts[0], TokenRng(*keys), **({"outputs": texts[1]} if outputs else {}))

    together = hidden([0, 1, 2, 3]).split(LENGTHS)
    for document in range(len(LENGTHS)):
        torch.testing.assert_close(hidden([document]), together[document], rtol=0, atol=1e-12)
    assert not torch.allclose(torch.cat(together), backbone(packed(1), **outputs))


def part(texts: Packed, documents: list[int]) -> Packed:
    """Some documents of a batch."""
    tokens = [texts.tokens.split(texts.lengths)[document] for document in documents]
    return Packed(torch.cat(tokens), tuple(map(len, tokens)), {"segment": torch.zeros_like(torch.cat(tokens))})


def test_virtual_tokens_have_distinct_dropout_keys():
    numbers = torch.tensor([5])
    rng = TokenRng(token_keys(0, 1, numbers, numbers * 0, Packed(torch.zeros(4).long(), (4,))))
    insertion = VirtualTokens(3, 8).insertion(Packed(torch.zeros(4).long(), (4,)))
    spread = rng.insert_virtual(insertion.source_S, insertion.number_S)
    assert len(set(spread.keys_T.tolist())) == 7 and torch.equal(spread.keys_T[3:], rng.keys_T)
    device = DeviceRng(0, torch.device("cpu"))
    assert device.insert_virtual(insertion.source_S, insertion.number_S) is device


def test_bidirectional_prefix_includes_virtual_tokens():
    backbone, _ = of_family("gpt")
    texts = replace(packed(1), prefixes=(2, 1, 7, 0))
    spelled_out, own = spelled(texts, 0)
    prefixes = tuple(prefix + len(WRITTEN) for prefix in texts.prefixes)
    wanted = backbone(replace(spelled_out, prefixes=prefixes))[own]
    add_virtual(backbone, backbone.embed, 0)
    torch.testing.assert_close(backbone(texts), wanted, rtol=0, atol=1e-12)


def test_tap_receives_states_without_virtual_tokens():
    backbone, _ = of_family("bert")
    add_virtual(backbone, backbone.embed, 1)
    tap = Seen()
    with torch.no_grad():
        plain = backbone(packed(1), tap=tap)
        torch.testing.assert_close(plain, backbone(packed(1)), rtol=0, atol=1e-12)
        changed = backbone(packed(1), tap=Changed(TapPoint(1), lambda x_TH: x_TH + 1.0))
    assert {len(x_TH) for x_TH in tap.states.values()} == {sum(LENGTHS)}
    assert not torch.allclose(plain, changed)
    weights = tap.attentions[TapPoint(1), "self_attn"]
    assert [tensor.shape[1:] for tensor in weights] == [(length + 3, length + 3) for length in LENGTHS]


def test_virtual_tokens_shorten_the_longest_text():
    backbone, _ = of_family("bert")
    add_virtual(backbone, backbone.embed, 0)
    assert backbone.longest_text == SIZES["max_positions"] - len(WRITTEN)
    longest = torch.zeros(backbone.longest_text, dtype=torch.int64)
    backbone(Packed(longest, (len(longest),)))
    with pytest.raises(UserError, match="33 tokens, 3 of them virtual") as caught:
        backbone(Packed(torch.zeros(30, dtype=torch.int64), (30,)))
    assert "max_length=29" in caught.value.hint


def test_text_shorter_than_after_is_refused():
    with pytest.raises(ValueError, match="behind 2 tokens"):
        VirtualTokens(3, 8, after=2).insertion(Packed(torch.zeros(4).long(), (3, 1)))


def test_generation_continues_after_virtual_tokens():
    """Up to the longest text that fits beside them."""
    backbone, _ = of_family("gpt")
    add_virtual(backbone, backbone.embed, 0)
    head = lm_head(backbone)
    (got,) = GenerativeModel(backbone, head).generate([[3, 4, 5]], GenerationConfig(max_new_tokens=40))
    ids = [3, 4, 5]
    with torch.no_grad():
        for chosen in got:
            hidden = backbone(Packed(torch.tensor(ids), (len(ids),)))
            assert int(head(hidden[-1:], backbone.embed.token.weight).argmax()) == chosen
            ids.append(chosen)
    assert len(ids) == backbone.longest_text
