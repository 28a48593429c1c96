"""A linear probe: multinomial logistic regression from hidden states to classes (Alain and Bengio 2017; Belinkov 2022).

Shape letters: N examples, H hidden width, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

RIDGE = 1.0
"""Half of this times the squared weights is added to the sum of the cross entropies; biases are free. States are
standardised first, so that it weighs alike at every layer and in every model."""
ITERATIONS = 50
"""Of L-BFGS over all examples, at most."""


@dataclass(frozen=True)
class Probe:
    """mean_H, scale_H: of the examples it learned from. weight_CH, bias_C: of the standardised states. iterations: that
    it took."""

    mean_H: Tensor
    scale_H: Tensor
    weight_CH: Tensor
    bias_C: Tensor
    iterations: int

    def logits(self, x_NH: Tensor) -> Tensor:
        """(N, C)."""
        return ((x_NH - self.mean_H) * self.scale_H) @ self.weight_CH.T + self.bias_C


def fit(x_NH: Tensor, labels_N: Tensor, classes: int, iterations: int = ITERATIONS) -> Probe:
    """The probe of these examples. It starts from zero and the loss is convex: nothing is drawn."""
    mean_H = x_NH.mean(0)
    spread_H = x_NH.std(0, correction=0)
    # A dimension that never changes says nothing, and is not blown up.
    scale_H = torch.where(spread_H > 1e-6, 1 / spread_H.clamp(min=1e-6), torch.zeros_like(spread_H))
    z_NH = (x_NH - mean_H) * scale_H
    weight_CH = x_NH.new_zeros(classes, x_NH.shape[1], requires_grad=True)
    bias_C = x_NH.new_zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight_CH, bias_C], max_iter=iterations, tolerance_grad=1e-6, tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> Any:
        optimizer.zero_grad()
        total = cross_entropy(z_NH @ weight_CH.T + bias_C, labels_N)
        total = total + RIDGE / 2 / len(labels_N) * weight_CH.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    taken = optimizer.state[weight_CH].get("n_iter", 0)
    return Probe(mean_H, scale_H, weight_CH.detach(), bias_C.detach(), int(taken))
