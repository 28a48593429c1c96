"""A model's predictions for the targets of one loss, from which another model can learn.

The divergence from a teacher is T^2 KL(teacher || student) at temperature T, so that the gradient hardly depends on T
(Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network", section 2).

Shape letters: M targets, C classes, W width of the output layer's input, V vocabulary, K top words, S temperatures, R
rows of a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.models.heads.base import ForwardGradient, TokenLogits, linear_loss_sum
from lmtool.nn.linear import product_type

# Rows of logits over a vocabulary computed at once.
ROWS = 256


class TargetProbabilities(ABC):
    """Probabilities of M targets, from a teacher, several teachers, or a file."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns M, or the number of binary decisions."""

    @abstractmethod
    def probabilities(self, temperature: float = 1.0, first: int = 0, end: int | None = None) -> Tensor:
        """Returns the probabilities of the targets from `first` to before `end`, in fp32 without gradient: (rows, C)
        that sum to 1; (rows,) for binary decisions; for values, the values at any temperature."""

    def complete(self, logs: Tensor, temperature: float, first: int = 0, end: int | None = None) -> Tensor:
        """Returns `probabilities` with all classes, for comparison with a student. If the probabilities of some classes
        are unknown, the remainder is distributed over these classes in proportion to the student's probabilities, as if
        they were one class. logs: (rows, C), the student's log probabilities."""
        return self.probabilities(temperature, first, end)

    def best(self) -> Tensor:
        """Returns the hard labels (M,): the most probable class, the binary decision as 0.0 or 1.0, or the value of
        each target."""
        if len(self) == 0:
            return self.harden(self.probabilities())
        return torch.cat(
            [self.harden(self.probabilities(1.0, first, first + ROWS)) for first in range(0, len(self), ROWS)]
        )

    def harden(self, probabilities: Tensor) -> Tensor:
        """Returns the hard labels for probabilities at temperature 1, as `best`."""
        return probabilities.argmax(-1)


class Predicted(TargetProbabilities):
    """A model's predictions for M targets, with gradient."""

    @abstractmethod
    def scores(self, first: int = 0, end: int | None = None) -> Tensor:
        """Returns the logits or values of the targets from `first` to before `end`, in fp32 and without gradient."""

    @abstractmethod
    def normalize(self, scores: Tensor, temperature: float) -> Tensor:
        """Returns the probabilities for scores, and values unchanged."""

    def probabilities(self, temperature: float = 1.0, first: int = 0, end: int | None = None) -> Tensor:
        return self.normalize(self.scores(first, end), temperature)

    @abstractmethod
    def divergence_sum(self, teacher: TargetProbabilities, temperature: float) -> Tensor:
        """Returns the sum over targets of the divergence from a teacher, a scalar; for values, that of squared
        errors."""

    @abstractmethod
    def hard_loss_sum(self, labels: Tensor) -> Tensor:
        """Returns the sum of the losses against labels as returned by `best`, a scalar."""


@dataclass(frozen=True)
class Classes(Predicted):
    """One of C classes per target. logits_MC: the logits, -inf for impossible classes."""

    logits_MC: Tensor

    def __len__(self) -> int:
        return len(self.logits_MC)

    def scores(self, first: int = 0, end: int | None = None) -> Tensor:
        return self.logits_MC[first:end].detach().float()

    def normalize(self, scores: Tensor, temperature: float) -> Tensor:
        return (scores / temperature).softmax(-1)

    def divergence_sum(self, teacher: TargetProbabilities, temperature: float) -> Tensor:
        logs_MC = (self.logits_MC.float() / temperature).log_softmax(-1)
        probabilities_MC = teacher.complete(logs_MC.detach(), temperature)
        # Impossible classes contribute 0; 0 times -inf would be NaN.
        terms_MC = torch.xlogy(probabilities_MC, probabilities_MC) - probabilities_MC * logs_MC.masked_fill(
            probabilities_MC == 0, 0.0
        )
        return terms_MC.sum() * temperature**2

    def hard_loss_sum(self, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits_MC.float(), labels, reduction="sum")


@dataclass(frozen=True)
class Binary(Predicted):
    """One independent binary decision per target. logits_M: the logits of label 1."""

    logits_M: Tensor

    def __len__(self) -> int:
        return len(self.logits_M)

    def scores(self, first: int = 0, end: int | None = None) -> Tensor:
        return self.logits_M[first:end].detach().float()

    def normalize(self, scores: Tensor, temperature: float) -> Tensor:
        return (scores / temperature).sigmoid()

    def harden(self, probabilities: Tensor) -> Tensor:
        return (probabilities >= 0.5).float()

    def divergence_sum(self, teacher: TargetProbabilities, temperature: float) -> Tensor:
        teacher_M = teacher.probabilities(temperature)
        cross_entropy = F.binary_cross_entropy_with_logits(
            self.logits_M.float() / temperature, teacher_M, reduction="sum"
        )
        entropy = torch.xlogy(teacher_M, teacher_M).sum() + torch.xlogy(1 - teacher_M, 1 - teacher_M).sum()
        return (cross_entropy + entropy) * temperature**2

    def hard_loss_sum(self, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.logits_M.float(), labels, reduction="sum")


@dataclass(frozen=True)
class Values(Predicted):
    """A number per target. unit: the unit of errors, by which they are divided."""

    values_M: Tensor
    unit: float = 1.0

    def __len__(self) -> int:
        return len(self.values_M)

    def scores(self, first: int = 0, end: int | None = None) -> Tensor:
        return self.values_M[first:end].detach().float()

    def normalize(self, scores: Tensor, temperature: float) -> Tensor:
        return scores

    def harden(self, probabilities: Tensor) -> Tensor:
        return probabilities

    def divergence_sum(self, teacher: TargetProbabilities, temperature: float) -> Tensor:
        return self.hard_loss_sum(teacher.probabilities())

    def hard_loss_sum(self, labels: Tensor) -> Tensor:
        return F.mse_loss(self.values_M.float(), labels, reduction="sum") / self.unit**2


@dataclass(frozen=True)
class PredictedWords(Predicted):
    """One word of a vocabulary per target, with logits computed in chunks of rows."""

    logits: TokenLogits

    def __len__(self) -> int:
        return len(self.logits.hidden_MW)

    @torch.no_grad()
    def scores(self, first: int = 0, end: int | None = None) -> Tensor:
        return self.logits.of(first, end).float()

    def normalize(self, scores: Tensor, temperature: float) -> Tensor:
        return (scores / temperature).softmax(-1)

    def divergence_sum(self, teacher: TargetProbabilities, temperature: float) -> Tensor:
        hidden, table, bias = self.logits.hidden_MW, self.logits.table_VW, self.logits.bias_V
        return _LinearDivergenceSum.apply(hidden, table, bias, teacher, temperature, product_type(hidden))

    def hard_loss_sum(self, labels: Tensor) -> Tensor:
        return linear_loss_sum(self.logits.hidden_MW, self.logits.table_VW, self.logits.bias_V, labels)


class _LinearDivergenceSum(ForwardGradient):
    """`Classes(F.linear(hidden, weight, bias)).divergence_sum(teacher)` in chunks of rows, as in `linear_loss_sum`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: TargetProbabilities,
        temperature: float,
        dtype: torch.dtype,
    ) -> Tensor:
        cast_hidden, cast_weight = hidden.detach().to(dtype), weight.detach().to(dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_gradients: list[Tensor] = []
        weight_gradient = torch.zeros_like(weight) if needs_weight else None
        bias_gradient = torch.zeros_like(bias) if bias is not None and needs_bias else None
        total = hidden.new_zeros((), dtype=torch.float32)
        for first in range(0, len(hidden), ROWS):
            with torch.autocast(hidden.device.type, enabled=False):
                rows = cast_hidden[first : first + ROWS]
                logits = F.linear(rows, cast_weight).float()
                logs = ((logits if bias is None else logits + bias) / temperature).log_softmax(-1)
            # The teacher computes in the caller's autocast type.
            probabilities = teacher.complete(logs, temperature, first, first + ROWS)
            with torch.autocast(hidden.device.type, enabled=False):
                total += (torch.xlogy(probabilities, probabilities) - probabilities * logs).sum()
                gradient = (logs.exp() - probabilities) * temperature
                if bias_gradient is not None:
                    bias_gradient += gradient.sum(0)
                gradient = gradient.to(dtype)
                if needs_hidden:
                    hidden_gradients.append(gradient @ cast_weight)
                if weight_gradient is not None:
                    weight_gradient += (gradient.T @ rows).to(weight.dtype)
        hidden_gradient = torch.cat(hidden_gradients).to(hidden.dtype) if hidden_gradients else torch.zeros_like(hidden)
        ctx.gradients = (hidden_gradient if needs_hidden else None, weight_gradient, bias_gradient)
        return total * temperature**2


@dataclass(frozen=True)
class AveragePrediction(TargetProbabilities):
    """The average of several predictions. parts: the predictions. weights: their weights, which sum to 1. average: what
    is averaged: probabilities at the requested temperature, or logits, which only models have."""

    parts: Sequence[TargetProbabilities]
    weights: Sequence[float]
    average: Literal["probabilities", "logits"] = "probabilities"

    @classmethod
    def of(
        cls, weighted: Sequence[tuple[float, TargetProbabilities]], average: Literal["probabilities", "logits"]
    ) -> AveragePrediction:
        """Returns the average of pairs (weight, prediction), with any positive weights."""
        total = sum(weight for weight, _ in weighted)
        return cls([part for _, part in weighted], [weight / total for weight, _ in weighted], average)

    def __len__(self) -> int:
        return len(self.parts[0])

    def probabilities(self, temperature: float = 1.0, first: int = 0, end: int | None = None) -> Tensor:
        if self.average == "logits":
            predicted = [cast(Predicted, part) for part in self.parts]
            return predicted[0].normalize(self._mean([part.scores(first, end) for part in predicted]), temperature)
        return self._mean([part.probabilities(temperature, first, end) for part in self.parts])

    def complete(self, logs: Tensor, temperature: float, first: int = 0, end: int | None = None) -> Tensor:
        if self.average == "logits":
            return self.probabilities(temperature, first, end)
        return self._mean([part.complete(logs, temperature, first, end) for part in self.parts])

    def harden(self, probabilities: Tensor) -> Tensor:
        return self.parts[0].harden(probabilities)

    def _mean(self, summands: Sequence[Tensor]) -> Tensor:
        mean = self.weights[0] * summands[0]
        for weight, tensor in zip(self.weights[1:], summands[1:], strict=True):
            # A class that is impossible for one model is impossible on average: -inf stays.
            mean = torch.add(mean, tensor, alpha=weight)
        return mean


@dataclass(frozen=True)
class TopWords(TargetProbabilities):
    """A teacher's K most probable words.

    The other words form one class for teacher and student. The divergence over K + 1 classes is at most that over all
    words, and it is 0 if both predict the same. Since the sum over the vocabulary is stored for each temperature, the K
    words have their exact probabilities.

    Attributes:
        words_MK: The most probable words in decreasing order.
        logits_MK: Their logits.
        norms_MS: Log of the sum over all words of exp(logit / T), for each temperature T.
        temperatures: The S temperatures.
        vocabulary: V, the number of words.
    """

    words_MK: Tensor
    logits_MK: Tensor
    norms_MS: Tensor
    temperatures: tuple[float, ...]
    vocabulary: int

    @classmethod
    @torch.no_grad()
    def of(cls, predicted: PredictedWords, k: int, temperatures: Sequence[float]) -> TopWords:
        """Returns the top K words of a prediction. Their logits are log probabilities over all words at temperature
        1."""
        words, top_logits, norms, vocabulary = [], [], [], 0
        for first in range(0, max(len(predicted), 1), ROWS):
            logits_RV = predicted.logits.of(first, first + ROWS).float().log_softmax(-1)
            vocabulary = logits_RV.shape[1]
            top = logits_RV.topk(min(k, vocabulary), dim=-1)
            words.append(top.indices)
            top_logits.append(top.values)
            norms.append(torch.stack([(logits_RV / temperature).logsumexp(-1) for temperature in temperatures], 1))
        return cls(torch.cat(words), torch.cat(top_logits), torch.cat(norms), tuple(temperatures), vocabulary)

    def __len__(self) -> int:
        return len(self.words_MK)

    def probabilities(self, temperature: float = 1.0, first: int = 0, end: int | None = None) -> Tensor:
        """Returns the probabilities of the top words, and 0 for the others: (rows, V)."""
        probabilities_RK = self._top_probabilities(temperature, first, end)
        probabilities_RV = probabilities_RK.new_zeros(len(probabilities_RK), self.vocabulary)
        return probabilities_RV.scatter_(1, self.words_MK[first:end].long(), probabilities_RK)

    def complete(self, logs: Tensor, temperature: float, first: int = 0, end: int | None = None) -> Tensor:
        probabilities_RK, words_RK = self._top_probabilities(temperature, first, end), self.words_MK[first:end].long()
        rest_RV = logs.exp().scatter_(1, words_RK, 0.0)
        # Rounding may make an empty remainder negative.
        remainder_R1 = (1.0 - probabilities_RK.sum(1, keepdim=True)).clamp_min(0.0)
        rest_RV *= remainder_R1 / rest_RV.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return rest_RV.scatter_(1, words_RK, probabilities_RK)

    def best(self) -> Tensor:
        return self.words_MK[:, 0].long()

    def _top_probabilities(self, temperature: float, first: int, end: int | None) -> Tensor:
        norms_R = self.norms_MS[first:end, self.temperatures.index(temperature)]
        return (self.logits_MK[first:end].float() / temperature - norms_R[:, None]).exp()


def truncate(predicted: TargetProbabilities, k: int | None, temperatures: Sequence[float]) -> TargetProbabilities:
    """Returns a prediction over a vocabulary reduced to the k most probable words, and other predictions unchanged. k:
    None for all words."""
    return (
        TopWords.of(predicted, k, temperatures)
        if k is not None and isinstance(predicted, PredictedWords)
        else predicted
    )
