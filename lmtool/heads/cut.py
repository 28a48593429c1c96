"""What a teacher predicts over a vocabulary, cut to its k most probable words.

The other words count as one class together, for teacher and student: the divergence is that of k + 1 classes, no
greater than the one over all words, and 0 where both predict the same. At every temperature the k words have the
shares that they have among all words: the sum over the vocabulary, too, is kept.

Shape letters: M targets, V vocabulary, K words that are kept, S temperatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmtool.heads.predicted import ROWS, Shares, Words


@dataclass(frozen=True)
class TopWords(Shares):
    """words_MK: the most probable words, the best first. logits_MK: of these. norms_MS: log of the sum over all words
    of exp(logit / T), by temperature. vocabulary: V."""

    words_MK: Tensor
    logits_MK: Tensor
    norms_MS: Tensor
    temperatures: tuple[float, ...]
    vocabulary: int

    @classmethod
    @torch.no_grad()
    def of(cls, predicted: Words, k: int, temperatures: Sequence[float]) -> TopWords:
        """The cut of a prediction. Logits are of shares: they add up to 1 at temperature 1, over all words."""
        words, kept, norms, vocabulary = [], [], [], 0
        for first in range(0, max(len(predicted), 1), ROWS):
            logits_RV = predicted.logits.of(first, first + ROWS).float().log_softmax(-1)
            vocabulary = logits_RV.shape[1]
            top = logits_RV.topk(min(k, vocabulary), dim=-1)
            words.append(top.indices)
            kept.append(top.values)
            norms.append(torch.stack([(logits_RV / t).logsumexp(-1) for t in temperatures], 1))
        return cls(torch.cat(words), torch.cat(kept), torch.cat(norms), tuple(temperatures), vocabulary)

    def __len__(self) -> int:
        return len(self.words_MK)

    def shares(self, temperature: float = 1.0, first: int = 0, last: int | None = None) -> Tensor:
        """(rows, V) of the words that are kept among all; 0 for the others."""
        shares_RK = self._kept(temperature, first, last)
        whole_RV = shares_RK.new_zeros(len(shares_RK), self.vocabulary)
        return whole_RV.scatter_(1, self.words_MK[first:last].long(), shares_RK)

    def completed(self, logs: Tensor, temperature: float, first: int = 0, last: int | None = None) -> Tensor:
        shares_RK, words_RK = self._kept(temperature, first, last), self.words_MK[first:last].long()
        rest_RV = logs.exp().scatter_(1, words_RK, 0.0)
        # What rounding leaves of a rest that is nothing is nothing.
        left_R1 = (1.0 - shares_RK.sum(1, keepdim=True)).clamp_min(0.0)
        rest_RV *= left_R1 / rest_RV.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return rest_RV.scatter_(1, words_RK, shares_RK)

    def best(self) -> Tensor:
        return self.words_MK[:, 0].long()

    def _kept(self, temperature: float, first: int, last: int | None) -> Tensor:
        """(rows, K) shares of the words that are kept."""
        norms_R = self.norms_MS[first:last, self.temperatures.index(temperature)]
        return (self.logits_MK[first:last].float() / temperature - norms_R[:, None]).exp()


def cut(predicted: Shares, k: int | None, temperatures: Sequence[float]) -> Shares:
    """A prediction with its k most probable words, where it is over a vocabulary. None: all."""
    return TopWords.of(predicted, k, temperatures) if k is not None and isinstance(predicted, Words) else predicted
