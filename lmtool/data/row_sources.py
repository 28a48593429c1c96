"""`data=jsonl`, `data=csv`, `data=parquet`: files whose rows are documents."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lmtool.data.compressed import packed
from lmtool.data.configs import SUFFIXES, CsvConfig, JsonlConfig, ParquetConfig, RowsConfig, columns_of
from lmtool.data.file_source import FileSource, has_control_characters
from lmtool.data.files import check_encoding
from lmtool.data.parquet import parquet_texts
from lmtool.data.problems import refuse
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
from lmtool.data.sources import in_parts
from lmtool.errors import UserError

AnyRows = TypeVar("AnyRows", bound=RowsConfig)
_KEY = "data.text"


class RowSource(FileSource[AnyRows]):
    """A row is a document, its columns of text under each other. Rows without text are counted, not read."""

    blank = "without a row that holds text"

    @abstractmethod
    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
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

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"text": ", ".join(self.columns)}


class JsonlSource(RowSource[JsonlConfig]):
    """An object a line. A column may be a dotted path into its objects. Its other keys may be what they are."""

    suffixes = packed(*SUFFIXES["jsonl"])

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
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

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
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

    def facts(self) -> dict[str, Any]:
        marks = {self._delimiter(path) or "\t" for scan in self.scans for path in scan.files}
        return super().facts() | {"delimiter": ", ".join(sorted(DELIMITERS[mark] for mark in marks))}

    def _delimiter(self, path: Path) -> str | None:
        return delimiter_for(path, self.config.delimiter, self.columns, self.config.encoding)


class ParquetSource(RowSource[ParquetConfig]):
    """Rows of parquet files; errors count them from 1."""

    suffixes = SUFFIXES["parquet"]

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
        return parquet_texts(path, self.columns, _KEY)
