"""Which example is which: by what a model reads of it, or by the row of the table that it is of.

The key of what is read is a hash of its tokens and of the places that predict, so that nothing is ever answered for
other tokens than those that the teacher read, whatever order, epoch or corruption they come from. Of 10 million
examples two have the same key with a probability of 3e-6.

Shape letters: T tokens, N documents, G examples, M targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmtool.distillation.interchange import parts_of
from lmtool.errors import UserError
from lmtool.learners.mixed_examples import MixedBatch, term_of
from lmtool.nn.configs import Side
from lmtool.streams import mix
from lmtool.types import Batch, Packed, Target

_ODD = np.uint64(0x9E3779B97F4A7C15)
_OUTPUTS, _PLACES, _ROWS = (np.uint64(number) for number in (1, 2, 3))


@dataclass(frozen=True)
class Held:
    """One term of a batch. batch: the part of it that has the term's targets, on the host."""

    batch: Batch
    target: Target

    @property
    def packed(self) -> Packed:
        """What its places count in."""
        outputs = self.batch.outputs
        return self.batch.inputs if self.target.side == "inputs" or outputs is None else outputs

    @property
    def inside(self) -> bool:
        """Whether its targets are places within a document, of which each has as many classes as tokens."""
        labels = self.target.labels
        return labels is not None and labels.ndim == 2 and not labels.is_floating_point()

    def examples(self) -> np.ndarray:
        """(N,) the example of each document, by its place among those of the batch. Parts of one stand together."""
        numbers = self.batch.examples.numpy()
        return np.concatenate([[0], np.cumsum(numbers[1:] != numbers[:-1])]).astype(np.int64)

    def keys(self, by_row: bool) -> np.ndarray:
        """(G,) uint64."""
        example_N = self.examples()
        first_G = np.flatnonzero(np.diff(example_N, prepend=-1))
        if by_row:
            assert self.batch.rows is not None
            return mix(self.batch.rows.numpy()[first_G].astype(np.uint64) * _ODD + _ROWS)
        keys = _read(self.batch.inputs, example_N, first_G)
        if self.batch.outputs is not None:
            keys = mix(keys + _OUTPUTS) + _read(self.batch.outputs, example_N, first_G)
        places = [at.reshape(-1) for at in (self.target.at, self.target.span) if at is not None]
        if places:
            at_M, start_N = torch.cat(places).numpy(), np.array(self.packed.starts)
            example_M = example_N[self.packed.documents.numpy()[at_M]]
            hashes = mix((at_M - start_N[first_G][example_M]).astype(np.uint64) * _ODD + _PLACES)
            keys = mix(keys) + _sums(hashes, example_M, len(first_G))
        return mix(keys)

    def owners(self, targets: int) -> np.ndarray:
        """(M,) the example of each target that is predicted. ValueError where these are not those of the batch."""
        example_N, at = self.examples(), self.target.at
        if at is None and self.target.span is not None:
            at = self.target.span[:, 0]
        of = example_N if at is None else example_N[self.packed.documents.numpy()[at.numpy()]]
        if at is None and targets % len(of):
            of = np.arange(of[-1] + 1)
        if len(of) == 0 and targets == 0:
            return of
        if len(of) == 0 or targets % len(of):
            raise ValueError(f"{targets} predictions of {len(of)} targets")
        return np.repeat(of, targets // len(of))


def held_terms(batch: Batch) -> dict[str, Held]:
    """By the name of its term, where a target of a batch stands."""
    if isinstance(batch, MixedBatch):
        return {
            term_of(name, term): Held(member.host, member.host.targets[term])
            for name, member in batch.members
            for term in member.targets
        }
    host = batch.host
    return {term: Held(host, target) for term, target in host.targets.items()}


def held_states(batch: Batch) -> Iterator[tuple[str, Held]]:
    """The states of the tokens that are read, by a name for each side: of each part of a batch, in their order."""
    for part in parts_of(batch):
        host = part.host
        for side, packed in _sides(host):
            yield f"states of {side}", Held(host, Target(None, at=torch.arange(len(packed.tokens)), side=side))


def _sides(batch: Batch) -> Iterator[tuple[Side, Packed]]:
    """What each stack reads of a batch."""
    yield "inputs", batch.inputs
    if batch.outputs is not None:
        yield "outputs", batch.outputs


def require_rows(batch: Batch) -> None:
    """UserError where what is predicted of a batch is of more, or of less, than rows."""
    for term, held in held_terms(batch).items():
        if held.batch.rows is None or held.target.at is not None or held.inside:
            raise UserError(
                f"{term} is predicted of tokens, and the teacher has another tokenizer than the student",
                "give a teacher with the student's tokenizer; or distill=sequence, which learns the teacher's texts",
            )


def _read(packed: Packed, example_N: np.ndarray, first_G: np.ndarray) -> np.ndarray:
    """(G,) hashes of the tokens of each example and of where its documents end."""
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


def order_of(owner_M: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """The targets with those of an example together: (M,) their order, and (G,) how many each has."""
    return np.argsort(owner_M, kind="stable"), np.bincount(owner_M, minlength=groups)


def on(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy of values as a tensor on a device."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
