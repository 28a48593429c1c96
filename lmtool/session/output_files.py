"""What commands write of rows: JSON lines, or the table that the output's name says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lmtool.data.columns import LINES
from lmtool.data.tables import Table
from lmtool.errors import UserError
from lmtool.runs.files import write_delimited, write_rows

DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".json", "")


def check_output(path: str | None) -> None:
    """UserError where no format goes by the suffix of an `output=`."""
    suffix = "" if path is None else Path(path).suffix.lower()
    if suffix not in (*_LINES, *DELIMITERS):
        raise UserError(
            f"output={path}: {suffix} is not written: one of .jsonl, {', '.join(DELIMITERS)}",
            f"output={Path(str(path)).with_suffix('.jsonl')}",
        )


def write_output(path: str, rows: Iterable[Mapping[str, Any]], key: str = "output") -> int:
    """Write the file of an `output=` (or another key), masked: a table where its suffix is .csv or .tsv, else a JSON
    line a row. The number of rows. UserError naming the key where the disk refuses."""
    file, written = Path(path).expanduser(), 0

    def counted() -> Iterator[Mapping[str, Any]]:
        nonlocal written
        for row in rows:
            yield row
            written += 1

    try:
        delimiter = DELIMITERS.get(file.suffix.lower())
        typed = key == "output"  # else it lies in a folder that was
        if not typed:
            file.parent.mkdir(parents=True, exist_ok=True)
        if delimiter is None:
            write_rows(file, counted(), typed)
        else:
            write_delimited(file, counted(), delimiter, typed)
    except OSError as error:
        raise UserError(f"{key}={path}: {error.strerror}", f"give another {key}=") from error
    return written


def beside_columns(
    table: Table | None, records: Iterable[Mapping[str, Any]], own: Mapping[str, str], probabilities: bool, flat: bool
) -> Iterator[dict[str, Any]]:
    """Records with all columns of the table that they are of, in its order, before what was predicted.

    own: names that the table's columns have in a task, by their names in the table. probabilities: whether those of all
    classes are kept. flat: of a format without nesting: a column a class, lists as words.
    """
    columns = {} if table is None else {name: values for name, values in table.columns.items() if name != LINES}
    taken = [name for name in ("prediction", "score") if name in columns]
    if taken:
        raise UserError(f"{table.origin[0][0]} has a column {taken[0]} already" if table else "", "rename it in a copy")
    for number, record in enumerate(records):
        kept = dict(record)
        shares = kept.pop("probabilities", None)
        if table is not None:
            given = {name: values[number] for name, values in columns.items()}
            # What the table says goes before what was read of it: both are the same text.
            read = {*given, *(own.get(name, name) for name in given), "id", "split", "gold"}
            kept = {**given, **{name: value for name, value in kept.items() if name not in read}}
        if probabilities and shares is not None:
            kept |= {f"probability_{label}": value for label, value in shares.items()} if flat else {
                "probabilities": shares
            }  # fmt: skip
        yield {name: _cell(value) for name, value in kept.items()} if flat else kept


def _cell(value: Any) -> Any:
    """A value of a table's cell: a list as its items with spaces between them."""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
