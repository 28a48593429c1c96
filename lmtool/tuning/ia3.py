"""(IA)3: Liu, Tam, Muqeeth, Mohta, Huang, Bansal, Raffel, "Few-Shot Parameter-Efficient Fine-Tuning is Better and
Cheaper than In-Context Learning", NeurIPS 2022, section 3.3.

Shape letters: T tokens, I inputs and O outputs of a map.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.learners.base import BaseLearner
from lmtool.tuning.base import TuningMethod, freeze
from lmtool.tuning.edited import EditedLinear, edit_linears, merge_linears


class ScaledOutputs(EditedLinear):
    """ia3 * (W x + b), ia3: (O,), one at the start."""

    def __init__(self, base: nn.Linear):
        super().__init__(base)
        self.ia3 = nn.Parameter(torch.ones_like(base.weight[:, 0]))

    def forward(self, x_TI: Tensor) -> Tensor:
        """(T, I) to (T, O)."""
        return super().forward(x_TI) * self.ia3

    def fold(self) -> None:
        self.weight.mul_(self.ia3[:, None])
        if self.bias is not None:
            self.bias.mul_(self.ia3)


class ScaledInputs(EditedLinear):
    """W (ia3 * x) + b, ia3: (I,), one at the start."""

    def __init__(self, base: nn.Linear):
        super().__init__(base)
        self.ia3 = nn.Parameter(torch.ones_like(base.weight[0]))

    def forward(self, x_TI: Tensor) -> Tensor:
        """(T, I) to (T, O)."""
        return F.linear(x_TI * self.ia3, self.weight, self.bias)

    def fold(self) -> None:
        self.weight.mul_(self.ia3)


class Ia3Tuning(TuningMethod):
    """Everything that came from a checkpoint is frozen but for the head; a vector learns for the keys and one for the
    values of each attention, cross-attention too, and one for the inner activations of each feed-forward part."""

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        edit_linears(learner, ("k_proj", "v_proj"), lambda name, linear: ScaledOutputs(linear))
        edit_linears(learner, ("fc_out",), lambda name, linear: ScaledInputs(linear))

    def merge(self, learner: BaseLearner) -> None:
        merge_linears(learner)
