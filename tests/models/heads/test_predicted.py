"""Predictions as targets of another model: divergences, their gradients, hard labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmtool.models.heads.base import TokenLogits
from lmtool.models.heads.predicted import Binary, Classes, PredictedWords, TopWords, Values


def logits(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(seed, rows=300, width=5, vocabulary=11):
    return TokenLogits(
        logits(rows, width, seed=seed), logits(vocabulary, width, seed=seed + 1), logits(vocabulary, seed=seed + 2)
    )


KINDS = {
    "classes": lambda x: Classes(x),
    "impossible": lambda x: Classes(torch.cat([x, x.new_full((len(x), 1), -torch.inf)], 1)),
    "binary": lambda x: Binary(x.flatten()),
    "values": lambda x: Values(x[:, 0]),
    "words": lambda x: PredictedWords(TokenLogits(x, torch.eye(4), torch.zeros(4))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_of_equal_predictions_is_zero(kind):
    x = logits(6, 4, seed=0).requires_grad_()
    lost = KINDS[kind](x).divergence_sum(KINDS[kind](x.detach().clone()), 2.0)
    lost.backward()
    assert lost.item() == pytest.approx(0.0, abs=1e-5)
    assert x.grad.abs().max() < 1e-5
    apart = KINDS[kind](x).divergence_sum(KINDS[kind](x.detach() * 2), 2.0)
    assert apart.item() > 0.1


def test_divergence_matches_torch_kl():
    student, teacher, temperature = logits(6, 4, seed=0), logits(6, 4, seed=1), 3.0
    expected = (
        F.kl_div((student / temperature).log_softmax(-1), (teacher / temperature).softmax(-1), reduction="sum")
        * temperature**2
    )
    assert Classes(student).divergence_sum(Classes(teacher), temperature).item() == pytest.approx(
        expected.item(), rel=1e-5
    )
    pairs = [torch.stack([x.flatten(), torch.zeros(24)], 1) for x in (student, teacher)]
    both = Classes(pairs[0]).divergence_sum(Classes(pairs[1]), temperature)
    alone = Binary(student.flatten()).divergence_sum(Binary(teacher.flatten()), temperature)
    assert alone.item() == pytest.approx(both.item(), rel=1e-4)


def test_chunked_divergence_matches_the_full_one():
    student, teacher = words(0), words(10)
    parts = [student.hidden_MW.requires_grad_(), student.table_VW.requires_grad_(), student.bias_V.requires_grad_()]
    plain = Classes(student.of()).divergence_sum(Classes(teacher.of()), 2.0)
    expected = torch.autograd.grad(0.5 * plain, parts)
    chunked = PredictedWords(student).divergence_sum(PredictedWords(teacher), 2.0)
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-4)
    for gradient, other in zip(torch.autograd.grad(0.5 * chunked, parts), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-4)
    assert torch.equal(PredictedWords(teacher).best(), teacher.of().argmax(-1))


def test_gradient_scale_does_not_depend_on_temperature():
    norms = []
    for temperature in (1.0, 2.0, 4.0, 8.0):
        student = (0.5 * logits(50, 10, seed=0)).requires_grad_()
        Classes(student).divergence_sum(Classes(0.5 * logits(50, 10, seed=1)), temperature).backward()
        norms.append(student.grad.norm().item())
    assert max(norms) < 2 * min(norms)


def test_hard_labels_of_each_kind():
    x = torch.tensor([[2.0, -1.0], [0.5, 0.7]])
    assert Classes(x).best().tolist() == [0, 1]
    assert Binary(x.flatten()).best().tolist() == [1.0, 0.0, 1.0, 1.0]
    assert Values(x[:, 0]).best().tolist() == [2.0, 0.5]
    assert Classes(x).hard_loss_sum(torch.tensor([0, 1])).item() == pytest.approx(
        F.cross_entropy(x, torch.tensor([0, 1]), reduction="sum").item()
    )


def test_top_words_divergence_matches_merged_classes():
    student, teacher = words(0), words(10)
    top = TopWords.of(PredictedWords(teacher), 4, (1.0, 2.0))
    parts = [student.hidden_MW.requires_grad_(), student.table_VW.requires_grad_()]
    lost = PredictedWords(student).divergence_sum(top, 2.0)
    # As classes: the retained words, and a class of all others.
    kept = top.words_MK
    probabilities, own = ((logits.of() / 2.0).softmax(-1) for logits in (teacher, student))
    joined = [
        torch.cat([each.gather(1, kept), 1 - each.gather(1, kept).sum(1, keepdim=True)], 1)
        for each in (probabilities, own)
    ]
    plain = Classes(joined[1].log()).divergence_sum(Classes(joined[0].log()), 1.0) * 4
    assert lost.item() == pytest.approx(plain.item(), rel=1e-4)
    expected = torch.autograd.grad(plain, parts)
    for gradient, other in zip(torch.autograd.grad(lost, parts), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-3)
    everything = TopWords.of(PredictedWords(teacher), 11, (2.0,))
    whole = PredictedWords(student).divergence_sum(PredictedWords(teacher), 2.0).item()
    assert PredictedWords(student).divergence_sum(everything, 2.0).item() == pytest.approx(whole, rel=1e-4)
    assert lost.item() < whole
    assert torch.equal(top.best(), PredictedWords(teacher).best())
