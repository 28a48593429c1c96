"""Training text of a vocabulary, and fast encoding of large texts."""

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

# Long texts are sampled in chunks of about 10,000 characters, up to the end of a word.
_CHUNK = re.compile(r"(?s).{1,10000}\S{0,1000}")
_NUMBERS = 4096  # generated at a time
ALPHABET = 1000  # characters at most, as in the library and in BERT's vocabularies
_TEXTS = 1000  # in a batch
# Training time grows with the square of a word's length, so longer words are split.
_WORD = re.compile(r"\S{1000}(?=\S)")


def sample(texts: Iterable[str], characters: int, most: int) -> Iterator[str]:
    """Sample the training text of a vocabulary, in order.

    Args:
        texts: All texts.
        characters: Their total number of characters.
        most: Yield about this many characters; everything if there are fewer.
    """
    if characters <= most:
        yield from texts
        return
    chunks = (chunk for text in texts for chunk in _CHUNK.findall(text))
    for chunk, number in zip(chunks, _random_numbers(), strict=False):
        if number < most / characters:
            yield chunk


def _random_numbers() -> Iterator[float]:
    """Numbers in [0, 1), independent of a run's seed: the vocabulary depends only on the text."""
    for start in count(0, _NUMBERS):
        examples = np.arange(start, start + _NUMBERS)
        yield from random_streams.uniform(0, "sample", 0, examples, 1, first_draw=1)[:, 0].tolist()


def training_text(texts: Iterable[str]) -> list[list[str]]:
    """The texts in batches of a thousand. UserError if all of it is white space."""
    batches = list(_batches(texts))
    if not any(text and not text.isspace() for batch in batches for text in batch):
        raise _no_characters()
    return batches


def _no_characters() -> UserError:
    return UserError("tokenizer: the training text has no characters", "use text with data.path=")


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch += _parts(text)
        if len(batch) >= _TEXTS:
            yield batch
            batch = []
    yield batch


def _parts(text: str) -> list[str]:
    """A text, split within words of more than 1000 characters."""
    bounds = [0, *(match.end() for match in _WORD.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def alphabet(
    batches: Sequence[Sequence[str]],
    normalizer: normalizers.Normalizer,
    vocab_size: int,
    special: int,
    marked: Callable[[str], str | None],
) -> tuple[list[str], list[str]]:
    """The most frequent characters, which get an entry, and their marked forms for another position in a word.

    Args:
        batches: The training text.
        normalizer: Applied to the text.
        vocab_size: Maximum number of entries.
        special: Number of special tokens.
        marked: Returns the marked form of a character, or None.

    Raises:
        UserError: If there are no characters, or if `vocab_size` is too small for them.
    """
    counts: Counter[str] = Counter()
    for batch in batches:
        for text in batch:
            counts.update(normalizer.normalize_str(text))
    characters = [character for character in counts if not character.isspace()]
    if not characters:  # the text has only control characters
        raise _no_characters()
    characters.sort(key=lambda character: (-counts[character], character))
    # Both forms take at most half of the vocabulary, so that longer entries fit.
    retained = sorted(characters[: min(ALPHABET, max(vocab_size // 4, 1))])
    second = [form for form in map(marked, retained) if form is not None]
    needed = special + len(retained) + len(second)
    if needed > vocab_size:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} is too small for {needed} special tokens and characters",
            "set tokenizer.vocab_size=1000 or more",
        )
    return retained, second


_CACHED_WORDS = 200_000
"""Maximum number of cached words, about 50 MB."""
_LONGEST = 40
"""Maximum number of characters of a cached word: longer words are rarely repeated."""


class FlatEncoder:
    """Encodes texts like `Tokenizer.encode_batch`, but into one array: (T,) int32 ids of all texts, and (N,) int64
    number of ids of each.

    If the tokenizer splits on spaces (BERT's WordPiece), each distinct word is encoded once and cached: a lookup takes
    a tenth of the time.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if not self._tokenizer.splits_on_spaces:
            rows: list[np.ndarray] = self._tokenizer.encode_batch(texts)
            flat = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
            return flat, np.array([len(row) for row in rows], dtype=np.int64)
        words_of = [text.split(" ") for text in texts]
        cache = self._cache
        new = list(dict.fromkeys(word for words in words_of for word in words if word not in cache))
        cache.update(zip(new, (row.tolist() for row in self._tokenizer.encode_batch(new)), strict=True))
        ids = [list(chain.from_iterable(map(cache.__getitem__, words))) for words in words_of]
        for word in new:  # the first words stay cached: they are more frequent
            if len(word) > _LONGEST or len(cache) > _CACHED_WORDS:
                del cache[word]
        flat = np.array(list(chain.from_iterable(ids)), dtype=np.int32)
        return flat, np.array(list(map(len, ids)), dtype=np.int64)
