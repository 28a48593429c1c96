"""Linear maps that a tuning method adds to: they keep the `weight` and `bias` of the map in whose place they stand."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import nn

from lmtool.learners.base import BaseLearner
from lmtool.tuning.places import linears, replace


class EditedLinear(nn.Linear):
    """A linear map with something of its own. The weights of `base` are shared, not copied."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias

    @abstractmethod
    def fold(self) -> None:
        """Put what was added into `weight` and `bias`; called without gradient, and once."""

    def plain(self) -> nn.Linear:
        """The map without what was added, over the same weights."""
        map_ = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        map_.weight, map_.bias = self.weight, self.bias
        return map_


def edit_linears(
    learner: BaseLearner, names: Collection[str], edited: Callable[[str, nn.Linear], EditedLinear]
) -> dict[str, EditedLinear]:
    """Put what `edited` makes of its name and itself in the place of each linear map of these names, wherever it is
    used. Gives the new ones by their names in a checkpoint."""
    maps = {name: edited(name, linear) for name, linear in linears(learner.backbone, names)}
    for name, linear in maps.items():
        replace(learner, name, linear)
    return maps


@torch.no_grad()
def merge_linears(learner: BaseLearner) -> None:
    """Fold all edited maps of a learner's backbone, and put plain ones in their places."""
    for name, module in list(learner.named_modules()):
        if isinstance(module, EditedLinear):
            cast(EditedLinear, module).fold()
            replace(learner, name, module.plain())
