"""Attribution of the profiler's events to the parts of a learner.

An operator of the forward belongs to the range it lies in, one of the backward to that of the operation it is the
gradient of: both have the same number of autograd's sequence. Time that is inside no operator is Python's, and the
launching of operators: `host`. So all parts together are the step. On CUDA operators count with the time of their
kernels, and `host` is the time in which the device has nothing to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from lmtool.training.profiling import (
    ATTENTION,
    CROSS_ATTENTION,
    DATA,
    DISTILLATION,
    HEAD,
    LEARNER,
    OBJECTIVE,
    PROJECTIONS,
    RANGE,
    STEP,
    TEACHER,
)

HOST, OTHER, LOSS, SCORES, COMPILED = "host", "other", "loss", ": scores", "layers, compiled"
CLIP, MOVE, ZERO = "optimizer: clip", "optimizer: step", "optimizer: zeroing"
_NODE = "autograd::engine::evaluate_function: "
_OPTIMIZER = {"Optimizer.step#": MOVE, "Optimizer.zero_grad#": ZERO}
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "CompiledFxGraph")
# What an attention does before its scores are computed: three maps, often as one product of joined matrices.
_JOINING = ("aten::linear", "aten::cat", "aten::to", "aten::split")
_MAPS = ("aten::linear", "aten::matmul", "aten::mm", "aten::addmm")


@dataclass
class Cost:
    """Milliseconds of operators in the forward and the backward, of Python between them (no part of those), and the
    number of operator calls, those of operators within others counted too."""

    forward: float = 0.0
    backward: float = 0.0
    host: float = 0.0
    calls: float = 0.0

    @property
    def operators(self) -> float:
        return self.forward + self.backward


@dataclass
class Attributed:
    """What a step spends, mean. parts: by name; the operators of all of them, and `host`, add up to `milliseconds`.
    products: milliseconds in matrix products. flops: of these; None for a kernel whose sizes the profiler has not."""

    milliseconds: float
    parts: dict[str, Cost]
    products: float
    flops: float


@dataclass
class _Scope:
    """A call of a range: how far it is. maps: whether an attention still computes its maps. headed: whether a learner
    has called a head, or a learner within it."""

    maps: bool = True
    headed: bool = False


@dataclass(frozen=True)
class _At:
    """Where an event stands. is_final: whether the part is settled, whatever ranges are nested in it."""

    part: str = STEP
    backward: bool = False
    is_final: bool = False
    scope: _Scope = field(default_factory=_Scope)


def attributed(events: Iterable[Any], on_device: bool = False) -> Attributed:
    """From the profiler's events, which have `STEP` ranges. on_device: whether kernels are counted, not the host."""
    host_events = [event for event in events if event.device_type.name == "CPU" and not event.is_async]
    return _Attribution(host_events, on_device).result()


class _Attribution:
    def __init__(self, events: Sequence[Any], on_device: bool):
        self.on_device = on_device
        self.steps = [event for event in events if event.name == RANGE + STEP]
        if not self.steps:
            raise ValueError("no step is in these events")
        main = self.steps[0].thread
        self.events = sorted(
            (event for event in events if event.cpu_parent is None),
            key=lambda event: (event.thread != main, event.time_range.start),
        )
        self.outside = _Outside(events, self.steps)
        self.parts: dict[str, Cost] = defaultdict(Cost)
        self.part_of_node: dict[int, str] = {}
        self.last_node = OTHER
        self.products = self.flops = 0.0

    def result(self) -> Attributed:
        for event in self.events:
            self._visit(event, _At())
        steps = len(self.steps)
        total = sum(step.time_range.elapsed_us() for step in self.steps) / 1000
        parts = {
            name: Cost(*(value / steps for value in (cost.forward, cost.backward, cost.host, cost.calls)))
            for name, cost in self.parts.items()
        }
        host = parts.pop(HOST, Cost())
        spent = sum(cost.operators for cost in parts.values())
        # A backward in a thread of its own runs while the host waits for it: what is left is the host's.
        parts[HOST] = Cost(forward=total / steps - spent, calls=host.calls)
        return Attributed(total / steps, parts, self.products / steps / 1000, self.flops / steps)

    def _visit(self, event: Any, at: _At) -> None:
        name = event.name
        if name.startswith(RANGE):
            at = self._entered(name.removeprefix(RANGE), at)
            self._count(event, at, operator=at.part == DATA and not self.on_device)
        elif name.startswith(_NODE):
            self.last_node = self.part_of_node.get(event.sequence_nr, self.last_node)
            at = _At(self.last_node, True, True)
            self._count(event, at, operator=False)
        elif any(name.startswith(prefix) for prefix in _OPTIMIZER):
            at = _At(_OPTIMIZER[name.partition("#")[0] + "#"], is_final=True)
            # Gradients are forgotten: what that takes is their memory, given back by no operator.
            self._count(event, at, operator=at.part == ZERO and not self.on_device)
        else:
            compiled = any(word in name for word in _COMPILED)
            at = self._labelled(event, at, compiled)
            if not at.backward and event.sequence_nr >= 0 and event.scope == 0:
                # Nested operators share a sequence number; the one that begins last is the operation it belongs to.
                self.part_of_node[event.sequence_nr] = _label(at.part)
            self._count(event, at, operator=compiled or _is_operator(name))
        for child in event.cpu_children:
            self._visit(child, at)

    def _entered(self, part: str, at: _At) -> _At:
        if at.is_final and not at.backward:
            return at
        if part in (HEAD, LEARNER):
            at.scope.headed = True
        whole = part.startswith((OBJECTIVE, DISTILLATION)) or part in (TEACHER, DATA)
        return _At(part, at.backward, whole or part.endswith(PROJECTIONS))

    def _labelled(self, event: Any, at: _At, compiled: bool) -> _At:
        """Where an operator stands: what its range leaves open is settled by its own name, or by when it runs."""
        if compiled and not (at.is_final and not at.backward):
            return replace(at, part=COMPILED, is_final=True)
        if at.is_final:
            return at
        name, part = event.name, at.part
        if part in (ATTENTION, CROSS_ATTENTION):
            at.scope.maps = at.scope.maps and name.startswith(_JOINING)
            kind = PROJECTIONS if at.scope.maps or name == "aten::linear" else SCORES
            return replace(at, part=part + kind, is_final=True)
        if part == HEAD and "loss" in name.lower():
            return replace(at, part=LOSS)  # fused with the products of the head
        if part == LOSS and name in _MAPS:
            return replace(at, part=HEAD, is_final=True)
        if part == LEARNER:
            return replace(at, part=LOSS if at.scope.headed else OTHER, is_final=True)
        if part == STEP:
            return replace(at, part=self.outside.part_at(event.time_range.start), is_final=True)
        return at

    def _count(self, event: Any, at: _At, operator: bool) -> None:
        cost = self.parts[_label(at.part)]
        milliseconds = _own_time(event, self.on_device) / 1000
        operator = operator or (self.on_device and bool(event.kernels))
        if not operator:
            cost.host += milliseconds
        elif at.backward:
            cost.backward += milliseconds
        else:
            cost.forward += milliseconds
        cost.calls += _is_operator(event.name)
        flops = flops_of(event.name, event.input_shapes)
        if flops is not None:
            self.flops += flops
            self.products += _time(event, self.on_device)


class _Outside:
    """What an operator in no range is a part of, by when it runs in its step: the loss between learner and backward,
    clipping between backward and optimizer."""

    def __init__(self, events: Sequence[Any], steps: Sequence[Any]):
        self.windows = [
            (
                step.time_range.end,
                min(_starts(events, step, RANGE + LEARNER), default=step.time_range.end),
                max(_starts(events, step, _NODE), default=step.time_range.end),
                min(_starts(events, step, *_OPTIMIZER), default=step.time_range.end),
            )
            for step in steps
        ]

    def part_at(self, moment: float) -> str:
        for end, learner, backward, optimizer in self.windows:
            if moment > end:
                continue
            if moment < learner or moment >= optimizer:
                return OTHER
            return CLIP if moment >= backward else LOSS
        return OTHER


def _starts(events: Sequence[Any], step: Any, *prefixes: str) -> list[float]:
    """When events of these names begin within a step."""
    window = step.time_range
    return [
        event.time_range.start
        for event in events
        if event.name.startswith(prefixes) and window.start <= event.time_range.start <= window.end
    ]


def _label(part: str) -> str:
    """The part of what a range leaves open."""
    if part in (ATTENTION, CROSS_ATTENTION):
        return part + SCORES
    return {LEARNER: OTHER, STEP: HOST}.get(part, part)


def _is_operator(name: str) -> bool:
    """Whether an event is an operator of torch, not a range, nor Python or the engine that calls operators."""
    return "::" in name and not name.startswith(("autograd::", "torch::"))


def _own_time(event: Any, on_device: bool) -> float:
    """Microseconds of an event without those within it; of its own kernels on a device."""
    return sum(kernel.duration for kernel in event.kernels) if on_device else event.self_cpu_time_total


def _time(event: Any, on_device: bool) -> float:
    """Microseconds of an event with those within it."""
    return _own_time(event, on_device) + sum(_time(child, on_device) for child in event.cpu_children)


def flops_of(name: str, shapes: Sequence[Sequence[int]]) -> float | None:
    """Operations of a matrix product, a multiply and an add as two; None for any other operator, and for one whose
    sizes its arguments do not say (attention over packed documents on CUDA). Masks are not taken off."""
    kind = name.removeprefix("aten::")
    if kind in ("mm", "bmm"):
        left, right = shapes[0], shapes[1]
    elif kind in ("addmm", "baddbmm"):
        left, right = shapes[1], shapes[2]
    elif kind.startswith("_scaled_dot_product_") and "attention" in kind and "math" not in kind:
        backward = kind.endswith("_backward")
        query, key, value = shapes[1:4] if backward else shapes[:3]
        if len(query) != 4 or not key:
            return None
        # q k^T and its weights times v; backward those scores again and four gradients (Dao et al. 2022, appendix B).
        products = prod(query[:-1]) * key[-2] * 2
        scores, sums = products * query[-1], products * value[-1]
        return float(3 * scores + 2 * sums) if backward else float(scores + sums)
    else:
        return None
    return 2.0 * prod(left) * right[-1]
