"""The parts of a model that may be compiled: functions of tensors alone, between the attentions.

Attention reads the lengths of its texts on the host and picks a plan and a kernel by them, so a compiler would build a
new graph for each batch. It therefore stays uncompiled, and everything between is compiled separately, once for all
layers of a kind (torchtitan's regional compilation). The number of tokens is dynamic; everything else that differs
between layers or steps is passed as a tensor, including dropout's generator (`RngTensors`). Compilation does not change
parameter names.

Shape letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.nn.dropout import Dropout, DropoutRng

Function = Callable[..., Any]


class CompiledRegions:
    """Calls regions through torch.compile. backend: one of torch's, or a function as `torch.compile` accepts it."""

    def __init__(self, backend: str | Function = "inductor"):
        self.backend = backend
        self._compiled: dict[Function, Function] = {}
        self._dropouts: dict[nn.Module, tuple[Dropout, ...]] = {}

    def call(
        self, function: Function, rows: tuple[int, ...], arguments: tuple[Any, ...], rng: DropoutRng | None
    ) -> Any:
        """Calls the compiled function. rows: indices of the arguments whose first dimension may differ between
        calls."""
        tensors = [tensor for number in rows for tensor in _tensors(arguments[number])]
        if any(len(tensor) < 2 for tensor in tensors):
            return function(*arguments, **_rng_keyword(rng))  # a compiler specializes on sizes of 0 and 1
        dropouts = self._dropouts_of(arguments[0]) if isinstance(arguments[0], nn.Module) else ()
        try:
            for dropout in dropouts:
                tensors += dropout.set_rng_tensors(rng)
            for tensor in tensors:
                torch._dynamo.mark_dynamic(tensor, 0)
            return self._compiled_function(function)(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(next(iter(str(error).split("\n\n"))).split())[:200]
            raise UserError(
                f"torch could not compile {function.__qualname__}: {reason}", "set compile=false"
            ) from error
        finally:
            for dropout in dropouts:
                dropout.rng_tensors = None

    def _compiled_function(self, function: Function) -> Function:
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, fullgraph=True, dynamic=False, backend=self.backend)
        return self._compiled[function]

    def _dropouts_of(self, module: nn.Module) -> tuple[Dropout, ...]:
        if module not in self._dropouts:
            parts = (part for part in module.modules() if isinstance(part, Dropout))
            self._dropouts[module] = tuple(part for part in parts if part.rate)
        return self._dropouts[module]


_active: CompiledRegions | None = None


@contextmanager
def regions_by(compiled: CompiledRegions | None) -> Iterator[None]:
    """Calls all regions through `compiled` inside the context; None: uncompiled. This applies to all threads of the
    process, because a backward pass recomputes layers in other threads."""
    global _active
    previous, _active = _active, compiled
    try:
        yield
    finally:
        _active = previous


def region(*rows: int) -> Callable[[Function], Function]:
    """Marks a function, or a method of a module, that may be compiled: it reads tensors, modules and constants, and
    dropout's generator as `rng`. rows: indices of the arguments, tensors or tuples of them, whose first dimension
    counts tokens."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*arguments: Any, rng: DropoutRng | None = None) -> Any:
            if _active is None or torch.compiler.is_compiling():
                return function(*arguments, **_rng_keyword(rng))
            return _active.call(function, rows, arguments, rng)

        return call

    return decorate


def _rng_keyword(rng: DropoutRng | None) -> dict[str, DropoutRng]:
    return {} if rng is None else {"rng": rng}


def _tensors(argument: Any) -> list[Tensor]:
    if argument is None:
        return []
    return [argument] if isinstance(argument, Tensor) else list(argument)


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def is_plain(module: nn.Module, kind: type[AnyModule]) -> TypeGuard[AnyModule]:
    """Whether a module is of exactly this class and has no hooks: not edited (LoRA), parametrized or observed."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is kind and not any(hooks)
