"""Whether a module is torch's own and nobody watches it, so that what it computes may be computed in another way."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def is_plain(module: nn.Module, kind: type[AnyModule]) -> TypeGuard[AnyModule]:
    """Whether it is of this very class, without hooks: not edited (LoRA), parametrised or observed."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is kind and not any(hooks)
