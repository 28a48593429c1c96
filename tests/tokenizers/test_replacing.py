"""Replacement of a vocabulary: each new entry maps to entries of the old one."""

from __future__ import annotations

import pytest

from lmtool.config.registry import build
from lmtool.tokenizers.configs import (
    BpeConfig,
    ByteBpeConfig,
    CharacterConfig,
    SentencePieceConfig,
    TokenizerConfig,
    WordConfig,
    WordPieceConfig,
)
from lmtool.tokenizers.entries import entry_text
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.conversion.vocabularies import replacement
from tests.tokenizers.test_tokenizers import TEXTS

KINDS: dict[str, TokenizerConfig] = {
    "wordpiece": WordPieceConfig(),
    "bytebpe": ByteBpeConfig(),
    "roberta": ByteBpeConfig(special_tokens="roberta"),
    "bpe": BpeConfig(),
    "t5": SentencePieceConfig(sentinels=7),
    "albert": SentencePieceConfig(special_tokens="albert"),
    "joined": SentencePieceConfig(algorithm="bpe", sentinels=7),
    "word": WordConfig(),
    "character": CharacterConfig(special_tokens="gpt"),
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: build(config, TEXTS, 330) for name, config in KINDS.items()}


def old_pieces(old: Tokenizer, new: Tokenizer, word: str) -> list[str]:
    """The old pieces of a new entry."""
    (number,) = (n for n in range(new.vocab_size) if new.pieces([n]) == [word])
    return old.pieces(replacement(old, new).sources[number])


@pytest.mark.parametrize("name", KINDS)
def test_equal_vocabulary_keeps_every_entry(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    old, new = tokenizers[name], build(KINDS[name], TEXTS, 330)
    mapping = replacement(old, new)
    assert mapping.matched == {number: number for number in range(old.vocab_size)}
    assert [ids.tolist() for ids in mapping.sources] == [[number] for number in range(old.vocab_size)]
    assert mapping.counts == {"kept": old.vocab_size, "new": 0, "dropped": 0, "without_old_pieces": 0}


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_replacement_between_all_tokenizer_kinds(before: str, after: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Roles match roles, text matches equal text, and new entries are built from text, not from special tokens."""
    old, new = tokenizers[before], tokenizers[after]
    mapping = replacement(old, new)
    counts = mapping.counts
    assert len(mapping.sources) == new.vocab_size == counts["kept"] + counts["new"]
    for role, number in new.roles.items():
        if role in old.roles and role not in ("pad", "bos", "eos"):  # a token may have several of these roles
            assert mapping.matched[number] == old.roles[role]
    for number, ours in mapping.matched.items():
        if number not in new.special_ids:
            both = entry_text(new.marks, new.pieces([number])[0]), entry_text(old.marks, old.pieces([ours])[0])
            assert both[0] == both[1] and ours not in old.special_ids
    text = [ids for number, ids in enumerate(mapping.sources) if number not in new.special_ids]
    assert not {number for ids in text for number in ids.tolist()} & old.special_ids
    made = [
        len(mapping.sources[number]) > 0
        for number in range(new.vocab_size)
        if number not in new.special_ids and entry_text(new.marks, new.pieces([number])[0]) is not None
    ]
    assert sum(made) > 0.5 * len(made) or before == "word"


def test_replacement_respects_word_starts(tokenizers: dict[str, Tokenizer]) -> None:
    few = {name: build(KINDS[name], TEXTS, size) for name, size in (("wordpiece", 130), ("joined", 90))}
    assert old_pieces(few["wordpiece"], tokenizers["wordpiece"], "sleeps")[1:][-1].startswith("##")
    inside = next(w for w in tokenizers["wordpiece"].pieces(range(178)) if w.startswith("##") and len(w) > 6)
    cut = old_pieces(few["wordpiece"], tokenizers["wordpiece"], inside)
    assert all(piece.startswith("##") for piece in cut) and "".join(cut).replace("##", "") == inside[2:]
    within = next(w for w in tokenizers["joined"].pieces(range(3, 300)) if not w.startswith("▁") and len(w) > 4)
    cut = old_pieces(few["joined"], tokenizers["joined"], within)
    assert "".join(cut) == within and not cut[0].startswith("▁")
    assert "".join(old_pieces(tokenizers["character"], tokenizers["bytebpe"], "Ġdog")) == " dog"
    assert "".join(old_pieces(tokenizers["character"], tokenizers["wordpiece"], "dog")) == "dog"
    assert old_pieces(tokenizers["wordpiece"], tokenizers["bytebpe"], "Ġdog") == ["dog"]
    assert old_pieces(tokenizers["word"], tokenizers["wordpiece"], "z") == []


def test_special_tokens_map_between_families(tokenizers: dict[str, Tokenizer]) -> None:
    bert, gpt, roberta, t5 = (tokenizers[name] for name in ("wordpiece", "bytebpe", "roberta", "t5"))
    kept = replacement(bert, roberta).matched
    assert kept[roberta.role("bos")] == bert.role("cls") and kept[roberta.role("eos")] == bert.role("sep")
    assert kept[roberta.role("pad")] == bert.role("pad") and kept[roberta.role("mask")] == bert.role("mask")
    # GPT-2's single special token takes an entry that is read, not padding.
    assert replacement(bert, gpt).matched[gpt.role("eos")] in (bert.role("cls"), bert.role("sep"))
    kept = replacement(build(SentencePieceConfig(sentinels=3), TEXTS, 330), t5).matched
    assert [number in kept for number in t5.sentinels] == [True] * 3 + [False] * 4
