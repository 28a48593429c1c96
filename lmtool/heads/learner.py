"""The base of every learner: a backbone, its heads, and what the loop asks of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.models.base import Backbone
from lmtool.nn.dropout import DeviceDraws, Draws, TokenDraws, token_keys
from lmtool.streams import key
from lmtool.types import Batch, ParameterGroup


class BaseLearner(nn.Module):
    """Holds `backbone` and `heads`; a subclass adds `counts(batch)` and `forward(batch, step)`.

    seed: of the run; new heads and dropout derive from it. measures: by term, scores over all (gold, predicted) of
    an evaluation, where a mean over targets does not say enough.
    """

    measures: Mapping[str, Callable[[np.ndarray, np.ndarray], dict[str, float]]] = {}

    def __init__(self, backbone: Backbone, seed: int):
        super().__init__()
        self.backbone: Backbone = backbone
        self.heads = nn.ModuleDict()
        self.seed = seed

    def add_head(self, name: str, head: nn.Module) -> None:
        """Enter a head under its name and give it the initial weights of the backbone's family. UserError where there
        is one of that name: heads of tasks have the names that users give."""
        if name in self.heads:
            raise UserError(f"task.name={name} is the name of a head that the model has anyway", "give another name")
        device = next(self.backbone.parameters()).device
        self.heads[name] = head.to(device)
        self.backbone.initialize(head, self.seed, f"heads.{name}.")

    def draws(self, batch: Batch, step: int) -> Draws | None:
        """The dropout of this batch in this step, for its inputs (and `for_outputs`); None in evaluation. Keyed by
        token on a CPU; on CUDA from the device's generator, seeded by the step and the batch's first example. A model
        that runs twice in a step takes draws `at` another place for its second forward."""
        if not self.training:
            return None
        device = batch.inputs.tokens.device
        if device.type == "cpu":
            keys_T = token_keys(self.seed, step, batch.examples, batch.parts, batch.inputs)
            if batch.outputs is None:
                return TokenDraws(keys_T)
            output_keys_T = token_keys(self.seed, step, batch.examples, batch.parts, batch.outputs, outputs=True)
            return TokenDraws(keys_T, output_keys_T)
        first = (int(batch.examples[0]), int(batch.parts[0])) if len(batch.examples) else ()
        return DeviceDraws(key(self.seed, "dropout", step, *first), device)

    def penalties(self) -> dict[str, Tensor]:
        """No terms beside the batch's."""
        return {}

    def on_step(self, step: int) -> None:
        """Nothing moves with the steps."""

    def parameter_groups(self) -> list[ParameterGroup]:
        """What learns, each tensor once: matrices decay, vectors (norms and biases) do not."""
        decay, rest = ParameterGroup("decay", []), ParameterGroup("no_decay", [], weight_decay_scale=0.0)
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                (decay if parameter.ndim >= 2 else rest).parameters.append((name, parameter))
        return [group for group in (decay, rest) if group.parameters]
