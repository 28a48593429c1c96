"""XLNet's two streams against transformers, in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.nn.cache import Carried
from lmtool.types import Packed
from tests.models.parity import CASES, assert_gradients_equal, loaded

CASE = CASES["xlnet"]


def ranked(packed: Packed, seed: int = 3) -> tuple[Packed, Tensor]:
    """The texts with ranks, and the positions of the targets: two fifths of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    order_T = torch.rand(len(packed.tokens), generator=generator)
    asked_T = torch.rand(len(packed.tokens), generator=generator) < 0.4
    rank_T = torch.where(asked_T, order_T.argsort().argsort(), -1)
    return Packed(packed.tokens, packed.lengths, {**packed.columns, "rank": rank_T}), asked_T.nonzero()[:, 0]


@torch.no_grad()
def test_content_stream_of_selected_tokens_matches_full_output():
    backbone, packed = loaded(CASE.pair()).double().ours.backbone, CASE.texts().packed
    some_M = torch.tensor([0, 3, 7, 30, 44, 50, 78])
    torch.testing.assert_close(backbone(packed, read_M=some_M), backbone(packed)[some_M], rtol=0, atol=1e-12)


def target_mapping(packed: Packed, at: Tensor, longest: int) -> tuple[Tensor, list[Tensor]]:
    """The target mapping of transformers, and the target positions of each text."""
    documents = range(len(packed.lengths))
    places = [at[packed.documents[at] == number] - packed.starts[number] for number in documents]
    mapping = torch.zeros(len(places), max(map(len, places)), longest, dtype=torch.float64)
    for number, own in enumerate(places):
        mapping[number, torch.arange(len(own)), own] = 1
    return mapping, places


@pytest.mark.parametrize("memory", [0, 7])
def test_two_stream_loss_and_gradients_match_transformers(memory):
    pair, texts = loaded(CASE.pair()).double(), CASE.texts()
    ids, mask = texts.ids, texts.mask
    packed, at = ranked(texts.packed)
    ranks = torch.full(ids.shape, -1)
    ranks[mask] = packed.columns["rank"]
    # perm_mask: i does not attend to j where rank_i <= rank_j and j is a target.
    hidden_ij = ((ranks[:, :, None] <= ranks[:, None, :]) & (ranks >= 0)[:, None, :]).double()
    mapping, places = target_mapping(packed, at, ids.shape[1])
    before = torch.randn(len(ids), 3, memory, 36, dtype=torch.float64, requires_grad=True)
    mems = list(before.permute(1, 2, 0, 3)) if memory else None
    streams = {"perm_mask": hidden_ij, "target_mapping": mapping, "mems": mems, "use_mems": True}
    output = CASE.call(pair.theirs, texts.arguments() | streams)
    wanted_MV = torch.cat([output.logits[number, : len(own)] for number, own in enumerate(places)])
    head, table = pair.ours.heads["lm"], pair.ours.backbone.embed.token.weight
    pair.ours.backbone.config = CASE.config.model_copy(update={"memory_length": memory})
    carried = Carried({"memory": before}, (memory,) * len(ids)) if memory else None
    hidden_MH = pair.ours.backbone(packed, query_M=at, carried=carried, reuse=4)
    # Where everything is masked, transformers attends to all tokens.
    sees = torch.tensor(
        [
            memory > 0 or bool(((ranks[n] < ranks[n, place]) & mask[n]).any())
            for n, own in enumerate(places)
            for place in own
        ]
    )
    assert (~sees).any() == (memory == 0)
    torch.testing.assert_close(head(hidden_MH, table)[sees], wanted_MV[sees], rtol=1e-5, atol=1e-5)
    labels = packed.tokens[at]
    wanted = F.cross_entropy(wanted_MV[sees], labels[sees])
    loss = head.loss_sum(hidden_MH[sees], table, labels[sees]) / int(sees.sum())
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    wanted.backward()
    loss.backward()
    assert_gradients_equal(pair)
    if carried is not None:  # the first four tokens of each text, after the rest of the old memory
        kept = [min(4, length) for length in packed.lengths]
        for number, count in enumerate(kept):
            theirs = torch.stack([layer[memory : memory + count, number] for layer in output.mems])
            own = torch.cat([before[number, :, count:], theirs], 1)
            torch.testing.assert_close(carried.after["memory"][number], own, rtol=1e-5, atol=1e-5)
