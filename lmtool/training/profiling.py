"""Training under torch's profiler: named ranges for the parts of a learner, and a loader that stops after some steps.

Methods of the learner's modules are wrapped in ranges from outside, by the module names that all families share, and
unwrapped at the end. Forward hooks, or wrapped projections, would disable the single matrix product that computes
an attention's queries, keys and values. Ranges compute nothing, so profiled training has the same results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lmtool.training.loop import StopTraining
from lmtool.training.progress import peak_memory
from lmtool.types import Learner, Loader, Step

RANGE = "lmtool/"  # prefix of all ranges
STEP, DATA, LEARNER, LAYOUT = "step", "data", "learner", "batch layout"
EMBEDDING, ATTENTION, CROSS_ATTENTION, FEED_FORWARD = "embedding", "attention", "cross-attention", "feed-forward"
NORMS, ADDED, HEAD, TEACHER = "norms, dropout, residuals", "adapters and prefixes", "head", "teacher"
PROJECTIONS = ": projections"
PRODUCT = "product"  # a matrix product of several operators, in the part around it
# Prefixes of additional networks; each network is one part.
OBJECTIVE, DISTILLATION = "objective: ", "distillation: "

# By the last component of a module's name: the module's part, and its methods that other modules call.
_PARTS_BY_NAME: dict[str, tuple[str, tuple[str, ...]]] = {
    "embed": (EMBEDDING, ("tokens", "finish")),
    "self_attn": (ATTENTION, ("forward",)),
    "cross_attn": (CROSS_ATTENTION, ("forward",)),
    "ffn": (FEED_FORWARD, ("forward",)),
    "prefix": (ADDED, ("layers",)),
    "cross_prefix": (ADDED, ("layers",)),
    "virtual": (ADDED, ("insertion", "insert")),
    "attn_adapter": (ADDED, ("forward",)),
    "ffn_adapter": (ADDED, ("forward",)),
}
_NETWORK_METHODS = ("forward", "loss_sum", "of_tokens", "scores", "transform", "sums")
_BACKBONE_METHODS = ("forward", "read_inputs", "encode", "decode")


@dataclass
class Recording:
    """Measurements of the profiled steps.

    Attributes:
        steps: Number of profiled steps.
        tokens, micro_batches: Totals over these steps.
        seconds: Mean time of a step with the profiler.
        unprofiled_seconds: Mean time of the same steps without the profiler, with their data already loaded.
        peak_bytes: See `peak_memory`.
        data: The profiled steps, which are repeated without the profiler.
    """

    profiler: profile
    steps: int
    tokens: int = 0
    micro_batches: int = 0
    seconds: float = 0.0
    unprofiled_seconds: float = 0.0
    peak_bytes: int = 0
    data: list[Step] = field(default_factory=list, repr=False)


class ProfiledLoader:
    """A `types.Loader` of another loader's steps: `warm_up` steps, `steps` profiled ones, and these again without the
    profiler. Then it raises StopTraining, and `recording` is complete."""

    def __init__(self, loader: Loader, device: torch.device, steps: int, warm_up: int):
        self._loader, self._device, self._warm_up = loader, device, warm_up
        self.recording = Recording(profiler_of(device), steps)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def steps_in_epoch(self, epoch: int) -> int:
        return self._loader.steps_in_epoch(epoch)

    def metadata(self) -> dict[str, object]:
        return self._loader.metadata()

    def steps(self, cursor: dict[str, int] | None, rank: int = 0, ranks: int = 1) -> Iterator[Step]:
        recording, source = self.recording, iter(self._loader.steps(cursor, rank, ranks))
        for _ in range(self._warm_up):
            yield next(source)
        self._wait()
        recording.profiler.start()
        started = time.perf_counter()
        yield from self._profiled(source)
        self._wait()
        recording.seconds = (time.perf_counter() - started) / recording.steps
        recording.peak_bytes = peak_memory(self._device)
        recording.profiler.stop()
        started = time.perf_counter()
        yield from recording.data
        self._wait()
        recording.unprofiled_seconds = (time.perf_counter() - started) / recording.steps
        raise StopTraining

    def _profiled(self, source: Iterator[Step]) -> Iterator[Step]:
        for _ in range(self.recording.steps):
            # The range ends at the loop's next call, so it contains the whole step.
            with profiler_range(STEP):
                with profiler_range(DATA):
                    data = next(source)
                self.recording.data.append(data)
                self.recording.tokens += sum(batch.tokens for batch in data.batches)
                self.recording.micro_batches += len(data.batches)
                yield data

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def profiler_of(device: torch.device) -> profile:
    """Returns a profiler of the host and of the device."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return profile(activities=activities, record_shapes=True)


def profiler_range(part: str) -> Any:
    """Returns a range in the profiler's events. It has a tenth of the overhead of torch's `record_function`."""
    return torch._C._profiler._RecordFunctionFast(RANGE + part)


@contextmanager
def ranges(
    learner: nn.Module, others: Sequence[tuple[object, str, str]] = (), compiled: bool = False
) -> Iterator[None]:
    """Names the parts of a learner, and other objects' methods (object, method, part), by ranges of the profiler.
    Compiled regions (`nn/regions`) contain no ranges, which would split them."""
    with ExitStack() as stack:
        for module, part, methods in profiled_modules(learner, compiled):
            for method in methods:
                if callable(getattr(module, method, None)):
                    stack.enter_context(_in_range(module, method, part))
        for other in others:
            stack.enter_context(_in_range(*other))
        yield


def profiled_modules(learner: nn.Module, compiled: bool = False) -> Iterator[tuple[nn.Module, str, tuple[str, ...]]]:
    """Yields the modules of a learner with their part and the methods that other modules call. A module with several
    names has the part of the first one. compiled: omit modules in regions."""
    for name, module in learner.named_modules():
        path = name.split(".")
        last, parent = path[-1], path[-2] if len(path) > 1 else ""
        is_learner = not name or isinstance(module, Learner)
        if parent in ("objective", "distill"):
            yield module, f"{OBJECTIVE if parent == 'objective' else DISTILLATION}{last}", _NETWORK_METHODS
        elif {"objective", "distill"} & set(path):
            continue
        elif is_learner:
            yield module, LEARNER, ("forward",)
        elif parent == "heads":
            yield module, HEAD, _NETWORK_METHODS
        elif "heads" in path:
            continue
        elif last == "backbone":
            yield module, LAYOUT, _BACKBONE_METHODS
            yield module, NORMS, ("leave",)
        elif last in ("encoder", "decoder"):
            yield module, NORMS, ("leave",)
        elif parent == "layers":
            yield module, NORMS, ("forward",)
        elif compiled and "layers" in path and last not in ("self_attn", "cross_attn"):
            continue
        elif last.startswith("norm") and len(path) > 2 and path[-3] == "layers":
            yield module, NORMS, ("forward",)  # an attention may call the norm before it
        elif last in _PARTS_BY_NAME and (not last.endswith("adapter") or any(True for _ in module.parameters())):
            yield module, *_PARTS_BY_NAME[last]
        elif parent in ("self_attn", "cross_attn") and last.endswith("_proj") and type(module) is not nn.Linear:
            # A projection that a tuning method replaced is called separately.
            yield module, (ATTENTION if parent == "self_attn" else CROSS_ATTENTION) + PROJECTIONS, ("forward",)


@contextmanager
def _in_range(owner: object, method: str, part: str) -> Iterator[None]:
    before = vars(owner).get(method)
    original: Callable[..., object] = getattr(owner, method)

    def ranged(*arguments: object, **keywords: object) -> object:
        with profiler_range(part):
            return original(*arguments, **keywords)

    object.__setattr__(owner, method, ranged)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(owner, method)
        else:
            object.__setattr__(owner, method, before)
