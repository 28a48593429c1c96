"""Scaling laws of the loss (Hoffmann et al., "Training Compute-Optimal Large Language Models", 2022, approaches 2 and
3; Besiroglu et al., "Chinchilla Scaling: A replication attempt", 2024).

Shape letters: R runs, S fits side by side, P the five parameters of the law.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from lmtool.learners.metrics.intervals import Interval, interval

DELTA = 1e-3
"""The residual of log L up to which the Huber loss is quadratic."""
CONSTANTS = ("E", "A", "B", "alpha", "beta")
"""The constants of L(N, D) = E + A / N^alpha + B / D^beta."""
_RESAMPLES = 300
# Iterations from a start of the grid, and of a resample from the fit.
_ITERATIONS, _RESAMPLE_ITERATIONS = 300, 60
# Starts: the exponents, and the shares of E, A / N^alpha and B / D^beta in the loss of a run of middle size.
_EXPONENTS = (0.1, 0.3, 0.6, 1.0)
_SHARES = ((0.6, 0.2, 0.2), (0.2, 0.4, 0.4), (0.1, 0.8, 0.1), (0.1, 0.1, 0.8))
# Starts of a resample: the fit itself, and this many of the best other starts.
_OTHER_STARTS = 2
# Bounds of log alpha and log beta: a law with smaller or larger exponents is constant, or a step.
_LOG_EXPONENTS = (np.log(0.01), np.log(5.0))


@dataclass(frozen=True, eq=False)
class ScalingLaw:
    """A fit of L(N, D) = E + A / N^alpha + B / D^beta: the constants, and their 95% intervals. residuals_R: log L minus
    the fit, of each run. parameters_P, resampled_SP: the fit, and those of the resamples, in the parameters that are
    optimized. center: the mean of log N and of log D."""

    constants: dict[str, float]
    intervals: dict[str, Interval]
    residuals_R: np.ndarray
    parameters_P: np.ndarray
    resampled_SP: np.ndarray
    center: tuple[float, float]

    def loss(self, parameters: float, tokens: float) -> float:
        """Returns the predicted loss of a model with this number of parameters after this number of tokens."""
        return float(np.exp(self._log_loss(self.parameters_P[None], parameters, tokens)[0]))

    def prediction(self, parameters: float, tokens: float, seed: int = 0) -> Interval:
        """Returns the 95% interval of the loss of a further run: of the law and of the noise of a run."""
        logs_S = self._log_loss(self.resampled_SP, parameters, tokens)
        noise_R = _noise(self.residuals_R)
        return interval(np.exp(logs_S + np.random.default_rng(seed).choice(noise_R, len(logs_S))))

    def _log_loss(self, fits_SP: np.ndarray, parameters: float, tokens: float) -> np.ndarray:
        n_R, d_R = np.array([np.log(parameters)]) - self.center[0], np.array([np.log(tokens)]) - self.center[1]
        return _terms(fits_SP, n_R, d_R)[1][:, 0]


def fit_law(parameters_R: np.ndarray, tokens_R: np.ndarray, losses_R: np.ndarray, seed: int = 0) -> ScalingLaw:
    """Fits L(N, D) = E + A / N^alpha + B / D^beta to runs by the sum of Huber losses of log L, from a grid of starts.

    The minimum is found by reweighted least squares (Levenberg-Marquardt), of which many run side by side; Hoffmann et
    al. use L-BFGS for the same sum. Intervals resample the residuals, widened for the five fitted parameters, so that
    every resample has the sizes of all runs. parameters_R, tokens_R, losses_R: N, D and L of each run.
    """
    n_R, d_R, logs_R = np.log(parameters_R), np.log(tokens_R), np.log(losses_R)
    center = float(n_R.mean()), float(d_R.mean())
    n_R, d_R = n_R - center[0], d_R - center[1]
    starts_SP = np.array(
        [
            [*(float(logs_R.mean()) + np.log([share_n, share_d, share_e])), np.log(alpha), np.log(beta)]
            for (share_e, share_n, share_d), alpha, beta in product(_SHARES, _EXPONENTS, _EXPONENTS)
        ]
    )
    fits_SP, losses_S = _minimize(starts_SP, n_R, d_R, np.tile(logs_R, (len(starts_SP), 1)), _ITERATIONS)
    order_S = np.argsort(losses_S)
    best_P = fits_SP[order_S[0]]
    predicted_R = _terms(best_P[None], n_R, d_R)[1][0]
    residuals_R = logs_R - predicted_R
    chance = np.random.default_rng(seed)
    noise_SR = chance.choice(_noise(residuals_R), (_RESAMPLES, len(logs_R)))
    first_SP = np.stack([best_P, *starts_SP[order_S[:_OTHER_STARTS]]])
    count = len(first_SP)
    refits_SP, refit_losses_S = _minimize(
        np.tile(first_SP, (_RESAMPLES, 1)),
        n_R,
        d_R,
        np.repeat(predicted_R + noise_SR, count, axis=0),
        _RESAMPLE_ITERATIONS,
    )
    best_S = refit_losses_S.reshape(_RESAMPLES, count).argmin(1)
    resampled_SP = refits_SP.reshape(_RESAMPLES, count, -1)[np.arange(_RESAMPLES), best_S]
    constants_S = _constants(resampled_SP, center)
    return ScalingLaw(
        {name: float(values_S[0]) for name, values_S in _constants(best_P[None], center).items()},
        {name: interval(values_S) for name, values_S in constants_S.items()},
        residuals_R,
        best_P,
        resampled_SP,
        center,
    )


def huber(residuals: np.ndarray) -> np.ndarray:
    """Returns the Huber loss of each residual."""
    size = np.abs(residuals)
    return np.where(size <= DELTA, size**2 / 2, DELTA * (size - DELTA / 2))


def _noise(residuals_R: np.ndarray) -> np.ndarray:
    """Returns centered residuals, widened because the fit has come as close to them as its parameters permit."""
    count = len(residuals_R)
    return (residuals_R - residuals_R.mean()) * np.sqrt(count / max(count - len(CONSTANTS), 1))


def _terms(fits_SP: np.ndarray, n_R: np.ndarray, d_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logarithms of the three terms (3, S, R) and of their sum (S, R). fits_SP: log(A / N^alpha) and
    log(B / D^beta) at the center, log E, log alpha and log beta."""
    a, b, e, log_alpha, log_beta = (column[:, None] for column in fits_SP.T)
    terms = np.stack([a - np.exp(log_alpha) * n_R, b - np.exp(log_beta) * d_R, np.broadcast_to(e, (len(e), len(n_R)))])
    return terms, np.logaddexp.reduce(terms, axis=0)


def _constants(fits_SP: np.ndarray, center: tuple[float, float]) -> dict[str, np.ndarray]:
    a, b, e, log_alpha, log_beta = fits_SP.T
    alpha, beta = np.exp(log_alpha), np.exp(log_beta)
    values = np.exp(e), np.exp(a + alpha * center[0]), np.exp(b + beta * center[1]), alpha, beta
    return dict(zip(CONSTANTS, values, strict=True))


def _minimize(
    starts_SP: np.ndarray, n_R: np.ndarray, d_R: np.ndarray, logs_SR: np.ndarray, iterations: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the fit (S, P) from each start and its sum of Huber losses (S,). logs_SR: log L of each run."""
    fits_SP, damping_S = starts_SP.copy(), np.full(len(starts_SP), 1e-3)

    def sums(fits_SP: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        terms, predicted_SR = _terms(fits_SP, n_R, d_R)
        residuals_SR = logs_SR - predicted_SR
        return terms - predicted_SR, residuals_SR, huber(residuals_SR).sum(1)

    shares, residuals_SR, losses_S = sums(fits_SP)
    for _ in range(iterations):
        share_n, share_d, share_e = np.exp(shares)
        alpha, beta = np.exp(fits_SP[:, 3:4]), np.exp(fits_SP[:, 4:5])
        slopes = np.stack([share_n, share_d, share_e, -alpha * share_n * n_R, -beta * share_d * d_R], -1)
        weights_SR = np.minimum(1.0, DELTA / np.maximum(np.abs(residuals_SR), 1e-300))
        weighted = slopes * weights_SR[..., None]
        products = weighted.swapaxes(1, 2) @ slopes
        gradient_SP = np.einsum("srp,sr->sp", weighted, residuals_SR)
        diagonal = np.einsum("spp->sp", products)
        ridge = damping_S[:, None] * np.maximum(diagonal, 1e-12) + 1e-15
        steps_SP = np.linalg.solve(products + ridge[..., None] * np.eye(len(CONSTANTS)), gradient_SP[..., None])[..., 0]
        candidates_SP = fits_SP + np.clip(steps_SP, -2.0, 2.0)
        candidates_SP[:, 3:] = np.clip(candidates_SP[:, 3:], *_LOG_EXPONENTS)
        new_shares, new_residuals_SR, new_losses_S = sums(candidates_SP)
        better_S = new_losses_S < losses_S
        if not better_S.any() and (damping_S >= 1e8).all():
            break
        damping_S = np.clip(np.where(better_S, damping_S / 5, damping_S * 4), 1e-10, 1e8)
        fits_SP = np.where(better_S[:, None], candidates_SP, fits_SP)
        shares = np.where(better_S[:, None], new_shares, shares)
        residuals_SR = np.where(better_S[:, None], new_residuals_SR, residuals_SR)
        losses_S = np.where(better_S, new_losses_S, losses_S)
    return fits_SP, losses_S


@dataclass(frozen=True, eq=False)
class Parabola:
    """The parabola of the loss in log N, for runs of one budget of FLOPs. coefficients: of the square, of log N, and
    the constant. best, tokens, loss: N, D and L at the minimum; None and NaN without a minimum between the smallest and
    the largest model. D is that of a line through log D over log N."""

    coefficients: tuple[float, float, float]
    best: float | None
    tokens: float
    loss: float


def fit_parabola(parameters_R: np.ndarray, tokens_R: np.ndarray, losses_R: np.ndarray) -> Parabola:
    """Fits the parabola of runs with the same FLOPs and at least three sizes, by least squares."""
    n_R = np.log(parameters_R)
    square, slope, constant = (float(value) for value in np.polyfit(n_R, losses_R, 2))
    best = -slope / (2 * square) if square > 0 else float("nan")
    if not n_R.min() < best < n_R.max():
        return Parabola((square, slope, constant), None, float("nan"), float("nan"))
    tokens = float(np.exp(np.polyval(np.polyfit(n_R, np.log(tokens_R), 1), best)))
    loss = constant + slope * best + square * best**2
    return Parabola((square, slope, constant), float(np.exp(best)), tokens, float(loss))
