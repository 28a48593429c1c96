"""`data=jsonl`, `data=csv`, `data=parquet`: files whose rows are documents."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lmtool.data.compressed import packed
from lmtool.data.configs import SUFFIXES, CsvConfig, JsonlConfig, ParquetConfig, RowsConfig
from lmtool.data.file_source import CONTROL, FileSource
from lmtool.data.files import check_encoding
from lmtool.data.parquet import parquet_texts
from lmtool.data.rows import DELIMITERS, delimiter_for, described, header_of, no_column, objects, ragged, records
from lmtool.data.sources import PART
from lmtool.errors import UserError

AnyRows = TypeVar("AnyRows", bound=RowsConfig)
_KEY = "data.text"


class RowSource(FileSource[AnyRows]):
    """A row is a document, its columns of text under each other. Rows without text are counted, not read."""

    @abstractmethod
    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
        """The number of each row, as errors name it, and what its columns of text hold, null for nothing."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that hold the text."""
        return (self.config.text,) if isinstance(self.config.text, str) else self.config.text

    def documents_of(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        for number, values in self.rows_of(path):
            try:
                text = self._joined(path, number, values)
            except UserError as error:
                self.fault(error)
                continue
            if counts is not None:
                counts["rows_without_text"] += not text
                counts["rows_with_control_characters"] += CONTROL.search(text) is not None
            for start in range(0, len(text), PART):
                yield text[start : start + PART], start + PART >= len(text)

    def _joined(self, path: Path, number: int, values: Sequence[Any]) -> str:
        texts = []
        for name, value in zip(self.columns, values, strict=True):
            if value is not None and not isinstance(value, str):
                raise UserError(
                    f"{path}:{number}: {name} is {described(value)}, not text", f"name a column of text: {_KEY}=COLUMN"
                )
            if value and not value.isspace():
                texts.append(value)
        return "\n".join(texts)

    def unit(self) -> str:
        return "row"

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"text": ", ".join(self.columns)}


class JsonlSource(RowSource[JsonlConfig]):
    """An object a line. Its other keys may be what they are."""

    suffixes = packed(*SUFFIXES["jsonl"])

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
        columns = self.columns
        for number, row in objects(path, self.fault):
            missing = next((name for name in columns if name not in row), None)
            if missing is None:
                yield number, [row[name] for name in columns]
            else:
                self.fault(no_column(f"{path}:{number}", missing, list(row), _KEY))


class CsvSource(RowSource[CsvConfig]):
    """Records below a header line; what they hold is text as it stands ("NA" too)."""

    suffixes = packed(*SUFFIXES["csv"])

    def prepare(self) -> None:
        check_encoding("data.encoding", self.config.encoding)
        self._seen: set[str] = set()

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
        encoding = self.config.encoding
        delimiter = delimiter_for(path, self.config.delimiter, self.columns, encoding)
        self._seen.add(DELIMITERS[delimiter or "\t"])
        lines = records(path, delimiter, encoding, "data.encoding")
        at, names = header_of(path, lines)
        for name in self.columns:
            if name not in names:
                raise no_column(f"{path}:{at}", name, names, _KEY)
        places = [names.index(name) for name in self.columns]
        for number, record in lines:
            if len(record) == len(names):
                yield number, [record[place] for place in places]
            else:
                self.fault(ragged(path, number, record, names))

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"delimiter": ", ".join(sorted(self._seen))}


class ParquetSource(RowSource[ParquetConfig]):
    """Rows of parquet files; errors count them from 1."""

    suffixes = SUFFIXES["parquet"]

    def rows_of(self, path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
        return parquet_texts(path, self.columns, _KEY)
