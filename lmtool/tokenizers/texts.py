"""The text a vocabulary is learned from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from tokenizers import normalizers

from lmtool.errors import UserError

# Characters that are read; more would hardly change the counts, and they are held in memory.
MOST = 500_000_000
ALPHABET = 1000  # characters at most, as in the library and in BERT's published vocabularies
_PORTION = 1000
# The time that learning takes grows with the square of a word's length: longer ones are learned in parts.
_WORD = re.compile(r"\S{1000}(?=\S)")


def training_text(texts: Iterable[str]) -> list[list[str]]:
    """The texts in portions of a thousand, up to `MOST` characters. UserError where all of it is white space."""
    portions = list(_portions(texts))
    if not any(text and not text.isspace() for portion in portions for text in portion):
        raise UserError("tokenizer: the text to train on holds no characters", "give text with data.path=")
    return portions


def _portions(texts: Iterable[str]) -> Iterator[list[str]]:
    portion: list[str] = []
    left = MOST
    for text in texts:
        portion += _parts(text[:left])
        left -= len(text)
        if len(portion) >= _PORTION or left <= 0:
            yield portion
            portion = []
        if left <= 0:
            return
    yield portion


def _parts(text: str) -> list[str]:
    """A text, cut where a word is longer than any of a language."""
    borders = [0, *(match.end() for match in _WORD.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


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
    characters = [one for one in counts if not one.isspace()]
    if not characters:  # text of control characters alone
        raise UserError("tokenizer: the text to train on holds no characters", "give text with data.path=")
    characters.sort(key=lambda one: (-counts[one], one))
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
