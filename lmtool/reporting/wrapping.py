"""Text cut into lines of so many cells of a terminal, at spaces: what is wider than a line is cut within."""

from __future__ import annotations

import unicodedata


def cells(text: str) -> int:
    """How wide a terminal draws a text: two cells a wide character, none an accent of its own."""
    if text.isascii():
        return len(text)
    return sum(_cells(character) for character in text)


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells; at least one, which may be empty."""
    lines: list[str] = []
    line, room = "", width
    for number, word in enumerate(text.split(" ")):
        needed = cells(word)
        if number and needed + 1 <= room:
            line, room = f"{line} {word}", room - needed - 1
            continue
        if number:
            lines.append(line)
        while needed > width:
            start = _fitting(word, width)
            lines.append(word[:start])
            word = word[start:]
            needed = cells(word)
        line, room = word, width - needed
    lines.append(line)
    return [line.rstrip() for line in lines if line.strip()] or [""]


def _fitting(word: str, width: int) -> int:
    """How many characters of a word a line holds, at least one."""
    taken = 0
    for number, character in enumerate(word):
        taken += _cells(character)
        if taken > width:
            return max(number, 1)
    return len(word)
