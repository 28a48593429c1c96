"""`lmtool embed`: hidden states of a model as vectors, one per text or one per token."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np

from lmtool.config.registry import Choice
from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.learners.base import no_progress
from lmtool.learners.representations.reading import embedder_of
from lmtool.learners.representations.vectors import Embedder, Vectors
from lmtool.reporting.console import Output
from lmtool.resolver.commands import EmbedConfig
from lmtool.runs.files import replacement_of
from lmtool.session.requests import PAIR, TEXT, requested_table, requested_texts
from lmtool.session.unfinished import UnfinishedOutput, unfinished_output
from lmtool.system.files import user_path
from lmtool.system.secrets import masked_data, masker
from lmtool.system.terminal import counted
from lmtool.training.precision import select_device, select_precision
from lmtool.weights.base import digest
from lmtool.weights.padded_model import LoadedCheckpoint, load
from lmtool.weights.reading import ignored_warnings
from lmtool.weights.saved_model import decode_section

VectorsFrom = Callable[[int], Iterator[Vectors]]
"""Returns the vectors of the rows from a number on."""
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


def write_npy(unfinished: UnfinishedOutput, vectors_from: VectorsFrom, count: int, embedder: Embedder) -> str:
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
    for text in vectors_from(rows_before):
        file.write(np.ascontiguousarray(text.vectors, dtype="<f4").data)
    unfinished.publish()
    return f"{' x '.join(f'{size:,}' for size in shape)} numbers"


def write_parquet(path: Path, rows: Rows, vectors: Iterable[Vectors], embedder: Embedder) -> int:
    """Writes the columns `row` (from 0), the texts (for tokens: `position` and `token`), and `vector`, or `layer_0`,
    `layer_1`, ... for several layers. Returns the number of rows. Raises OSError if writing fails."""
    pyarrow, width, rows_written = _pyarrow(str(path)), embedder.width, 0
    vector_type = pyarrow.list_(pyarrow.float32(), width)
    mask, remaining_vectors = masker(), iter(vectors)
    with replacement_of(path) as draft:
        writer = None
        try:
            for start in range(0, len(rows), _GROUP_TEXTS):
                group = list(islice(remaining_vectors, _GROUP_TEXTS))
                columns = dict(_columns(rows, start, group, embedder))
                columns = {name: masked_data(values, mask) for name, values in columns.items()}
                for number, name in enumerate(_layers(embedder)):
                    flat = np.concatenate([text.vectors[number].reshape(-1) for text in group])
                    columns[name] = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(flat), width).cast(vector_type)
                table = pyarrow.table(columns)
                writer = writer or pyarrow.parquet.ParquetWriter(draft, table.schema)
                writer.write_table(table)
                rows_written += table.num_rows
        finally:
            if writer is not None:
                writer.close()
    return rows_written


def _columns(rows: Rows, start: int, group: list[Vectors], embedder: Embedder) -> Iterator[tuple[str, list[object]]]:
    """Yields the columns that identify the vectors of a group of texts. start: row of the first text."""
    numbers = range(start, start + len(group))
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
    rows = _rows(config, loaded)
    embedder, description = embedder_of(
        loaded, config.checkpoint, config.layers, config.pooling, config.batch_tokens, precision, config.offline
    )
    check_output(config.output, embedder.pooling)

    def warn(text: str) -> None:
        output.line(f"warning: {text}", "yellow")

    for note in (*ignored_warnings(config.checkpoint, loaded.report.ignored), *embedder.notes):
        warn(note)
    if config.output is None:
        for line in _lines(rows, embedder.vectors(rows, no_progress, warn), embedder):
            output.line(line)
        return
    with output.bar("embedding") as progress:

        def vectors_from(first: int) -> Iterator[Vectors]:
            if first:
                output.line(f"continues after {first:,} of {counted(len(rows), 'text')}, which were embedded before")
            return embedder.vectors(rows, progress, warn, first)

        settings = [embedder.pooling, embedder.average, embedder.states.layers, config.batch_tokens, precision.name]
        weights = [digest(part.state_dict()) for part in (loaded.model, embedder.modules) if part is not None]
        identity = loaded.saved.get("model"), embedder.tokenizer.fingerprint
        request = [*weights, *identity, embedder.format_name, embedder.prompt, embedder.max_length, *settings]
        written = _write(config.output, rows, vectors_from, embedder, request)
    output.line(f"{written}: {config.output} · {description} · {precision.name}")


def _rows(config: EmbedConfig, loaded: LoadedCheckpoint) -> Rows:
    """Returns the texts or pairs to embed: the columns that the checkpoint's task reads, otherwise `text` and
    `pair`."""
    task = decode_section(config.checkpoint, loaded.saved, Choice("task", key="kind", optional=True))
    table = requested_table(config, task)
    if table is None:
        texts, origin = requested_texts(config)
        columns = {TEXT: texts}
        if config.pair is not None:
            if len(texts) != 1:
                raise UserError("pair= needs a single text=", "use a file with the columns text and pair")
            columns[PAIR] = [config.pair]
        return Rows(list(range(len(texts))), columns, None, origin)
    aliases = {} if task is None else task.aliases
    present = {aliases.get(name, name): values for name, values in table.columns.items()}
    names = () if task is None else task.text
    if len(names) not in (1, 2) or not set(names) <= set(present):
        names = (TEXT, PAIR) if PAIR in present else (TEXT,)
    missing = [name for name in names if name not in present]
    if missing:
        raise UserError(
            f"{table.origin[0][0]}: no column {missing[0]} to read; there are {', '.join(table.columns)}",
            f"rename its text column to {missing[0]} in a copy of the file",
        )
    columns = {name: [_text(value) for value in present[name]] for name in names}
    return Rows(list(range(len(table))), columns, None, table.origin)


def _text(value: object) -> str:
    """Returns a cell as text; words of a list are separated by spaces."""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _write(path: str, rows: Rows, vectors_from: VectorsFrom, embedder: Embedder, settings: object) -> str:
    """Writes the vectors and returns a description of their number. Raises UserError if writing fails."""
    try:
        if Path(path).suffix.lower() == ".npy":
            with unfinished_output(path, [settings, rows.columns]) as unfinished:
                return write_npy(unfinished, vectors_from, len(rows), embedder)
        rows_written = write_parquet(user_path(path), rows, vectors_from(0), embedder)
        texts = counted(len(rows), "text")
        return texts if embedder.pooling != "none" else f"{counted(rows_written, 'token')} of {texts}"
    except OSError as error:
        raise UserError(f"output={path} cannot be written: {error.strerror}", "set another output=") from error


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
