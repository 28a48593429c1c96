"""The text a vocabulary is learned from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, pairwise

import numpy as np
from tokenizers import normalizers

from lmtool import random_streams
from lmtool.errors import UserError
from lmtool.tokenizers.tokenizer import Tokenizer

# A longer text is sampled in chunks of about this many characters, up to the end of a word.
_STRETCH = re.compile(r"(?s).{1,10000}\S{0,1000}")
_SAMPLES = 4096  # made at a time
ALPHABET = 1000  # characters at most, as in the library and in BERT's published vocabularies
_CHUNK = 1000
# Training time grows with the square of a word's length, so longer words are split.
_WORD = re.compile(r"\S{1000}(?=\S)")


def sample(texts: Iterable[str], characters: int, most: int) -> Iterator[str]:
    """The texts that a vocabulary is learned from, in their order: all where they have at most `most` characters, else
    a seeded share of them, with about `most` in it. characters: how many they have together."""
    if characters <= most:
        yield from texts
        return
    stretches = (stretch for text in texts for stretch in _STRETCH.findall(text))
    for stretch, draw in zip(stretches, _sampled(), strict=False):
        if draw < most / characters:
            yield stretch


def _sampled() -> Iterator[float]:
    """Numbers in [0, 1), the same for every seed of a run: its vocabulary is that of its text."""
    for start in count(0, _SAMPLES):
        yield from random_streams.uniform(0, "sample", 0, np.arange(start, start + _SAMPLES), 1, first_draw=1)[
            :, 0
        ].tolist()


def training_text(texts: Iterable[str]) -> list[list[str]]:
    """The texts in portions of a thousand. UserError where all of it is white space."""
    chunks = list(_chunks(texts))
    if not any(text and not text.isspace() for chunk in chunks for text in chunk):
        raise UserError("tokenizer: the text to train on holds no characters", "give text with data.path=")
    return chunks


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    for text in texts:
        chunk += _parts(text)
        if len(chunk) >= _CHUNK:
            yield chunk
            chunk = []
    yield chunk


def _parts(text: str) -> list[str]:
    """A text, cut where a word is longer than any of a language."""
    bounds = [0, *(match.end() for match in _WORD.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def alphabet(
    chunks: Sequence[Sequence[str]],
    normalizer: normalizers.Normalizer,
    vocab_size: int,
    special: int,
    marked: Callable[[str], str | None],
) -> tuple[list[str], list[str]]:
    """The characters that get an entry, the commonest first kept; and their second forms, for another place in a word.

    special: entries that are taken already. marked: the second form of a character, None where it has none.
    UserError where there are no characters, or no room for them.
    """
    counts: Counter[str] = Counter()
    for chunk in chunks:
        for text in chunk:
            counts.update(normalizer.normalize_str(text))
    characters = [character for character in counts if not character.isspace()]
    if not characters:  # text of control characters alone
        raise UserError("tokenizer: the text to train on holds no characters", "give text with data.path=")
    characters.sort(key=lambda character: (-counts[character], character))
    # Both forms of the alphabet take at most half of the vocabulary, to leave room for longer entries.
    retained = sorted(characters[: min(ALPHABET, max(vocab_size // 4, 1))])
    second = [form for form in map(marked, retained) if form is not None]
    needed = special + len(retained) + len(second)
    if needed > vocab_size:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} has no room for {needed} special tokens and characters",
            "set tokenizer.vocab_size=1000 or more",
        )
    return retained, second


# Encoding of large texts word by word: if the tokenizer splits on spaces, each distinct word is encoded once.
#
# BERT's WordPiece splits on white space first, so the text between two spaces has the same ids everywhere. Natural text
# repeats its words, and a lookup takes a tenth of the time of encoding.


_MOST = 200_000
"""Words that are held, about 50 MB."""
_LONGEST = 40
"""Characters of a word that is held: longer ones seldom come again."""


class FlatEncoder:
    """The ids of texts laid end to end, (T,) int32, and how many each text has, (N,) int64: those of
    `Tokenizer.encode_batch`."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if not self._tokenizer.splits_on_spaces:
            rows: list[np.ndarray] = self._tokenizer.encode_batch(texts)
            flat = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
            return flat, np.array([len(row) for row in rows], dtype=np.int64)
        words_of = [text.split(" ") for text in texts]
        known = self._ids
        new = list(dict.fromkeys(word for words in words_of for word in words if word not in known))
        known.update(zip(new, (row.tolist() for row in self._tokenizer.encode_batch(new)), strict=True))
        pieces = [list(chain.from_iterable(map(known.__getitem__, words))) for words in words_of]
        for word in new:  # of more than there is room for, the first stay: they are the more frequent ones
            if len(word) > _LONGEST or len(known) > _MOST:
                del known[word]
        flat = np.array(list(chain.from_iterable(pieces)), dtype=np.int32)
        return flat, np.array(list(map(len, pieces)), dtype=np.int64)
