"""Scaling laws are recovered from planted constants."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from lmtool.learners.metrics.scaling import DELTA, fit_law, fit_parabola, huber

CHINCHILLA = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
SIZES, RATIOS = np.geomspace(4e7, 1e10, 6), np.geomspace(3, 120, 5)
N, D = (values.ravel() for values in np.meshgrid(SIZES, RATIOS, indexing="ij"))
D = N * D


def loss(n, d, constants=CHINCHILLA):
    return constants["E"] + constants["A"] / n ** constants["alpha"] + constants["B"] / d ** constants["beta"]


def test_planted_constants_are_recovered_without_noise():
    law = fit_law(N, D, loss(N, D))
    for name, value in CHINCHILLA.items():
        assert law.constants[name] == pytest.approx(value, rel=1e-2), name
    assert law.loss(7e10, 1.4e12) == pytest.approx(loss(7e10, 1.4e12), rel=1e-4)


def test_planted_constants_are_in_the_intervals_with_noise():
    noisy = loss(N, D) * np.exp(np.random.default_rng(0).normal(0, 0.004, len(N)))
    law = fit_law(N, D, noisy)
    for name, value in CHINCHILLA.items():
        low, high = law.intervals[name]
        assert low <= value <= high, name
    low, high = law.prediction(7e10, 1.4e12)
    assert low < loss(7e10, 1.4e12) < high and high - low < 0.2


def test_no_worse_than_l_bfgs_of_scipy():
    noisy = loss(N, D) * np.exp(np.random.default_rng(3).normal(0, 0.01, len(N)))
    law = fit_law(N, D, noisy)

    def objective(p):
        terms = np.stack([p[0] - p[3] * np.log(N), p[1] - p[4] * np.log(D), np.full(len(N), p[2])])
        predicted = np.logaddexp.reduce(terms, axis=0)
        residuals = np.log(noisy) - predicted
        a, b, e = np.exp(terms - predicted) * -np.clip(residuals, -DELTA, DELTA)
        gradient = np.array([a.sum(), b.sum(), e.sum(), -(a * np.log(N)).sum(), -(b * np.log(D)).sum()])
        return huber(residuals).sum() * 1e4, gradient * 1e4

    best = min(
        minimize(objective, [a, b, 0.5, x, y], jac=True, method="L-BFGS-B").fun
        for a in (2, 6, 10) for b in (2, 6, 10) for x in (0.2, 0.5) for y in (0.2, 0.5)
    )  # fmt: skip
    assert huber(law.residuals_R).sum() * 1e4 <= best * 1.001


def test_intervals_cover_the_planted_values(monkeypatch):
    """Of 20 samples with noise of 1%, the 95% intervals of the exponents and of a larger run cover 16 or more; half as
    wide, they would cover 12 or fewer. A third of the resamples is enough for this."""
    monkeypatch.setattr("lmtool.learners.metrics.scaling._RESAMPLES", 100)
    covered = {"alpha": 0, "beta": 0, "run": 0}
    for seed in range(20):
        chance = np.random.default_rng(seed)
        law = fit_law(N, D, loss(N, D) * np.exp(chance.normal(0, 0.01, len(N))), seed)
        for name in ("alpha", "beta"):
            covered[name] += law.intervals[name].low <= CHINCHILLA[name] <= law.intervals[name].high
        further = loss(3e10, 6e11) * np.exp(chance.normal(0, 0.01))
        low, high = law.prediction(3e10, 6e11)
        covered["run"] += low <= further <= high
    assert min(covered.values()) >= 16, covered


def test_parabola_finds_an_interior_minimum_only():
    sizes = np.geomspace(1e6, 1e8, 5)
    curved = 3 + 0.1 * (np.log(sizes) - np.log(2e7)) ** 2
    found = fit_parabola(sizes, 1e15 / 6 / sizes, curved)
    assert found.best == pytest.approx(2e7) and found.loss == pytest.approx(3)
    assert found.tokens == pytest.approx(1e15 / 6 / 2e7)
    assert fit_parabola(sizes, 1e15 / sizes, -np.log(sizes)).best is None
    assert fit_parabola(sizes, 1e15 / sizes, -curved).best is None
