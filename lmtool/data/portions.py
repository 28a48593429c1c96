"""The text of a source in portions that are tokenized one by one, in any process, and come to the same.

Where a sentence ends depends on the parts of its document before it: documents that come in several parts are cut into
sentences here, in their order; all others where they are tokenized.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lmtool.data.sentences import SentenceSplitter

PORTION = 1_000_000
"""Characters tokenized at a time."""


class TextSize:
    """Words of a text, separated by white space, and its bytes in UTF-8; of a document that comes in parts, too."""

    def __init__(self) -> None:
        self.words = self.bytes = 0
        self._within_word = False

    def add(self, text: str, ends: bool) -> None:
        """A part of a document; ends: whether the document ends there."""
        continued = self._within_word and bool(text) and not text[0].isspace()
        self.words += len(text.split()) - continued
        self.bytes += len(text.encode("utf-8", "surrogatepass"))
        self._within_word = not ends and (not text[-1].isspace() if text else self._within_word)


@dataclass
class Portion:
    """pieces: of a complete document its text, of a part of a longer one the sentences that are over with it. ends:
    whether the document ends with the piece. characters: of all pieces. words, bytes: of those cut into sentences."""

    pieces: list[str | list[str]] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    characters: int = 0
    words: int = 0
    bytes: int = 0


def portions(parts: Iterator[tuple[str, bool]], size: int = PORTION) -> Iterator[Portion]:
    """Portions of `size` characters or more, of what `Source.parts` gives: the same each time."""
    portion, splitter, counted, begun = Portion(), SentenceSplitter(), TextSize(), False
    for text, ends in parts:
        if ends and not begun:
            portion.pieces.append(text)
        else:
            before = counted.words, counted.bytes
            counted.add(text, ends)
            portion.pieces.append(splitter.split(text, ends))
            portion.words += counted.words - before[0]
            portion.bytes += counted.bytes - before[1]
        begun = not ends
        portion.ends.append(ends)
        portion.characters += len(text)
        if portion.characters >= size:
            yield portion
            portion = Portion()
    if portion.pieces:
        yield portion
