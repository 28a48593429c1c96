"""ELMo against a plain implementation of its definition: states and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtool.config.registry import build
from lmtool.models.characters import VocabularyBytes
from lmtool.models.elmo import Elmo
from lmtool.models.pretransformer_configs import ElmoConfig
from lmtool.nn.stack import Tap, TapPoint
from lmtool.types import Packed

SIZES = {
    "vocab_size": 13, "num_layers": 2, "hidden_size": 14, "cell_size": 5, "cell_clip": 0.3, "projection_clip": 0.15,
    "word_length": 9, "character_size": 5, "filters": ((1, 2), (3, 5)), "highways": 2, "dropout": 0.0,
}  # fmt: skip
ENTRIES = [b"cat", b"s", b"dog", b"abcdefghijk", "é".encode(), b"</S>", b"x", b"longer", b"est", b"<S>"]
CONTINUES = [number in (1, 4, 8) for number in range(len(ENTRIES))]
# Words of several pieces, a truncated word, texts that begin with a continuation piece, an empty text.
TEXTS = [[0, 1, 2, 5], [1, 4, 3, 1, 0], [], [9, 7, 8, 8, 2, 5], [6]]
WORDS = [["cats", "dog", 5], ["sé", "abcdefghijks", "cat"], [], [9, "longerestest", "dog", 5], ["x"]]


def elmo(**fields) -> Elmo:
    model = build(ElmoConfig(**{**SIZES, **fields}), 3).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    model.reader.spell(
        VocabularyBytes.of_bytes(ENTRIES, np.array(CONTINUES), model.reader.longest, start_id=9, end_id=5)
    )
    return model


def packed() -> Packed:
    return Packed(torch.tensor([number for text in TEXTS for number in text]), tuple(map(len, TEXTS)))


def plain_word(model: Elmo, word: str | int) -> Tensor:
    """A word's vector: padded bytes between two boundary symbols; every filter at every position; highways; a
    projection."""
    signs = {9: 257, 5: 258}
    inner = [signs[word]] if isinstance(word, int) else [byte + 1 for byte in word.encode()[: SIZES["word_length"] - 2]]
    symbols = [259, *inner, 260]
    symbols += [261] * (SIZES["word_length"] - len(symbols))
    vectors = torch.stack([model.reader.characters.weight[symbol] for symbol in symbols])
    features = []
    for convolution, (width, count) in zip(model.reader.convolutions, SIZES["filters"], strict=True):
        for number in range(count):
            values = [
                (convolution.weight[number].T * vectors[place : place + width]).sum() + convolution.bias[number]
                for place in range(len(vectors) - width + 1)
            ]
            features.append(torch.stack(values).max().relu())
    x = torch.stack(features)
    for highway in model.reader.highways:
        gate = torch.sigmoid(highway.gate.weight @ x + highway.gate.bias)
        x = gate * (highway.transform.weight @ x + highway.transform.bias).relu() + (1 - gate) * x
    return model.reader.project.weight @ x + model.reader.project.bias


def plain_lstm(lstm, inputs: list[Tensor]) -> list[Tensor]:
    given, cell, outputs = torch.zeros(lstm.output_size).double(), torch.zeros(lstm.cell_size).double(), []
    for x in inputs:
        write, forget, new, read = (lstm.weight_ih @ x + lstm.weight_hh @ given + lstm.bias).chunk(4)
        cell = (forget.sigmoid() * cell + write.sigmoid() * new.tanh()).clamp(-lstm.cell_clip, lstm.cell_clip)
        given = (lstm.weight_hr @ (read.sigmoid() * cell.tanh())).clamp(-lstm.projection_clip, lstm.projection_clip)
        outputs.append(given)
    return outputs


def plain_text(model: Elmo, words: list[str | int]) -> tuple[list[Tensor], list[Tensor]]:
    """The states of a text's words, forward and backward. Every layer but the first has a residual connection."""
    forward = backward = [plain_word(model, word) for word in words]
    for number, layer in enumerate(model.layers):
        one, other = plain_lstm(layer.forward_lstm, forward), plain_lstm(layer.backward_lstm, backward[::-1])[::-1]
        forward = [y + x for y, x in zip(one, forward, strict=True)] if number else one
        backward = [y + x for y, x in zip(other, backward, strict=True)] if number else other
    return forward, backward


def test_states_and_gradients_match_a_plain_implementation():
    model, states, pieces = elmo(), [], []
    for ids, words in zip(TEXTS, WORDS, strict=True):
        forward, backward = plain_text(model, words)
        whole = [torch.cat(pair) for pair in zip(forward, backward, strict=True)]
        starts = [place == 0 or not CONTINUES[number] for place, number in enumerate(ids)]
        pieces += [whole[number] for number in np.cumsum(starts) - 1]
        states += whole
    expected, got = torch.stack(pieces), model(packed())
    torch.testing.assert_close(got, expected)
    assert (torch.stack(states).abs() < 3).all() and len(states) < len(pieces)
    weights = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
    ours = torch.autograd.grad((got * weights).sum(), list(model.parameters()))
    theirs = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    torch.testing.assert_close(ours, theirs)


class Replaced(Tap):
    """Replaces the states after the embedding by a leaf tensor."""

    def wants(self, place: TapPoint) -> bool:
        return place.layer == 0

    def __call__(self, place: TapPoint, x_TH: Tensor) -> Tensor:
        self.leaf = x_TH.detach().requires_grad_()
        return self.leaf


def test_each_direction_depends_on_one_side_of_the_text_only():
    model, tap = elmo(cell_clip=None, projection_clip=None), Replaced()
    hidden_TH = model(Packed(torch.tensor([0, 2, 6, 5, 3, 0, 7]), (4, 3)), tap=tap)
    half = SIZES["hidden_size"] // 2
    forward, backward = slice(half), slice(half, None)
    for text in (range(4), range(4, 7)):
        for place in text:
            before, after = range(text.start, place + 1), range(place, text.stop)
            for own, other, read in ((forward, backward, before), (backward, forward, after)):
                (gradients_TH,) = torch.autograd.grad(hidden_TH[place, own].sum(), tap.leaf, retain_graph=True)
                assert gradients_TH.any(1).nonzero().flatten().tolist() == list(read)
                assert not gradients_TH[:, other].any(), "directions mix"


def test_read_m_selects_tokens_and_pieces_share_a_word_state():
    model = elmo()
    hidden_TH = model(packed())
    read_M = torch.tensor([0, 1, 7, 11, 12])
    assert torch.equal(model(packed(), read_M=read_M), hidden_TH[read_M])
    assert torch.equal(hidden_TH[0], hidden_TH[1]) and torch.equal(hidden_TH[10], hidden_TH[12])


def test_initial_weights_match_the_published_code():
    model = build(ElmoConfig(vocab_size=20, hidden_size=64, cell_size=48, filters=((1, 100), (2, 300))), 0)
    reader = model.reader
    assert 0.9 < reader.characters.weight.abs().max() <= 1 and reader.characters.weight.std() > 0.5
    assert all(0.04 < convolution.weight.abs().max() <= 0.05 for convolution in reader.convolutions)
    assert all((highway.gate.bias == -2).all() for highway in reader.highways)
    assert math.isclose(reader.project.weight.detach().std(), 400**-0.5, rel_tol=0.02)
    lstm = model.layers[1].backward_lstm
    assert lstm.bias.sum() == lstm.cell_size and lstm.weight_hh.abs().max() <= (6 / (4 * 48 + 32)) ** 0.5


def test_filter_wider_than_word_length_is_refused():
    with pytest.raises(ValueError, match="a width of 7 exceeds word_length=6"):
        ElmoConfig(word_length=6)
