"""Optimizers match their references, respect parameter groups, and resume bit for bit."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.runs import checkpoints
from lmtool.training.configs import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    InverseSqrtConfig,
    LambConfig,
    MuonConfig,
    OptimizerConfig,
    StableAdamWConfig,
    is_hidden_matrix,
)
from lmtool.training.loop import train
from lmtool.training.optimizers import load_state_tensors, named_parameters, set_learning_rate, state_tensors
from lmtool.types import ParameterGroup

from .fakes import FakeLearner, FakeLoader, evaluator, open_run, settings

SHAPES = {
    "embed.weight": (7, 4),
    "layers.0.ffn.fc_in.weight": (6, 4),
    "layers.0.ffn.fc_in.bias": (6,),
    "layers.0.norm1.weight": (4,),
    "layers.0.stack": (2, 3, 5),
    "gate": (1,),
}
EVERY = {
    "adamw": AdamWConfig(lr=0.01),
    "adamw_scaled": AdamWConfig(lr=0.02, scale_parameter=True, weight_decay=0.1),
    "adam": AdamConfig(lr=0.01, l2=0.1),
    "adafactor": AdafactorConfig(),
    "adafactor_mean": AdafactorConfig(lr=0.01, beta1=0.9, weight_decay=0.1, scale_parameter=False),
    "lamb": LambConfig(lr=0.01),
    "stable_adamw": StableAdamWConfig(lr=0.01),
    "muon": MuonConfig(lr=0.01),
}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    named = {name: nn.Parameter(0.3 * torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    named["gate"].data.zero_()
    return named


def gradients(steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {name: 10 ** (step % 3 - 2) * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for step in range(steps)
    ]


def groups_of(named: dict[str, nn.Parameter], **scales: float) -> list[ParameterGroup]:
    decay = [(name, parameter) for name, parameter in named.items() if parameter.ndim > 1]
    rest = [(name, parameter) for name, parameter in named.items() if parameter.ndim < 2]
    return [ParameterGroup("decay", decay, **scales), ParameterGroup("rest", rest, weight_decay_scale=0.0)]


def optimized(
    config: OptimizerConfig, rate: Callable[[int], float] = lambda step: 0.01, steps: int = 12
) -> dict[str, Any]:
    """The parameters after some steps of lmtool's optimizer."""
    named = parameters()
    optimizer = build(config, groups_of(named))
    for step, given in enumerate(gradients(steps), start=1):
        set_learning_rate(optimizer, rate(step))
        for name, parameter in named.items():
            parameter.grad = given[name].clone()
        optimizer.step()
    return named


def reference(step_of: Callable[[str, torch.Tensor, torch.Tensor, int], None], steps: int = 12) -> dict[str, Any]:
    """The parameters after some steps of a plain loop; step_of(name, parameter, gradient, step) updates in place."""
    named = parameters()
    for step, given in enumerate(gradients(steps), start=1):
        for name, parameter in named.items():
            with torch.no_grad():
                step_of(name, parameter, given[name], step)
    return named


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    start = parameters()
    for name, tensor in expected.items():
        assert not torch.equal(tensor, start[name])
        torch.testing.assert_close(actual[name], tensor, rtol=1e-6, atol=1e-6)


def transformers_adafactor(decay: float, rate: Callable[[int], float] | None = None, **options: Any) -> dict[str, Any]:
    named = parameters()
    groups = groups_of(named)
    optimizer = transformers.Adafactor(
        [{"params": [parameter for _, parameter in group.parameters], "weight_decay": decay * group.weight_decay_scale}
         for group in groups],
        lr=None if rate is None else 1.0, relative_step=rate is None, **options,
    )  # fmt: skip
    for step, given in enumerate(gradients(12), start=1):
        for name, parameter in named.items():
            parameter.grad = given[name].clone()
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        optimizer.step()
    return named


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("beta1", [None, 0.9])
def test_adafactor_matches_transformers(scale: bool, beta1: float | None) -> None:
    def rate(step: int) -> float:
        return 0.02 / step

    config = AdafactorConfig(scale_parameter=scale, beta1=beta1, clip_threshold=0.7, decay_rate=0.6, weight_decay=0.1)
    expected = transformers_adafactor(
        0.1, rate=rate, scale_parameter=scale, beta1=beta1, clip_threshold=0.7, decay_rate=-0.6
    )
    assert_equal(optimized(config, rate), expected)


@pytest.mark.parametrize("warmup_init", [False, True])
def test_adafactor_schedule_matches_relative_steps(warmup_init: bool) -> None:
    schedule = build(InverseSqrtConfig(warmup_steps=10_000, warmup_start=0.0 if warmup_init else 1.0))
    config = AdafactorConfig()
    for step in (1, 77, 9_999, 10_000, 10_001, 524_288):
        first = 1e-6 * step if warmup_init else 1e-2
        assert config.lr * schedule(step, math.inf) == pytest.approx(min(first, 1 / math.sqrt(step)))
    actual = optimized(config, lambda step: config.lr * schedule(step, math.inf))
    assert_equal(actual, transformers_adafactor(0.0, warmup_init=warmup_init))


def test_adafactor_state_is_row_and_column_means() -> None:
    matrix = nn.Parameter(torch.randn(30, 20))
    optimizer = build(AdafactorConfig(), [ParameterGroup("all", [("matrix", matrix)])])
    matrix.grad = torch.randn(30, 20)
    optimizer.step()
    assert sum(state.numel() for state in state_tensors(optimizer, {"matrix": matrix}).values()) == 30 + 20 + 1


def adam_direction(means: dict[str, Any], name: str, gradient: Any, step: int, betas: Any, epsilon: float) -> Any:
    mean, square = means.setdefault(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
    mean = betas[0] * mean + (1 - betas[0]) * gradient
    square = betas[1] * square + (1 - betas[1]) * gradient**2
    means[name] = mean, square
    return (mean / (1 - betas[0] ** step)) / ((square / (1 - betas[1] ** step)).sqrt() + epsilon)


def test_lamb_matches_paper() -> None:
    means: dict[str, Any] = {}

    def step_of(name: str, parameter: torch.Tensor, gradient: torch.Tensor, step: int) -> None:
        update = adam_direction(means, name, gradient, step, (0.9, 0.999), 1e-6)
        ratio = torch.tensor(1.0)
        if parameter.ndim > 1:
            update = update + 0.1 * parameter
            ratio = parameter.norm() / update.norm()
        parameter -= 0.01 * ratio * update

    assert_equal(optimized(LambConfig(weight_decay=0.1)), reference(step_of))


def test_stable_adamw_matches_paper() -> None:
    """An unusually large gradient lowers the learning rate."""
    means: dict[str, Any] = {}
    surprises: list[float] = []

    def step_of(name: str, parameter: torch.Tensor, gradient: torch.Tensor, step: int) -> None:
        update = adam_direction(means, name, gradient, step, (0.9, 0.98), 1e-6)
        square = means[name][1] / (1 - 0.98**step)
        surprises.append(float((gradient**2 / square.clamp(min=1e-12)).mean().sqrt()))
        rate = 0.01 / max(1.0, surprises[-1])
        parameter *= 1 - rate * (0.1 if parameter.ndim > 1 else 0.0)
        parameter -= rate * update

    assert_equal(optimized(StableAdamWConfig(weight_decay=0.1)), reference(step_of))
    assert max(surprises) > 1.0 > min(surprises)


def test_lamb_updates_zero_parameter() -> None:
    matrix = nn.Parameter(torch.zeros(3, 2))
    optimizer = build(LambConfig(lr=0.5), [ParameterGroup("all", [("matrix", matrix)])])
    matrix.grad = torch.ones(3, 2)
    optimizer.step()
    torch.testing.assert_close(matrix.data, torch.full((3, 2), -0.5))


def test_scaled_adamw_matches_reference() -> None:
    means: dict[str, Any] = {}

    def step_of(name: str, parameter: torch.Tensor, gradient: torch.Tensor, step: int) -> None:
        update = adam_direction(means, name, gradient, step, (0.9, 0.999), 1e-8)
        rate = 0.01 * max(1e-3, float(parameter.square().mean().sqrt()))
        if parameter.ndim > 1:
            parameter *= 1 - 0.01 * 0.1
        parameter -= rate * update

    assert_equal(optimized(AdamWConfig(scale_parameter=True, weight_decay=0.1)), reference(step_of))


def test_adam_l2_penalty_is_in_gradient() -> None:
    means: dict[str, Any] = {}

    def step_of(name: str, parameter: torch.Tensor, gradient: torch.Tensor, step: int) -> None:
        if parameter.ndim > 1:
            gradient = gradient + 0.1 * parameter
        parameter -= 0.01 * adam_direction(means, name, gradient, step, (0.9, 0.98), 1e-9)

    actual = optimized(AdamConfig(l2=0.1, betas=(0.9, 0.98), epsilon=1e-9))
    assert_equal(actual, reference(step_of))
    plain = optimized(AdamWConfig(weight_decay=0.1, betas=(0.9, 0.98), epsilon=1e-9))
    assert not torch.allclose(actual["embed.weight"], plain["embed.weight"], atol=1e-4)


def test_muon_updates_hidden_matrices_and_adamw_others() -> None:
    hidden = [name for name, parameter in parameters().items() if is_hidden_matrix(name, parameter.ndim)]
    assert hidden == ["layers.0.ffn.fc_in.weight"]
    table = nn.Parameter(torch.zeros(5, 4))
    assert not is_hidden_matrix("backbone.layers.0.self_attn.position.keys", table.ndim)
    config = MuonConfig(weight_decay=0.1)
    actual, beside = optimized(config), optimized(AdamWConfig(betas=(0.9, 0.95), weight_decay=0.1))
    for name in set(SHAPES) - set(hidden):
        assert torch.equal(actual[name], beside[name])

    own = parameters()[hidden[0]]
    torchs = torch.optim.Muon([own], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for given in gradients(12):
        own.grad = given[hidden[0]].clone()
        torchs.step()
    assert torch.equal(actual[hidden[0]], own)


def test_muon_without_hidden_matrices_is_refused() -> None:
    head = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(UserError, match="for the matrices of the layers, but none of them is trained"):
        build(MuonConfig(), [ParameterGroup("head", [("heads.sequence.weight", head)])])


@pytest.mark.parametrize("name", list(EVERY))
def test_groups_scale_learning_rate_and_decay(name: str) -> None:
    """A group scale of 0.5 equals half the learning rate, and groups without decay are unchanged by zero gradients."""
    config = EVERY[name]
    halves = []
    for scale, rate in ((0.5, 0.02), (1.0, 0.01)):
        named = parameters()
        optimizer = build(config, groups_of(named, learning_rate_scale=scale))
        for given in gradients(3):
            set_learning_rate(optimizer, rate)
            for key, parameter in named.items():
                parameter.grad = given[key].clone()
            optimizer.step()
        halves.append(named)
    for key in ("embed.weight", "layers.0.ffn.fc_in.weight", "layers.0.stack"):
        torch.testing.assert_close(halves[0][key], halves[1][key], rtol=1e-6, atol=1e-7)

    decays = config.model_copy(update={"l2" if name == "adam" else "weight_decay": 0.5})
    named, start = parameters(), parameters()
    optimizer = build(decays, groups_of(named))
    set_learning_rate(optimizer, 0.1)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, parameter in named.items():
        assert torch.equal(parameter, start[key]) == (parameter.ndim < 2), key


class Layered(FakeLearner):
    """The fake learner with its matrix in a layer, so that Muon updates it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.dense])


def run_training(folder: Path, config: OptimizerConfig, max_steps: int) -> Layered:
    learner = Layered()
    groups = [
        ParameterGroup(
            group.name,
            [(name.replace("dense.", "layers.0."), parameter) for name, parameter in group.parameters],
            weight_decay_scale=group.weight_decay_scale,
        )
        for group in learner.parameter_groups()
    ]
    learner.parameter_groups = lambda: groups  # type: ignore[method-assign]
    with open_run(folder) as run:
        train(
            learner, FakeLoader(), evaluator(learner), run,
            settings(max_steps=max_steps, evaluate_every=4, optimizer=config),
        )  # fmt: skip
    return learner


@pytest.mark.parametrize("name", list(EVERY))
def test_resume_matches_uninterrupted_run(name: str, tmp_path: Path) -> None:
    """A run of 8 steps, and a run resumed from its checkpoint of step 4."""
    whole = run_training(tmp_path / "whole", EVERY[name], 8)
    run_training(tmp_path / "cut", EVERY[name], 8)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000008")
    on = run_training(tmp_path / "cut", EVERY[name], 8)
    for key, tensor in whole.state_dict().items():
        assert torch.equal(on.state_dict()[key], tensor), key
    states = [
        checkpoints.read_tensors(tmp_path / run / "checkpoints" / "step_00000008", checkpoints.OPTIMIZER)
        for run in ("whole", "cut")
    ]
    assert states[0].keys() == states[1].keys() and states[0]
    assert all(torch.equal(states[1][key], tensor) for key, tensor in states[0].items())
    assert not torch.equal(whole.dense.weight, Layered().dense.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(EVERY))
def test_loaded_state_continues_on_device(name: str) -> None:
    """State loaded from the host gives the same next step."""

    def on_device() -> tuple[dict[str, nn.Parameter], Any]:
        named = {key: nn.Parameter(parameter.detach().cuda()) for key, parameter in parameters().items()}
        return named, build(EVERY[name], groups_of(named))

    def step(named: dict[str, nn.Parameter], optimizer: Any, given: dict[str, torch.Tensor]) -> None:
        for key, parameter in named.items():
            parameter.grad = given[key].cuda()
        optimizer.step()

    (named, optimizer), (on, fresh), given = on_device(), on_device(), gradients(3)
    for gradient in given[:2]:
        step(named, optimizer, gradient)
    with torch.no_grad():
        for key, tensor in on.items():
            tensor.copy_(named[key])
    load_state_tensors(fresh, on, {key: tensor.cpu() for key, tensor in state_tensors(optimizer, named).items()})
    step(named, optimizer, given[2])
    step(on, fresh, given[2])
    assert all(torch.equal(on[key], tensor) for key, tensor in named.items())


@pytest.mark.parametrize("name", list(EVERY))
def test_optimizer_state_is_restored_by_name(name: str) -> None:
    named = parameters()
    optimizer = build(EVERY[name], groups_of(named))
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = {key: state.clone() for key, state in state_tensors(optimizer, named).items()}
    assert {key.partition(".")[2] for key in saved} == set(SHAPES)
    fresh = build(EVERY[name], list(reversed(groups_of(named))))
    load_state_tensors(fresh, named_parameters(groups_of(named)), saved)
    back = state_tensors(fresh, named)
    assert back.keys() == saved.keys() and all(torch.equal(back[key], state) for key, state in saved.items())
    largest = max(saved, key=lambda key: saved[key].numel())
    with pytest.raises(UserError, match="another model"):
        load_state_tensors(fresh, named, saved | {largest: torch.zeros(11, 13)})
