"""Attribution of the profiler's events to the parts of a learner.

An operator in the forward pass belongs to the range around it. An operator in the backward pass belongs to the range of
its forward operation, which has the same autograd sequence number. The remaining time, which Python and the launch of
operators take, is the part `host`, so that the parts add up to the step. On CUDA an operator takes the time of its
kernels, and `host` is the time in which the device is idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from torch.autograd.profiler_util import FunctionEvent

from lmtool.training.profiling import (
    ATTENTION,
    CROSS_ATTENTION,
    DATA,
    DISTILLATION,
    HEAD,
    LEARNER,
    OBJECTIVE,
    PRODUCT,
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
# The operators with which an attention computes its projections: three products, or one with concatenated matrices.
_PROJECTION_OPERATORS = ("aten::linear", "aten::cat", "aten::to", "aten::split")
_MATRIX_PRODUCTS = ("aten::linear", "aten::matmul", "aten::mm", "aten::addmm")


@dataclass
class Cost:
    """Milliseconds of operators in the forward and backward pass, milliseconds of Python between them, and the number
    of operator calls, including nested ones."""

    forward: float = 0.0
    backward: float = 0.0
    host: float = 0.0
    calls: float = 0.0

    @property
    def operators(self) -> float:
        return self.forward + self.backward


@dataclass
class MeanStep:
    """The mean cost of a step. milliseconds: its duration. parts: cost by part; the operators of all parts and `host`
    add up to `milliseconds`. products: milliseconds in matrix products. flops: FLOPs of the matrix products whose
    shapes the profiler recorded."""

    milliseconds: float
    parts: dict[str, Cost]
    products: float
    flops: float


@dataclass
class _Scope:
    """The state of a range while its events are read. projecting: whether an attention still computes its projections.
    called_head: whether a learner has called a head or another learner."""

    projecting: bool = True
    called_head: bool = False


@dataclass(frozen=True)
class _Location:
    """The location of an event. is_final: whether nested ranges belong to the same part."""

    part: str = STEP
    backward: bool = False
    is_final: bool = False
    scope: _Scope = field(default_factory=_Scope)


def attribute(events: Iterable[FunctionEvent], on_device: bool = False) -> MeanStep:
    """Attributes the profiler's events, which include `STEP` ranges. on_device: measure kernels instead of the host."""
    host_events = [event for event in events if event.device_type.name == "CPU" and not event.is_async]
    return _Attribution(host_events, on_device).result()


class _Attribution:
    def __init__(self, events: Sequence[FunctionEvent], on_device: bool):
        self.on_device = on_device
        self.steps = [event for event in events if event.name == RANGE + STEP]
        if not self.steps:
            raise ValueError("the events contain no step")
        main_thread = self.steps[0].thread
        self.events = sorted(
            (event for event in events if event.cpu_parent is None),
            key=lambda event: (event.thread != main_thread, event.time_range.start),
        )
        self.outside = _OutsideRanges(events, self.steps)
        self.parts: dict[str, Cost] = defaultdict(Cost)
        self.part_of_node: dict[int, str] = {}
        self.part_of_last_node = OTHER
        self.products = self.flops = 0.0

    def result(self) -> MeanStep:
        for event in self.events:
            self._visit(event, _Location())
        steps = len(self.steps)
        total = sum(step.time_range.elapsed_us() for step in self.steps) / 1000
        parts = {
            name: Cost(*(value / steps for value in (cost.forward, cost.backward, cost.host, cost.calls)))
            for name, cost in self.parts.items()
        }
        host = parts.pop(HOST, Cost())
        operator_time = sum(cost.operators for cost in parts.values())
        # The backward pass runs in another thread while the host waits, so the host has the remaining time.
        parts[HOST] = Cost(forward=total / steps - operator_time, calls=host.calls)
        return MeanStep(total / steps, parts, self.products / steps / 1000, self.flops / steps)

    def _visit(self, event: FunctionEvent, location: _Location) -> None:
        name = event.name
        if name.startswith(RANGE):
            location = self._location_in_range(name.removeprefix(RANGE), location)
            self._add_cost(event, location, operator=location.part == DATA and not self.on_device)
        elif name.startswith(_NODE):
            self.part_of_last_node = self.part_of_node.get(event.sequence_nr, self.part_of_last_node)
            location = _Location(self.part_of_last_node, True, True)
            self._add_cost(event, location, operator=False)
        elif any(name.startswith(prefix) for prefix in _OPTIMIZER):
            location = _Location(_OPTIMIZER[name.partition("#")[0] + "#"], is_final=True)
            # Zeroing frees the gradients' memory, which takes time outside operators.
            self._add_cost(event, location, operator=location.part == ZERO and not self.on_device)
        else:
            compiled = any(word in name for word in _COMPILED)
            location = self._location_of_operator(event, location, compiled)
            if not location.backward and event.sequence_nr >= 0 and event.scope == 0:
                # Nested operators have the same sequence number; the innermost one is the operation.
                self.part_of_node[event.sequence_nr] = _default_part(location.part)
            self._add_cost(event, location, operator=compiled or _is_operator(name))
        for child in event.cpu_children:
            self._visit(child, location)

    def _location_in_range(self, part: str, location: _Location) -> _Location:
        if location.is_final and not location.backward:
            return location
        if part == PRODUCT:
            around = location.part
            kind = PROJECTIONS if around in (ATTENTION, CROSS_ATTENTION) else ""
            return replace(location, part=around + kind, is_final=True)
        if part in (HEAD, LEARNER):
            location.scope.called_head = True
        is_final = part.startswith((OBJECTIVE, DISTILLATION)) or part in (TEACHER, DATA) or part.endswith(PROJECTIONS)
        return _Location(part, location.backward, is_final)

    def _location_of_operator(self, event: FunctionEvent, location: _Location, compiled: bool) -> _Location:
        """Returns the location of an operator. If its range has several parts, the operator's name or start decides."""
        if compiled and not (location.is_final and not location.backward):
            return replace(location, part=COMPILED, is_final=True)
        if location.is_final:
            return location
        name, part = event.name, location.part
        if part in (ATTENTION, CROSS_ATTENTION):
            location.scope.projecting = location.scope.projecting and name.startswith(_PROJECTION_OPERATORS)
            kind = PROJECTIONS if location.scope.projecting or name == "aten::linear" else SCORES
            return replace(location, part=part + kind, is_final=True)
        if part == HEAD and "loss" in name.lower():
            return replace(location, part=LOSS)  # the loss is fused with the head's products
        if part == LOSS and name in _MATRIX_PRODUCTS:
            return replace(location, part=HEAD, is_final=True)
        if part == LEARNER:
            return replace(location, part=LOSS if location.scope.called_head else OTHER, is_final=True)
        if part == STEP:
            return replace(location, part=self.outside.part_at(event.time_range.start), is_final=True)
        return location

    def _add_cost(self, event: FunctionEvent, location: _Location, operator: bool) -> None:
        cost = self.parts[_default_part(location.part)]
        milliseconds = _time_without_nested(event, self.on_device) / 1000
        operator = operator or (self.on_device and bool(event.kernels))
        if not operator:
            cost.host += milliseconds
        elif location.backward:
            cost.backward += milliseconds
        else:
            cost.forward += milliseconds
        cost.calls += _is_operator(event.name)
        flops = flops_of(event.name, event.input_shapes)  # type: ignore[arg-type]  # lists of sizes
        if flops is not None:
            self.flops += flops
            self.products += _total_time(event, self.on_device)


class _OutsideRanges:
    """The part of an operator outside all ranges, by its start: loss between the learner and the backward pass,
    clipping between the backward pass and the optimizer."""

    def __init__(self, events: Sequence[FunctionEvent], steps: Sequence[FunctionEvent]):
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


def _starts(events: Sequence[FunctionEvent], step: FunctionEvent, *prefixes: str) -> list[float]:
    window = step.time_range
    return [
        event.time_range.start
        for event in events
        if event.name.startswith(prefixes) and window.start <= event.time_range.start <= window.end
    ]


def _default_part(part: str) -> str:
    """Returns the part of the operators in a range that belong to no more specific part."""
    if part in (ATTENTION, CROSS_ATTENTION):
        return part + SCORES
    return {LEARNER: OTHER, STEP: HOST}.get(part, part)


def _is_operator(name: str) -> bool:
    """Whether an event is an operator of torch, not a range, Python or autograd's engine."""
    return "::" in name and not name.startswith(("autograd::", "torch::"))


def _time_without_nested(event: FunctionEvent, on_device: bool) -> float:
    return sum(kernel.duration for kernel in event.kernels) if on_device else event.self_cpu_time_total


def _total_time(event: FunctionEvent, on_device: bool) -> float:
    return _time_without_nested(event, on_device) + sum(_total_time(child, on_device) for child in event.cpu_children)


def flops_of(name: str, shapes: Sequence[Sequence[int]]) -> float | None:
    """Returns the FLOPs of a matrix product (a multiplication and an addition are two), without regard to masks. None
    for other operators, and if the argument shapes do not determine the FLOPs (attention over packed documents on
    CUDA)."""
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
        # Forward: q k^T, and weights times v. Backward: q k^T again, and four gradients (Dao et al. 2022, appendix B).
        products = prod(query[:-1]) * key[-2] * 2
        scores, sums = products * query[-1], products * value[-1]
        return float(3 * scores + 2 * sums) if backward else float(scores + sums)
    else:
        return None
    return 2.0 * prod(left) * right[-1]
