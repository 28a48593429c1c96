"""Output files: rows, tables and JSON, each replaced atomically."""

from __future__ import annotations

import csv
import errno
import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from lmtool.config.base import JsonObject
from lmtool.errors import Problem, UserError, cannot_write
from lmtool.system.files import draft_path, replace_bytes, sync_path, user_path
from lmtool.system.secrets import masked_data, masker


def replace_text(path: Path, text: str) -> None:
    """Replaces a small file atomically."""
    replace_bytes(path, text.encode())


def replace_link(path: Path, name: str) -> None:
    """Replaces a link atomically by one to `name` in the same folder. On a filesystem without links, writes a small
    file that contains the name instead."""
    draft = draft_path(path)
    try:
        draft.symlink_to(name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        return replace_text(path, f"{name}\n")
    try:
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


LONGEST_ROW = 10_000_000
"""Maximum bytes of a JSON line in a run's files, which may contain the text of an example."""


def bounded_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file with their line ends. Raises UserError for a line longer than LONGEST_ROW bytes,
    because a damaged file may be a single line of gigabytes."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST_ROW + 1)
            if not line:
                return
            if len(line) > LONGEST_ROW:
                hint = "its disk may be broken: move the file away; a run resumes without its rows"
                raise UserError(f"{path}:{number}: the line is longer than {LONGEST_ROW} bytes", hint)
            yield line


def read_rows(path: Path) -> list[JsonObject]:
    """Reads the rows of a metrics.jsonl; a missing file has none. Ignores a last line without a line end, which a
    killed process left incomplete. Raises UserError for any other line that is not a row."""
    rows = []
    with suppress(FileNotFoundError):
        for number, line in enumerate(bounded_lines(path), 1):
            if not line.endswith(b"\n"):
                continue
            row = None
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                hint = "move the file away: the run resumes without these rows"
                raise UserError(f"{path}:{number} is not a row with a step", hint)
            rows.append(row)
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, object]], named_by_user: bool = True) -> None:
    """Writes JSON lines atomically, with secrets masked; see `replacement_of` for `named_by_user`. Raises OSError if
    writing fails; nothing is left behind."""
    mask = masker()
    with replacement_of(path, named_by_user) as draft, draft.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(to_json(masked_data(plain_data(dict(row)), mask), indent=None) + "\n" for row in rows)


SCORED_ROWS = "validation_rows_sha256"
"""The key of result.json with the `rows_digest` of the rows that gave the run's score."""


def rows_digest(rows: Iterable[object]) -> str | None:
    """Returns the sha256 of rows as JSON, each a list of texts and a gold label; None without rows."""
    digest, empty = hashlib.sha256(), True
    for row in rows:
        digest.update(to_json(row, indent=None).encode("utf-8", "surrogatepass") + b"\n")
        empty = False
    return None if empty else digest.hexdigest()


_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/")
"""Names of streams that are already open, so that writing to them does not wait for a reader."""


def output_errors(output: str | None) -> Iterator[Problem]:
    """Yields a problem unless `output` is None, or a possible file in an existing folder. A named pipe would wait for a
    reader, and a device stores nothing."""
    if output is None:
        return
    path = user_path(output)
    if path.is_dir():
        yield Problem("output", f"output={output} is a folder, not a file", f"set output={path / 'predictions.jsonl'}")
    elif not path.parent.is_dir():
        hint = f"create it: mkdir -p {path.parent}; or set another output="
        yield Problem("output", f"output={output}: there is no folder {path.parent}", hint)
    elif path.exists() and not path.is_file() and not str(path).startswith(_STREAMS):
        kind = "a pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"
        hint = "set another output=; output=/dev/stdout writes to the standard output"
        yield Problem("output", f"output={output} is {kind}, not a file", hint)


def output_folder_errors(output: str | None) -> Iterator[Problem]:
    """Yields a problem if a file is in the place of the output folder."""
    yield from _file_in_place_of_folder("output", output)


def run_folder_errors(run_dir: str | None) -> Iterator[Problem]:
    """Yields a problem if a file is in the place of the run's folder."""
    yield from _file_in_place_of_folder("run_dir", run_dir)


def _file_in_place_of_folder(key: str, folder: str | None) -> Iterator[Problem]:
    paths = () if folder is None else (user_path(folder), *user_path(folder).parents)
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None and not existing.is_dir():
        yield Problem(key, f"{key}={folder}: {existing} is a file, not a folder", f"set another {key}=")


def overwriting_errors(output: str | None, reads: Callable[[Path], bool]) -> Iterator[Problem]:
    """Yields a problem if the output file would replace a file that the command reads. reads: whether it reads a file,
    given by its real path."""
    file = Path(os.path.realpath(user_path(output or "")))
    if file.is_file() and reads(file):
        yield Problem("output", f"output={output} would replace a file that the command reads", "set another output=")


@contextmanager
def replacement_of(path: Path, named_by_user: bool = True) -> Iterator[Path]:
    """Yields a temporary path whose file replaces `path` when the block ends without an error.

    If the user named the path, links are followed, and an open stream (/dev/stdout) is written directly. In a run's
    folder, a link is replaced.
    """
    path = Path(os.path.realpath(path)) if named_by_user else path
    direct = named_by_user and path.exists() and not path.is_file()
    draft = path if direct else draft_path(path)
    try:
        yield draft
        if not direct:
            os.replace(draft, path)
    except BaseException:
        if not direct:
            draft.unlink(missing_ok=True)
        raise


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Converts an OSError while the block writes into the UserError of `cannot_write`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


class _Commas(csv.excel):
    """The line end is CRLF so that csv quotes a cell with a CR; `write_delimited` writes LF."""


class _Tabs(_Commas):
    delimiter, quoting, quotechar = "\t", csv.QUOTE_NONE, None


class _LineFeeds:
    def __init__(self, file: TextIO):
        self._file = file

    def write(self, line: str) -> None:
        self._file.write(line.removesuffix("\r\n") + "\n")


def write_delimited(
    path: Path, rows: Iterable[Mapping[str, object]], delimiter: str, named_by_user: bool = True
) -> None:
    """Writes a table with a header line, in the same way as `write_rows`. Raises UserError if a cell of a tab-separated
    table contains a tab or a line end, since such cells are not quoted."""
    mask, writer = masker(), None
    with replacement_of(path, named_by_user) as draft, draft.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            values = masked_data(plain_data(dict(row)), mask)
            cells = {name: "" if value is None else value for name, value in values.items()}
            if writer is None:
                writer = csv.DictWriter(_LineFeeds(file), list(cells), dialect=_Tabs if delimiter == "\t" else _Commas)
                writer.writeheader()
            try:
                writer.writerow(cells)
            except csv.Error as error:
                raise UserError(
                    f"output={path}: a cell contains a tab or a line end, which this format cannot store",
                    "set output=NAME.csv",
                ) from error


def remove_folder(folder: Path) -> None:
    """Removes a folder, after renaming it, so that a crash leaves no incomplete folder under its name."""
    renamed = folder.with_name(f".del-{folder.name}-{os.getpid()}")
    os.rename(folder, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def plain_data(value: Any) -> Any:
    """Converts data for JSON: tuples to lists, paths to text, numpy and torch scalars to numbers, nan to null."""
    if isinstance(value, dict):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_data(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy and torch
        return plain_data(value.tolist())
    raise TypeError(f"{value!r} is not plain data")


def to_json(value: object, indent: int | None = 2) -> str:
    return json.dumps(plain_data(value), indent=indent, ensure_ascii=False, allow_nan=False)
