"""The examples and targets of a batch, and the keys under which a teacher's outputs for them are stored.

A key is a hash of an example's tokens and target positions, or of its row in a table, so that the outputs are found in
whichever batch the example occurs.

Shape letters: N documents of a batch, G examples of a batch (an example has one or several documents), T tokens, M
targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lmtool.distillation.recording import member_batches
from lmtool.errors import UserError
from lmtool.learners.mixed_examples import MixedBatch, term_of
from lmtool.nn.configs import Side
from lmtool.random_streams import mix
from lmtool.types import Batch, Packed, Target

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""An odd multiplier (2**64 divided by the golden ratio), which spreads consecutive numbers before they are hashed."""
_OUTPUTS, _POSITIONS, _ROWS = (np.uint64(number) for number in (1, 2, 3))
"""Numbers that keep the hashes of outputs, target positions and table rows apart from each other."""


@dataclass(frozen=True)
class TermBatch:
    """The targets of one loss term in a batch. batch: the batch on the host; in a mixture, that of the member that has
    the term."""

    batch: Batch
    target: Target

    @property
    def packed(self) -> Packed:
        """The packed texts that the positions of the targets index."""
        outputs = self.batch.outputs
        return self.batch.inputs if self.target.side == "inputs" or outputs is None else outputs

    @property
    def classes_are_positions(self) -> bool:
        """Whether the classes of a target are the positions of its document, as in extractive question answering."""
        labels = self.target.labels
        return labels is not None and labels.ndim == 2 and not labels.is_floating_point()

    def example_indices(self) -> np.ndarray:
        """Returns the index of each document's example within the batch, (N,). Documents of an example are adjacent."""
        numbers = self.batch.examples.numpy()
        return np.concatenate([[0], np.cumsum(numbers[1:] != numbers[:-1])]).astype(np.int64)

    def keys(self, by_row: bool) -> np.ndarray:
        """Returns the (G,) uint64 keys of the batch's examples: hashes of their rows in the table (by_row), or of their
        tokens and the positions of their targets, so that a text with other masks has another key."""
        example_N = self.example_indices()
        first_G = np.flatnonzero(np.diff(example_N, prepend=-1))
        if by_row:
            assert self.batch.rows is not None
            return mix(self.batch.rows.numpy()[first_G].astype(np.uint64) * _ODD + _ROWS)
        keys = _hashes(self.batch.inputs, example_N, first_G)
        if self.batch.outputs is not None:
            keys = mix(keys + _OUTPUTS) + _hashes(self.batch.outputs, example_N, first_G)
        positions = [indices.reshape(-1) for indices in (self.target.at, self.target.span) if indices is not None]
        if positions:
            at_M, start_N = torch.cat(positions).numpy(), np.array(self.packed.starts)
            example_M = example_N[self.packed.documents.numpy()[at_M]]
            hashes = mix((at_M - start_N[first_G][example_M]).astype(np.uint64) * _ODD + _POSITIONS)
            keys = mix(keys) + _sums(hashes, example_M, len(first_G))
        return mix(keys)

    def owners(self, target_count: int) -> np.ndarray:
        """Returns the index of each predicted target's example, (M,). Raises ValueError if `target_count`, M, does not
        match the batch."""
        example_N, positions = self.example_indices(), self.target.at
        if positions is None and self.target.span is not None:
            positions = self.target.span[:, 0]
        owners = example_N if positions is None else example_N[self.packed.documents.numpy()[positions.numpy()]]
        if positions is None and target_count % len(owners):
            # The documents of an example share its targets, as in multiple choice.
            owners = np.arange(owners[-1] + 1)
        if len(owners) == 0 and target_count == 0:
            return owners
        if len(owners) == 0 or target_count % len(owners):
            raise ValueError(f"{target_count} predictions of {len(owners)} targets")
        return np.repeat(owners, target_count // len(owners))


def batch_terms(batch: Batch) -> dict[str, TermBatch]:
    """Returns the targets of each loss term of a batch, by the term's name."""
    if isinstance(batch, MixedBatch):
        return {
            term_of(name, term): TermBatch(member.host, member.host.targets[term])
            for name, member in batch.members
            for term in member.targets
        }
    host = batch.host
    return {term: TermBatch(host, target) for term, target in host.targets.items()}


def batch_states(batch: Batch) -> Iterator[tuple[str, TermBatch]]:
    """Yields the tokens that each stack reads, as targets whose "predictions" are the states of the tokens. They are
    stored like predictions, under the name "states of inputs" or "states of outputs"."""
    sides: tuple[Side, Side] = ("inputs", "outputs")
    for part in member_batches(batch):
        host = part.host
        for side, packed in zip(sides, (host.inputs, host.outputs), strict=True):
            if packed is not None:
                yield f"states of {side}", TermBatch(host, Target(None, at=torch.arange(len(packed.tokens)), side=side))


def require_rows(batch: Batch) -> None:
    """Raises UserError if a term is predicted per token, which requires the student's tokenizer."""
    for term, part in batch_terms(batch).items():
        if part.batch.rows is None or part.target.at is not None or part.classes_are_positions:
            raise UserError(
                f"{term} is predicted per token, but the teacher's tokenizer differs from the student's",
                "use a teacher with the student's tokenizer; or distill=sequence, which learns the teacher's texts",
            )


def _hashes(packed: Packed, example_N: np.ndarray, first_G: np.ndarray) -> np.ndarray:
    tokens_T, lengths_N = packed.tokens.numpy().astype(np.uint64), np.array(packed.lengths, dtype=np.int64)
    starts_N = np.array(packed.starts, dtype=np.int64)
    example_T = np.repeat(example_N, lengths_N)
    positions_T = np.arange(len(tokens_T)) - starts_N[first_G][example_T]
    hashes_T = mix(tokens_T * _ODD + mix(positions_T.astype(np.uint64)))
    end_hashes_N = mix((starts_N + lengths_N - starts_N[first_G][example_N]).astype(np.uint64) + _ODD)
    return _sums(hashes_T, example_T, len(first_G)) + _sums(end_hashes_N, example_N, len(first_G))


def _sums(values: np.ndarray, groups: np.ndarray, group_count: int) -> np.ndarray:
    totals = np.zeros(group_count, dtype=np.uint64)
    np.add.at(totals, groups, values)
    return totals


def group_by_example(owner_M: np.ndarray, example_count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices (M,) that sort the targets by example, stably, and the number of targets (G,) of each
    example."""
    return np.argsort(owner_M, kind="stable"), np.bincount(owner_M, minlength=example_count)
