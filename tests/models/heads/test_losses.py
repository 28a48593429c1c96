"""The chunked cross entropy against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmtool.models.heads import base
from lmtool.models.heads.base import linear_loss_sum, linear_scores, loss_sum


@pytest.fixture(params=[(512, 32), (8, 3)], ids=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    monkeypatch.setitem(base._CHUNKS, "cpu", request.param)


def inputs(targets=20, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((targets, 6), (31, 6), (31,))
    hidden, table, bias = (torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes)
    return hidden, table, bias, torch.randint(31, (targets,), generator=generator)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("with_bias", [True, False])
def test_chunked_loss_and_gradients_match_torch(chunks, with_bias, smoothing, z_loss):
    hidden, table, bias, labels = inputs()
    leaves = (hidden, table, bias) if with_bias else (hidden, table)
    logits = F.linear(hidden, table, bias if with_bias else None)
    wanted = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    wanted = wanted + z_loss * logits.logsumexp(-1).square().sum()
    loss = linear_loss_sum(hidden, table, bias if with_bias else None, labels, smoothing, z_loss)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    pairs = zip(torch.autograd.grad(loss / 7, leaves), torch.autograd.grad(wanted / 7, leaves), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_autocast_gradients_are_close_to_fp32(chunks):
    hidden, table, bias, labels = inputs(dtype=torch.float32)
    plain = F.cross_entropy(F.linear(hidden, table, bias), labels, reduction="sum")
    wanted = torch.autograd.grad(plain, (hidden, table))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_loss_sum(hidden, table, bias, labels)
    assert loss.dtype == torch.float32
    for mine, theirs in zip(torch.autograd.grad(loss, (hidden, table)), wanted, strict=True):
        assert (mine - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_loss_of_underflowing_probabilities_is_exact(scale):
    hidden, table, bias, labels = inputs(dtype=torch.float32)
    wanted = F.cross_entropy(F.linear(hidden.double() * scale, table.double(), bias.double()), labels, reduction="sum")
    assert (float(wanted) > 87 * len(labels)) == (scale > 1)
    torch.testing.assert_close(linear_loss_sum(hidden * scale, table, bias, labels).double(), wanted, rtol=1e-6, atol=0)


def test_frozen_table_has_no_gradient():
    hidden, table, bias, labels = inputs()
    linear_loss_sum(hidden, table.detach(), bias.detach(), labels).backward()
    assert hidden.grad is not None and table.grad is None


def test_loss_without_targets_is_zero():
    hidden, table, bias, labels = inputs(targets=0)
    loss = linear_loss_sum(hidden, table, bias, labels)
    loss.backward()
    assert loss == 0 and not table.grad.any() and not bias.grad.any() and hidden.grad.shape == (0, 6)
    assert linear_scores(hidden, table, bias, labels)[0].shape == (0,)


def test_second_backward_is_refused():
    hidden, table, bias, labels = inputs()
    loss = linear_loss_sum(hidden, table, bias, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_chunked_scores_match_torch(chunks):
    hidden, table, bias, labels = inputs()
    each, best = linear_scores(hidden, table, bias, labels)
    logits = F.linear(hidden, table, bias)
    torch.testing.assert_close(each, F.cross_entropy(logits, labels, reduction="none").float())
    assert torch.equal(best, logits.argmax(-1))


def test_loss_sum_matches_torch_with_smoothing_and_weights():
    logits, labels, weights = torch.randn(9, 3), torch.randint(3, (9,)), torch.tensor([0.5, 1.0, 2.0])
    torch.testing.assert_close(
        loss_sum(logits, labels, 0.1, weights),
        F.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=0.1),
    )
    assert loss_sum(logits.bfloat16(), labels).dtype == torch.float32
