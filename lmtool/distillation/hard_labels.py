"""A teacher known only by a file of predictions: it provides hard labels and never runs.

Shape letters: N documents, G examples, M targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.distillation.seen import RecordedOutputs, StudentData, Teacher
from lmtool.distillation.store.outputs import batch_terms, order_of
from lmtool.errors import UserError
from lmtool.models.heads.predicted import TargetProbabilities
from lmtool.nn.stack import Tap
from lmtool.types import Batch


@dataclass(frozen=True)
class FixedLabels(TargetProbabilities):
    """labels: (M,), returned by `best`."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def probabilities(self, temperature: float = 1.0, first: int = 0, last: int | None = None) -> Tensor:
        raise TypeError("hard labels have no probabilities")

    def best(self) -> Tensor:
        return self.labels


@dataclass(frozen=True)
class _Labels:
    """By example, the labels of one term. keys_G: sorted. first_G, count_G: its slice of `labels`."""

    keys_G: np.ndarray
    first_G: np.ndarray
    count_G: np.ndarray
    labels: Tensor


@dataclass(kw_only=True)
class HardLabels(Teacher):
    """The learner is the student's, which turns rows into examples. relabel: replaces the labels of the training data
    by the predictions, and returns a line for the first screen."""

    relabel: Callable[[SplitData], tuple[SplitData, dict[str, Any]]]
    terms: dict[str, _Labels] = field(default_factory=dict)

    @property
    def teaches(self) -> frozenset[str]:
        return frozenset([self.learner.config.name])

    def begin(self, reading: StudentData) -> dict[str, Any]:
        data, metadata = self.relabel(reading.data)
        examples = self.learner.examples(data, reading.max_length)
        budget = max(reading.tokens, int(examples.plan(0).lengths.max()))
        retained: dict[str, list[tuple[np.ndarray, np.ndarray, Tensor]]] = {}
        for batch in PackedLoader(examples, 0, None, budget, shuffle=False).epoch_batches():
            for term, held in batch_terms(batch).items():
                labels = held.target.labels
                if labels is None or term not in self.teaches:
                    continue
                keys_G = held.keys(by_row=False)
                order_M, count_G = order_of(held.owners(len(labels)), len(keys_G))
                retained.setdefault(term, []).append((keys_G, count_G, labels[torch.from_numpy(order_M)]))
        self.terms = {term: _joined(parts) for term, parts in retained.items()}
        return metadata

    def see(self, batch: Batch, states: Tap | None = None) -> RecordedOutputs:
        """UserError if it has no labels for an example of the batch."""
        predicted: dict[str, TargetProbabilities] = {}
        for term, held in batch_terms(batch).items():
            known, target = self.terms.get(term), held.target.labels
            if known is None or target is None:
                continue
            keys_G = held.keys(by_row=False)
            at_G = np.searchsorted(known.keys_G, keys_G).clip(max=len(known.keys_G) - 1)
            order_M, count_G = order_of(held.owners(len(target)), len(keys_G))
            if (known.keys_G[at_G] != keys_G).any() or (known.count_G[at_G] != count_G).any():
                raise UserError(
                    f"distill.predictions={self.origin} lacks examples of {term} in this run",
                    "use a teacher instead: distill.teacher=RUN",
                )
            within_M = np.arange(len(order_M)) - np.repeat(np.cumsum(count_G) - count_G, count_G)
            labels = torch.empty_like(target)
            labels[torch.from_numpy(order_M)] = known.labels[
                torch.from_numpy(np.repeat(known.first_G[at_G], count_G) + within_M)
            ]
            predicted[term] = FixedLabels(labels.flatten().to(batch.inputs.tokens.device))
        return RecordedOutputs(self.learner, batch, predicted)


def _joined(parts: list[tuple[np.ndarray, np.ndarray, Tensor]]) -> _Labels:
    keys, counts = (np.concatenate(columns) for columns in list(zip(*parts, strict=True))[:2])
    unique, first_index = np.unique(keys, return_index=True)
    firsts = np.cumsum(counts) - counts
    return _Labels(unique, firsts[first_index], counts[first_index], torch.cat([labels for *_, labels in parts]))
