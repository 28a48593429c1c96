"""`data=text`, `jsonl`, `csv` and `parquet`: files of text, and files whose rows are documents."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from lmtool.data.compressed import packed
from lmtool.data.configs import (
    SUFFIXES,
    CsvConfig,
    JsonlConfig,
    ParquetConfig,
    RowsConfig,
    TextConfig,
    columns_of,
    kind_of,
)
from lmtool.data.file_source import FileSource, has_control_characters
from lmtool.data.files import check_encoding, read_chunks, refuse
from lmtool.data.parquet import parquet_texts
from lmtool.data.rows import (
    DELIMITERS,
    delimiter_for,
    header_of,
    no_column,
    objects,
    ragged,
    records,
    text_of,
    values_of,
)
from lmtool.data.sources import PART, in_parts
from lmtool.errors import UserError

# `data=text`: plain text files.


LONG_LINE = 1_000_000  # characters; longer lines are read and counted


class TextSource(FileSource[TextConfig]):
    """Files, folders and glob patterns of text, in documents of lines."""

    suffixes = packed(*SUFFIXES["text"])

    def prepare(self) -> None:
        check_encoding("data.encoding", self.config.encoding)

    def rule(self) -> str:
        return f"text 1 {self.config.document}"

    def documents_of(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        pieces: Pieces = ((text, ends) for _, text, ends in read_chunks(path, self.config.encoding, "data.encoding"))
        if counts is not None:
            pieces = _counted(pieces, counts)
        return _GROUPINGS[self.config.document](pieces)

    def unit(self) -> str:
        return self.config.document

    def metadata(self) -> dict[str, object]:
        files = [path for scan in self.scans for path in scan.files]
        kinds = {kind: path for path in files if (kind := kind_of(path.name)) not in (None, "text")}
        warnings = [
            f"{path.name} is read as plain text, markup and all; data={kind} reads the text of its rows"
            for kind, path in kinds.items()
        ]
        return super().metadata() | ({"warnings": warnings} if warnings else {})


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

    def add(self, text: str, at_start: bool) -> Iterator[tuple[str, bool]]:
        """Take a line, or a further piece of one; a part is given up where enough came before it."""
        if self._size > PART:
            yield "\n".join(self._lines), False
            self._lines, self._size, self.parted = [""], 0, True
        if at_start:
            self._lines.append(text)
        else:
            self._lines[-1] += text
        self._size += len(text) + at_start

    def close(self) -> Iterator[tuple[str, bool]]:
        """The end of the document, where one was started."""
        if self._lines:
            yield "\n".join(self._lines), True
            self._lines, self._size, self.parted = [], 0, False


def _blocks(pieces: Pieces) -> Iterator[tuple[str, bool]]:
    document, at_start = _Document(), True
    for text, ends in pieces:
        if not at_start or (text and not text.isspace()):
            yield from document.add(text, at_start)
        else:
            yield from document.close()
        at_start = ends
    yield from document.close()


def _each(pieces: Pieces) -> Iterator[tuple[str, bool]]:
    document, at_start = _Document(), True
    for text, ends in pieces:
        if not at_start or (text and not text.isspace()):
            yield from document.add(text, at_start)
        if ends:
            yield from document.close()
        at_start = ends


def _whole(pieces: Pieces) -> Iterator[tuple[str, bool]]:
    document, at_start, empty, blank = _Document(), True, 0, True
    for text, ends in pieces:
        if not text and at_start and ends:
            empty += 1  # kept where more text follows
        else:
            for _ in range(empty if document else 0):
                yield from document.add("", True)
            empty, blank = 0, blank and text.isspace()
            yield from document.add(text, at_start)
        at_start = ends
    if not blank or document.parted:
        yield from document.close()


_GROUPINGS = {"block": _blocks, "file": _whole, "line": _each}


# `data=jsonl`, `data=csv`, `data=parquet`: files whose rows are documents.


AnyRows = TypeVar("AnyRows", bound=RowsConfig)
_KEY = "data.text"


class RowSource(FileSource[AnyRows]):
    """A row is a document, its columns of text under each other. Rows without text are counted, not read."""

    blank = "without a row that holds text"

    @abstractmethod
    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[object]]]:
        """The number of each row, as errors name it, and what its columns of text hold, null for nothing."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that hold the text."""
        return columns_of(self.config)

    def documents_of(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        for number, values in self.rows_of(path):
            try:
                text = text_of(f"{path}:{number}", self.columns, values, _KEY)
            except UserError as error:
                refuse(error)
                continue
            if counts is not None:
                counts["rows_without_text"] += not text
                counts["rows_with_control_characters"] += has_control_characters(text)
            yield from in_parts(text)

    def unit(self) -> str:
        return "row"

    def metadata(self) -> dict[str, object]:
        return super().metadata() | {"text": ", ".join(self.columns)}


class JsonlSource(RowSource[JsonlConfig]):
    """An object a line. A column may be a dotted path into its objects. Its other keys may be what they are."""

    suffixes = packed(*SUFFIXES["jsonl"])

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[object]]]:
        for number, row in objects(path):
            try:
                values = values_of(f"{path}:{number}", row, self.columns, _KEY)
            except UserError as error:
                refuse(error)
                continue
            yield number, values


class CsvSource(RowSource[CsvConfig]):
    """Records below a header line; what they hold is text as it stands ("NA" too)."""

    suffixes = packed(*SUFFIXES["csv"])

    def prepare(self) -> None:
        check_encoding("data.encoding", self.config.encoding)

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[object]]]:
        encoding = self.config.encoding
        lines = records(path, self._delimiter(path), encoding, "data.encoding")
        at, names = header_of(path, lines)
        for name in self.columns:
            if name not in names:
                raise no_column(f"{path}:{at}", name, names, _KEY)
        places = [names.index(name) for name in self.columns]
        for number, record in lines:
            if len(record) == len(names):
                yield number, [record[place] for place in places]
            else:
                refuse(ragged(path, number, record, names))

    def metadata(self) -> dict[str, object]:
        marks = {self._delimiter(path) or "\t" for scan in self.scans for path in scan.files}
        return super().metadata() | {"delimiter": ", ".join(sorted(DELIMITERS[mark] for mark in marks))}

    def _delimiter(self, path: Path) -> str | None:
        return delimiter_for(path, self.config.delimiter, self.columns, self.config.encoding)


class ParquetSource(RowSource[ParquetConfig]):
    """Rows of parquet files; errors count them from 1."""

    suffixes = SUFFIXES["parquet"]

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[object]]]:
        return parquet_texts(path, self.columns, _KEY)
