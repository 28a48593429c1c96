"""Scores against scikit-learn's and scipy's, on degenerate inputs too."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from lmtool.errors import UserError
from lmtool.learners.metrics import compute, confusion, paired_standard_error, ratio_standard_error
from lmtool.learners.metrics.scores import METRICS

random = np.random.default_rng(5)
CLASSES = {
    "random": (random.integers(0, 2, 301), random.integers(0, 2, 301)),
    "three": (random.integers(0, 3, 97), random.integers(0, 3, 97)),
    "a class never predicted": (random.integers(0, 4, 60), random.integers(0, 3, 60)),
    "a class never in gold": (random.integers(0, 2, 60), random.integers(0, 3, 60)),
    "constant prediction": (random.integers(0, 2, 50), np.zeros(50, int)),
    "constant positive": (random.integers(0, 2, 50), np.ones(50, int)),
    "one class": (np.zeros(20, int), np.zeros(20, int)),
    "one row": (np.array([1]), np.array([1])),
    "all wrong": (np.array([0, 1, 0, 1]), np.array([1, 0, 1, 0])),
}
VALUES = {
    "random": (random.normal(size=200), random.normal(size=200)),
    "ties": (random.integers(0, 4, 150) / 2.0, random.integers(0, 3, 150) / 3.0),
    "tiny": (random.normal(size=40) * 1e-160, random.normal(size=40) * 1e-160),
    "float32": (random.normal(size=64).astype(np.float32), random.normal(size=64).astype(np.float32)),
    "offset": (1e6 + random.normal(size=50), random.normal(size=50)),
    "exact": (np.arange(9.0), 2 * np.arange(9.0) + 1),
    "constant": (np.arange(9.0), np.full(9, 0.1)),
}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["gold", "predicted"])
def test_non_finite_values_score_nan(side: str, wrong: float) -> None:
    values = {"gold": np.arange(6.0), "predicted": np.arange(6.0) + 0.1}
    values[side][2] = wrong
    for name, value in compute(list(METRICS), **values).items():
        assert np.isnan(value), name
    for name in ("pearson", "spearman", "mse"):
        values[side][2] = np.nan
        assert np.isnan(METRICS[name](values["gold"], values["predicted"])), name


@pytest.mark.parametrize("name", CLASSES)
def test_class_scores_match_scikit_learn(name):
    from sklearn import metrics as reference

    gold, predicted = CLASSES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {
            "accuracy": reference.accuracy_score(gold, predicted),
            "macro_f1": reference.f1_score(gold, predicted, average="macro"),
            "matthews": reference.matthews_corrcoef(gold, predicted),
        }
        if max(gold.max(), predicted.max()) < 2:
            expected["f1"] = reference.f1_score(gold, predicted, zero_division=0)
    assert compute(list(expected), gold, predicted) == pytest.approx(expected, abs=1e-12)
    classes = max(gold.max(), predicted.max()) + 1
    assert np.array_equal(
        confusion(gold, predicted, classes), reference.confusion_matrix(gold, predicted, labels=range(classes))
    )


@pytest.mark.parametrize("name", VALUES)
def test_value_scores_match_scipy(name):
    from scipy import stats
    from sklearn.metrics import mean_squared_error

    gold, predicted = VALUES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {
            "pearson": stats.pearsonr(gold.astype(float), predicted.astype(float)).statistic,
            "spearman": stats.spearmanr(gold, predicted).statistic,
        }
    for score, value in expected.items():
        assert METRICS[score](gold, predicted) == pytest.approx(value, abs=1e-12, nan_ok=True)
    assert compute(["mse"], gold, predicted)["mse"] == pytest.approx(
        mean_squared_error(gold.astype(float), predicted.astype(float)), abs=1e-12
    )


def test_correlation_with_a_constant_is_zero():
    assert compute(["pearson", "spearman"], [1.0, 2.0], [3.0, 3.0]) == {"pearson": 0.0, "spearman": 0.0}


def test_unknown_metric_and_empty_inputs_are_refused():
    with pytest.raises(UserError, match="the metric acuracy does not exist"):
        compute(["acuracy"], [1], [1])
    with pytest.raises(UserError, match="cannot score 0"):
        compute(["accuracy"], [], [])


def test_ratio_standard_error_matches_simulation():
    """Examples of different size with correlated losses: the spread of the ratio over simulated samples."""
    draws, ratios, errors = np.random.default_rng(0), [], []
    for _ in range(600):
        counts = draws.integers(1, 30, 200)
        sums = counts * (2 + draws.normal(size=200)) + np.sqrt(counts) * draws.normal(size=200)
        ratios.append(sums.sum() / counts.sum())
        errors.append(ratio_standard_error(sums, counts))
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)
    assert np.isnan(ratio_standard_error([1.0], [1]))
    assert paired_standard_error([2.0, 4.0, 8.0], [1.0, 2.0, 4.0], [1, 2, 4]) == pytest.approx(0)
