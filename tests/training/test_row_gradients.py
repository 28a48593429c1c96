"""Sparse row gradients of a token table give the same updates as dense gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lmtool.nn.embeddings import Embeddings
from lmtool.nn.positions import Position
from lmtool.training.optimizers import gradient_norm
from lmtool.training.step import sparse_row_gradients

BATCHES = torch.tensor([[[1, 2, 2, 5], [5, 7, 1, 1]], [[3, 3, 2, 9], [0, 9, 9, 4]], [[8, 8, 8, 8], [8, 1, 8, 8]]])


class Texts(nn.Module):
    """A table of 12 tokens, read by the head too if tied."""

    def __init__(self, tied: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embed = Embeddings(12, 4, Position(), 0.0)
        self.dense, self.tied = nn.Linear(4, 4), tied

    def forward(self, ids_T: Tensor) -> Tensor:
        hidden_TH = self.dense(self.embed.tokens(ids_T)).tanh()
        return (hidden_TH @ self.embed.token.weight.T if self.tied else hidden_TH).exp().sum()


def train_steps(model: Texts, wanted: bool, clip_norm: float | None) -> list[float]:
    """Gradient norms of three steps with two micro-batches each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    norms = []
    with sparse_row_gradients(model, optimizer, wanted):
        for step in BATCHES:
            for ids_T in step:
                model(ids_T).backward()
            gradient = model.embed.token.weight.grad
            assert gradient is not None and gradient.is_sparse == (wanted and not model.tied)
            norms.append(float(gradient_norm(list(model.parameters()), clip_norm)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 1e9, 1.0])
def test_row_gradients_match_dense_gradients(tied: bool, clip_norm: float | None) -> None:
    models = [Texts(tied), Texts(tied)]
    norms = [train_steps(model, wanted, clip_norm) for model, wanted in zip(models, (False, True), strict=True)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6) and min(norms[0]) > 1.0
    for ours, dense in zip(*(model.parameters() for model in models), strict=True):
        # The norm sums in another order, so clipped gradients may differ in the last bit.
        assert torch.equal(ours, dense) if clip_norm != 1.0 else torch.allclose(ours, dense, rtol=1e-6)


def test_hooked_table_keeps_dense_gradient() -> None:
    edited, plain = Texts(tied=False), Texts(tied=False)
    edited.embed.token.register_forward_hook(lambda *_: None)
    for model, wanted in ((edited, True), (plain, False)):
        with sparse_row_gradients(model, torch.optim.SGD(model.parameters()), wanted):
            model(BATCHES[0, 0]).backward()
    plain(BATCHES[0, 1]).backward()
    assert not edited.embed.token.weight.grad.is_sparse and not plain.embed.token.weight.grad.is_sparse
