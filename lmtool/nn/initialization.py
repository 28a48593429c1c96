"""Initial weights: a pure function of (seed, tensor name), the same on every device.

A tensor's values depend only on its own name, so adding a head does not change a model's other weights. Dropout sites,
which depend on names too, are set at the same time.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lmtool.nn.dropout import name_dropouts
from lmtool.random_streams import key

Draw = Callable[[Tensor, torch.Generator], None]
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def truncated_normal(std: float) -> Draw:
    """Returns a normal distribution whose values beyond two standard deviations are resampled. The result has a
    standard deviation of 0.880 `std` (BERT's original code)."""

    def draw(tensor: Tensor, generator: torch.Generator) -> None:
        # Takes a third of the time of torch's trunc_normal_, which uses the inverse error function.
        values = tensor.view(-1).normal_(0.0, std, generator=generator)
        outliers = (values.abs() > 2 * std).nonzero().flatten()
        while len(outliers):
            values[outliers] = torch.empty(len(outliers)).normal_(0.0, std, generator=generator)
            outliers = outliers[values[outliers].abs() > 2 * std]

    return draw


def normal(std: float) -> Draw:
    """Returns a normal distribution around 0 (GPT-2)."""

    def draw(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, std, generator=generator)

    return draw


def normal_by_inputs(factor: float) -> Draw:
    """Returns a normal distribution around 0 with standard deviation `factor` / sqrt(inputs of the matrix)."""

    def draw(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, factor / math.sqrt(tensor.shape[-1]), generator=generator)

    return draw


def uniform(bound: float) -> Draw:
    """Returns a uniform distribution between -bound and bound."""

    def draw(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.uniform_(-bound, bound, generator=generator)

    return draw


def orthogonal_blocks(tensor: Tensor, generator: torch.Generator) -> None:
    """Makes each of the stacked square blocks an orthogonal matrix (Saxe, McClelland and Ganguli 2014). In a recurrent
    map each gate has a block."""
    for block in tensor.split(tensor.shape[1]):
        nn.init.orthogonal_(block, generator=generator)


def zero(tensor: Tensor, generator: torch.Generator) -> None:
    """Sets all elements to 0."""
    tensor.zero_()


def generator_for(seed: int, name: str) -> torch.Generator:
    """Returns a CPU generator for the tensor of this name."""
    generator = torch.Generator()
    generator.manual_seed(key(seed, "init", zlib.crc32(name.encode())) & (2**63 - 1))
    return generator


def initialize(module: nn.Module, seed: int, draw: Draw, prefix: str = "") -> None:
    """Initializes matrices by `draw`, biases as 0 and norm gains as 1, and sets the sites of dropout. prefix: prepended
    to the module's tensor names, for a part of a larger model. Tensors on the meta device are skipped."""
    initialize_each(module, seed, lambda name, part: draw, prefix)


@torch.no_grad()
def initialize_each(module: nn.Module, seed: int, draw_of: Callable[[str, nn.Module], Draw], prefix: str = "") -> None:
    """Initializes as `initialize` does, but with a distribution for each module. draw_of: returns the distribution for
    the name of a module and the module."""
    name_dropouts(module, prefix)
    for path, part in module.named_modules():
        for kind, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                continue
            name = f"{prefix}{path}.{kind}" if path else prefix + kind
            if parameter.ndim >= 2:
                values = torch.empty(parameter.shape)
                draw_of(path, part)(values, generator_for(seed, name))
                parameter.copy_(values)
            else:
                # Vectors are biases, or the gain of a norm.
                parameter.fill_(0.0 if "bias" in kind else 1.0)


class _SkipInitialization(TorchFunctionMode):
    """Skips torch's own initialization, for which torch would import its compiler on the meta device (a second)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def materialize(make: Callable[[], AnyModule]) -> AnyModule:
    """Builds a module on the default device without torch's own initialization, which would take seconds at full size
    and advance the global generator. The values are undefined until `initialize` sets them."""
    device = torch.get_default_device()
    with torch.device("meta"), _SkipInitialization():
        module = make()
    if device.type == "meta":
        return module
    # Like `to_empty`, which calls empty_like on meta tensors and thereby imports sympy for half a second.
    return module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
