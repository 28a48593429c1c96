"""Gradual unfreezing: Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification", ACL 2018,
section 3.3."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from lmtool.learners.base import BaseLearner
from lmtool.training.depth import levels
from lmtool.tuning.configs.schemes import GradualUnfreezingConfig
from lmtool.tuning.schemes import Scheme


class GradualUnfreezing(Scheme):
    """The head learns first, then one level more from the top after each epoch or every few steps: the layers from the
    last to the first, of an encoder-decoder the decoder's before the encoder's, and the embeddings. A level without
    anything that learns by the method is left out.

    Everything is given to the optimizer from the start; what is still frozen has no gradient, and no state there.
    """

    config: GradualUnfreezingConfig

    def __init__(self, config: GradualUnfreezingConfig):
        super().__init__(config)
        self._levels: list[dict[str, nn.Parameter]] = []
        self._starts = [1]
        self._steps_in_epoch: Callable[[int], int] | None = None

    def attach(self, learner: BaseLearner, new: Collection[str] | None) -> None:
        named = dict(learner.named_parameters())
        learning = {name: tensor for name, tensor in named.items() if name in learner.learning}
        ordered = [{name: learning[name] for name in members if name in learning} for members in levels(named).values()]
        self._levels = [members for members in ordered if members]

    def begin(self, steps_in_epoch: Callable[[int], int]) -> None:
        self._steps_in_epoch = steps_in_epoch

    def first_step(self, name: str, steps: int) -> int | None:
        number = next(number for number, members in enumerate(self._levels) if name in members)
        reached = all(self._start(above) <= steps for above in range(number + 1))
        return self._start(number) if reached else None

    def on_step(self, learner: BaseLearner, step: int) -> None:
        learns = True
        for number, members in enumerate(self._levels):
            # Behind one that does not learn yet none does: epochs that are never reached are not planned.
            learns = learns and self._start(number) <= step
            for parameter in members.values():
                parameter.requires_grad_(learns)

    def _start(self, number: int) -> int:
        """The first step of a level, by its number from 0, the head's."""
        if self.config.every_steps is not None:
            return 1 + number * self.config.every_steps
        while len(self._starts) <= number:
            assert self._steps_in_epoch is not None, "the length of an epoch is not known: call begin"
            self._starts.append(self._starts[-1] + self._steps_in_epoch(len(self._starts) - 1))
        return self._starts[number]
