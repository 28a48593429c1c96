"""The memory that a run needs for its weights and optimizer, and the memory that is available.

The needed memory is computed from the run's learner on the meta device, before any weight is allocated.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch import nn

from lmtool.config.registry import Choice, build
from lmtool.costs.attention import VALUE_BYTES
from lmtool.distillation.configs.modes import CodistillationConfig
from lmtool.distillation.teacher_configs import TeacherSpec, saved_teacher
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.model import ModelWithHeads
from lmtool.models.configs import ModelConfig
from lmtool.nn.attention import MultiHead
from lmtool.nn.embeddings import StackInput
from lmtool.nn.feedforward import FeedForward
from lmtool.reporting.text import size
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.system.ranks import rank_info
from lmtool.training.configs import OptimizerConfig
from lmtool.training.precision import Precision
from lmtool.types import part_of
from lmtool.weights.assemble import assemble
from lmtool.weights.reading import group_by_part
from lmtool.weights.saved_model import decode_section, saved_config

_PROC, _CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Returns the available bytes on a device; None if the system does not report them. On a CPU it is the minimum of
    three numbers: the machine's available memory with free swap, the bytes that the process's control groups
    (containers, batch systems) leave, and those that its own limit (ulimit -v) leaves."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([*_machine_bytes(), *_control_group_bytes(), *_process_bytes()], default=None)


def _machine_bytes() -> Iterator[int]:
    """On systems other than Linux, all of the machine's memory."""
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
        kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        yield 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
    except (OSError, KeyError, ValueError, IndexError):
        if "SC_PHYS_PAGES" in os.sysconf_names:
            yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group_bytes() -> Iterator[int]:
    """The limit of each of the process's control groups, minus memory that it cannot reclaim."""
    try:
        entries = [line.split(":", 2) for line in (_PROC / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        if controllers == "":  # version 2
            root, names = _CONTROL_GROUPS, ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current")
        elif "memory" in controllers.split(","):
            root, names = _CONTROL_GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "", "")
        else:
            continue
        folder = root / path.strip("/")
        # In a container the path may be that of the host; the container's own group is then the root.
        for group in [folder, *folder.parents] if folder.is_dir() else [root]:
            limit, usage = _read_number(group / names[0]), _read_number(group / names[1])
            if limit is not None and usage is not None:
                swap = (_read_number(group / names[2]) or 0) - (_read_number(group / names[3]) or 0) if names[2] else 0
                yield limit - usage + _reclaimable_bytes(group) + max(swap, 0)
            if group == root:
                break


def _reclaimable_bytes(group: Path) -> int:
    """Cached files, which the system frees when memory is needed."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))
    except (OSError, ValueError, IndexError):
        return 0


def _process_bytes() -> Iterator[int]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        try:
            pages = int((_PROC / "self/statm").read_text().split()[0])
            yield soft - pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            yield soft


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


TrainingConfig = PretrainConfig | FinetuneConfig


def parameters_by_part(learner: nn.Module) -> dict[str, int]:
    """Counts the parameters of each part of a learner ("backbone", "heads.pooler", ...); tied parameters count once."""
    return {
        part: sum(tensor.numel() for tensor in tensors.values())
        for part, tensors in group_by_part(dict(learner.named_parameters())).items()
    }


def parameters_by_block(backbone: nn.Module) -> dict[str, int]:
    """Counts the parameters of a backbone's blocks: "embeddings", "attention", "feed-forward", and "other", such as
    norms. Shared parameters count once, for the first of these; blocks without parameters are left out."""
    kinds = {"embeddings": StackInput, "attention": MultiHead, "feed-forward": FeedForward, "other": nn.Module}
    counts, counted = dict.fromkeys(kinds, 0), set[int]()
    for kind, block in kinds.items():
        for module in backbone.modules():
            for parameter in module.parameters() if isinstance(module, block) else ():
                if id(parameter) not in counted:
                    counted.add(id(parameter))
                    counts[kind] += parameter.numel()
    return {kind: count for kind, count in counts.items() if count}


def trainable_by_role(learner: ModelWithHeads) -> dict[str, dict[str, int]]:
    """Returns, by role, the number of parameters that are trained at any time of the run (`trainable`) and of all
    parameters (`total`). Tied parameters count once. Roles: `backbone`; `method`, the parameters that the tuning method
    added; `head`; and each part of the objective."""
    by_role = {role: {"trainable": 0, "total": 0} for role in ("backbone", "method", "head")}
    for name, parameter in learner.named_parameters():
        part = part_of(name)
        role = "method" if name in learner.added_names else "head" if part.startswith("heads.") else part
        counts = by_role.setdefault(role, {"trainable": 0, "total": 0})
        counts["total"] += parameter.numel()
        counts["trainable"] += parameter.numel() * (name in learner.trainable_names)
    return by_role


def planned_teachers(config: RunConfig) -> list[BaseLearner]:
    """Builds the learners of a run's teachers from their configurations, on the meta device."""
    models = [TeacherSpec(path, saved_teacher(path, config.offline)).model for path in config.distill.checkpoints]
    objective_or_task = cast(TrainingConfig, config).learner_config  # the configuration of the objective or task
    with torch.device("meta"):
        return [
            objective_or_task.learner(build(model, config.seed), None, config.seed)
            for model in models
            if model is not None
        ]


def configuration_of_peers(config: TrainingConfig, distill: CodistillationConfig) -> TrainingConfig:
    """Returns the run's configuration with the model of its peers."""
    return config.model_copy(update={"model": model_of_peers(config, distill)})


def planned_learner(config: TrainingConfig) -> BaseLearner:
    """Builds the learner of a run on the meta device."""
    with torch.device("meta"):
        return assemble(config, None)[0]


def require_memory(config: TrainingConfig, precision: Precision) -> None:
    """Raises UserError, before any weight is allocated, if a run does not fit into memory: see `too_large`."""
    problem = too_large(config, precision)
    if problem is not None:
        raise problem


def too_large(config: TrainingConfig, precision: Precision) -> UserError | None:
    """Returns an error if a run's weights, gradients and optimizer state exceed the available memory; otherwise None.

    On a CPU the needs of all processes of the machine are added; with parallel=fsdp the processes divide one copy.
    Activations are not counted, because they depend on the size of a forward pass, which can be reduced.
    """
    cpu, rank = torch.device("cpu"), rank_info(os.environ)
    # Weights are first created on the host, without gradients, and then trained on the device. If the device is the
    # CPU, the second entry replaces the first.
    for device, trained in {cpu: False, precision.device: True}.items():
        available = available_bytes(device)
        # All processes of the machine share the host's memory; each has a device.
        processes = rank.local_size if device == cpu else 1
        shards = rank.size if trained and config.parallel == "fsdp" else 1
        required_bytes = _needed_bytes(config, trained) * processes // shards
        if available is not None and required_bytes > available:
            parts = "weights, gradients and optimizer" if trained else "weights"
            parts = (f"shards of {parts}" if shards > 1 else parts) + (f" in {processes} processes" * (processes > 1))
            sizes = f"{parts} need {size(required_bytes)}, {size(available)} are available"
            message = f"model={config.model.name} is too large for {device}: {sizes}"
            return UserError(message, _smaller_model_hint(config.model))
    return None


def _needed_bytes(config: TrainingConfig, trained: bool) -> int:
    required_bytes, distill = _bytes_of_learner(config, trained), config.distill
    required_bytes += VALUE_BYTES * sum(map(values_of, planned_teachers(config)))
    if not isinstance(distill, CodistillationConfig):
        return required_bytes
    peers = configuration_of_peers(config, distill)
    required_bytes += (distill.learners - 1) * _bytes_of_learner(peers, trained)
    if distill.refresh_steps is not None:
        required_bytes += _bytes_of_learner(config, False) + (distill.learners - 1) * _bytes_of_learner(peers, False)
    return required_bytes


def _bytes_of_learner(config: TrainingConfig, trained: bool) -> int:
    learner = planned_learner(config)
    weights = VALUE_BYTES * values_of(learner) + sum(buffer.nbytes for buffer in learner.buffers())
    tuning_config = config.tuning_config
    if tuning_config is not None and tuning_config.needs_initial_weights:
        # Such a method keeps the starting values of the trainable weights.
        weights += VALUE_BYTES * sum(tensor.numel() for tensor in learner.backbone.parameters() if tensor.requires_grad)
    if not trained:
        return weights
    trainable, moments = trained_values(learner, config.optimizer)
    copies = 1 if config.weight_average is None else 2  # the gradient, and the average
    return weights + VALUE_BYTES * (copies * trainable + moments)


def trained_values(learner: nn.Module, optimizer: OptimizerConfig) -> tuple[int, int]:
    """Counts the trainable values of a learner, and the values of the optimizer's state."""
    shapes = {name: tuple(value.shape) for name, value in learner.named_parameters() if value.requires_grad}
    return sum(map(prod, shapes.values())), sum(optimizer.state_size(*parameter) for parameter in shapes.items())


def values_of(module: nn.Module) -> int:
    """Counts the values of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _smaller_model_hint(model: ModelConfig) -> str:
    defaults = {name: field.default for name, field in type(model).model_fields.items() if type(field.default) is int}
    larger = {name: default for name, default in defaults.items() if getattr(model, name) > default}
    sizes = " ".join(f"model.{name}={default}" for name, default in larger.items())
    return f"set {sizes}" if sizes else "use a smaller model: `lmtool list model`, or set a lower model.num_layers="


def saved_values(config: RunConfig, learner: ModelWithHeads) -> int | None:
    """Counts the parameters in a checkpoint of a tuned run, which saves only what differs from its starting checkpoint;
    None if checkpoints are complete."""
    tuning = learner.tuning
    if tuning is None or config.checkpoint in (None, "none"):
        return None
    delta = tuning.delta_names(learner)
    return sum(parameter.numel() for name, parameter in learner.named_parameters() if name in delta)


def model_of_peers(config: TrainingConfig, distill: CodistillationConfig) -> ModelConfig:
    """Returns the model of codistillation's peers: distill.model, or the model of distill.checkpoint, or the run's.
    Raises UserError if the checkpoint cannot be read."""
    if distill.model is not None or distill.checkpoint is None:
        return distill.model or config.model
    saved = saved_config(distill.checkpoint, config.offline)
    model = decode_section(distill.checkpoint, saved, Choice("model"))
    assert isinstance(model, ModelConfig)
    return model
