"""`data=text`: plain text files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lmtool.data.compressed import packed
from lmtool.data.configs import SUFFIXES, TextConfig, kind_of
from lmtool.data.file_source import FileSource, has_control_characters
from lmtool.data.files import check_encoding, read_pieces
from lmtool.data.sources import PART

LONG_LINE = 1_000_000  # characters; longer lines are read and counted


class TextSource(FileSource[TextConfig]):
    """Files, folders and glob patterns of text, in documents of lines."""

    suffixes = packed(*SUFFIXES["text"])

    def prepare(self) -> None:
        check_encoding("data.encoding", self.config.encoding)

    def rule(self) -> str:
        return f"text 1 {self.config.document}"

    def documents_of(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        pieces: Pieces = ((text, ends) for _, text, ends in read_pieces(path, self.config.encoding, "data.encoding"))
        if counts is not None:
            pieces = _counted(pieces, counts)
        return _GROUPINGS[self.config.document](pieces)

    def unit(self) -> str:
        return self.config.document

    def facts(self) -> dict[str, Any]:
        files = [path for scan in self.scans for path in scan.files]
        kinds = {kind: path for path in files if (kind := kind_of(path.name)) not in (None, "text")}
        warnings = [
            f"{path.name} is read as plain text, markup and all; data={kind} reads the text of its rows"
            for kind, path in kinds.items()
        ]
        return super().facts() | ({"warnings": warnings} if warnings else {})


Pieces = Iterable[tuple[str, bool]]
"""Lines, long ones in several pieces; and whether the line ends with the piece."""


def _counted(pieces: Pieces, counts: Counter[str]) -> Iterator[tuple[str, bool]]:
    size, control = 0, False
    for text, ends in pieces:
        size += len(text)
        control = control or has_control_characters(text)
        if ends:
            counts["long_lines"] += size > LONG_LINE
            counts["lines_with_control_characters"] += control
            size, control = 0, False
        yield text, ends


class _Document:
    """A document while its lines come in. What is beyond `PART` characters is given up as a part of it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0
        self.parted = False  # whether a part of it was given up

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, text: str, begins: bool) -> Iterator[tuple[str, bool]]:
        """Take a line, or a further piece of one; a part is given up where enough came before it."""
        if self._size > PART:
            yield "\n".join(self._lines), False
            self._lines, self._size, self.parted = [""], 0, True
        if begins:
            self._lines.append(text)
        else:
            self._lines[-1] += text
        self._size += len(text) + begins

    def close(self) -> Iterator[tuple[str, bool]]:
        """The end of the document, where one was begun."""
        if self._lines:
            yield "\n".join(self._lines), True
            self._lines, self._size, self.parted = [], 0, False


def _blocks(pieces: Pieces) -> Iterator[tuple[str, bool]]:
    document, begins = _Document(), True
    for text, ends in pieces:
        if not begins or (text and not text.isspace()):
            yield from document.add(text, begins)
        else:
            yield from document.close()
        begins = ends
    yield from document.close()


def _each(pieces: Pieces) -> Iterator[tuple[str, bool]]:
    document, begins = _Document(), True
    for text, ends in pieces:
        if not begins or (text and not text.isspace()):
            yield from document.add(text, begins)
        if ends:
            yield from document.close()
        begins = ends


def _whole(pieces: Pieces) -> Iterator[tuple[str, bool]]:
    document, begins, empty, blank = _Document(), True, 0, True
    for text, ends in pieces:
        if not text and begins and ends:
            empty += 1  # kept where more text follows
        else:
            for _ in range(empty if document else 0):
                yield from document.add("", True)
            empty, blank = 0, blank and text.isspace()
            yield from document.add(text, begins)
        begins = ends
    if not blank or document.parted:
        yield from document.close()


_GROUPINGS = {"block": _blocks, "file": _whole, "line": _each}
