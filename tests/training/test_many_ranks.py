"""One of 64 processes, alone: torch's fake process group answers for the others. What each holds, and what a step
sends, is what docs/scale.md counts with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lmtool.config.tables import build
from lmtool.objectives.configs import MlmConfig
from lmtool.training import engine
from lmtool.training.engine import engine_for, shard
from lmtool.training.precision import FP32_CPU
from lmtool.training.step import gradients
from lmtool.types import Step
from tests.objectives.objective_fixtures import backbone, rows_of, split, store, tokenizer

SIZE, LAYERS = 64, 3
CPU = torch.device("cpu")


class Everyone:
    """A group whose other processes have what this one has. messages: between the hosts."""

    size = SIZE

    def __init__(self, rank: int):
        self.rank, self.messages = rank, 0

    def sum(self, counts: Mapping[str, float]) -> dict[str, float]:
        self.messages += 1
        return {name: self.size * count for name, count in counts.items()}

    def add_up(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor


class Traffic(TorchDispatchMode):
    """Counts collectives and the bytes of what they complete, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function._opname
            # A scattered sum reads what the others complete.
            whole = args[1] if name == "_reduce_scatter_base_" else args[0]
            tensors = [whole] if isinstance(whole, Tensor) else whole
            self.calls[name] += 1
            self.bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return function(*args, **kwargs or {})


@pytest.fixture(params=[0, 1, SIZE - 1])
def group(request: pytest.FixtureRequest) -> Iterator[Everyone]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=SIZE)
    yield Everyone(request.param)
    dist.destroy_process_group()


def learner_and_batch() -> tuple[Any, Any]:
    """Tables and layers of rows that 64 divides."""
    words = tokenizer()
    sizes = {"vocab_size": 448, "hidden_size": 64, "feedforward_size": 128, "num_layers": LAYERS}
    learner = build(MlmConfig(), backbone("bert", **sizes), words, 3)
    return learner, rows_of(learner.examples(split(store(words)), 32), 4)


def step_of(learner: Any, batch: Any, parallel: Any, group: Any) -> Traffic:
    runs = engine_for(learner, parallel, group)
    with Traffic() as traffic:
        outcome = gradients(runs, Step([batch], {}, 0.0), 1, 0, FP32_CPU)
    assert bool(torch.isfinite(outcome.loss)) and outcome.tokens == SIZE * batch.tokens
    return traffic


def at_once(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """What adds gradients up, without the work's own future, which the fake group leaves empty."""
    dist.all_reduce(tensor)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


def test_gradients_cross_once(group: Everyone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_summed", at_once)
    learner, batch = learner_and_batch()
    learning = sum(parameter.numel() for parameter in learner.parameters())
    traffic = step_of(learner, batch, "ddp", group)
    assert set(traffic.calls) == {"allreduce_"} and group.messages == 1  # the loop's other one has the clock
    # Beside the gradients the loss, its terms, and which parameters were used.
    parameters = len(list(learner.parameters()))
    assert 4 * learning <= traffic.bytes["allreduce_"] <= 4 * (learning + parameters + 16)


def test_weights_cross_twice_a_forward_and_gradients_once(group: Everyone) -> None:
    learner, batch = learner_and_batch()
    shapes = {name: tuple(parameter.shape) for name, parameter in learner.named_parameters()}
    shard(learner, CPU, group)  # type: ignore[arg-type]
    held = {name: tuple(parameter.to_local().shape) for name, parameter in learner.named_parameters()}
    assert held.keys() == shapes.keys()
    padded = 0
    for name, (rows, *rest) in shapes.items():
        each = -(-rows // SIZE)  # torch.chunk's
        assert held[name] == (max(0, min(each, rows - each * group.rank)), *rest), name
        padded += SIZE * each * int(torch.Size(rest).numel())
    traffic = step_of(learner, batch, "fsdp", group)
    units = LAYERS + 1
    # What stands outside the layers stays complete until its backward.
    assert traffic.calls["_allgather_base_"] == 2 * LAYERS + 1 and traffic.calls["_reduce_scatter_base_"] == units
    assert traffic.bytes["_reduce_scatter_base_"] == 4 * padded
    assert 4 * padded < traffic.bytes["_allgather_base_"] <= 2 * 4 * padded
    assert group.messages == 2  # what is predicted, and what was used
