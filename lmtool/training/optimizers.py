"""Code shared by all optimizers: parameter groups, layer-wise learning rates, clipping and saved state.

The state is saved by parameter name (`exp_avg.backbone.layers.0.ffn.fc_in.weight`), so that a resumed run may have
another order of groups and parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmtool.errors import UserError
from lmtool.training.sharding import full_tensor, is_sharded, shard_like
from lmtool.types import Learner, ParameterGroup, part_of

TorchGroup: TypeAlias = dict[str, Any]
"""A parameter group of a torch optimizer: its parameters and options."""
HEAD, EMBEDDINGS = "head", "embeddings"
_PARTS = ("backbone", "heads", "objective")


def levels(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the names of parameters by level from the top down: "head" (everything outside the backbone; may be
    empty), "layer 2", "layer 1" (with several stacks "decoder layer 1", ...), "embeddings" (with positions and virtual
    tokens).

    Parameters of a stack outside its layers (the final norm) belong to its top layer. In a backbone without layers
    they belong to the head.
    """
    head: list[str] = []
    embeddings: list[str] = []
    outside: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        path = name.split(".")
        if part_of(name) != "backbone":
            head.append(name)
        elif "embed" in path:
            embeddings.append(name)
        elif "layers" in path:
            index = path.index("layers")
            stacks.setdefault(".".join(path[:index]), {}).setdefault(int(path[index + 1]), []).append(name)
        else:
            outside.append(name)
    for name in outside:
        layers = next((stacks[stack] for stack in reversed(stacks) if name.startswith(f"{stack}.")), {0: head})
        layers[max(layers)].append(name)
    by_level = {HEAD: head}
    for stack in reversed(stacks):
        title = f"{stack.rpartition('.')[2]} layer" if len(stacks) > 1 else "layer"
        by_level |= {f"{title} {number + 1}": stacks[stack][number] for number in sorted(stacks[stack], reverse=True)}
    return by_level | ({EMBEDDINGS: embeddings} if embeddings else {})


def names_by_model(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the names of parameters, without the prefix of their model, by that prefix; it is "" for a single
    model."""
    models: dict[str, list[str]] = {}
    for name in names:
        path = name.split(".")
        index = next((number for number, piece in enumerate(path) if piece in _PARTS), 0)
        prefix = "".join(f"{piece}." for piece in path[:index])
        models.setdefault(prefix, []).append(name.removeprefix(prefix))
    return models


def layer_decayed(groups: Sequence[ParameterGroup], names: Iterable[str], decay: float) -> list[ParameterGroup]:
    """Splits groups by level (`levels`), and multiplies the learning rate of each level below the head by `decay`
    relative to the level above. names: all parameters, including frozen ones; each of several models has its own prefix
    and levels.

    This is the rule of ELECTRA's paper (Clark et al. 2020, table 7). Its code has decay^2 at the top layer (`n_layers +
    2 - depth` in run_finetuning.py). ULMFiT's decay is 1/2.6 (Howard and Ruder 2018, section 3.2).
    """
    if decay == 1:
        return list(groups)
    depths = {
        f"{prefix}{name}": depth
        for prefix, names_of_model in names_by_model(names).items()
        for depth, members in enumerate(levels(names_of_model).values())
        for name in members
    }
    split: list[ParameterGroup] = []
    for group in groups:
        members_by_depth: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group.parameters:
            members_by_depth.setdefault(depths[name], []).append((name, parameter))
        split += [
            replace(group, parameters=members, learning_rate_scale=group.learning_rate_scale * decay**depth)
            for depth, members in sorted(members_by_depth.items())
        ]
    return split


_CLIP_EPSILON = 1e-6  # added to the norm in `clip_grads_with_norm_`


class PlainOptimizer(Optimizer):
    """torch's base class of optimizers without the decorators for compiled graphs, whose first call imports the
    compiler and takes a second. lmtool compiles no optimizer step."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


def training_groups(learner: Learner, layer_decay: float) -> list[ParameterGroup]:
    """Returns the learner's parameter groups with layer-wise learning rates."""
    assert isinstance(learner, nn.Module)
    return layer_decayed(learner.parameter_groups(), [name for name, _ in learner.named_parameters()], layer_decay)


def torch_groups(groups: Iterable[ParameterGroup], lr: float, weight_decay: float = 0.0) -> list[TorchGroup]:
    """Returns the groups that have parameters, for torch's optimizers. Their learning rate and weight decay are
    multiples of the configuration's; the loop calls `set_learning_rate` before each step."""
    return [
        {
            "params": [parameter for _, parameter in group.parameters],
            "lr": lr * group.learning_rate_scale,
            "weight_decay": weight_decay * group.weight_decay_scale,
            "learning_rate_scale": group.learning_rate_scale,
            "weight_decay_scale": group.weight_decay_scale,
        }
        for group in groups
        if group.parameters
    ]


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> float:
    """Gives every group its multiple of the learning rate. Returns the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["learning_rate_scale"]
    return learning_rate


def named_parameters(groups: Sequence[ParameterGroup]) -> dict[str, nn.Parameter]:
    """Returns trained parameters by name. Raises ValueError if a parameter is in two groups, where it would be moved
    twice."""
    parameters: dict[str, nn.Parameter] = {}
    parameter_ids: set[int] = set()
    for group in groups:
        for name, parameter in group.parameters:
            if name in parameters or id(parameter) in parameter_ids:
                raise ValueError(f"{name} is in two parameter groups")
            parameters[name] = parameter
            parameter_ids.add(id(parameter))
    return parameters


def state_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the optimizer's state by `KIND.PARAMETER`. A parameter that has had no gradient has no state."""
    return {
        f"{kind}.{name}": value
        for name, parameter in parameters.items()
        for kind, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_state_tensors(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Restores a saved state. Raises UserError if the state belongs to other parameters. A state tensor is a scalar or
    has the shape of its parameter, or that of the optimizer's `state_shape(kind, parameter)`."""
    optimizer.state.clear()
    # Fused kernels read the step count on the device, other optimizers on the host.
    fused = any(group.get("fused") for group in optimizer.param_groups)
    shape_of = getattr(optimizer, "state_shape", lambda kind, parameter: parameter.shape)
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        parameter = parameters.get(name)
        if parameter is None or (value.ndim > 0 and value.shape != shape_of(kind, parameter)):
            raise UserError(
                f"the checkpoint's optimizer state belongs to another model: {name} {tuple(value.shape)}",
                "resume with the run's original configuration, or set another name=",
            )
        if value.ndim and is_sharded(parameter):
            sharded_like = parameter if value.shape == parameter.shape else parameter.new_zeros(value.shape)
            optimizer.state[parameter][kind] = shard_like(value, sharded_like).clone()
            continue
        device = parameter.device if value.ndim or fused else torch.device("cpu")
        optimizer.state[parameter][kind] = value.to(device, copy=True)


_AVERAGE = "average"  # among a parameter's optimizer state, so that it is saved, restored and sharded like it


@torch.no_grad()
def update_average(optimizer: Optimizer, step: int, decay: float) -> None:
    """Updates the exponential moving average of the trained weights (Polyak and Juditsky 1992) after the optimizer's
    step, numbered from 1. Its decay is min(decay, (1 + step) / (10 + step)), as in TensorFlow's
    ExponentialMovingAverage, so that the first weights are soon forgotten. A parameter without a gradient so far has no
    average, but does not change either."""
    states = {parameter: state for parameter, state in optimizer.state.items() if state}
    averages = [state.setdefault(_AVERAGE, parameter.detach().clone()) for parameter, state in states.items()]
    if averages:
        torch._foreach_lerp_(averages, list(states), 1 - min(decay, (1 + step) / (10 + step)))


@torch.no_grad()
def swap_average(optimizer: Optimizer) -> None:
    """Exchanges the trained weights with their averages, in place. Does nothing for parameters without an average."""
    for parameter, state in optimizer.state.items():
        if _AVERAGE in state:
            weights = parameter.detach().clone()
            parameter.copy_(state[_AVERAGE])
            state[_AVERAGE].copy_(weights)


def gradient_norm(parameters: Sequence[nn.Parameter], clip_norm: float | None) -> Tensor:
    """Clips gradients to a total norm of `clip_norm`, and returns their norm before that, on the device. Sparse
    gradients are coalesced."""
    sparse = [parameter for parameter in parameters if parameter.grad is not None and parameter.grad.is_sparse]
    for parameter in sparse:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.coalesce()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]
    norm = full_tensor(nn.utils.get_total_norm(values))
    # On a CPU the norm is known here, which saves a multiplication of all gradients by 1.
    if clip_norm is None or (norm.device.type == "cpu" and norm + _CLIP_EPSILON <= clip_norm):
        return norm
    dense = [parameter for parameter in parameters if parameter.grad is not None and not parameter.grad.is_sparse]
    nn.utils.clip_grads_with_norm_(dense, clip_norm, norm)
    for parameter in sparse:
        assert parameter.grad is not None
        parameter.grad.values().mul_((clip_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0))
    return norm
