"""Rows of a .parquet file. Classes that the library datasets wrote as numbers are read by their names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtool.data.tables import Table
from lmtool.errors import UserError


def read_parquet(path: Path) -> Table:
    """All rows; the origin counts them from 1. UserError where pyarrow is not installed, or cannot read the file."""
    try:
        import pyarrow  # a large library, needed for these files only
        import pyarrow.parquet
    except ModuleNotFoundError as problem:
        raise UserError(
            f"{path}: parquet is read by the library pyarrow, which is not installed",
            "pip install 'lmtool[hub]', or convert the file to .jsonl",
        ) from problem
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as problem:
        reason = " ".join(str(problem).split())[:160]
        raise UserError(f"{path}: not readable as parquet: {reason}", "write or copy the file again") from problem
    if not table.num_rows:
        raise UserError(f"{path}: no rows", "give a file with rows")
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    written = (table.schema.metadata or {}).get(b"huggingface")
    features = json.loads(written).get("info", {}).get("features", {}) if written else {}
    for name in columns.keys() & features.keys():
        names = _class_names(features[name])
        if names:
            columns[name] = [named(value, names) for value in columns[name]]
    return Table(columns, [(str(path), number + 1) for number in range(table.num_rows)])


def _class_names(feature: Any) -> list[str] | None:
    """The names of a column of classes, or of lists of classes."""
    if isinstance(feature, list) and len(feature) == 1:  # how older files write a list
        feature = feature[0]
    if isinstance(feature, Mapping) and isinstance(feature.get("feature"), Mapping):
        feature = feature["feature"]
    return feature.get("names") if isinstance(feature, Mapping) else None


def named(value: Any, names: Sequence[str]) -> Any:
    """A class's number, or a list of them, by name; "" for none and for the hub's -1. The hub's classes False and True
    are truth values, as the files of their data sets have them."""
    if isinstance(value, list | tuple):
        return [named(element, names) for element in value]
    name = names[value] if value is not None and value >= 0 else ""
    return name == "True" if name and {*names} == {"False", "True"} else name
