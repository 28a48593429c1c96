"""The text a vocabulary is learned from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lmtool.errors import UserError

# Characters that are read; more would hardly change the counts, and they are held in memory.
MOST = 500_000_000
_PORTION = 1000


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
        portion.append(text[:left])
        left -= len(text)
        if len(portion) == _PORTION or left <= 0:
            yield portion
            portion = []
        if left <= 0:
            return
    yield portion
