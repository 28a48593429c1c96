"""Alignment of tokens with the characters and words of a text."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest

from lmtool.config.registry import build
from lmtool.tokenizers.configs import ByteBpeConfig, SentencePieceConfig, WordPieceConfig

TEXT = "The quick brown fox, they said, isn't naïve: it jumps over 12 lazy dogs in Ångström (by the sea shore)."
KINDS = {
    "wordpiece": WordPieceConfig(minimum_count=1),
    "bytebpe": ByteBpeConfig(minimum_count=1),
    "roberta": ByteBpeConfig(minimum_count=1, special_tokens="roberta"),
    "t5": SentencePieceConfig(sentinels=4),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return build(KINDS[request.param], [TEXT] * 8, 120 if request.param == "t5" else 330)


@pytest.mark.parametrize(
    "text", [TEXT, "", " ", "  two  spaces ", "naïve café\nline", "中文 and 漢字", "e\u0301 x\u00a0y"]
)
def test_spans_cover_text_in_order(tokenizer, text):
    ids, spans = tokenizer.encode_aligned(text)
    assert ids.tolist() == tokenizer.encode(text).tolist() and spans.shape == (len(ids), 2)
    assert (spans[:, 0] <= spans[:, 1]).all() and (np.diff(spans[:, 0]) >= 0).all()
    covered = np.zeros(len(text), dtype=bool)
    for start, end in spans:
        assert text[start:end] == text[start:end].strip()
        covered[start:end] = True
    # A combining mark that the normalizer removes has no token.
    left = [character for place, character in enumerate(text) if not covered[place]]
    assert all(character.isspace() or unicodedata.combining(character) for character in left)


def test_tokens_are_aligned_with_words(tokenizer):
    words = [*TEXT.split(), "!", "a-b", "x" * 30]
    ((ids, numbers),) = tokenizer.encode_sentences([words])
    assert ids.tolist() == tokenizer.encode(" ".join(words)).tolist()
    assert sorted(set(numbers.tolist())) == list(range(len(words))) and (np.diff(numbers) >= 0).all()
    _, spans = tokenizer.encode_aligned(" ".join(words))
    for number, word in enumerate(words):
        own = spans[numbers == number]
        assert " ".join(words)[own[0, 0] : own[-1, 1]] == word


def test_word_removed_by_normalizer_has_no_token():
    tokenizer = build(KINDS["wordpiece"], [TEXT] * 8, 330)
    ((_, numbers),) = tokenizer.encode_sentences([["quick", "\u200d", "fox"]])
    assert set(numbers.tolist()) == {0, 2}


def test_word_ids_match_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = build(KINDS["wordpiece"], [TEXT] * 8, 330)
    tokenizer.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    words = [*TEXT.split(), "unseen-word", "2,000"]
    encoded = reference(words, is_split_into_words=True, add_special_tokens=False)
    ((ids, numbers),) = tokenizer.encode_sentences([words])
    assert ids.tolist() == encoded["input_ids"] and numbers.tolist() == encoded.word_ids()
