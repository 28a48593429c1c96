"""The stored outputs of one term: flat files, appended while they are made, and memory-mapped for reading.

keys, first, counts: by example, sorted by key: the example, the offset of its values, and their number. values: logits,
or values; over a vocabulary those of the top words, as log-probabilities at temperature 1. words, norms: over a
vocabulary only: the top words, and the log-sum over all words for each temperature.

Shape letters: E examples, G those of a batch, R rows of values, W their width, M targets, S temperatures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.distillation.configs import TermConfig
from lmtool.distillation.recording import member_batches
from lmtool.errors import NotFinite, UserError
from lmtool.learners.mixed_examples import MixedBatch, term_of
from lmtool.models.heads.predicted import (
    ROWS,
    Binary,
    Classes,
    PredictedWords,
    TargetProbabilities,
    TopWords,
    Values,
)
from lmtool.nn.configs import Side
from lmtool.random_streams import mix
from lmtool.types import Batch, Packed, Target

_ODD = np.uint64(0x9E3779B97F4A7C15)
_OUTPUTS, _POSITIONS, _ROWS = (np.uint64(number) for number in (1, 2, 3))


@dataclass(frozen=True)
class TermBatch:
    """One term of a batch. batch: the part of it that has the term's targets, on the host."""

    batch: Batch
    target: Target

    @property
    def packed(self) -> Packed:
        """The packed texts that its positions index."""
        outputs = self.batch.outputs
        return self.batch.inputs if self.target.side == "inputs" or outputs is None else outputs

    @property
    def inside(self) -> bool:
        """Whether its targets are positions within a document, with as many classes as the document has tokens."""
        labels = self.target.labels
        return labels is not None and labels.ndim == 2 and not labels.is_floating_point()

    def examples(self) -> np.ndarray:
        """(N,) the example of each document, by its index within the batch. Parts of an example are adjacent."""
        numbers = self.batch.examples.numpy()
        return np.concatenate([[0], np.cumsum(numbers[1:] != numbers[:-1])]).astype(np.int64)

    def keys(self, by_row: bool) -> np.ndarray:
        """(G,) uint64."""
        example_N = self.examples()
        first_G = np.flatnonzero(np.diff(example_N, prepend=-1))
        if by_row:
            assert self.batch.rows is not None
            return mix(self.batch.rows.numpy()[first_G].astype(np.uint64) * _ODD + _ROWS)
        keys = _hashes(self.batch.inputs, example_N, first_G)
        if self.batch.outputs is not None:
            keys = mix(keys + _OUTPUTS) + _hashes(self.batch.outputs, example_N, first_G)
        positions = [at.reshape(-1) for at in (self.target.at, self.target.span) if at is not None]
        if positions:
            at_M, start_N = torch.cat(positions).numpy(), np.array(self.packed.starts)
            example_M = example_N[self.packed.documents.numpy()[at_M]]
            hashes = mix((at_M - start_N[first_G][example_M]).astype(np.uint64) * _ODD + _POSITIONS)
            keys = mix(keys) + _sums(hashes, example_M, len(first_G))
        return mix(keys)

    def owners(self, targets: int) -> np.ndarray:
        """(M,) the example of each predicted target. ValueError if these do not match the batch."""
        example_N, at = self.examples(), self.target.at
        if at is None and self.target.span is not None:
            at = self.target.span[:, 0]
        owners = example_N if at is None else example_N[self.packed.documents.numpy()[at.numpy()]]
        if at is None and targets % len(owners):
            owners = np.arange(owners[-1] + 1)
        if len(owners) == 0 and targets == 0:
            return owners
        if len(owners) == 0 or targets % len(owners):
            raise ValueError(f"{targets} predictions of {len(owners)} targets")
        return np.repeat(owners, targets // len(owners))


def batch_terms(batch: Batch) -> dict[str, TermBatch]:
    """By term name, the location of its targets in a batch."""
    if isinstance(batch, MixedBatch):
        return {
            term_of(name, term): TermBatch(member.host, member.host.targets[term])
            for name, member in batch.members
            for term in member.targets
        }
    host = batch.host
    return {term: TermBatch(host, target) for term, target in host.targets.items()}


def batch_states(batch: Batch) -> Iterator[tuple[str, TermBatch]]:
    """The states of the tokens that each stack reads, in each part of a batch in order, by a name per side."""
    sides: tuple[Side, Side] = ("inputs", "outputs")
    for part in member_batches(batch):
        host = part.host
        for side, packed in zip(sides, (host.inputs, host.outputs), strict=True):
            if packed is not None:
                yield f"states of {side}", TermBatch(host, Target(None, at=torch.arange(len(packed.tokens)), side=side))


def require_rows(batch: Batch) -> None:
    """UserError if predictions are not per row."""
    for term, part in batch_terms(batch).items():
        if part.batch.rows is None or part.target.at is not None or part.inside:
            raise UserError(
                f"{term} is predicted per token, but the teacher has another tokenizer than the student",
                "use a teacher with the student's tokenizer; or distill=sequence, which learns the teacher's texts",
            )


def _hashes(packed: Packed, example_N: np.ndarray, first_G: np.ndarray) -> np.ndarray:
    """(G,) hashes of the tokens of each example and the ends of its documents."""
    tokens_T, lengths_N = packed.tokens.numpy().astype(np.uint64), np.array(packed.lengths, dtype=np.int64)
    starts_N = np.array(packed.starts, dtype=np.int64)
    example_T = np.repeat(example_N, lengths_N)
    within_T = np.arange(len(tokens_T)) - starts_N[first_G][example_T]
    hashes_T = mix(tokens_T * _ODD + mix(within_T.astype(np.uint64)))
    ends_N = mix((starts_N + lengths_N - starts_N[first_G][example_N]).astype(np.uint64) + _ODD)
    return _sums(hashes_T, example_T, len(first_G)) + _sums(ends_N, example_N, len(first_G))


def _sums(values: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """(groups,) uint64 sums modulo 2**64."""
    totals = np.zeros(groups, dtype=np.uint64)
    np.add.at(totals, group, values)
    return totals


def group_by_example(owner_M: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups targets by example: (M,) their order, and (G,) counts."""
    return np.argsort(owner_M, kind="stable"), np.bincount(owner_M, minlength=groups)


def on(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy of values as a tensor on a device."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KINDS: dict[str, type[TargetProbabilities]] = {
    "classes": Classes,
    "binary": Binary,
    "values": Values,
    "words": PredictedWords,
}


@dataclass(frozen=True)
class Format:
    """dtype: of values on disk. top_k: words stored of a vocabulary; None: all. temperatures: those of the stored
    log-sums."""

    dtype: str
    top_k: int | None
    temperatures: tuple[float, ...]

    def plain(self, values: Tensor) -> np.ndarray:
        """Values as written. UserError if the dtype's range is too small."""
        written = values.detach().to(TYPES[self.dtype]).cpu()
        if bool(torch.isinf(written.float()).logical_and(torch.isfinite(values.cpu())).any()):
            raise UserError(
                f"distill.store_dtype={self.dtype} cannot represent the teacher's predictions",
                "set distill.store_dtype=bfloat16 or float32",
            )
        return (written.view(torch.int16) if self.dtype == "bfloat16" else written).numpy()

    def tensor(self, values: np.ndarray, device: torch.device) -> Tensor:
        """The inverse: stored values as a tensor."""
        read = on(values, device)
        return read.view(torch.bfloat16) if self.dtype == "bfloat16" else read


class TermWriter:
    """Appends the teacher's predictions of one term to the files `NUMBER.*.bin` of a folder."""

    def __init__(self, folder: Path, number: int, layout: Format):
        self.folder, self.number, self.layout = folder, number, layout
        self.kind = ""
        self.width = self.vocabulary = self.rows = 0
        self.inside = False
        self.stored: set[int] = set()
        self._keys: list[np.ndarray] = []
        self._first: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._files: dict[str, BinaryIO] = {}
        self._dtypes: dict[str, str] = {}

    def add(self, part: TermBatch, keys_G: np.ndarray, predicted: TargetProbabilities) -> None:
        """Adds the new examples of a batch."""
        self.kind = next(name for name, kind in _KINDS.items() if type(predicted) is kind)
        self.inside = part.inside
        columns = self._columns(predicted)
        if self.inside:
            columns, counts_G = {"values": _flat(columns["values"], part)}, _lengths(part) * 2
        else:
            order_M, counts_G = group_by_example(part.owners(len(columns["values"])), len(keys_G))
            columns = {name: values[order_M] for name, values in columns.items()}
        firsts = np.unique(keys_G, return_index=True)[1]
        new_G = np.zeros(len(keys_G), dtype=bool)
        new_G[[at for at in firsts.tolist() if int(keys_G[at]) not in self.stored]] = True
        written = np.repeat(new_G, counts_G)
        for name, values in columns.items():
            self._append(name, values[written])
        counts = counts_G[new_G]
        self._keys.append(keys_G[new_G])
        self._first.append(self.rows + np.cumsum(counts) - counts)
        self._counts.append(counts)
        self.stored.update(keys_G[new_G].tolist())
        self.rows += int(counts.sum())

    def has(self, keys_G: np.ndarray) -> bool:
        """Whether it has all of these examples."""
        return self.stored.issuperset(keys_G.tolist())

    def _columns(self, predicted: TargetProbabilities) -> dict[str, np.ndarray]:
        """(M, W) the values of the targets, and their words and log-sums."""
        if isinstance(predicted, PredictedWords):
            return self._of_words(predicted)
        if isinstance(predicted, Classes):
            values = predicted.logits_MC
        else:
            values = predicted.logits_M[:, None] if isinstance(predicted, Binary) else predicted.values_M[:, None]  # type: ignore[attr-defined]
        if bool(torch.isnan(values).any()):
            raise NotFinite("the teacher's predictions", None)
        self.width = values.shape[1]
        return {"values": self.layout.plain(values.float())}

    def _of_words(self, predicted: PredictedWords) -> dict[str, np.ndarray]:
        if self.layout.top_k is None:
            pieces = [predicted.logits.of(row, row + ROWS).detach().float() for row in range(0, len(predicted), ROWS)]
            plain = [self.layout.plain(piece) for piece in pieces]
            self.width = self.vocabulary = plain[0].shape[1] if plain else self.width
            return {"values": np.concatenate(plain) if plain else np.zeros((0, self.width), dtype=np.float32)}
        top = TopWords.of(predicted, self.layout.top_k, self.layout.temperatures)
        self.width, self.vocabulary = top.words_MK.shape[1], top.vocabulary
        words = top.words_MK.cpu().numpy().astype("<u2" if top.vocabulary <= 2**16 else "<u4")
        norms = top.norms_MS.cpu().numpy().astype("<f4")
        return {"values": self.layout.plain(top.logits_MK), "words": words, "norms": norms}

    def _append(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = open(  # noqa: SIM115 closed when all is written
                self.folder / f"{self.number}.{name}.bin", "wb"
            )
            self._dtypes[name] = values.dtype.str
        values.tofile(self._files[name])

    def close(self) -> JsonObject:
        """Writes the keys. Returns the term's entry for the manifest."""
        keys, first, counts = (np.concatenate(parts) for parts in (self._keys, self._first, self._counts))
        order = np.argsort(keys)
        for name, values in {"keys": keys, "first": first.astype("<i8"), "counts": counts.astype("<i8")}.items():
            self._append(name, values[order])
        for file in self._files.values():
            file.close()
        return {
            "number": self.number,
            "kind": self.kind,
            "inside": self.inside,
            "width": 1 if self.inside else self.width,
            "vocabulary": self.vocabulary,
            "examples": len(keys),
            "rows": self.rows,
            "dtypes": self._dtypes,
        }


class TermReader:
    """Reads the predictions for a batch from the files of a term. metadata: returned by `TermWriter.close`."""

    def __init__(self, folder: Path, metadata: JsonMapping, layout: Format):
        self.metadata, self.layout = metadata, layout
        shapes = {"keys": (metadata["examples"],), "first": (metadata["examples"],), "counts": (metadata["examples"],)}
        widths = {"values": metadata["width"], "words": metadata["width"], "norms": len(layout.temperatures)}
        self.arrays: dict[str, np.ndarray] = {}
        for name, dtype in metadata["dtypes"].items():
            shape = shapes.get(name) or (metadata["rows"], widths[name])
            file = folder / f"{metadata['number']}.{name}.bin"
            mapped = np.memmap(file, dtype=dtype, mode="r", shape=shape) if 0 not in shape else np.zeros(shape, dtype)
            self.arrays[name] = mapped.view(np.ndarray)

    def read(self, part: TermBatch, keys_G: np.ndarray, device: torch.device) -> TargetProbabilities | None:
        """The teacher's predictions for a batch; None if an example is missing."""
        keys_E = self.arrays["keys"]
        at_G = np.minimum(np.searchsorted(keys_E, keys_G), max(len(keys_E) - 1, 0))
        if not len(keys_E) or not np.array_equal(keys_E[at_G], keys_G):
            return None
        first_G, counts_G = self.arrays["first"][at_G], self.arrays["counts"][at_G]
        if self.metadata["inside"]:
            return _padded(self.arrays["values"][ranges(first_G, counts_G)], _lengths(part), self.layout, device)
        order_M, targets_G = group_by_example(part.owners(int(counts_G.sum())), len(keys_G))
        if not np.array_equal(targets_G, counts_G):
            raise ValueError("the store has another number of targets for an example than the batch")
        rows = np.empty(len(order_M), dtype=np.int64)
        rows[order_M] = ranges(first_G, counts_G)
        return self._predictions(rows, device)

    def _predictions(self, rows: np.ndarray, device: torch.device) -> TargetProbabilities:
        kind, values = self.metadata["kind"], self.arrays["values"]
        if kind == "words" and "words" in self.arrays:
            words = on(self.arrays["words"][rows].astype(np.int64), device)
            norms = on(self.arrays["norms"][rows], device)
            logits = self.layout.tensor(values[rows], device)
            return TopWords(words, logits, norms, self.layout.temperatures, self.metadata["vocabulary"])
        if kind == "words":
            return StoredWords(values, rows, self.layout, device)
        tensor = self.layout.tensor(values[rows], device)
        if kind == "classes":
            return Classes(tensor)
        return Binary(tensor[:, 0]) if kind == "binary" else Values(tensor[:, 0])


@dataclass(frozen=True)
class StoredWords(TargetProbabilities):
    """All logits over a vocabulary, read from disk in slices."""

    values: np.ndarray
    rows: np.ndarray
    layout: Format
    device: torch.device

    def __len__(self) -> int:
        return len(self.rows)

    def probabilities(self, temperature: float = 1.0, first: int = 0, last: int | None = None) -> Tensor:
        logits = self.layout.tensor(self.values[self.rows[first:last]], self.device)
        return (logits.float() / temperature).softmax(-1)


def temperatures_of(terms: Iterable[TermConfig]) -> tuple[float, ...]:
    """The temperatures of the terms, and 1."""
    temperatures = (getattr(term, "temperature", 1.0) for term in terms)
    return tuple(sorted({1.0, *temperatures}))


def _lengths(part: TermBatch) -> np.ndarray:
    """(N,) tokens of each document."""
    return np.array(part.packed.lengths, dtype=np.int64)


def ranges(first_G: np.ndarray, counts_G: np.ndarray) -> np.ndarray:
    """The numbers of each range, concatenated."""
    before_G = np.cumsum(counts_G) - counts_G
    return np.arange(int(counts_G.sum())) + np.repeat(first_G - before_G, counts_G)


def _inside(lengths_N: np.ndarray) -> np.ndarray:
    """(2N, L) whether a position is within its document, for starts and then for ends."""
    return np.arange(lengths_N.max(initial=0)) < np.repeat(lengths_N, 2)[:, None]


def _flat(values_ML: np.ndarray, part: TermBatch) -> np.ndarray:
    """(R, 1) the scores of the positions within each document."""
    return values_ML[_inside(_lengths(part))][:, None]


def _padded(values_R1: np.ndarray, lengths_N: np.ndarray, layout: Format, device: torch.device) -> Classes:
    """The inverse: (2N, L), -inf after the end of a document."""
    inside_ML = _inside(lengths_N)
    logits_ML = torch.full(inside_ML.shape, -torch.inf, dtype=TYPES[layout.dtype], device=device)
    logits_ML[on(inside_ML, device)] = layout.tensor(values_R1[:, 0], device)
    return Classes(logits_ML)
