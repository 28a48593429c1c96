"""The modules that tuning methods put into a model: made where it is, and drawn from keyed streams."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from lmtool.nn.initialization import generator_for, materialize

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def made_for(learner: nn.Module, kind: Callable[..., AnyModule], *arguments: Any) -> AnyModule:
    """A new module, `kind(*arguments)`, on the device of a learner. Its values are undefined until they are drawn."""
    return materialize(partial(kind, *arguments)).to(next(learner.parameters()).device)


@torch.no_grad()
def draw_as_torch(module: nn.Module, seed: int, prefix: str) -> None:
    """The initial values that torch gives: tables standard normal, maps and LSTMs uniform within 1/sqrt of their inputs
    or states; each tensor by its name. prefix: what stands before the names of this module's tensors."""
    for place, part in module.named_modules():
        for kind, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                continue
            generator = generator_for(seed, f"{prefix}{place}.{kind}" if place else prefix + kind)
            values = torch.empty(parameter.shape)
            if isinstance(part, nn.Linear | nn.LSTM):
                bound = 1 / math.sqrt(part.in_features if isinstance(part, nn.Linear) else part.hidden_size)
                parameter.copy_(values.uniform_(-bound, bound, generator=generator))
            else:
                parameter.copy_(values.normal_(generator=generator))
