"""Replaces a vocabulary: maps each new entry to the equal old entry, or to the old tokens of its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import models

from lmtool.tokenizers.entries import PREFIX, SPACE, SUFFIX, EntryText, entry_text
from lmtool.tokenizers.tokenizer import ROLES, Tokenizer

# Roles of tokens at the same position in a text. Padding comes last, since its token may also have another role.
_EQUIVALENT_ROLES = {"cls": "bos", "bos": "cls", "sep": "eos", "eos": "sep"}
_ORDERED_ROLES = (*(role for role in ROLES if role != "pad"), "pad")


@dataclass(frozen=True)
class Replacement:
    """The map between two vocabularies.

    Attributes:
        sources: For each new id, the old ids whose vectors are averaged; may be empty.
        matched: Old ids by new id, for entries with the same role or text in both vocabularies.
        old_size: Number of old entries.
    """

    sources: tuple[np.ndarray, ...]
    matched: Mapping[int, int]
    old_size: int

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of retained, new and dropped entries, and of new entries without old tokens."""
        return {
            "kept": len(self.matched),
            "new": len(self.sources) - len(self.matched),
            "dropped": self.old_size - len(set(self.matched.values())),
            "without_old_pieces": sum(len(ids) == 0 for ids in self.sources),
        }


def replacement(old: Tokenizer, new: Tokenizer) -> Replacement:
    """Maps the entries of `new` to the entries of `old`.

    Special tokens are matched by role, sentinels by number, and other entries by text: they are equal if they have the
    same spelling or, if the tokenizers mark words differently, the same text at the same position in a word. The old
    tokenizer tokenizes the text of each unmatched entry.
    """
    matched = _match_entries(old, new)
    words = new.pieces(range(new.vocab_size))
    texts = {
        number: entry_text(new.marks, words[number])
        for number in range(new.vocab_size)
        if number not in matched and number not in new.special_ids and words[number]
    }
    segments = _Segmenter(old, new).segment([(words[number], entry) for number, entry in texts.items()])
    tokenized = dict(zip(texts, segments, strict=True))
    empty = np.empty(0, dtype=np.int64)
    sources = [
        np.array([matched[number]]) if number in matched else tokenized.get(number, empty)
        for number in range(new.vocab_size)
    ]
    return Replacement(tuple(sources), matched, old.vocab_size)


def _match_entries(old: Tokenizer, new: Tokenizer) -> dict[int, int]:
    matched: dict[int, int] = {}
    for role in _ORDERED_ROLES:
        old_role = next((name for name in (role, _EQUIVALENT_ROLES.get(role)) if name in old.roles), None)
        if role in new.roles and old_role is not None:
            matched.setdefault(new.roles[role], old.roles[old_role])
    matched |= dict(zip(new.sentinels, old.sentinels, strict=False))
    old_words, new_words = old.pieces(range(old.vocab_size)), new.pieces(range(new.vocab_size))
    special = {old_words[number]: number for number in old.special_ids}
    old_ids = _ids_by_text(old, old_words, old.marks == new.marks)
    for number, word in enumerate(new_words):
        if number in matched or not word:
            continue
        if number in new.special_ids:
            old_id = special.get(word)
        else:
            old_id = old_ids.get(word if old.marks == new.marks else entry_text(new.marks, word))
        if old_id is not None:
            matched[number] = old_id
    # Ids without an entry have unused rows in the embedding, which are matched in order.
    unused = ([number for number, word in enumerate(words) if not word] for words in (new_words, old_words))
    return matched | dict(zip(*unused, strict=False))


def _ids_by_text(old: Tokenizer, words: Sequence[str], by_spelling: bool) -> dict[str | EntryText | None, int]:
    """Returns the ids of a vocabulary's text entries, by spelling or by text; the smallest id if several are equal."""
    ids = [number for number in range(len(words)) if words[number] and number not in old.special_ids]
    keys = {number: words[number] if by_spelling else entry_text(old.marks, words[number]) for number in reversed(ids)}
    return {key: number for number, key in keys.items() if key is not None}


class _Segmenter:
    def __init__(self, old: Tokenizer, new: Tokenizer):
        self.old = old
        words = old.pieces(range(old.vocab_size))
        self.numbers = {word: number for number, word in enumerate(words) if word}
        # Byte-level entries that start a word begin with a space. In a vocabulary of characters the space is a separate
        # token, which a new entry gets only if the new vocabulary marks spaces.
        marks_spaces = new.marks in ("bytes", "space", "characters")
        self.with_space = old.marks == "bytes" or (old.marks == "characters" and marks_spaces)
        self.continuations = _continuation_model(self.numbers, old) if old.marks == "continues" else None

    def segment(self, entries: Sequence[tuple[str, EntryText | None]]) -> list[np.ndarray]:
        """Returns the (P,) int64 old ids of each entry (spelling, text), without special and unknown tokens."""
        texts = [self._text(entry) for _, entry in entries]
        tokens = [
            [number for number in ids.tolist() if number not in self.old.special_ids] if entry else self._byte_ids(word)
            for (word, entry), ids in zip(entries, self.old.encode_batch(texts), strict=True)
        ]
        return [
            np.array(self._adjust_ends(ids, entry), dtype=np.int64)
            for ids, (_, entry) in zip(tokens, entries, strict=True)
        ]

    def _text(self, entry: EntryText | None) -> str:
        if entry is None:
            return ""
        return " " * (entry.starts and self.with_space) + entry.text

    def _byte_ids(self, word: str) -> list[int]:
        characters = word if self.old.marks == "bytes" else ""
        return [self.numbers[character] for character in characters if character in self.numbers]

    def _adjust_ends(self, ids: list[int], entry: EntryText | None) -> list[int]:
        """Replaces the first (last) token by its variant within a word, if the entry does not start (end) a word."""
        if entry is None:
            return ids
        if self.continuations is not None and (not entry.starts or not ids):
            text = self.old.normalize(entry.text).strip()
            tokens = [piece.id for piece in self.continuations.tokenize(text)]
            return ids if set(tokens) & self.old.special_ids else tokens or ids
        if not ids:
            return ids
        first, *rest = ids
        (word,) = self.old.pieces([first])
        if not entry.starts and self.old.marks == "space" and word.startswith(SPACE):
            if word == SPACE and rest:
                return rest
            first = self.numbers.get(word.removeprefix(SPACE), first)
        ids = [first, *rest]
        (word,) = self.old.pieces(ids[-1:])
        if entry.ends is False and self.old.marks == "end":
            ids[-1] = self.numbers.get(word.removesuffix(SUFFIX), ids[-1])
        return ids


def _continuation_model(numbers: Mapping[str, int], old: Tokenizer) -> models.WordPiece:
    """Returns a WordPiece model that tokenizes text within a word, so that the first token is a continuation too."""
    continuing = {word.removeprefix(PREFIX): number for word, number in numbers.items() if word.startswith(PREFIX)}
    (unknown,) = old.pieces([old.role("unk")])
    return models.WordPiece({**numbers, **continuing}, unk_token=unknown, max_input_chars_per_word=1000)
