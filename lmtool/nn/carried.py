"""State that a model carries from one segment of a running text to the next: a recurrent state, a memory.

Shape letters: N documents of a batch, L lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmtool.types import Lanes, send

State = dict[str, Tensor]
"""By name a tensor whose first dimension counts documents, or lanes."""


@dataclass
class Carried:
    """What one forward begins with and leaves behind, of the N documents of its batch in their order.

    before: the state in front of each document, without gradient. read: on the host, how many tokens of its lane come
    before each document: 0 where the lane begins, with the initial state. after: the state behind each, of the same
    shapes, which the forward sets.
    """

    before: State
    read: tuple[int, ...]
    after: State | None = None


class CarriedState(nn.Module):
    """The state of every lane, which a learner holds from batch to batch. It is no weight: a checkpoint has it in a
    file of its own. tensors: (L, ...) each; none before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: State = {}

    def begin(self, lanes: Lanes, initial: Callable[[int], State]) -> Carried:
        """The state in front of the segments of a batch. initial: the state of so many lanes that begin.

        ValueError where lanes are under way and nothing is held of them: batches before this one were left out.
        """
        if not any(lanes.read):
            return Carried(initial(len(lanes.numbers)), lanes.read)
        if not self.tensors:
            raise ValueError(f"lanes are under way, {max(lanes.read)} tokens were read, and no state is held of them")
        if lanes.complete:
            return Carried(dict(self.tensors), lanes.read)
        return Carried({name: x.index_select(0, _rows(lanes, x)) for name, x in self.tensors.items()}, lanes.read)

    def keep(self, lanes: Lanes, carried: Carried, initial: Callable[[int], State]) -> None:
        """Hold what a forward left, without gradient. Tensors are replaced, never written to: a backward may still want
        those of before. RuntimeError where the forward left nothing."""
        if carried.after is None:
            raise RuntimeError("a model that carries state left none behind a segment")
        after = {name: x.detach().to(carried.before[name].dtype) for name, x in carried.after.items()}
        if not lanes.complete:
            held = self.tensors or initial(lanes.count)
            after = {name: held[name].index_copy(0, _rows(lanes, x), x) for name, x in after.items()}
        self.tensors = after


def _rows(lanes: Lanes, like: Tensor) -> Tensor:
    return send(torch.tensor(lanes.numbers), like.device)


def _states(model: nn.Module) -> dict[str, CarriedState]:
    """Those held in a model, by the names of the modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CarriedState)}


def carried_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All state held in a model, by names of its own, for a checkpoint; empty where there is none."""
    return {f"{path}.{name}": x for path, state in _states(model).items() for name, x in state.tensors.items()}


def load_carried(model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Hold what `carried_tensors` gave."""
    for path, state in _states(model).items():
        own = {name: x for name, x in tensors.items() if name.rpartition(".")[0] == path}
        state.tensors = {name.rpartition(".")[2]: send(x, device) for name, x in own.items()}


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Within, a model holds no state; behind it, what it held before: for a pass over other text in between."""
    held = {state: state.tensors for state in _states(model).values()}
    for state in held:
        state.tensors = {}
    try:
        yield
    finally:
        for state, tensors in held.items():
            state.tensors = tensors
