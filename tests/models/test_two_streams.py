"""XLNet's two streams: the dependencies that ranks allow, and the likelihood of a permutation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmtool.config.registry import build
from lmtool.models.encoder_configs import XlnetConfig
from lmtool.models.heads.lm import lm_head
from lmtool.nn.dropout import TokenRng, token_keys
from lmtool.nn.stack import Tap
from lmtool.types import Packed

LENGTHS = (6, 1, 9)
CONFIG = XlnetConfig(
    vocab_size=30, num_layers=3, hidden_size=12, num_heads=2, feedforward_size=20, max_positions=32, dropout=0.0,
    attention_dropout=0.0, initializer_std=0.4,
)  # fmt: skip


def texts(ranks: torch.Tensor) -> Packed:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(30, (sum(LENGTHS),), generator=generator)
    segments = torch.randint(3, (sum(LENGTHS),), generator=generator)
    return Packed(tokens, LENGTHS, {"segment": segments, "rank": ranks})


def drawn_ranks(asked: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(sum(LENGTHS), generator=torch.Generator().manual_seed(4)) + 1
    return torch.zeros(sum(LENGTHS), dtype=torch.int64).index_copy(0, asked, order[asked])


def test_states_depend_on_tokens_of_lower_rank_only():
    """The Jacobian with respect to the token vectors: a state of the query stream depends on exactly the tokens of
    lower rank in its text, a state of the content stream on those of lower or equal rank."""
    asked = torch.tensor([0, 2, 3, 6, 8, 9, 14])
    packed = texts(drawn_ranks(asked))
    small = {"num_layers": 2, "hidden_size": 4, "feedforward_size": 6, "initializer_std": 0.8}
    backbone = build(CONFIG.model_copy(update=small), 0).double()
    ranks, documents = packed.columns["rank"], packed.documents
    together = documents[:, None] == documents[None, :]
    seen: list[torch.Tensor] = []

    class Last(Tap):
        def wants(self, place):
            return place.layer == 2

        def __call__(self, place, x_TH):
            seen.append(x_TH)
            return x_TH

    def streams(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        backbone.embed.tokens = lambda ids: vectors
        query = backbone(packed, query_M=asked, tap=Last())
        return query, seen.pop()

    vectors = torch.randn(len(packed.tokens), 4, dtype=torch.float64)
    by_query, by_content = torch.autograd.functional.jacobian(streams, vectors)
    strict = (ranks[None, :] < ranks[asked][:, None]) & together[asked]
    assert torch.equal(by_query.abs().amax((1, 3)) > 0, strict)
    assert torch.equal(by_content.abs().amax((1, 3)) > 0, (ranks[None, :] <= ranks[:, None]) & together)
    assert not strict[3].any(), "the text of one token attends to nothing"


def test_identity_permutation_has_the_causal_likelihood():
    """log p(text) = sum of log p(token | preceding tokens), each from a text that ends at the token."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    packed, asked = texts(positions), torch.arange(sum(LENGTHS))
    backbone = build(CONFIG, 0).double()
    head, table = lm_head(backbone).double(), backbone.embed.token.weight
    whole = head.loss_sum(backbone(packed, query_M=asked), table, packed.tokens)
    total = torch.zeros((), dtype=torch.float64)
    for place, label in enumerate(packed.tokens.tolist()):
        start, length = place - int(positions[place]), int(positions[place]) + 1
        columns = {name: column[start : start + length] for name, column in packed.columns.items()}
        # The text ends at the position, whose token is replaced.
        text = Packed(
            packed.tokens[start : start + length].index_fill(0, torch.tensor([length - 1]), 7), (length,), columns
        )
        logits = head(backbone(text, query_M=torch.tensor([length - 1])), table)
        total = total + F.cross_entropy(logits, torch.tensor([label]))
    torch.testing.assert_close(whole, total, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_packed_matches_separate_texts(rate):
    """With dropout too, which depends on a text's tokens and on its positions in the query stream."""
    asked = torch.tensor([0, 2, 3, 6, 8, 9, 14])
    packed = texts(drawn_ranks(asked))
    backbone = build(CONFIG.model_copy(update={"dropout": rate, "attention_dropout": rate}), 0).double()
    documents = torch.arange(3)

    def rng(examples, text):
        return TokenRng(token_keys(5, 1, examples, torch.zeros_like(examples), text))

    together = backbone(packed, rng(documents, packed), query_M=asked)
    for number, (start, length) in enumerate(zip(packed.starts, LENGTHS, strict=True)):
        part = slice(start, start + length)
        text = Packed(packed.tokens[part], (length,), {name: column[part] for name, column in packed.columns.items()})
        own = (asked >= start) & (asked < start + length)
        alone = backbone(text, rng(documents[number : number + 1], text), query_M=asked[own] - start)
        torch.testing.assert_close(alone, together[own], rtol=0, atol=1e-12)
    if rate:
        content = backbone(packed, rng(documents, packed))[asked]
        assert (content == 0).ne(together == 0).any(), "the streams have separate dropout"


def test_query_stream_without_ranks_is_refused():
    packed = Packed(torch.arange(4), (4,), {})
    with pytest.raises(ValueError, match="needs the column rank"):
        build(CONFIG, 0)(packed, query_M=torch.tensor([1]))
