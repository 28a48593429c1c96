"""`data=text`, `jsonl`, `csv` and `parquet`: plain text files, and files in which a row is a document."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from lmtool.data.compressed import compressed_suffixes
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
    ragged_error,
    records,
    text_of,
    values_of,
)
from lmtool.data.sources import PART, in_parts
from lmtool.errors import UserError

LONG_LINE = 1_000_000  # characters; longer lines are read, and counted in the metadata


class TextSource(FileSource[TextConfig]):
    """Plain text files, whose lines are grouped into documents as `document` says."""

    suffixes = compressed_suffixes(*SUFFIXES["text"])

    def prepare(self) -> None:
        check_encoding("data.encoding", self.config.encoding)

    def rule(self) -> str:
        return f"text 1 {self.config.document}"

    def documents_of(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        chunks = read_chunks(path, self.config.encoding, "data.encoding")
        pieces: Pieces = ((text, end is not None) for _, text, end in chunks)
        if counts is not None:
            pieces = _count(pieces, counts)
        return _GROUPINGS[self.config.document](pieces)

    def unit(self) -> str:
        return self.config.document

    def metadata(self) -> dict[str, object]:
        files = [path for scan in self.scans for path in scan.files]
        kinds = {kind: path for path in files if (kind := kind_of(path.name)) not in (None, "text")}
        warnings = [
            f"{path.name} is read as plain text, including its markup; data={kind} reads the text of its rows"
            for kind, path in kinds.items()
        ]
        return super().metadata() | ({"warnings": warnings} if warnings else {})


Pieces = Iterable[tuple[str, bool]]
"""(text, ends) for each line, or for each piece of a long line. ends: whether the line ends with this piece."""


def _count(pieces: Pieces, counts: Counter[str]) -> Iterator[tuple[str, bool]]:
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
    """The lines of a document so far. They are yielded as a part when they exceed `PART` characters."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0
        self.has_parts = False

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, text: str, at_start: bool) -> Iterator[tuple[str, bool]]:
        """at_start: whether a line starts with the piece."""
        if self._size > PART:
            yield "\n".join(self._lines), False
            self._lines, self._size, self.has_parts = [""], 0, True
        if at_start:
            self._lines.append(text)
        else:
            self._lines[-1] += text
        self._size += len(text) + at_start

    def close(self) -> Iterator[tuple[str, bool]]:
        if self._lines:
            yield "\n".join(self._lines), True
            self._lines, self._size, self.has_parts = [], 0, False


def _blocks(pieces: Pieces, one_line: bool = False) -> Iterator[tuple[str, bool]]:
    """Documents end at a blank line, or with `one_line` at every line."""
    document, at_start = _Document(), True
    for text, ends in pieces:
        if not at_start or (text and not text.isspace()):
            yield from document.add(text, at_start)
        elif not one_line:
            yield from document.close()
        if one_line and ends:
            yield from document.close()
        at_start = ends
    yield from document.close()


def _complete_file(pieces: Pieces) -> Iterator[tuple[str, bool]]:
    """Without empty lines at the start and end of the document."""
    document, at_start, empty, blank = _Document(), True, 0, True
    for text, ends in pieces:
        if not text and at_start and ends:
            empty += 1  # added if more text follows
        else:
            for _ in range(empty if document else 0):
                yield from document.add("", True)
            empty, blank = 0, blank and text.isspace()
            yield from document.add(text, at_start)
        at_start = ends
    if not blank or document.has_parts:
        yield from document.close()


_GROUPINGS: dict[str, Callable[[Pieces], Iterator[tuple[str, bool]]]] = {
    "block": _blocks,
    "file": _complete_file,
    "line": partial(_blocks, one_line=True),
}

AnyRows = TypeVar("AnyRows", bound=RowsConfig)
_KEY = "data.text"


class RowSource(FileSource[AnyRows]):
    """Files in which a row is a document: its columns of text, joined by newlines. Rows without text are counted and
    omitted."""

    blank = "without rows that contain text"  # in the message that there is no text

    @abstractmethod
    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[object]]]:
        """Returns the number of each row, for errors, and the values of its columns of text."""

    @property
    def columns(self) -> tuple[str, ...]:
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
    """JSON lines. A column may be a dotted path; other keys may have any values."""

    suffixes = compressed_suffixes(*SUFFIXES["jsonl"])

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[object]]]:
        for number, row in objects(path):
            try:
                values = values_of(f"{path}:{number}", row, self.columns, _KEY)
            except UserError as error:
                refuse(error)
                continue
            yield number, values


class CsvSource(RowSource[CsvConfig]):
    """CSV and TSV files with a header line. All values are text, including "NA"."""

    suffixes = compressed_suffixes(*SUFFIXES["csv"])

    def prepare(self) -> None:
        check_encoding("data.encoding", self.config.encoding)

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[object]]]:
        encoding = self.config.encoding
        lines = records(path, self._delimiter(path), encoding, "data.encoding")
        line_number, names = header_of(path, lines)
        for name in self.columns:
            if name not in names:
                raise no_column(f"{path}:{line_number}", name, names, _KEY)
        indices = [names.index(name) for name in self.columns]
        for number, record in lines:
            if len(record) == len(names):
                yield number, [record[index] for index in indices]
            else:
                refuse(ragged_error(path, number, record, names))

    def metadata(self) -> dict[str, object]:
        delimiters = {self._delimiter(path) or "\t" for scan in self.scans for path in scan.files}
        return super().metadata() | {"delimiter": ", ".join(sorted(DELIMITERS[delimiter] for delimiter in delimiters))}

    def _delimiter(self, path: Path) -> str | None:
        return delimiter_for(path, self.config.delimiter, self.columns, self.config.encoding)


class ParquetSource(RowSource[ParquetConfig]):
    """Parquet files. Errors number their rows from 1."""

    suffixes = SUFFIXES["parquet"]

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[object]]]:
        return parquet_texts(path, self.columns, _KEY)
