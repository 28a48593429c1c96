"""The text that a vocabulary is trained on, and fast encoding of large texts."""

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
_RANDOM_NUMBERS = 4096  # numbers generated at a time
MAX_ALPHABET = 1000  # characters, as in the library and in BERT's vocabularies
_BATCH_TEXTS = 1000
# Training time grows with the square of a word's length, so longer words are split.
_LONG_WORD = re.compile(r"\S{1000}(?=\S)")


def sample(texts: Iterable[str], characters: int, most: int) -> Iterator[str]:
    """Yields, in order, a sample of about `most` characters of the text that a vocabulary is trained on; all texts,
    unchanged, if they have no more. characters: the number in all texts."""
    if characters <= most:
        yield from texts
        return
    chunks = (chunk for text in texts for chunk in _CHUNK.findall(text))
    for chunk, number in zip(chunks, _random_numbers(), strict=False):
        if number < most / characters:
            yield chunk


def _random_numbers() -> Iterator[float]:
    """In [0, 1), independent of a run's seed, since the vocabulary must depend only on the text."""
    for start in count(0, _RANDOM_NUMBERS):
        examples = np.arange(start, start + _RANDOM_NUMBERS)
        yield from random_streams.uniform(0, "sample", 0, examples, 1, first_draw=1)[:, 0].tolist()


def training_text(texts: Iterable[str]) -> list[list[str]]:
    """Returns the texts in batches, with long words split. Raises UserError if the texts have only white space."""
    batches = list(_batches(texts))
    if not any(text and not text.isspace() for batch in batches for text in batch):
        raise _no_characters()
    return batches


def _no_characters() -> UserError:
    return UserError("tokenizer: the training text has no characters", "set data.path= to a text with characters")


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        bounds = [0, *(match.end() for match in _LONG_WORD.finditer(text)), len(text)]
        batch += [text[start:end] for start, end in pairwise(bounds)]
        if len(batch) >= _BATCH_TEXTS:
            yield batch
            batch = []
    yield batch


def alphabet(
    batches: Sequence[Sequence[str]],
    normalizer: normalizers.Normalizer,
    vocab_size: int,
    special: int,
    add_mark: Callable[[str], str | None],
) -> tuple[list[str], list[str]]:
    """Returns the most frequent characters, which become entries, and the same characters with a mark ("##a", "a</w>").
    special: number of special tokens. add_mark: returns a character with a mark, or None if the character needs no such
    entry. Raises UserError if the text has no characters, or if `vocab_size` is too small for the characters."""
    counts: Counter[str] = Counter()
    for batch in batches:
        for text in batch:
            counts.update(normalizer.normalize_str(text))
    characters = [character for character in counts if not character.isspace()]
    if not characters:  # normalization has removed all characters of the text
        raise _no_characters()
    characters.sort(key=lambda character: (-counts[character], character))
    # With and without mark, characters take at most half of the vocabulary, so that longer entries fit.
    frequent = sorted(characters[: min(MAX_ALPHABET, max(vocab_size // 4, 1))])
    with_marks = [entry for entry in map(add_mark, frequent) if entry is not None]
    required = special + len(frequent) + len(with_marks)
    if required > vocab_size:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size} is too small for {required} special tokens and characters",
            "set tokenizer.vocab_size=1000 or more",
        )
    return frequent, with_marks


_CACHED_WORDS = 200_000
"""Maximum number of cached words, which take about 50 MB."""
_MAX_CACHED_LENGTH = 40
"""Maximum number of characters of a cached word, since longer words rarely occur again."""


class FlatEncoder:
    """Encodes texts like `Tokenizer.encode_batch`, but returns the (T,) int32 ids of all texts in one array, and the
    (N,) int64 number of ids of each text.

    If the tokenizer splits on spaces (BERT's WordPiece), each distinct word is encoded once and cached: a lookup takes
    a tenth of the time of encoding.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if not self._tokenizer.splits_on_spaces:
            rows: list[np.ndarray] = self._tokenizer.encode_batch(texts)
            flat = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
            return flat, np.array([len(row) for row in rows], dtype=np.int64)
        words_by_text = [text.split(" ") for text in texts]
        cache = self._cache
        new_words = list(dict.fromkeys(word for words in words_by_text for word in words if word not in cache))
        cache.update(zip(new_words, (row.tolist() for row in self._tokenizer.encode_batch(new_words)), strict=True))
        ids = [list(chain.from_iterable(map(cache.__getitem__, words))) for words in words_by_text]
        for word in new_words:  # early words stay cached, since they tend to be more frequent
            if len(word) > _MAX_CACHED_LENGTH or len(cache) > _CACHED_WORDS:
                del cache[word]
        flat = np.array(list(chain.from_iterable(ids)), dtype=np.int32)
        return flat, np.array(list(map(len, ids)), dtype=np.int64)
