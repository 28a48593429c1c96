"""The stored outputs of a teacher for one loss term, in flat files.

The files are written batch by batch, and memory-mapped for reading. Three files have one entry per example, sorted by
key: `keys` (hashes of examples), `first` (the row of the example's first value) and `counts` (the number of its rows).
The file `values` has one row per target, with logits or a predicted value. If top_k truncates predictions over a
vocabulary, `values` has the log probabilities of the most probable words at temperature 1, and two more files have one
row per target: `words` (the ids of these words) and `norms` (the log of the sum over all words, for each temperature).

Shape letters: E stored examples, G examples of a batch, N documents of a batch, M targets of a batch, R rows of values,
W width of a row, S temperatures, K words of a row, L positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.distillation.configs.base import TermConfig
from lmtool.distillation.store.keys import TermBatch, group_by_example
from lmtool.errors import NotFinite, UserError
from lmtool.models.heads.predicted import ROWS, Binary, Classes, PredictedWords, TargetProbabilities, TopWords, Values


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Returns values as a tensor on a device."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KINDS: dict[str, type[TargetProbabilities]] = {
    "classes": Classes,
    "binary": Binary,
    "values": Values,
    "words": PredictedWords,
}


@dataclass(frozen=True)
class StoreFormat:
    """The format of stored outputs on disk. top_k: the number of most probable words that are stored per target; None
    means all words. temperatures: those at which truncated predictions can be read."""

    dtype: str
    top_k: int | None
    temperatures: tuple[float, ...]

    def to_numpy(self, values: Tensor) -> np.ndarray:
        """Converts values to their format on disk. Raises UserError if the range of the dtype is too small."""
        array = values.detach().to(TYPES[self.dtype]).cpu()
        if bool(torch.isinf(array.float()).logical_and(torch.isfinite(values.cpu())).any()):
            raise UserError(
                f"distill.store_dtype={self.dtype} cannot represent the largest of the teacher's logits",
                "set distill.store_dtype=bfloat16 or float32",
            )
        return (array.view(torch.int16) if self.dtype == "bfloat16" else array).numpy()

    def to_tensor(self, values: np.ndarray, device: torch.device) -> Tensor:
        """Converts stored values to a tensor, the inverse of `to_numpy`."""
        tensor = to_device(values, device)
        return tensor.view(torch.bfloat16) if self.dtype == "bfloat16" else tensor


class TermWriter:
    """Appends the teacher's predictions of one term to the files `NUMBER.*.bin` of a folder. number: the number of the
    term in the file names."""

    def __init__(self, folder: Path, number: int, store_format: StoreFormat):
        self.folder, self.number, self.store_format = folder, number, store_format
        self.kind = ""
        self.width = self.vocabulary = self.rows = 0
        self.classes_are_positions = False
        self.stored_keys: set[int] = set()
        self._keys: list[np.ndarray] = []
        self._first: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._files: dict[str, BinaryIO] = {}
        self._dtypes: dict[str, str] = {}

    def add(self, part: TermBatch, keys_G: np.ndarray, predicted: TargetProbabilities) -> None:
        """Writes the predictions for the examples of a batch, except examples that are already stored."""
        self.kind = next(name for name, kind in _KINDS.items() if type(predicted) is kind)
        self.classes_are_positions = part.classes_are_positions
        columns = self._columns(predicted)
        if self.classes_are_positions:
            columns, counts_G = {"values": _without_padding(columns["values"], part)}, _lengths(part) * 2
        else:
            order_M, counts_G = group_by_example(part.owners(len(columns["values"])), len(keys_G))
            columns = {name: values[order_M] for name, values in columns.items()}
        # If a batch contains the same example twice, only the first is written.
        unique_indices = np.unique(keys_G, return_index=True)[1]
        is_new_G = np.zeros(len(keys_G), dtype=bool)
        is_new_G[[index for index in unique_indices.tolist() if int(keys_G[index]) not in self.stored_keys]] = True
        is_new_R = np.repeat(is_new_G, counts_G)
        for name, values in columns.items():
            self._append(name, values[is_new_R])
        counts = counts_G[is_new_G]
        self._keys.append(keys_G[is_new_G])
        self._first.append(self.rows + np.cumsum(counts) - counts)
        self._counts.append(counts)
        self.stored_keys.update(keys_G[is_new_G].tolist())
        self.rows += int(counts.sum())

    def has(self, keys_G: np.ndarray) -> bool:
        """Returns whether the predictions for all of these examples are stored."""
        return self.stored_keys.issuperset(keys_G.tolist())

    def _columns(self, predicted: TargetProbabilities) -> dict[str, np.ndarray]:
        if isinstance(predicted, PredictedWords):
            return self._word_columns(predicted)
        if isinstance(predicted, Classes):
            values = predicted.logits_MC
        else:
            values = predicted.logits_M[:, None] if isinstance(predicted, Binary) else predicted.values_M[:, None]  # type: ignore[attr-defined]
        if bool(torch.isnan(values).any()):
            raise NotFinite("the teacher's predictions", None)
        self.width = values.shape[1]
        return {"values": self.store_format.to_numpy(values.float())}

    def _word_columns(self, predicted: PredictedWords) -> dict[str, np.ndarray]:
        if self.store_format.top_k is None:
            slices = [predicted.logits.of(row, row + ROWS).detach().float() for row in range(0, len(predicted), ROWS)]
            arrays = [self.store_format.to_numpy(logits) for logits in slices]
            self.width = self.vocabulary = arrays[0].shape[1] if arrays else self.width
            return {"values": np.concatenate(arrays) if arrays else np.zeros((0, self.width), dtype=np.float32)}
        top = TopWords.of(predicted, self.store_format.top_k, self.store_format.temperatures)
        self.width, self.vocabulary = top.words_MK.shape[1], top.vocabulary
        words = top.words_MK.cpu().numpy().astype("<u2" if top.vocabulary <= 2**16 else "<u4")
        norms = top.norms_MS.cpu().numpy().astype("<f4")
        return {"values": self.store_format.to_numpy(top.logits_MK), "words": words, "norms": norms}

    def _append(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = open(  # noqa: SIM115 `close` closes it
                self.folder / f"{self.number}.{name}.bin", "wb"
            )
            self._dtypes[name] = values.dtype.str
        values.tofile(self._files[name])

    def close(self) -> JsonObject:
        """Writes `keys`, `first` and `counts`, and closes the files. Returns the metadata for the manifest."""
        keys, first, counts = (np.concatenate(parts) for parts in (self._keys, self._first, self._counts))
        order = np.argsort(keys)
        for name, values in {"keys": keys, "first": first.astype("<i8"), "counts": counts.astype("<i8")}.items():
            self._append(name, values[order])
        for file in self._files.values():
            file.close()
        return {
            "number": self.number,
            "kind": self.kind,
            "inside": self.classes_are_positions,
            "width": 1 if self.classes_are_positions else self.width,
            "vocabulary": self.vocabulary,
            "examples": len(keys),
            "rows": self.rows,
            "dtypes": self._dtypes,
        }


class TermReader:
    """Reads predictions from the files of a term. metadata: the return value of `TermWriter.close`."""

    def __init__(self, folder: Path, metadata: JsonMapping, store_format: StoreFormat):
        self.metadata, self.store_format = metadata, store_format
        shapes = {"keys": (metadata["examples"],), "first": (metadata["examples"],), "counts": (metadata["examples"],)}
        widths = {"values": metadata["width"], "words": metadata["width"], "norms": len(store_format.temperatures)}
        self.arrays: dict[str, np.ndarray] = {}
        for name, dtype in metadata["dtypes"].items():
            shape = shapes.get(name) or (metadata["rows"], widths[name])
            file = folder / f"{metadata['number']}.{name}.bin"
            mapped = np.memmap(file, dtype=dtype, mode="r", shape=shape) if 0 not in shape else np.zeros(shape, dtype)
            self.arrays[name] = mapped.view(np.ndarray)

    def read(self, part: TermBatch, keys_G: np.ndarray, device: torch.device) -> TargetProbabilities | None:
        """Returns the teacher's predictions for the targets of a batch; None if an example is not stored. keys_G: the
        keys of the examples of the batch."""
        keys_E = self.arrays["keys"]
        index_G = np.minimum(np.searchsorted(keys_E, keys_G), max(len(keys_E) - 1, 0))
        if not len(keys_E) or not np.array_equal(keys_E[index_G], keys_G):
            return None
        first_G, counts_G = self.arrays["first"][index_G], self.arrays["counts"][index_G]
        if self.metadata["inside"]:
            return _with_padding(
                self.arrays["values"][ranges(first_G, counts_G)], _lengths(part), self.store_format, device
            )
        order_M, targets_G = group_by_example(part.owners(int(counts_G.sum())), len(keys_G))
        if not np.array_equal(targets_G, counts_G):
            raise ValueError("the batch and the store differ in the number of an example's targets")
        rows = np.empty(len(order_M), dtype=np.int64)
        rows[order_M] = ranges(first_G, counts_G)
        return self._predictions(rows, device)

    def _predictions(self, rows: np.ndarray, device: torch.device) -> TargetProbabilities:
        kind, values = self.metadata["kind"], self.arrays["values"]
        if kind == "words" and "words" in self.arrays:
            words = to_device(self.arrays["words"][rows].astype(np.int64), device)
            norms = to_device(self.arrays["norms"][rows], device)
            logits = self.store_format.to_tensor(values[rows], device)
            return TopWords(words, logits, norms, self.store_format.temperatures, self.metadata["vocabulary"])
        if kind == "words":
            return StoredWords(values, rows, self.store_format, device)
        tensor = self.store_format.to_tensor(values[rows], device)
        if kind == "classes":
            return Classes(tensor)
        return Binary(tensor[:, 0]) if kind == "binary" else Values(tensor[:, 0])


@dataclass(frozen=True)
class StoredWords(TargetProbabilities):
    """Stored logits over a whole vocabulary, of which only the requested rows are read from disk."""

    values: np.ndarray
    rows: np.ndarray
    store_format: StoreFormat
    device: torch.device

    def __len__(self) -> int:
        return len(self.rows)

    def probabilities(self, temperature: float = 1.0, first: int = 0, end: int | None = None) -> Tensor:
        logits = self.store_format.to_tensor(self.values[self.rows[first:end]], self.device)
        return (logits.float() / temperature).softmax(-1)


def temperatures_of(terms: Iterable[TermConfig]) -> tuple[float, ...]:
    """Returns the softmax temperatures of the terms, and 1, in ascending order."""
    temperatures = (getattr(term, "temperature", 1.0) for term in terms)
    return tuple(sorted({1.0, *temperatures}))


def _lengths(part: TermBatch) -> np.ndarray:
    return np.array(part.packed.lengths, dtype=np.int64)


def ranges(first_G: np.ndarray, counts_G: np.ndarray) -> np.ndarray:
    """Concatenates the integer ranges from first_G[g] to first_G[g] + counts_G[g]."""
    before_G = np.cumsum(counts_G) - counts_G
    return np.arange(int(counts_G.sum())) + np.repeat(first_G - before_G, counts_G)


def _position_mask(lengths_N: np.ndarray) -> np.ndarray:
    return np.arange(lengths_N.max(initial=0)) < np.repeat(lengths_N, 2)[:, None]


def _without_padding(values_ML: np.ndarray, part: TermBatch) -> np.ndarray:
    return values_ML[_position_mask(_lengths(part))][:, None]


def _with_padding(
    values_R1: np.ndarray, lengths_N: np.ndarray, store_format: StoreFormat, device: torch.device
) -> Classes:
    inside_ML = _position_mask(lengths_N)
    logits_ML = torch.full(inside_ML.shape, -torch.inf, dtype=TYPES[store_format.dtype], device=device)
    logits_ML[to_device(inside_ML, device)] = store_format.to_tensor(values_R1[:, 0], device)
    return Classes(logits_ML)
