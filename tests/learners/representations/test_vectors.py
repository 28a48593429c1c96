"""Embeddings of texts: against transformers' hidden states, and independent of the batch."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch

from lmtool.config.registry import build
from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.learners.base import truncation_warnings
from lmtool.learners.representations.reading import embedder_of
from lmtool.learners.representations.vectors import HiddenStates
from lmtool.models.pretransformer_configs import LstmConfig
from lmtool.training.precision import FP32_CPU
from lmtool.types import Packed
from lmtool.weights.padded_model import load
from tests.weights.published_folders import make

TEXTS = ["the quick brown fox", "she sells sea shells by the sea shore", "dog", "what a lovely film, what a film!"]


def embedded(folder, layers, pooling, texts=TEXTS, batch_tokens=1000, truncated=None):
    """The vectors of texts."""
    embeds, stated = embedder_of(load(folder), str(folder), layers, pooling, batch_tokens, FP32_CPU)
    truncated = Counter() if truncated is None else truncated
    return list(embeds.vectors(Rows.of_texts(text=list(texts)), truncated)), stated


@pytest.fixture(scope="module", params=["bert", "gpt", "t5", "bart"])
def folder(request, tmp_path_factory):
    """A published folder and its transformers model."""
    place = tmp_path_factory.mktemp(request.param)
    return place, make(request.param, place)


def test_layer_vectors_match_transformers_hidden_states(folder):
    place, theirs = folder
    for text in embedded(place, "all", "none")[0]:
        ids = torch.from_numpy(text.tokens)[None]
        reader = theirs.get_encoder() if theirs.config.is_encoder_decoder else theirs
        with torch.no_grad():
            expected = reader(input_ids=ids, output_hidden_states=True).hidden_states
        np.testing.assert_allclose(text.vectors, torch.cat(expected).numpy(), rtol=0, atol=2e-5)


def test_vectors_do_not_depend_on_batch_or_selected_layers(folder):
    place, _ = folder
    tokens, _ = embedded(place, "all", "none")
    pooled = {how: embedded(place, "all", how)[0] for how in ("first", "mean", "max", "last")}
    for layer, number in (("last", -1), (1, 1), (0, 0)):
        alone, _ = embedded(place, layer, "mean", TEXTS, batch_tokens=1)
        for text, own, means in zip(tokens, alone, pooled["mean"], strict=True):
            assert own.vectors.shape == (1, 36)
            np.testing.assert_allclose(own.vectors[0], text.vectors[number].mean(0), rtol=0, atol=1e-5)
            np.testing.assert_allclose(own.vectors[0], means.vectors[number], rtol=0, atol=1e-5)
    averaged, _ = embedded(place, "mean", "mean")
    for number, text in enumerate(tokens):
        np.testing.assert_allclose(averaged[number].vectors[0], text.vectors[1:].mean((0, 1)), rtol=0, atol=1e-5)
        np.testing.assert_allclose(pooled["first"][number].vectors, text.vectors[:, 0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(pooled["last"][number].vectors, text.vectors[:, -1], rtol=0, atol=1e-5)
        np.testing.assert_allclose(pooled["max"][number].vectors, text.vectors.max(1), rtol=0, atol=1e-5)


def test_auto_pooling_follows_the_checkpoint(tmp_path):
    make("bert", tmp_path)
    assert "pooling=mean (the checkpoint names none)" in embedded(tmp_path, "last", "auto")[1]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    vectors, stated = embedded(tmp_path, "last", "auto")
    assert "pooling=max (the checkpoint's 1_Pooling/config.json)" in stated
    np.testing.assert_array_equal(vectors[0].vectors, embedded(tmp_path, "last", "max")[0][0].vectors)


def test_long_texts_are_truncated_with_a_warning(tmp_path):
    make("bert", tmp_path)
    truncated = Counter()
    vectors, _ = embedded(tmp_path, "last", "none", ["dog " * 100, "dog"], truncated=truncated)
    assert len(vectors[0].tokens) == 40
    assert list(truncation_warnings(truncated, 2)) == ["1 of 2 texts are truncated to 40 tokens"]


@pytest.mark.parametrize("layers", [3, -1, "first"])
def test_missing_layers_are_refused(tmp_path, layers):
    make("bert", tmp_path)
    with pytest.raises(UserError, match=f"layers={layers} is not a layer: the model has layers 1 to 2"):
        embedded(tmp_path, layers, "mean")


def test_layers_of_different_widths_are_refused():
    backbone = build(LstmConfig(vocab_size=30, embedding_size=8, hidden_size=12, num_layers=2), 0)
    texts = Packed(torch.arange(9), (4, 5))
    assert HiddenStates(backbone, FP32_CPU).layers == (1, 2)  # all layers as wide as the last one
    for layers, width in (((1, 2), 12), ((0,), 8)):
        states = HiddenStates(backbone, FP32_CPU, layers)
        assert states.read(texts).shape == (len(layers), 9, width) and states.width == width
    with pytest.raises(UserError, match="layer 0 has states of width 8, but layer 2 of width 12"):
        HiddenStates(backbone, FP32_CPU, (0, 1, 2))
