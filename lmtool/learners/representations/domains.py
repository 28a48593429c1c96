"""Tells the passages of two texts apart by a linear classifier of their words or of their hidden states: the better it
does on passages that it has not read, the further the two domains are apart (Ben-David, Blitzer, Crammer and Pereira
2007; Blitzer, Dredze and Pereira 2007).

Shape letters: N passages, F features (words, or dimensions of a state).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from lmtool.learners.representations.layers import Probe, fit
from lmtool.random_streams import Permutation

MAX_PASSAGES = 2000
"""Maximum number of passages of each text: one half trains the classifier, the other half measures it."""
LEAST_PASSAGES = 20
"""Minimum number of different passages of each text."""
MAX_WORDS, _LEAST_OCCURRENCES = 2000, 3
_RIDGE = 0.05
"""The coefficient of regularization for each training passage. Stronger than that of probes, because there may be more
words than passages: for two texts of 2,000 passages, each of 30 of 5,000 words, whose frequencies differ slightly, 0.05
gave accuracies of 0.552 and 0.558 (two seeds), and the coefficient of probes 0.538 and 0.552."""
_WORD = re.compile(r"\w+")
_SHOWN = 5
_SPLITS = 200
# The counters in the random stream "sample" of the passages, their halves, and random splits.
_PASSAGES, _HALVES, _RANDOM = 17, 18, 1 << 11
_Z = 1.959964
"""The quantile of the normal distribution for an interval of 95%."""


@dataclass(frozen=True)
class Passages:
    """The same number of passages of two texts, in halves. A passage that occurs in both texts is in the same half of
    both, since a classifier cannot learn such a passage.

    second_N: whether a passage comes from the second text. trains_N: whether the classifier is trained on it, rather
    than tested. Each half has equally many passages from both texts.
    """

    texts: list[str]
    second_N: np.ndarray
    trains_N: np.ndarray

    @classmethod
    def of(cls, first: Sequence[str], second: Sequence[str], limit: int = MAX_PASSAGES) -> Passages | None:
        """Samples at most `limit` different passages of each text. Returns None if one of them has less than
        LEAST_PASSAGES."""
        sides = [[text for text in dict.fromkeys(side) if text.strip()] for side in (first, second)]
        count = min(limit, *map(len, sides))
        if count < LEAST_PASSAGES:
            return None
        samples = [
            [side[number] for number in Permutation(len(side), 0, "sample", _PASSAGES)(np.arange(count)).tolist()]
            for side in sides
        ]
        shared = set(samples[0]).intersection(samples[1])
        texts, second_N, trains_N = list[str](), list[bool](), list[bool]()
        for number, sample in enumerate(samples):
            # The shared passages are in the same order, and so have the same halves, in both texts.
            for part in (sorted(shared), [text for text in sample if text not in shared]):
                if not part:
                    continue
                texts += part
                second_N += [bool(number)] * len(part)
                order = Permutation(len(part), 0, "sample", _HALVES)(np.arange(len(part)))
                trains_N += (order < len(part) // 2).tolist()
        return cls(texts, np.array(second_N), np.array(trains_N))


@dataclass(frozen=True)
class Separation:
    """How well a classifier distinguishes passages of two texts: its accuracy on `count` held-out passages (one half if
    the texts do not differ) and the 95% interval (Wilson 1927), which ignores the choice of the training passages."""

    accuracy: float
    low: float
    high: float
    count: int

    @property
    def differs(self) -> bool:
        """Whether the interval excludes one half."""
        return not self.low <= 0.5 <= self.high

    @property
    def proxy_distance(self) -> float:
        """The proxy A-distance 2 (1 - 2 error) of Ben-David et al. 2007: 2 if the texts are told apart without error,
        about 0 if they do not differ."""
        return 2 * (1 - 2 * (1 - self.accuracy))


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Returns the 95% interval of a fraction."""
    fraction, square = right / count, _Z**2 / count
    middle = (fraction + square / 2) / (1 + square)
    half_width = _Z / (1 + square) * sqrt(fraction * (1 - fraction) / count + square / (4 * count))
    return middle - half_width, middle + half_width


def separate(passages: Passages, x_NF: Tensor) -> tuple[Separation, Probe]:
    """Trains a logistic regression on one half of the passages, and measures it on the other. x_NF: the features of the
    passages."""
    trains_N, labels_N = torch.from_numpy(passages.trains_N), torch.from_numpy(passages.second_N).long()
    probe = fit(x_NF[trains_N], labels_N[trains_N], 2, ridge=_RIDGE * int(trains_N.sum()))
    right_N = probe.logits(x_NF[~trains_N]).argmax(1) == labels_N[~trains_N]
    right, count = int(right_N.sum()), len(right_N)
    return Separation(right / count, *wilson_interval(right, count), count), probe


def separate_by_words(passages: Passages) -> tuple[Separation, tuple[list[str], list[str]]]:
    """Separates passages by the words that they contain, lower-cased. The words are the most frequent ones of the
    training passages. Also returns the words with the largest weights for the first text, and for the second."""
    words_of = [set(_WORD.findall(text.lower())) for text in passages.texts]
    counts = Counter(
        word for words, trains in zip(words_of, passages.trains_N, strict=True) if trains for word in sorted(words)
    )
    known = [word for word, count in counts.most_common(MAX_WORDS) if count >= _LEAST_OCCURRENCES]
    numbers = {word: number for number, word in enumerate(known)}
    x_NF = torch.zeros(len(passages.texts), len(known))
    for row, words in enumerate(words_of):
        x_NF[row, [numbers[word] for word in words if word in numbers]] = 1.0
    separation, probe = separate(passages, x_NF)
    weights_F = (probe.weight_CH[1] - probe.weight_CH[0]).numpy()
    order = np.argsort(weights_F, kind="stable")
    first = [known[number] for number in order[:_SHOWN] if weights_F[number] < 0]
    second = [known[number] for number in order[::-1][:_SHOWN] if weights_F[number] > 0]
    return separation, (first, second)


@dataclass(frozen=True)
class MeanDistance:
    """The distance of the mean states of two texts, in units of the root mean square distance of a passage from the
    mean of its text. chance: the value that 95% of random splits of the passages stay below."""

    distance: float
    chance: float


def mean_distance(passages: Passages, x_NF: Tensor) -> MeanDistance:
    """Compares the mean states of two texts. x_NF: the states of the passages."""
    x = x_NF.double().numpy()
    random = [_distance(x, split) for split in _random_splits(len(x))]
    return MeanDistance(_distance(x, passages.second_N), float(np.quantile(random, 0.95)))


@lru_cache(maxsize=1)  # the layers of a model have the same splits
def _random_splits(passages: int) -> list[np.ndarray]:
    numbers = np.arange(passages)
    return [Permutation(passages, 0, "sample", _RANDOM + number)(numbers) % 2 == 0 for number in range(_SPLITS)]


def _distance(x_NF: np.ndarray, second_N: np.ndarray) -> float:
    sides = x_NF[~second_N], x_NF[second_N]
    means = [side.mean(0) for side in sides]
    spread = np.mean([np.square(side - mean).sum(1).mean() for side, mean in zip(sides, means, strict=True)])
    return float(np.linalg.norm(means[1] - means[0]) / max(sqrt(spread), 1e-12))
