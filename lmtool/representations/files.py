"""Vectors on disk: .npy, one array of all texts; .parquet, a row a text or a row a token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.data.split import Rows
from lmtool.errors import UserError
from lmtool.representations.vectors import Embedder, Vectors
from lmtool.runs.files import in_one_move
from lmtool.secrets import masked_data, masker

# Texts in a row group of a .parquet file.
_GROUP = 256


def check_output(path: str | None, pooling: str) -> None:
    """UserError where no format goes by the suffix of an `output=`, or it does not hold what is asked for."""
    if path is None:
        return
    suffix = Path(path).suffix.lower()
    if suffix not in (".npy", ".parquet"):
        raise UserError(
            f"output={path}: vectors are written as .npy or .parquet", f"output={Path(path).with_suffix('.npy')}"
        )
    if suffix == ".npy" and pooling == "none":
        raise UserError(
            f"output={path}: an array has no place for the tokens of pooling=none",
            f"output={Path(path).with_suffix('.parquet')}, or pooling=mean",
        )
    if suffix == ".parquet":
        _pyarrow(path)


def write_npy(path: Path, vectors: Iterable[Vectors], count: int, embedder: Embedder) -> tuple[int, ...]:
    """(N, H) float32 in the order of the rows, or (N, W, H) of several layers; the shape. OSError where the disk
    refuses."""
    layers, width = _layers(embedder), embedder.width
    shape = (count, width) if len(layers) == 1 else (count, len(layers), width)
    with in_one_move(path) as draft, draft.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for text in vectors:
            file.write(np.ascontiguousarray(text.vectors, dtype="<f4").data)
    return shape


def write_parquet(path: Path, rows: Rows, vectors: Iterable[Vectors], embedder: Embedder) -> int:
    """The columns `row`, counted from 0, the texts (of tokens `position` and `token` instead), and `vector`, or
    `layer_0`, `layer_1`, ... of several layers. The number of rows written. OSError where the disk refuses."""
    pyarrow, width, written = _pyarrow(str(path)), embedder.width, 0
    kind = pyarrow.list_(pyarrow.float32(), width)
    mask, taken = masker(), iter(vectors)
    with in_one_move(path) as draft:
        writer = None
        try:
            for start in range(0, len(rows), _GROUP):
                group = list(islice(taken, _GROUP))
                columns = dict(_columns(rows, start, group, embedder))
                columns = {name: masked_data(values, mask) for name, values in columns.items()}
                for number, name in enumerate(_layers(embedder)):
                    flat = np.concatenate([text.vectors[number].reshape(-1) for text in group])
                    columns[name] = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(flat), width).cast(kind)
                table = pyarrow.table(columns)
                writer = writer or pyarrow.parquet.ParquetWriter(draft, table.schema)
                writer.write_table(table)
                written += table.num_rows
        finally:
            if writer is not None:
                writer.close()
    return written


def _columns(rows: Rows, start: int, group: list[Vectors], embedder: Embedder) -> Iterator[tuple[str, list[Any]]]:
    """What stands beside the vectors of some texts."""
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
    """The columns of the vectors, a layer each."""
    layers = embedder.states.layers
    return ["vector"] if embedder.average or len(layers) == 1 else [f"layer_{layer}" for layer in layers]


def _pyarrow(path: str) -> Any:
    """UserError where the library is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as problem:
        raise UserError(
            f"output={path}: parquet is written by the library pyarrow, which is not installed",
            "pip install 'lmtool[hub]', or give output=NAME.npy",
        ) from problem
    return pyarrow
