"""Word vectors and the CNN over word windows against a plain implementation, one document at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmtool.config.registry import build
from lmtool.models.heads.sequence import summary
from lmtool.models.pretransformer_configs import CnnConfig, WordVectorsConfig
from lmtool.types import Packed

LENGTHS = (5, 0, 1, 12, 2)


def packed() -> Packed:
    return Packed(torch.randint(0, 41, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3)), LENGTHS)


def plain_states(model, tokens):
    """The hidden states (L, H) of one document, by torch's convolution with zero padding."""
    x_LH = F.embedding(tokens, model.embed.token.weight)
    if model.embed.project is not None:
        x_LH = model.embed.project(x_LH)
    for layer in model.layers:
        maps = []
        for width, linear in zip(model.config.filter_widths, layer.filters, strict=True):
            kernel = linear.weight.view(linear.out_features, width, -1).transpose(1, 2)
            between = F.pad(x_LH.T[None], ((width - 1) // 2, width // 2))
            maps.append(F.conv1d(between, kernel, linear.bias)[0].T)
        x_LH = torch.cat(maps, 1).relu()
    return x_LH


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 22, "embedding_size": 22},
        {"hidden_size": 21, "embedding_size": 13, "num_layers": 2},
        {"hidden_size": 7, "embedding_size": 7, "filter_widths": (5,)},
        {"hidden_size": 10, "embedding_size": 9, "filter_widths": (1, 6)},
    ],
)
def test_cnn_matches_a_convolution_of_each_document(sizes):
    model = build(CnnConfig(vocab_size=41, **sizes), 1).double()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter)
    inputs, parameters = packed(), list(model.parameters())
    states_TH = model(inputs)
    plain = [plain_states(model, tokens) for tokens in inputs.tokens.split(list(LENGTHS)) if len(tokens)]
    torch.testing.assert_close(states_TH, torch.cat(plain), rtol=1e-12, atol=1e-12)
    highest = torch.stack([document.amax(0) for document in plain])
    pooled_NH = summary(states_TH, inputs, "max")
    torch.testing.assert_close(pooled_NH[[0, 2, 3, 4]], highest, rtol=1e-12, atol=1e-12)
    assert not pooled_NH[1].any()  # a document without tokens
    weights = torch.randn(highest.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ours = torch.autograd.grad((pooled_NH[[0, 2, 3, 4]] * weights).sum() + states_TH.square().sum(), parameters)
    theirs = torch.autograd.grad((highest * weights).sum() + torch.cat(plain).square().sum(), parameters)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
    assert any(gradient.abs().max() > 1e-3 for gradient in ours)
    read = torch.tensor([0, 4, 5, 11, 19])
    torch.testing.assert_close(model(inputs, read_M=read), states_TH[read], rtol=1e-12, atol=1e-12)


def test_windows_do_not_cross_documents():
    model, inputs = build(CnnConfig(vocab_size=41, hidden_size=12, embedding_size=12), 0), packed()
    before = model(inputs)
    changed = inputs.tokens.clone()
    changed[sum(LENGTHS[:3]) :] = (changed[sum(LENGTHS[:3]) :] + 1) % 41  # in the later documents
    after = model(Packed(changed, LENGTHS))
    assert torch.equal(before[:6], after[:6]) and not torch.equal(before[6], after[6])


def test_word_vectors_are_rows_of_the_table():
    model, inputs = build(WordVectorsConfig(vocab_size=41, hidden_size=6), 0), packed()
    states_TH = model(inputs)
    assert torch.equal(states_TH, model.embed.token.weight[inputs.tokens])
    assert torch.equal(model(inputs, read_M=torch.tensor([2, 19])), states_TH[[2, 19]])
    means_NH = summary(states_TH, inputs, "mean")
    assert torch.equal(means_NH[1], torch.zeros(6))  # a document without tokens
    torch.testing.assert_close(means_NH[3], states_TH[6:18].mean(0))
    assert sum(parameter.numel() for parameter in model.parameters()) == 41 * 6


def test_invalid_filter_widths_are_refused():
    with pytest.raises(ValueError, match="hidden_size=4 is smaller than the number of filter widths, 5"):
        CnnConfig(hidden_size=4, filter_widths=(1, 2, 3, 4, 5))
    with pytest.raises(ValueError, match="each must be from 1 to 1000, and none may occur twice"):
        CnnConfig(filter_widths=(3, 3, 4))
