"""Rows of parquet files as a table or a stream. Class numbers of the library datasets are replaced by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmtool.data.compressed import Broken, require_proportion
from lmtool.data.rows import no_column
from lmtool.data.tables import Table
from lmtool.errors import UserError
from lmtool.system.files import parse_json

_ROWS = 128  # decoded at a time


def read_parquet(path: Path) -> Table:
    """Returns all rows, numbered from 1. Raises UserError if pyarrow is not installed or cannot read the file."""
    with _open_parquet(path) as file:
        table = file.read()
    if not table.num_rows:
        raise UserError(f"{path}: no rows", "use a file with rows")
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    metadata = table.schema.metadata or {}
    features = _hub_features(path, metadata.get(b"huggingface", b"{}"))
    for name in columns.keys() & features.keys():
        names = _class_names(features[name])
        if names:
            columns[name] = [names_of_classes(value, names) for value in columns[name]]
    origin = [(str(path), number + 1) for number in range(table.num_rows)]
    return Table(columns, origin, index=_pandas_index(path, metadata.get(b"pandas", b"{}")))


def _pandas_index(path: Path, metadata: bytes) -> tuple[str, ...]:
    """The columns that pandas has written for the index of a data frame."""
    value = parse_json(metadata, path, "write the file again with pandas, or without its metadata")
    index = value.get("index_columns") if isinstance(value, dict) else None
    return tuple(name for name in index if isinstance(name, str)) if isinstance(index, list) else ()


def _hub_features(path: Path, metadata: bytes) -> dict[str, Any]:
    """What the library datasets has written about each column."""
    hint = "write the file again without the metadata of the library datasets"
    value = parse_json(metadata, path, hint)
    for key in ("info", "features"):
        value = value.get(key, {}) if isinstance(value, dict) else None
    if not isinstance(value, dict):
        raise UserError(f"{path}: its metadata `huggingface` does not describe columns", hint)
    return value


def parquet_texts(path: Path, columns: Sequence[str], key: str) -> Iterator[tuple[int, tuple[str | None, ...]]]:
    """Yields the number of each row, from 1, and the values of its columns of text. key: the key that names the
    columns, for errors. Raises UserError as `read_parquet`, and for a column that is missing or does not contain
    text."""
    number, text_bytes, size = 0, 0, path.stat().st_size
    with _open_parquet(path) as file:
        schema = file.schema_arrow
        for name in columns:
            if name not in schema.names:
                raise no_column(f"{path}", name, schema.names, key)
            if not _is_text(schema.field(name).type):
                texts = [field.name for field in schema if _is_text(field.type)]
                hint = f"name a column of text: {key}={texts[0]}" if texts else "use a file with a column of text"
                raise UserError(f"{path}: the column {name} contains {schema.field(name).type}, not text", hint)
        for batch in file.iter_batches(_ROWS, columns=list(dict.fromkeys(columns)), use_threads=False):
            text_bytes += batch.nbytes
            try:
                require_proportion(text_bytes, size)
                values = [batch.column(name).to_pylist() for name in columns]
            except Broken as problem:
                raise UserError(f"{path}:{number + 1}: {problem.reason}", problem.hint) from problem
            except UnicodeDecodeError as problem:
                message = f"{path}: one of the rows {number + 1} to {number + len(batch)} is not UTF-8"
                raise UserError(message, "write the file again, with its texts encoded as UTF-8") from problem
            for row in zip(*values, strict=True):
                number += 1
                yield number, row


def parquet_rows(path: Path) -> Iterator[dict[str, object]]:
    """Yields the rows one by one. Raises UserError like `read_parquet`."""
    with _open_parquet(path) as file:
        for batch in file.iter_batches(_ROWS, use_threads=False):
            yield from batch.to_pylist()


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view, types.is_null))


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow  # large, and required only for these files
        import pyarrow.parquet
    except ModuleNotFoundError as problem:
        raise UserError(
            f"{path}: reading parquet requires the library pyarrow, which is not installed",
            "pip install 'lmtool[hub]', or convert the file to .jsonl",
        ) from problem
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as problem:
        reason = " ".join(str(problem).split())[:160]
        raise UserError(f"{path}: not readable as parquet: {reason}", "write or copy the file again") from problem


def _class_names(feature: object) -> list[str] | None:
    if isinstance(feature, list) and len(feature) == 1:  # a list in older files
        feature = feature[0]
    if isinstance(feature, Mapping) and isinstance(feature.get("feature"), Mapping):
        feature = feature["feature"]
    return feature.get("names") if isinstance(feature, Mapping) else None


def names_of_classes(value: Any, names: Sequence[str]) -> Any:
    """Returns the name of a class number, or those of a list; "" for null and for the hub's -1. The class names False
    and True become booleans, as in the data sets' own files."""
    if isinstance(value, list | tuple):
        return [names_of_classes(element, names) for element in value]
    name = names[value] if value is not None and value >= 0 else ""
    return name == "True" if name and {*names} == {"False", "True"} else name
