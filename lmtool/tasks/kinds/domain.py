"""Domain adaptation with unlabelled text: beside each labelled text stands one of another domain, and an auxiliary loss
makes what the head reads of both alike. Evaluation and prediction know nothing of it.

Shape letters: N texts of one domain, M of both, H width of what the head reads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool import random_streams
from lmtool.data.plan import Plan
from lmtool.learners.mixed_examples import MixedBatch, joined
from lmtool.tasks.configs.base import CoralConfig, DannConfig
from lmtool.tasks.kinds.texts import SequenceExamples

TARGET = "target"
_STEEPNESS = 10.0  # of the schedule, Ganin et al. 2016, section 5.2.2


class Adaptation(ABC):
    """An auxiliary loss over the features of both domains."""

    def __init__(self, config: Any):
        self.config = config

    @property
    def uninformed(self) -> float:
        """What it loses at most where the domains are not told apart, in nats."""
        return 0.0

    def head(self, width: int) -> nn.Module | None:
        """What of it learns, over features of this width; None where nothing does."""
        return None

    @abstractmethod
    def count(self, source: int, target: int) -> float:
        """How much it predicts of so many texts of both domains."""

    @abstractmethod
    def loss(self, source_NH: Tensor, target_NH: Tensor, head: nn.Module | None, step: int) -> Tensor:
        """The sum of its losses."""


class GradientReversal(Adaptation):
    """Cross entropy of a domain classifier behind a layer that reverses the gradient (Ganin et al. 2016)."""

    config: DannConfig

    @property
    def uninformed(self) -> float:
        return math.log(2)

    def head(self, width: int) -> nn.Module:
        return DomainClassifier(width, self.config.hidden_size)

    def count(self, source: int, target: int) -> float:
        return float(source + target)

    def strength(self, step: int) -> float:
        """How many times the gradient is reversed at a step: from 0 to nearly 1."""
        progress = min(step / self.config.steps, 1.0)
        return 2 / (1 + math.exp(-_STEEPNESS * progress)) - 1

    def loss(self, source_NH: Tensor, target_NH: Tensor, head: nn.Module | None, step: int) -> Tensor:
        assert head is not None
        features_MH = torch.cat([source_NH, target_NH])
        labels_M = torch.ones(len(features_MH), dtype=torch.int64, device=features_MH.device)
        labels_M[: len(source_NH)] = 0
        logits_M2 = head(_Reversal.apply(features_MH, self.strength(step)))
        return F.cross_entropy(logits_M2.float(), labels_M, reduction="sum")


class MomentMatching(Adaptation):
    """The squared Frobenius distance of the covariances over 4 H^2 (Sun and Saenko 2016, equation 1), of the texts of
    one forward; the mean over forwards where a batch is accumulated."""

    config: CoralConfig

    def count(self, source: int, target: int) -> float:
        return 1.0

    def loss(self, source_NH: Tensor, target_NH: Tensor, head: nn.Module | None, step: int) -> Tensor:
        width = source_NH.shape[1]
        gap_HH = _covariance(source_NH.float()) - _covariance(target_NH.float())
        return gap_HH.square().sum() / (4 * width**2)


class DomainClassifier(nn.Module):
    """A hidden layer with ReLU, and two outputs: which domain."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.dense = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, 2)

    def forward(self, features_MH: Tensor) -> Tensor:
        """(M, H) to (M, 2)."""
        return self.output(F.relu(self.dense(features_MH)))


class _Reversal(torch.autograd.Function):
    """The identity, whose gradient is reversed and scaled."""

    @staticmethod
    def forward(context: Any, features: Tensor, strength: float) -> Tensor:
        context.strength = strength
        return features.view_as(features)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -context.strength * gradient, None


def _covariance(features_NH: Tensor) -> Tensor:
    """(H, H); of one text zero."""
    centred_NH = features_NH - features_NH.mean(0)
    return centred_NH.T @ centred_NH / max(len(features_NH) - 1, 1)


class PairedExamples:
    """Implements `data.plan.Examples`: each text of a task with one of the other domain, drawn anew each epoch; none of
    these comes twice more than another."""

    def __init__(self, source: SequenceExamples, target: SequenceExamples, seed: int):
        self.source, self.target, self.seed, self.term = source, target, seed, source.term
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            own, others = self.source.plan(epoch), self.target.plan(epoch)
            order = random_streams.Permutation(len(others), self.seed, "sample", epoch)
            taken = order(np.arange(len(own)) % len(others))
            rows = np.empty(len(own), dtype=[("source", "i8"), ("target", "i8")])
            rows["source"], rows["target"] = np.arange(len(own)), taken
            kept = dict([*self._plans.items()][-1:])
            self._plans = kept | {epoch: Plan(rows, own.lengths + others.lengths[taken])}
        return self._plans[epoch]

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> MixedBatch:
        # Numbers of their own, so that no two texts share a draw.
        own, others = 2 * np.asarray(examples), 2 * np.asarray(examples) + 1
        source = self.source.batch(self.source.plan(epoch).rows[rows["source"]], own, epoch)
        target = self.target.batch(self.target.plan(epoch).rows[rows["target"]], others, epoch)
        return joined([(self.term, source), (TARGET, target)])

    def facts(self) -> dict[str, Any]:
        """Those of the task's texts; lengths are of both."""
        facts = {**self.source.facts(), **self.plan(0).facts()}
        return {**facts, "target_examples": len(self.target.plan(0))}
