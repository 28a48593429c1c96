"""Encoding word by word gives the same ids as encoding whole texts."""

from __future__ import annotations

import random

import pytest
from test_published_folders import ADVERSARIAL, TEXTS

from lmtool.config.registry import build
from lmtool.tokenizers import texts
from lmtool.tokenizers.configs import BpeConfig, ByteBpeConfig, SentencePieceConfig, WordPieceConfig
from lmtool.tokenizers.texts import FlatEncoder
from lmtool.tokenizers.tokenizer import Tokenizer

ALPHABET = (
    "abcdeé\u0301ÀßİΣς中한 ก\u200b\u200d\xa0\u3000\u2028\t\n\r\x00\x1c\x85\ufeff\U0001f469.,'’[]<>#_-0１²" + " " * 12
)


def random_texts(count: int) -> list[str]:
    chance = random.Random(0)
    pieces = [*ALPHABET, "[MASK]", "[CLS] ", " [SEP]", "##ing", "the", "Reading"]
    return ["".join(chance.choices(pieces, k=chance.randint(0, 25))) for _ in range(count)]


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("lowercase", [True, False])
def test_word_cache_matches_text_encoding(lowercase, parse, tmp_path, monkeypatch):
    build(WordPieceConfig(lowercase=lowercase), TEXTS, 300).save(tmp_path / "saved")
    tokenizer = Tokenizer.load(tmp_path / "saved", parse)
    assert tokenizer.splits_on_spaces and tokenizer.parse_special_tokens == parse
    monkeypatch.setattr(texts, "_CACHED_WORDS", 2000)
    corpus, encode = [*ADVERSARIAL, *TEXTS[:4], *random_texts(3000)], FlatEncoder(tokenizer)
    for start in range(0, len(corpus), 500):
        portion = corpus[start : start + 500]
        flat, lengths = encode(portion)
        expected = tokenizer.encode_batch(portion)
        assert lengths.tolist() == [len(row) for row in expected]
        assert flat.tolist() == [number for row in expected for number in row.tolist()]
        assert len(encode._cache) <= 2000
    assert encode([])[0].tolist() == [] and encode([""])[1].tolist() == [0]


@pytest.mark.parametrize("config", [ByteBpeConfig(), BpeConfig(), SentencePieceConfig()])
def test_tokenizers_without_word_splitting_encode_texts(config):
    tokenizer = build(config, TEXTS, 400)
    assert not tokenizer.splits_on_spaces
    flat, lengths = FlatEncoder(tokenizer)(ADVERSARIAL[:10])
    rows = tokenizer.encode_batch(ADVERSARIAL[:10])
    assert flat.tolist() == [number for row in rows for number in row.tolist()]
    assert lengths.tolist() == [len(row) for row in rows] and FlatEncoder(tokenizer)([])[0].tolist() == []
