"""The vectors of one word in several sentences, layer by layer."""

from __future__ import annotations

import numpy as np
import pytest

from lmtool.config.registry import Choice, build
from lmtool.errors import UserError
from lmtool.learners.representations.vectors import HiddenStates, compare_word
from lmtool.training.precision import select_device, select_precision
from tests.objectives.objective_fixtures import backbone, tokenizer

PRECISION = select_precision("fp32", select_device("cpu"))
SENTENCES = ["the cat sat near two dogs", "some dogs ran and the Cat saw"]


def test_static_vectors_are_equal_and_contextual_ones_differ() -> None:
    tokens = tokenizer()
    section = {"name": "word_vectors", "vocab_size": tokens.vocab_size, "hidden_size": 16}
    static = HiddenStates(build(Choice("model").validate(section), 0).eval(), PRECISION)
    vectors = compare_word(static, tokens, "bert", SENTENCES, "cat")
    assert vectors.layers == (0,)
    np.testing.assert_allclose(vectors.same_W, 1, rtol=1e-6)
    assert vectors.others_W[0] < 0.9
    contextual = HiddenStates(backbone().eval(), PRECISION)
    vectors = compare_word(contextual, tokens, "bert", SENTENCES, "cat")
    assert len(vectors.same_W) == contextual.depth + 1 and vectors.same_W.max() < 0.9999
    np.testing.assert_allclose(vectors.similarity_WSS, vectors.similarity_WSS.transpose(0, 2, 1), rtol=1e-6)


def test_sentence_without_the_word_is_refused() -> None:
    with pytest.raises(UserError, match="no 'two' in 'some dogs ran"):
        compare_word(HiddenStates(backbone().eval(), PRECISION), tokenizer(), "bert", SENTENCES, "two")
