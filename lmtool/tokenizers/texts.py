"""The text a vocabulary is learned from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, pairwise

import numpy as np
from tokenizers import normalizers

from lmtool import random_streams
from lmtool.errors import UserError

# A longer text is sampled in stretches of about so many characters, up to the end of a word.
_STRETCH = re.compile(r"(?s).{1,10000}\S{0,1000}")
_DRAWS = 4096  # made at a time
ALPHABET = 1000  # characters at most, as in the library and in BERT's published vocabularies
_PORTION = 1000
# The time that learning takes grows with the square of a word's length: longer ones are learned in parts.
_WORD = re.compile(r"\S{1000}(?=\S)")


def sample(texts: Iterable[str], characters: int, most: int) -> Iterator[str]:
    """The texts that a vocabulary is learned from, in their order: all where they have at most `most` characters, else
    a seeded share of them, with about `most` in it. characters: how many they have together."""
    if characters <= most:
        yield from texts
        return
    stretches = (stretch for text in texts for stretch in _STRETCH.findall(text))
    for stretch, draw in zip(stretches, _draws(), strict=False):
        if draw < most / characters:
            yield stretch


def _draws() -> Iterator[float]:
    """Numbers in [0, 1), the same for every seed of a run: its vocabulary is that of its text."""
    for start in count(0, _DRAWS):
        yield from random_streams.uniform(0, "sample", 0, np.arange(start, start + _DRAWS), 1, first_draw=1)[
            :, 0
        ].tolist()


def training_text(texts: Iterable[str]) -> list[list[str]]:
    """The texts in portions of a thousand. UserError where all of it is white space."""
    portions = list(_portions(texts))
    if not any(text and not text.isspace() for portion in portions for text in portion):
        raise UserError("tokenizer: the text to train on holds no characters", "give text with data.path=")
    return portions


def _portions(texts: Iterable[str]) -> Iterator[list[str]]:
    portion: list[str] = []
    for text in texts:
        portion += _parts(text)
        if len(portion) >= _PORTION:
            yield portion
            portion = []
    yield portion


def _parts(text: str) -> list[str]:
    """A text, cut where a word is longer than any of a language."""
    boundaries = [0, *(match.end() for match in _WORD.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(boundaries)]


def alphabet(
    portions: Sequence[Sequence[str]],
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
    for portion in portions:
        for text in portion:
            counts.update(normalizer.normalize_str(text))
    characters = [character for character in counts if not character.isspace()]
    if not characters:  # text of control characters alone
        raise UserError("tokenizer: the text to train on holds no characters", "give text with data.path=")
    characters.sort(key=lambda character: (-counts[character], character))
    # Both forms of the alphabet take at most half of the vocabulary, so that there is room for pieces.
    kept = sorted(characters[: min(ALPHABET, max(vocab_size // 4, 1))])
    second = [form for form in map(marked, kept) if form is not None]
    needed = special + len(kept) + len(second)
    if needed > vocab_size:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} has no room for {needed} special tokens and characters",
            "set tokenizer.vocab_size=1000 or more",
        )
    return kept, second
