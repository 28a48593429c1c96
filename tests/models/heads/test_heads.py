"""Token heads, and the summary of a document."""

from __future__ import annotations

import pytest
import torch

from lmtool.models.heads.lm import LMHead, MaskedLMHead
from lmtool.models.heads.sequence import summary
from lmtool.types import Batch, Packed

SIZES = {"vocab_size": 60, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "feedforward_size": 32}


def batch_of(lengths=(3, 6), examples=(4, 9)) -> Batch:
    packed = Packed(torch.arange(sum(lengths)) + 1, lengths)
    return Batch(packed, {}, torch.tensor(examples), torch.zeros(len(lengths), dtype=torch.int32))


def test_summary_of_each_kind():
    packed = batch_of().inputs
    hidden = torch.randn(9, 4)
    assert torch.equal(summary(hidden, packed, "first"), hidden[[0, 3]])
    assert torch.equal(summary(hidden, packed, "last"), hidden[[2, 8]])
    torch.testing.assert_close(summary(hidden, packed, "mean"), torch.stack([hidden[:3].mean(0), hidden[3:].mean(0)]))
    assert torch.equal(summary(hidden, packed, "max"), torch.stack([hidden[:3].amax(0), hidden[3:].amax(0)]))


def test_masked_lm_head_is_dense_norm_table_and_bias():
    head, table, hidden = MaskedLMHead(16, 60), torch.randn(60, 16), torch.randn(5, 16)
    wanted = head.norm(torch.nn.functional.gelu(head.dense(hidden))) @ table.T + head.bias
    torch.testing.assert_close(head(hidden, table), wanted)
    assert [name for name, _ in head.named_parameters()] == [
        "bias",
        "dense.weight",
        "dense.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert not list(LMHead().parameters())


@pytest.mark.parametrize("head", [MaskedLMHead(16, 60), LMHead()])
def test_loss_and_scores_match_the_logits(head):
    table, hidden, labels = torch.randn(60, 16), torch.randn(5, 16), torch.randint(60, (5,))
    each = torch.nn.functional.cross_entropy(head(hidden, table), labels, reduction="none")
    torch.testing.assert_close(head.loss_sum(hidden, table, labels), each.sum())
    torch.testing.assert_close(head.scores(hidden, table, labels)[0], each.detach())
