"""Captures the learner of a command before its first step, and trains some steps in one or several processes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lmtool.cli import main as cli
from lmtool.config.registry import build
from lmtool.nn.stack import recompute_layers
from lmtool.training.compiling import compiled
from lmtool.training.engine import Plain, engine_for, shard
from lmtool.training.group import ProcessGroup
from lmtool.training.optimizers import named_parameters, set_learning_rate, training_groups
from lmtool.training.precision import FP32_CPU
from lmtool.training.sharding import full_tensor
from lmtool.training.step import apply_gradients, gradients
from tests.commands.conftest import merge_overrides


class Caught(BaseException):
    """A BaseException, which no error handler of the command catches."""


def capture_work(words: Sequence[str]) -> bytes:
    """The pickled learner, loader and settings of a command line when training starts."""

    def train(*arguments: Any, **more: Any) -> None:
        learner, loader, _, _, settings, *_ = arguments
        raise Caught(pickle.dumps((learner, loader, settings)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmtool.session.fit.train", train)
        with pytest.raises(Caught) as catch:
            cli.main(merge_overrides(words))
    return catch.value.args[0]


def train_steps(group: ProcessGroup, work: bytes, steps: int, double: bool = False) -> dict[str, Any]:
    """Trains captured work; returns losses, terms, tokens and read examples by step, the gradients of the first step,
    and the weights after the last. double: computes in fp64."""
    torch.set_num_threads(1)
    learner, loader, settings = pickle.loads(work)
    learner.train()
    if double:
        learner.double()
    if settings.gradient_checkpointing:
        recompute_layers(learner)
    with compiled(settings.compiles, "aot_eager"):  # a fast backend
        return _steps(group, learner, loader, settings, steps)


def _steps(group: ProcessGroup, learner: Any, loader: Any, settings: Any, steps: int) -> dict[str, Any]:
    if settings.parallel == "fsdp" and group.size > 1:
        shard(learner, FP32_CPU.device, group)
    groups = training_groups(learner, settings.optimizer.layer_decay)
    named, optimizer, schedule = named_parameters(groups), build(settings.optimizer, groups), build(settings.schedule)
    engine = engine_for(learner, settings.parallel, group)
    assert (type(engine) is Plain) == (group.size == 1)
    report: dict[str, Any] = {"losses": [], "terms": [], "tokens": [], "read": [], "forwards": []}
    data = iter(loader.steps(None, group.rank, group.size))
    for step in range(1, steps + 1):
        set_learning_rate(optimizer, settings.optimizer.lr * schedule(step, steps))
        of_step = next(data)
        outcome = gradients(engine, of_step, step, settings.seed, FP32_CPU)
        report["losses"].append(float(outcome.loss))
        report["terms"].append({name: float(term) for name, term in outcome.terms.items()})
        report["tokens"].append(outcome.tokens)
        report["read"].append([number for batch in of_step.batches for number in batch.examples.tolist()])
        report["forwards"].append(len(of_step.batches) + len(of_step.idle))
        if step == 1:
            report["gradients"] = {
                name: None if parameter.grad is None else full_tensor(parameter.grad).numpy().copy()
                for name, parameter in named.items()
            }
        apply_gradients(optimizer, None, list(named.values()), settings.optimizer.clip_norm)
    report["weights"] = {name: full_tensor(parameter.detach()).numpy().copy() for name, parameter in named.items()}
    return report
