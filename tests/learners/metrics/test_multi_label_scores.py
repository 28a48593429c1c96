"""Multi-label scores against scikit-learn's, and the best threshold of each class."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from lmtool.learners.metrics.scores import MULTI_LABEL, best_thresholds, compute_multi_label

random = np.random.default_rng(3)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_multi_label_scores_match_scikit_learn(fraction: float) -> None:
    gold = random.random((40, 5)) < fraction
    predicted = random.random((40, 5)) < 0.4
    predicted[:20], predicted[:, 4] = gold[:20], False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = {
            "micro_f1": f1_score(gold, predicted, average="micro", zero_division=0),
            "macro_f1": f1_score(gold, predicted, average="macro", zero_division=0),
            "subset_accuracy": accuracy_score(gold, predicted),
        }
    assert compute_multi_label(tuple(MULTI_LABEL), gold, predicted) == pytest.approx(wanted, abs=1e-12)


def test_thresholds_maximize_f1() -> None:
    probabilities = np.round(random.random((30, 4)), 1).astype(np.float32)  # with ties
    gold = (random.random((30, 4)) < probabilities).astype(float)
    gold[:, 3] = 0
    thresholds = best_thresholds(gold, probabilities)
    assert thresholds[3] == 0.5
    for column in range(3):
        cuts = np.append(np.unique(probabilities[:, column]), 2.0)
        best = max(f1_score(gold[:, column], probabilities[:, column] >= cut, zero_division=0) for cut in cuts)
        reached = f1_score(gold[:, column], probabilities[:, column] >= thresholds[column], zero_division=0)
        assert reached == pytest.approx(best) and 0 < best < 1


def test_threshold_is_the_middle_of_equal_ones() -> None:
    assert best_thresholds(np.array([[1], [0]]), np.array([[0.9], [0.2]])) == pytest.approx([0.55])
    assert best_thresholds(np.array([[1], [0], [1], [0]]), np.array([[0.9], [0.8], [0.7], [0.1]])) == pytest.approx(
        [0.4]
    )
