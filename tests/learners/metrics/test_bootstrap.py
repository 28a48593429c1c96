"""Bootstrap intervals, scores by class and calibration error, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from lmtool.learners.metrics import by_class, calibration, confusion, interval, resample_count, resampled_rows


def test_interval_of_a_mean_matches_the_standard_error() -> None:
    right = np.random.default_rng(3).random(400) < 0.7
    low, high = interval([right[rows].mean() for rows in resampled_rows(400, 2000)])
    error = np.sqrt(right.mean() * (1 - right.mean()) / 400)
    assert (low, high) == pytest.approx((right.mean() - 1.96 * error, right.mean() + 1.96 * error), abs=error / 8)


def test_interval_depends_little_on_the_resampling_seed():
    """By less than a tenth of a standard error on 277 rows; with 1,000 resamples by up to a quarter."""
    values = np.random.default_rng(2).normal(size=277)
    error, resamples = values.std() / np.sqrt(277), resample_count(277, ["accuracy"])
    ends = [interval([values[rows].mean() for rows in resampled_rows(277, resamples, seed)]) for seed in range(4)]
    assert np.ptp(ends, axis=0).max() < error / 10


def test_resample_count_decreases_with_rows():
    """10,000 resamples where they take less than a second; rank correlations sort each resample."""
    counts = {count: resample_count(count, ["accuracy"]) for count in (1, 872, 2000, 5463, 10**6)}
    assert counts == {1: 10_000, 872: 10_000, 2000: 10_000, 5463: 3660, 10**6: 1000}
    assert resample_count(1500, ["pearson", "spearman"]) == 1333


def test_resamples_do_not_depend_on_their_number():
    few, more = list(resampled_rows(7000, 1)), list(resampled_rows(7000, 5))
    assert (few[0] == more[0]).all() and not (more[0] == more[4]).all()
    # The same in every version.
    assert [rows.tolist() for rows in resampled_rows(3, 3)] == [[1, 2, 1], [1, 0, 2], [2, 1, 1]]


def test_resamples_are_with_replacement_and_reproducible() -> None:
    first, again = list(resampled_rows(50, 20)), list(resampled_rows(50, 20))
    assert all((rows == same).all() for rows, same in zip(first, again, strict=True))
    assert {rows.min() >= 0 and rows.max() < 50 and len(rows) == 50 for rows in first} == {True}
    # A resample has 1 - 1/e of the rows.
    assert np.mean([len(set(rows)) for rows in first]) == pytest.approx(50 * (1 - np.exp(-1)), abs=2)


def test_interval_ignores_undefined_scores() -> None:
    assert interval([1.0, np.nan, 1.0]) == (1.0, 1.0)
    assert np.isnan(interval([np.nan])).all()


def test_scores_by_class_match_scikit_learn() -> None:
    random = np.random.default_rng(8)
    gold, predicted = random.integers(0, 3, 90), random.integers(0, 4, 90)
    of = by_class(confusion(gold, predicted, 4), "abcd")
    expected = precision_recall_fscore_support(gold, predicted, labels=range(4), zero_division=0)
    assert list(of) == list("abcd")
    ours = [[scores[name] for scores in of.values()] for name in ("precision", "recall", "f1", "support")]
    assert np.allclose(ours, expected, atol=1e-12)


def test_calibration_error_matches_hand_computed_value() -> None:
    # Two bins: (0, .5] holds .5 (correct): |1 - .5|; (.5, 1] holds .8 (correct), .6 (wrong): |.5 - .7|.
    # (1 * .5 + 2 * .2) / 3 = .3
    outcome = calibration(np.array([True, True, False]), np.array([0.5, 0.8, 0.6]), bins=2)
    assert outcome["calibration_error"] == pytest.approx(0.3)
    assert outcome["bins"] == [[1, 0.5, 1.0], [2, pytest.approx(0.7), 0.5]]
