"""Parameter groups and state shared by all optimizers: torch's groups, layer-wise learning rates, named state tensors.

The state is saved by parameter name (`exp_avg.backbone.layers.0.ffn.fc_in.weight`), so that neither the order of the
groups nor that of the parameters matters when a run resumes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmtool.errors import UserError
from lmtool.runs.checkpoints import complete, cut_like, is_cut
from lmtool.types import Learner, ParameterGroup, part_of

HEAD, EMBEDDINGS = "head", "embeddings"
_PARTS = ("backbone", "heads", "objective")


def levels(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of parameters, in the order of their model, by the level they stand at, from the top down: "head" (all
    that is no backbone; maybe empty), "layer 2", "layer 1" (with several stacks "decoder layer 1", ...), "embeddings".

    What stands in a stack, but in no layer of it (its final norm), belongs to its top layer; in a backbone without
    layers to the head. Tables of positions and virtual tokens belong to the embeddings.
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
            at = path.index("layers")
            stacks.setdefault(".".join(path[:at]), {}).setdefault(int(path[at + 1]), []).append(name)
        else:
            outside.append(name)
    for name in outside:
        layers = next((stacks[stack] for stack in reversed(stacks) if name.startswith(f"{stack}.")), {0: head})
        layers[max(layers)].append(name)
    ordered = {HEAD: head}
    for stack in reversed(stacks):
        title = f"{stack.rpartition('.')[2]} layer" if len(stacks) > 1 else "layer"
        ordered |= {f"{title} {number + 1}": stacks[stack][number] for number in sorted(stacks[stack], reverse=True)}
    return ordered | ({EMBEDDINGS: embeddings} if embeddings else {})


def by_model(names: Iterable[str]) -> dict[str, list[str]]:
    """Uniform names of parameters by what stands before them: "" for the names of one model."""
    models: dict[str, list[str]] = {}
    for name in names:
        path = name.split(".")
        at = next((number for number, piece in enumerate(path) if piece in _PARTS), 0)
        prefix = "".join(f"{piece}." for piece in path[:at])
        models.setdefault(prefix, []).append(name.removeprefix(prefix))
    return models


def layer_decayed(groups: Sequence[ParameterGroup], names: Iterable[str], decay: float) -> list[ParameterGroup]:
    """The groups, cut by level, with learning rates that fall from the top down: the head's as it is, each level's
    `decay` times that of the level above it.

    names: of all parameters, also of those that do not learn; where several models learn together, each has a prefix of
    its own before the uniform names, and levels of its own. ELECTRA's paper (Clark et al. 2020, table
    7) says no more than this; its code leaves a step out below the head, so that there the top layer has decay^2
    (`n_layers + 2 - depth` in run_finetuning.py). ULMFiT (Howard and Ruder 2018, section 3.2) has 1/2.6.
    """
    if decay == 1:
        return list(groups)
    depths = {
        f"{prefix}{name}": depth
        for prefix, own in by_model(names).items()
        for depth, members in enumerate(levels(own).values())
        for name in members
    }
    cut = []
    for group in groups:
        of_depth: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group.parameters:
            of_depth.setdefault(depths[name], []).append((name, parameter))
        cut += [
            replace(group, parameters=members, learning_rate_scale=group.learning_rate_scale * decay**depth)
            for depth, members in sorted(of_depth.items())
        ]
    return cut


# What `clip_grads_with_norm_` adds to the norm before it divides by it.
_CLIP_EPSILON = 1e-6


class PlainOptimizer(Optimizer):
    """torch's base of optimizers without the decorators that keep its methods out of compiled graphs: their first call
    imports the compiler, which takes a second, and no step of lmtool is compiled."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


def training_groups(learner: Learner, layer_decay: float) -> list[ParameterGroup]:
    """What learns, as an optimizer gets it: the learner's groups, with rates that fall with the depth. layer_decay: of
    the optimizer's configuration."""
    assert isinstance(learner, nn.Module)
    return layer_decayed(learner.parameter_groups(), [name for name, _ in learner.named_parameters()], layer_decay)


def torch_groups(groups: Iterable[ParameterGroup], lr: float, weight_decay: float = 0.0) -> list[dict[str, object]]:
    """The groups as torch's optimizers take them; empty ones are left out.

    A group's learning rate and weight decay are multiples of the configuration's. The loop sets the learning rate
    before each step with `set_learning_rate`.
    """
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
    """Give every group its multiple of the learning rate. Returns the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["learning_rate_scale"]
    return learning_rate


def named_parameters(groups: Sequence[ParameterGroup]) -> dict[str, nn.Parameter]:
    """What learns, by name. ValueError where a parameter stands in two groups: it would be moved twice."""
    named: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for group in groups:
        for name, parameter in group.parameters:
            if name in named or id(parameter) in seen:
                raise ValueError(f"{name} stands in two parameter groups")
            named[name] = parameter
            seen.add(id(parameter))
    return named


def state_tensors(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as `KIND.PARAMETER` -> tensor. A parameter without a gradient so far has none."""
    return {
        f"{kind}.{name}": value
        for name, parameter in named.items()
        for kind, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_state_tensors(optimizer: Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Put a saved state back. UserError where it belongs to other parameters.

    A tensor of the state has its parameter's shape, or is a scalar, or has the shape that the optimizer's own
    `state_shape(kind, parameter)` tells.
    """
    optimizer.state.clear()
    # The step count is read by the fused kernels on the device, and by everything else on the host.
    fused = any(group.get("fused") for group in optimizer.param_groups)
    shape_of = getattr(optimizer, "state_shape", lambda kind, parameter: parameter.shape)
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        parameter = named.get(name)
        if parameter is None or (value.ndim > 0 and value.shape != shape_of(kind, parameter)):
            raise UserError(
                f"the checkpoint's optimizer state is of another model: {name} {tuple(value.shape)}",
                "resume with the configuration the run was started with, or set another name=",
            )
        if value.ndim and is_cut(parameter):
            like = parameter if value.shape == parameter.shape else parameter.new_zeros(value.shape)
            optimizer.state[parameter][kind] = cut_like(value, like).clone()
            continue
        device = parameter.device if value.ndim or fused else torch.device("cpu")
        optimizer.state[parameter][kind] = value.to(device, copy=True)


def gradient_norm(parameters: Sequence[nn.Parameter], clip_norm: float | None) -> Tensor:
    """Norm of all gradients together, on the device, before they are shortened to `clip_norm` at most. A sparse
    gradient has each of its rows once or is made so."""
    sparse = [parameter for parameter in parameters if parameter.grad is not None and parameter.grad.is_sparse]
    for parameter in sparse:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.coalesce()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    stored = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]
    norm = complete(nn.utils.get_total_norm(stored))
    # On a CPU it is known here whether they are shortened; times 1 is a pass over all of them for nothing.
    if clip_norm is None or (norm.device.type == "cpu" and norm + _CLIP_EPSILON <= clip_norm):
        return norm
    dense = [parameter for parameter in parameters if parameter.grad is not None and not parameter.grad.is_sparse]
    nn.utils.clip_grads_with_norm_(dense, clip_norm, norm)
    for parameter in sparse:
        assert parameter.grad is not None
        parameter.grad.values().mul_((clip_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0))
    return norm
