"""Sentence boundaries by a few rules, for next-sentence prediction and for splitting long texts.

A sentence ends behind . ! ? or … and closing quotes or brackets, before white space and something that is not a small
letter, or before the end of a line; not behind a title, a common abbreviation or an initial. It ends before a blank
line, and behind the full stops of Chinese and Japanese. Anything longer than `LONGEST` characters is cut at white
space, so that one enormous line costs no more than many short ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST = 10_000

_CLOSING = r"[\"'”’»)\]]*"
_END = re.compile(
    rf"[.!?…]+{_CLOSING}(?=\s+[\"'“‘«(\[*_—-]*[^\sa-z\"'“‘«(\[*_—-]|[^\S\n]*\n)"
    r"|[。！？]+[」』”’]*(?!\s*$)"
    r"|\S(?=[^\S\n]*\n[^\S\n]*\n)"
)
# Of text without a blank line: its last rule begins at any character, so that this is four times as fast.
_WITHIN_A_BLOCK = re.compile(_END.pattern.rpartition("|")[0])
_BLANK = re.compile(r"\n[^\S\n]*\n")
_TITLES = (
    "mr mrs ms dr st prof sr jr rev hon capt col gen lt sgt messrs mme mlle vs etc e.g i.e eg ie cf fig no vol ch pp "
    "ed eds al inc ltd co corp jan feb mar apr jun jul aug sep sept oct nov dec approx"
)
_ABBREVIATIONS = frozenset(_TITLES.split())
_WORD = re.compile(r"[\w.]+$")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text; laid end to end they are the text (white space stands before the next sentence)."""
    pieces, start = [], 0
    for match in _ends(text):
        if match.group() == "." and _abbreviated(text, match.start()):
            continue
        pieces.append(text[start : match.end()])
        start = match.end()
    pieces.append(text[start:])
    if not pieces[-1].strip():
        rest = pieces.pop()
        if pieces:
            pieces[-1] += rest
        else:
            pieces = [rest]
    if max(map(len, pieces)) <= LONGEST:
        return pieces
    return [part for piece in pieces for part in _cut(piece)]


class SentenceSplitter:
    """`split_sentences` of documents that come in parts: no more is held than the sentence that is not over yet."""

    def __init__(self) -> None:
        self._rest = ""

    def split(self, text: str, ends: bool) -> list[str]:
        """The sentences that are over with a part. ends: whether the document is."""
        text, self._rest = self._rest + text, ""
        if ends:
            return split_sentences(text)
        # Whether a sentence ends is known where a letter or a digit follows: no rule looks further.
        known = next((place for place in range(len(text) - 1, -1, -1) if text[place].isalnum()), 0)
        pieces, start = [], 0
        for match in _ends(text):
            if match.end() > known:
                break
            if match.group() == "." and _abbreviated(text, match.start()):
                continue
            pieces.append(text[start : match.end()])
            start = match.end()
        parts = [part for piece in pieces for part in _cut(piece)]
        while known - start > LONGEST:  # one that is longer, wherever it ends
            first = _cut(text[start : start + LONGEST + 1])[0]
            parts.append(first)
            start += len(first)
        self._rest = text[start:]
        return parts


def _ends(text: str) -> Iterator[re.Match[str]]:
    """Where sentences may end."""
    return (_END if _BLANK.search(text) else _WITHIN_A_BLOCK).finditer(text)


def _abbreviated(text: str, dot: int) -> bool:
    word = _WORD.search(text[max(dot - 12, 0) : dot])
    if word is None:
        return False
    name = word.group()
    return name.lower() in _ABBREVIATIONS or (len(name) == 1 and name.isupper() and name != "I")


def _cut(piece: str) -> list[str]:
    """Parts of at most LONGEST characters, cut before white space where there is some."""
    parts = []
    while len(piece) > LONGEST:
        window = piece[1 : LONGEST + 1]
        spaces = [window.rfind(space) for space in (" ", "\n", "\t")]
        at = max(spaces) + 1 if max(spaces) >= 0 else LONGEST
        parts.append(piece[:at])
        piece = piece[at:]
    return [*parts, piece] if piece else parts
