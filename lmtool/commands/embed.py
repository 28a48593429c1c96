"""`lmtool embed`: hidden states of a model as vectors, one per text or one per token."""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from lmtool.config.registry import Choice
from lmtool.data.examples import Rows
from lmtool.data.rows import text_cell
from lmtool.errors import UserError
from lmtool.learners.base import truncation_warnings
from lmtool.learners.representations.reading import embedder_of
from lmtool.learners.representations.vectors import Embedder, Vectors
from lmtool.reporting.console import Output
from lmtool.resolver.commands import EmbedConfig
from lmtool.runs.files import replacement_of
from lmtool.session.requests import PAIR, TEXT, Input, file_digest, input_portions, requested_input
from lmtool.session.unfinished import UnfinishedOutput, unfinished_output
from lmtool.system.files import user_path
from lmtool.system.secrets import masked_data, masker
from lmtool.system.terminal import counted
from lmtool.tasks.configs.base import TaskConfig
from lmtool.training.precision import select_device, select_precision
from lmtool.weights.base import digest
from lmtool.weights.padded_model import load
from lmtool.weights.reading import ignored_warnings
from lmtool.weights.saved_model import decode_section

PortionsFrom = Callable[[int], Iterator[tuple[int, Rows, Iterator[Vectors]]]]
"""Returns the portions of `Embedder.portion` rows from a row on: the first row, the rows, and their vectors."""
# Texts in a row group of a .parquet file.
_GROUP_TEXTS = 256


def check_output(path: str | None, pooling: str) -> None:
    """Raises UserError if the suffix of `output=` is not a known format, or the format cannot hold the vectors."""
    if path is None:
        return
    suffix = Path(path).suffix.lower()
    if suffix not in (".npy", ".parquet"):
        raise UserError(
            f"output={path}: the suffix must be .npy or .parquet", f"set output={Path(path).with_suffix('.npy')}"
        )
    if suffix == ".npy" and pooling == "none":
        raise UserError(
            f"output={path}: a .npy array cannot hold the tokens of pooling=none",
            f"set output={Path(path).with_suffix('.parquet')}, or pooling=mean",
        )
    if suffix == ".parquet":
        _pyarrow(path)


def write_npy(unfinished: UnfinishedOutput, portions_from: PortionsFrom, count: int, embedder: Embedder) -> str:
    """Writes (N, H) float32 in the order of the rows, or (N, W, H) for several layers, after the rows that are there.
    Returns what was written. Raises OSError if writing fails."""
    layers, file = _layers(embedder), unfinished.file
    shape = (count, embedder.width) if len(layers) == 1 else (count, len(layers), embedder.width)
    header, row_bytes = io.BytesIO(), 4 * math.prod(shape[1:])
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    rows_before = max(0, file.seek(0, os.SEEK_END) - len(header.getvalue())) // row_bytes
    # Whole portions only, so that the other rows are computed in the same batches as without a stop.
    rows_before -= rows_before % embedder.portion
    file.truncate(len(header.getvalue()) + rows_before * row_bytes if rows_before else 0)
    if not rows_before:
        file.write(header.getvalue())
    for _, _, vectors in portions_from(rows_before):
        for text in vectors:
            file.write(np.ascontiguousarray(text.vectors, dtype="<f4").data)
    unfinished.publish()
    return f"{' x '.join(f'{size:,}' for size in shape)} numbers"


def write_parquet(unfinished: UnfinishedOutput, portions_from: PortionsFrom, path: Path, embedder: Embedder) -> int:
    """Writes the columns `row` (from 0), the texts (for tokens: `position` and `token`), and `vector`, or `layer_0`,
    `layer_1`, ... for several layers. Returns the number of rows. Raises OSError if writing fails.

    A .parquet file cannot be continued, since its index is at its end. The unfinished output is a sequence of portions:
    the number of bytes (8, little-endian) and a stream of Arrow's IPC format.
    """
    pyarrow, file, rows_written = _pyarrow(str(path)), unfinished.file, 0
    ends = list(_portion_ends(file))
    file.truncate(ends[-1] if ends else 0)
    for first, rows, vectors in portions_from(len(ends) * embedder.portion):
        buffer = pyarrow.BufferOutputStream()
        stream = None
        for table in _tables(pyarrow, first, rows, vectors, embedder):
            stream = stream or pyarrow.ipc.new_stream(buffer, table.schema)
            stream.write_table(table)
        assert stream is not None
        stream.close()
        content = buffer.getvalue()
        file.write(content.size.to_bytes(8, "little"))
        file.write(content)
        file.flush()
    with replacement_of(path) as draft:
        writer, start = None, 0
        try:
            for end in _portion_ends(file):
                file.seek(start + 8)
                for batch in pyarrow.ipc.open_stream(file.read(end - start - 8)):
                    writer = writer or pyarrow.parquet.ParquetWriter(draft, batch.schema)
                    writer.write_batch(batch)
                    rows_written += batch.num_rows
                start = end
        except pyarrow.ArrowInvalid as error:
            raise unfinished.damaged() from error
        finally:
            if writer is not None:
                writer.close()
    return rows_written


def _portion_ends(file: BinaryIO) -> Iterator[int]:
    """Yields the ends of the complete portions of an unfinished .parquet output, in bytes from its start."""
    size, end = file.seek(0, os.SEEK_END), 0
    while end + 8 <= size:
        file.seek(end)
        end += 8 + int.from_bytes(file.read(8), "little")
        if end <= size:
            yield end


def _tables(
    pyarrow: ModuleType, first: int, rows: Rows, vectors: Iterator[Vectors], embedder: Embedder
) -> Iterator[Any]:
    """Yields the tables of groups of texts. first: the number of the first row of `rows`."""
    width, mask = embedder.width, masker()
    vector_type = pyarrow.list_(pyarrow.float32(), width)
    for start in range(0, len(rows), _GROUP_TEXTS):
        group = list(islice(vectors, _GROUP_TEXTS))
        columns = dict(_columns(rows, start, first, group, embedder))
        columns = {name: masked_data(values, mask) for name, values in columns.items()}
        for number, name in enumerate(_layers(embedder)):
            flat = np.concatenate([text.vectors[number].reshape(-1) for text in group])
            columns[name] = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(flat), width).cast(vector_type)
        yield pyarrow.table(columns)


def _columns(
    rows: Rows, start: int, first: int, group: list[Vectors], embedder: Embedder
) -> Iterator[tuple[str, list[object]]]:
    """Yields the columns that identify the vectors of a group of texts. start: index of the first text in `rows`.
    first: the number of the first row of `rows`."""
    numbers = range(first + start, first + start + len(group))
    if embedder.pooling != "none":
        yield "row", list(numbers)
        for name, values in rows.columns.items():
            yield name, values[start : start + len(group)]
        return
    yield "row", [number for number, text in zip(numbers, group, strict=True) for _ in text.tokens]
    yield "position", [position for text in group for position in range(len(text.tokens))]
    yield "token", [piece for text in group for piece in embedder.tokenizer.pieces(text.tokens)]


def _layers(embedder: Embedder) -> list[str]:
    """Returns the names of the columns of vectors, one per layer."""
    layers = embedder.states.layers
    return ["vector"] if embedder.average or len(layers) == 1 else [f"layer_{layer}" for layer in layers]


def _pyarrow(path: str) -> ModuleType:
    """Returns the library pyarrow. Raises UserError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as problem:
        raise UserError(
            f"output={path} needs the library pyarrow, which is not installed",
            "pip install 'lmtool[hub]', or set output=NAME.npy",
        ) from problem
    return pyarrow


_PRINTED_VALUES = 6


def run(config: EmbedConfig) -> None:
    """Reads texts, embeds them, and prints or writes the vectors."""
    check_output(config.output, config.pooling)
    output, precision = Output(), select_precision(config.precision, select_device(config.device))
    loaded = load(config.checkpoint, str(precision.device), config.offline)
    task = decode_section(config.checkpoint, loaded.saved, Choice("task", key="kind", optional=True))
    embedder, description = embedder_of(
        loaded, config.checkpoint, config.layers, config.pooling, config.batch_tokens, precision, config.offline
    )
    check_output(config.output, embedder.pooling)
    # All rows are read before the first one is embedded, so that an error in one of them comes first.
    in_portions = config.output is not None and config.input not in (None, "-")
    rows = None if in_portions else _rows(config, requested_input(config, task), task)
    count = sum(map(len, _portions(config, task, rows, embedder.portion)))

    for note in (*ignored_warnings(config.checkpoint, loaded.report.ignored), *embedder.notes):
        output.warn(note)
    truncated: Counter[str] = Counter()
    if config.output is None:
        assert rows is not None
        for line in _lines(rows, embedder.vectors(rows, truncated), embedder):
            output.line(line)
        for text in truncation_warnings(truncated, count):
            output.warn(text)
        return
    embedded = count
    with output.bar("embedding") as progress:

        def portions_from(first: int) -> Iterator[tuple[int, Rows, Iterator[Vectors]]]:
            nonlocal embedded
            embedded -= first
            if first:
                output.line(f"continues after {first:,} of {counted(count, 'text')}, which were embedded before")
            start = 0
            for portion in _portions(config, task, rows, embedder.portion):
                if start >= first:
                    report = partial(_report, progress, start, count)
                    yield start, portion, embedder.vectors(portion, truncated, report)
                start += len(portion)

        settings = [embedder.pooling, embedder.average, embedder.states.layers, config.batch_tokens, precision.name]
        weights = [digest(part.state_dict()) for part in (loaded.model, embedder.modules) if part is not None]
        identity = loaded.saved.get("model"), embedder.tokenizer.fingerprint
        request = [*weights, *identity, embedder.format_name, embedder.prompt, embedder.max_length, *settings]
        request.append(file_digest(str(config.input)) if rows is None else rows.columns)
        written = _write(config.output, count, portions_from, embedder, request)
    for text in truncation_warnings(truncated, embedded):
        output.warn(text)
    output.line(f"{written}: {config.output} · {description} · {precision.name}")


def _portions(config: EmbedConfig, task: TaskConfig | None, rows: Rows | None, size: int) -> Iterator[Rows]:
    """Yields the rows in portions: `rows`, or if these are None, those of `input=`."""
    if rows is None:
        yield from (_rows(config, portion, task) for portion in input_portions(str(config.input), task, size))
        return
    for start in range(0, len(rows), size):
        yield rows.take(np.arange(start, min(start + size, len(rows))))


def _report(progress: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _rows(config: EmbedConfig, requested: Input, task: TaskConfig | None) -> Rows:
    """Returns the texts or pairs to embed: the columns that the checkpoint's task reads, otherwise `text` and
    `pair`."""
    table = requested.table
    if table is None:
        columns = {TEXT: requested.texts}
        if config.pair is not None:
            if len(requested) != 1:
                raise UserError("pair= needs a single text=", "use a file with the columns text and pair")
            columns[PAIR] = [config.pair]
        return Rows(list(range(len(requested))), columns, None, requested.origin)
    present = table.columns if task is None else task.with_aliases(table.columns)
    names = () if task is None else task.text
    if len(names) not in (1, 2) or not set(names) <= set(present):
        names = (TEXT, PAIR) if PAIR in present else (TEXT,)
    missing = [name for name in names if name not in present]
    if missing:
        raise UserError(
            f"{table.origin[0][0]}: no column {missing[0]} to read; there are {', '.join(table.columns)}",
            f"rename its text column to {missing[0]} in a copy of the file",
        )
    columns = {
        name: [_text(place, name, value) for value, place in zip(present[name], table.origin, strict=True)]
        for name in names
    }
    return Rows(list(range(len(table))), columns, None, table.origin)


def _text(place: tuple[str, int], name: str, value: object) -> str:
    """Returns a cell as text; words of a list are separated by spaces."""
    words = value if isinstance(value, (list, tuple)) else [value]
    return " ".join(text_cell(place, name, word) for word in words)


def _write(path: str, count: int, portions_from: PortionsFrom, embedder: Embedder, request: object) -> str:
    """Writes the vectors and returns a description of their number. Raises UserError if writing fails."""
    with unfinished_output(path, request) as unfinished:
        if Path(path).suffix.lower() == ".npy":
            return write_npy(unfinished, portions_from, count, embedder)
        rows_written = write_parquet(unfinished, portions_from, user_path(path), embedder)
    texts = counted(count, "text")
    return texts if embedder.pooling != "none" else f"{counted(rows_written, 'token')} of {texts}"


def _lines(rows: Rows, vectors: Iterable[Vectors], embedder: Embedder) -> Iterator[str]:
    """Yields the lines for the screen: the first numbers of each vector."""
    texts = list(zip(*rows.columns.values(), strict=True))
    for text, embedded in zip(texts, vectors, strict=True):
        pieces = embedder.tokenizer.readable(embedded.tokens) if embedder.pooling == "none" else []
        for number, layer_vectors in enumerate(embedded.vectors):
            name = "" if len(embedded.vectors) == 1 else f"layer {embedder.states.layers[number]}  "
            if embedder.pooling != "none":
                yield f"{name}{_numbers(layer_vectors)}  {' | '.join(text)}"
            for piece, vector in zip(pieces, layer_vectors, strict=False):
                yield f"{name}{_numbers(vector)}  {piece}"


def _numbers(vector: np.ndarray) -> str:
    return " ".join(f"{value: .3f}" for value in vector[:_PRINTED_VALUES]) + f" ... ({len(vector)} numbers)"
