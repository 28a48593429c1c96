"""Word-level and character-level vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.tokenizers.configs import CharacterConfig, ListedConfig, WordConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.test_tokenizers import STRINGS, TEXTS

CONFIGS = [
    WordConfig(), WordConfig(special_tokens="t5", sentinels=5), WordConfig(special_tokens="gpt", lowercase=False),
    CharacterConfig(), CharacterConfig(special_tokens="roberta", lowercase=True),
    CharacterConfig(special_tokens="t5", sentinels=5),
]  # fmt: skip


def config_id(config: ListedConfig) -> str:
    return f"{config.name} {config.special_tokens}"


def test_word_vocabulary_has_most_frequent_words() -> None:
    texts = ["The cat, the dog. The cat!"]
    tokenizer = build(WordConfig(minimum_count=1), texts, 8)
    assert tokenizer.pieces(range(8))[5:] == ["the", "cat", "!"]
    pieces = tokenizer.pieces(tokenizer.encode("the CAT barks"))
    assert pieces == ["the", "cat", "[UNK]"] and tokenizer.starts_word.all()
    twice = build(WordConfig(), texts, 400)
    assert twice.pieces(range(twice.vocab_size))[5:] == ["the", "cat"]
    assert tokenizer.decode(tokenizer.encode("the cat!")) == "the cat !"


def test_character_tokenizer_keeps_text() -> None:
    text = "Ab  c.\nÀb\t"
    tokenizer = build(CharacterConfig(special_tokens="gpt"), [text], 100)
    assert tokenizer.decode(tokenizer.encode(text)) == text and len(tokenizer.encode(text)) == len(text)
    assert tokenizer.readable(tokenizer.encode("b c\n\té")) == ["b", "␣", "c", "⏎", "⇥", "<unk>"]
    starts = tokenizer.starts_word[tokenizer.encode("b, cÀ")]
    assert starts.tolist() == [False, True, True, False, False]
    few = build(CharacterConfig(special_tokens="gpt"), ["aaaa bb c"], 4)
    assert few.pieces(range(4)) == ["<unk>", "<|endoftext|>", "a", " "]


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_saved_listed_tokenizer_matches_transformers(config: ListedConfig, tmp_path: Path) -> None:
    tokenizer, again = build(config, TEXTS, 90), build(config, iter(TEXTS), 90)
    assert tokenizer.fingerprint == again.fingerprint and tokenizer.vocab_size <= 90
    assert {*tokenizer.roles, *(["sentinel"] if tokenizer.sentinels else [])} == config.roles
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.roles == tokenizer.roles
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    special = tokenizer.special_ids - {tokenizer.role("unk")}
    for text in STRINGS:
        ids, spans = loaded.encode_aligned(text)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert not special & set(ids.tolist())
        if text.isascii() and "\x00" not in text:
            pieces = zip(loaded.pieces(ids), spans, strict=True)
            known = [(piece, text[start:end]) for piece, (start, end) in pieces if piece not in ("[UNK]", "<unk>")]
            assert all(piece.strip().lower() == part.lower() for piece, part in known), text
    if tokenizer.sentinels:
        last = tokenizer.vocab_size - 1
        assert tokenizer.sentinels == tuple(range(last, last - 5, -1)) and set(tokenizer.sentinels) < special


def test_too_small_or_empty_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="vocab_size=103 is too small for words and 103 special tokens") as caught:
        build(WordConfig(special_tokens="t5"), TEXTS, 103)
    assert "tokenizer.sentinels=" in str(caught.value.hint)
    with pytest.raises(UserError, match="minimum_count=9: no word of the text is this frequent"):
        build(WordConfig(minimum_count=9), ["every word of it once"], 400)
    for config in (WordConfig(), CharacterConfig()):
        with pytest.raises(UserError, match="no characters"):
            build(config, ["", " \n"], 400)
