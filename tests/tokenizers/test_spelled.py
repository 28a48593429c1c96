"""Word vocabulary with bytes that spell unknown words."""

from __future__ import annotations

import numpy as np
import pytest

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.models.characters import VocabularyBytes
from lmtool.tokenizers.configs import SpelledConfig
from lmtool.tokenizers.tokenizer import Tokenizer

TEXTS = ["The cat sat; the cat's mat, the café and 中文.", "A dog sat on a mat."] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build(SpelledConfig(), TEXTS, 290)


def test_unknown_words_are_spelled_in_bytes(tokenizer):
    ids = tokenizer.encode("The cats Zé")
    assert tokenizer.readable(ids) == ["The", "cat", "##s", "␣", "##Z", "##<C3>", "##<A9>"]
    assert tokenizer.starts_word[ids].tolist() == [True, True, False, True, False, False, False]
    assert tokenizer.vocab_size == len(set(tokenizer.pieces(range(tokenizer.vocab_size)))) <= 290


@pytest.mark.parametrize("text", ["the cats ' mat , zyzzyva 日 本 Ünïcödé \U0001f469", "## a # b", ""])
def test_decoding_keeps_everything_but_spacing(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
    assert tokenizer.roles["unk"] not in ids


def test_frequent_words_come_first_and_survive_saving(tokenizer, tmp_path):
    assert tokenizer.pieces(range(5)) == ["</S>", "<S>", "<UNK>", "Ġ.", "Ġcat"]
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.fingerprint, loaded.roles) == (tokenizer.fingerprint, tokenizer.roles)


def test_long_words_are_truncated(tokenizer):
    first, then = (
        tokenizer.encode_sentences([["é" * 200 + "end", "mat"]])[0][1],
        tokenizer.encode("é" * 200 + "end mat"),
    )
    assert (first == 0).sum() == 50 and tokenizer.readable(then[-1:]) == ["mat"]


def test_vocabulary_bytes_spell_entries(tokenizer):
    spellings = VocabularyBytes.of(tokenizer, 4)
    ids = tokenizer.encode("The cats")
    rows = spellings.symbols_VB[ids]
    assert bytes(rows[0][:3].astype(np.uint8) - 1) == b"The" and rows[0][3] == 0
    assert spellings.lengths_V[ids].tolist() == [3, 3, 1] and spellings.continues_V[ids].tolist() == [
        False,
        False,
        True,
    ]
    assert spellings.symbols_VB[tokenizer.roles["eos"]][0] == 258 and spellings.lengths_V[tokenizer.roles["eos"]] == 1


def test_vocabulary_without_room_for_words_is_refused():
    with pytest.raises(UserError, match="is too small for words and 260"):
        build(SpelledConfig(), TEXTS, 260)
