"""Hostile tokenizer.json files: rules that would fill the memory, and empty vocabularies."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers

from lmtool.errors import UserError
from lmtool.tokenizers import folders
from lmtool.tokenizers.folders import require_bounded, require_bounded_map
from lmtool.tokenizers.tokenizer import Tokenizer

WORDS = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
MODEL = {**WORDS, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
A_BECOMES_TEN = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
A_BECOMES_LIGATURE = A_BECOMES_TEN | {"content": "ﷺ"}  # 18 characters under NFKC
EACH = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}
INSERT_BEFORE_A = {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"}


def write(folder: Path, **parts: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": MODEL, **parts}))
    return folder


def sequence(key: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence("normalizers", *[A_BECOMES_TEN] * 12)},
        {"normalizer": sequence("normalizers", *[sequence("normalizers", EACH)] * 12)},
        {"normalizer": sequence("normalizers", *[INSERT_BEFORE_A] * 12)},
        {"normalizer": sequence("normalizers", *[{"type": "Prepend", "prepend": "aa"}, A_BECOMES_TEN] * 3)},
        {"normalizer": sequence("normalizers", *[A_BECOMES_LIGATURE, {"type": "NFKC"}, A_BECOMES_TEN] * 3)},
        {"normalizer": A_BECOMES_TEN, "pre_tokenizer": sequence("pretokenizers", *[{"type": "ByteLevel"}] * 6)},
        {"decoder": sequence("decoders", *[A_BECOMES_TEN] * 12)},
        {
            "post_processor": sequence(
                "processors", *[{"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}] * 2}] * 12
            )
        },
    ],
)
def test_rules_with_exponential_growth_are_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: .* may replace one character by more than 1,000"):
        Tokenizer.load(write(tmp_path, **parts))


def test_growth_bound_holds_for_random_rules() -> None:
    chance = random.Random(0)
    for _ in range(200):
        steps, rules = [], []
        for _ in range(chance.randint(1, 4)):
            pattern, content = "".join(chance.choices("ab", k=chance.randint(1, 2))), "ab" * chance.randint(0, 3)
            regular = chance.choice(["", "*", "+", "?", "|b", "."])
            steps.append(normalizers.Replace(Regex(pattern + regular) if regular else pattern, content))
            kind = {"Regex": pattern + regular} if regular else {"String": pattern}
            rules.append({"type": "Replace", "pattern": kind, "content": content})
        most, written = 1.0, list[str]()
        for rule in rules:
            most *= folders._growth(rule, written)
        text = "".join(chance.choices("ab", k=20))
        # An empty pattern also matches at the end of the text.
        assert len(normalizers.Sequence(steps).normalize_str(text)) <= most * (len(text) + 1), rules


def test_single_replacement_is_accepted(tmp_path: Path) -> None:
    assert len(Tokenizer.load(write(tmp_path, normalizer=A_BECOMES_TEN)).encode("a")) == 1


def character_map(replacement: bytes) -> bytes:
    """A character map of SentencePiece: the size of a trie, the trie, and the replacements."""
    trie = b"trie"
    return struct.pack("<I", len(trie)) + trie + replacement


def test_character_map_with_long_replacement_is_refused(tmp_path: Path) -> None:
    require_bounded_map(tmp_path, character_map(b"a" * 1000))
    with pytest.raises(UserError, match="the character map may replace one character by more than 1,000"):
        require_bounded_map(tmp_path, character_map(b"a" * 2000))


@pytest.mark.parametrize(
    "rule", ["Lowercase", [], {"type": "Sequence"}, {"type": "Precompiled"}, {"type": "Replace", "content": 5}]
)
def test_malformed_rule_is_left_to_the_library(rule: object, tmp_path: Path) -> None:
    require_bounded(tmp_path, {"normalizer": rule})  # raises nothing


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": {"model": MODEL | {"vocab": {}}}},
        {"tokenizer.json": {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}}},
        {"tokenizer.json": {"model": {"type": "BPE", "vocab": {}, "merges": []}}},
        {"tokenizer.json": {"model": {"type": "Unigram", "vocab": [], "unk_id": None}}},
        {"vocab.txt": ""},
        {"vocab.json": {}, "merges.txt": ""},
    ],
)
def test_empty_vocabulary_is_refused(files: dict[str, Any], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match="not a valid tokenizer file: the vocabulary has no entries"):
        Tokenizer.load(tmp_path)


def test_text_outside_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, model=MODEL | {"unk_token": "[NONE]"}))
    assert len(tokenizer.encode("a")) == 1
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text]), tokenizer.encode_with_template):
        with pytest.raises(UserError, match="cannot tokenize a text") as caught:
            encode("b")
        assert "unknown token" in str(caught.value.hint)
