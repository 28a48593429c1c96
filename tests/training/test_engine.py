"""Gradients of two processes equal those of one, also with unused parameters and empty batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtool.training.engine import Plain, engine_for, outside_layers
from lmtool.training.group import ProcessGroup
from lmtool.training.precision import FP32_CPU
from lmtool.training.step import apply_gradients, gradients
from lmtool.types import Batch, Step, StepOutput

from .fakes import FakeLearner, batch_of
from .ranks import Ranks, alone, started


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


class PatchyLearner(FakeLearner):
    """Uses its head only for example 0, and freezes the norm in steps 1 and 4."""

    def counts(self, batch: Batch) -> dict[str, float]:
        counts = super().counts(batch)
        return counts if 0 in batch.examples else {"word": counts["word"]}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        output = super().forward(batch, step)
        if 0 not in batch.examples:
            del output.sums["kind"]
        return output

    def on_step(self, step: int) -> None:
        self.norm.weight.requires_grad_(step not in (1, 4))


Parts = Sequence[Sequence[Sequence[int]]]


def train_steps(group: ProcessGroup, parts: Parts, scaled: bool = False, steps: int = 5) -> list[dict[str, Any]]:
    """Several steps over the same examples.

    Args:
        parts: Examples of each micro-batch by rank; a single process reads all of them.
    """
    learner = PatchyLearner(dropout=0.0).train()
    engine = engine_for(learner, "ddp", group)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    named = dict(learner.named_parameters())
    optimizer = torch.optim.SGD(named.values(), 0.1)
    own = parts[group.rank] if group.size > 1 else [micro for part in parts for micro in part]
    most = max(len(part) for part in parts) if group.size > 1 else len(own)
    idle = tuple(batch_of(np.array([3])) for _ in range(most - len(own)))
    data = Step([batch_of(np.array(micro)) for micro in own], {}, 0.0, idle=idle)
    report = []
    for step in range(1, steps + 1):
        outcome = gradients(engine, data, step, 0, FP32_CPU, scaler)
        scale = 1.0 if scaler is None else scaler.get_scale()
        gradient: dict[str, Tensor | None] = {
            name: None if parameter.grad is None else parameter.grad / scale for name, parameter in named.items()
        }
        norm = apply_gradients(optimizer, scaler, list(named.values()), 1.0)
        terms = {name: float(term) for name, term in outcome.terms.items() if not math.isnan(float(term))}
        report.append(
            {"loss": float(outcome.loss), "terms": terms, "tokens": outcome.tokens, "norm": float(norm)}
            | {"gradients": gradient, "weights": {name: tensor.detach().clone() for name, tensor in named.items()}}
        )
    return report


PARTS: dict[str, Parts] = {
    "two micro-batches each": [[[0, 2], [3, 5]], [[1, 4], [6, 7]]],
    "head used in last micro-batch": [[[3, 5], [0, 2]], [[1, 4], [6, 7]]],
    "unused head": [[[3, 5]], [[1, 4]]],
    "more micro-batches on one rank": [[[0, 2, 5], [4, 7], [3]], [[1, 9]]],
    "no micro-batches on one rank": [[[0, 3]], []],
}


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("scaled", [False, True])
def test_two_processes_match_single_process(two: Ranks, case: str, scaled: bool) -> None:
    expected, (first, second) = alone(train_steps, PARTS[case], scaled), two.run(train_steps, PARTS[case], scaled)
    for step, of_first, of_second in zip(expected, first, second, strict=True):
        assert of_first["loss"] == pytest.approx(step["loss"], rel=1e-6) and of_first["loss"] == of_second["loss"]
        assert of_first["terms"] == pytest.approx(step["terms"], rel=1e-6) and of_first["tokens"] == step["tokens"]
        assert of_first["norm"] == pytest.approx(step["norm"], rel=1e-6)
        for name, gradient in step["gradients"].items():
            assert torch.equal(of_first["weights"][name], of_second["weights"][name])
            if gradient is None:  # None, so that an optimizer skips the parameter
                assert of_first["gradients"][name] is None and of_second["gradients"][name] is None
            else:
                torch.testing.assert_close(of_first["gradients"][name], gradient, rtol=1e-5, atol=1e-6 * step["norm"])
    unused = {name for name, gradient in expected[0]["gradients"].items() if gradient is None}
    assert unused >= {"unused.weight", "norm.weight"}
    assert ("classify.weight" in unused) == (case == "unused head")


def test_single_process_uses_plain_engine() -> None:
    learner = FakeLearner()
    engine = alone(lambda group: engine_for(learner, "ddp", group))
    assert type(engine) is Plain and engine.learner is learner


def test_plain_learner_is_used_without_importing_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import takes a second, and every run uses its learner outside its layers."""
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", None)  # an import would fail
    with outside_layers(FakeLearner()):
        pass
