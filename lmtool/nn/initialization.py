"""Initial weights: a pure function of (seed, name of the tensor), the same on every device.

A tensor's draws depend on its own name only, so a model's weights do not change when a head is added to it. What else
a name decides, where a module's dropout draws, is given with them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lmtool.nn.dropout import name_sites
from lmtool.random_streams import key

Draw = Callable[[Tensor, torch.Generator], None]
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def truncated_normal(std: float) -> Draw:
    """Normal, redrawn beyond two standard deviations: what is left has 0.880 of `std` (BERT's published code)."""

    def draw(tensor: Tensor, generator: torch.Generator) -> None:
        # A third of the time of torch's trunc_normal_, which goes by the inverse error function.
        values = tensor.view(-1).normal_(0.0, std, generator=generator)
        beyond = (values.abs() > 2 * std).nonzero().flatten()
        while len(beyond):
            values[beyond] = torch.empty(len(beyond)).normal_(0.0, std, generator=generator)
            beyond = beyond[values[beyond].abs() > 2 * std]

    return draw


def normal(std: float) -> Draw:
    """Normal around 0 (GPT-2)."""

    def draw(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, std, generator=generator)

    return draw


def normal_by_inputs(factor: float) -> Draw:
    """Normal around 0, of a width of `factor` over the root of what a row of the matrix reads."""

    def draw(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, factor / math.sqrt(tensor.shape[-1]), generator=generator)

    return draw


def uniform(bound: float) -> Draw:
    """Uniform between -bound and bound."""

    def draw(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.uniform_(-bound, bound, generator=generator)

    return draw


def orthogonal_blocks(tensor: Tensor, generator: torch.Generator) -> None:
    """Square blocks below each other, an orthogonal matrix each: the maps of a recurrent state, a gate each (Saxe,
    McClelland and Ganguli 2014)."""
    for block in tensor.split(tensor.shape[1]):
        nn.init.orthogonal_(block, generator=generator)


def zero(tensor: Tensor, generator: torch.Generator) -> None:
    """Zeros."""
    tensor.zero_()


def generator_for(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU for the tensor of this name."""
    generator = torch.Generator()
    generator.manual_seed(key(seed, "init", zlib.crc32(name.encode())) & (2**63 - 1))
    return generator


def initialize(module: nn.Module, seed: int, draw: Draw, prefix: str = "") -> None:
    """Matrices by `draw`, biases 0, norms 1 and 0; and the sites of dropout. prefix: what stands before the names of
    this module's tensors in the whole model. Tensors on the meta device have no values and are passed by."""
    initialize_each(module, seed, lambda name, part: draw, prefix)


@torch.no_grad()
def initialize_each(module: nn.Module, seed: int, draw_of: Callable[[str, nn.Module], Draw], prefix: str = "") -> None:
    """`initialize` with a draw for each part: draw_of takes the part's name in the module and the part."""
    name_sites(module, prefix)
    for place, part in module.named_modules():
        for kind, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                continue
            name = f"{prefix}{place}.{kind}" if place else prefix + kind
            if parameter.ndim >= 2:
                values = torch.empty(parameter.shape)
                draw_of(place, part)(values, generator_for(seed, name))
                parameter.copy_(values)
            else:
                # Vectors are biases, or the gain of a norm.
                parameter.fill_(0.0 if "bias" in kind else 1.0)


class _Undrawn(TorchFunctionMode):
    """Modules made inside keep what memory holds: torch's own draws are left out. On the meta device, where they draw
    nothing, torch would import its compiler for them, which takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def materialize(make: Callable[[], AnyModule]) -> AnyModule:
    """Make a module on the default device without torch's own initialisation, which would cost seconds at full size
    and move the global generator. Its values are undefined until `initialize`."""
    device = torch.get_default_device()
    with torch.device("meta"), _Undrawn():
        module = make()
    if device.type == "meta":
        return module
    # As `to_empty`, whose empty_like on a meta tensor imports sympy for half a second.
    return module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
