"""The memory that a run needs, computed from its learner on the meta device, and the available memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import cast

import torch
from pydantic import ValidationError
from torch import nn

from lmtool.config.saved import JsonMapping
from lmtool.config.tables import Choice, build
from lmtool.costs.plan import VALUE_BYTES
from lmtool.distillation.configs import CodistillationConfig
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.model import ModelWithHeads
from lmtool.models.configs import ModelConfig
from lmtool.reporting.text import size
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.resolver.teachers import TeacherSpec, saved_teacher
from lmtool.system.ranks import rank_info
from lmtool.training.precision import Precision
from lmtool.types import part_of
from lmtool.weights.assemble import assemble
from lmtool.weights.reading import by_part
from lmtool.weights.saved_model import saved_config, section

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Available bytes on a device; None if the system does not report them.

    On a CPU, the minimum of the machine's available memory with free swap, the limits of its control groups
    (containers, batch systems), and the process's own limit (ulimit -v).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([*_machine(), *_groups(), *_own_limit()], default=None)


def _machine() -> Iterator[int]:
    """The machine's available memory; on systems other than Linux, all of it."""
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        yield 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
    except (OSError, KeyError, ValueError, IndexError):
        if "SC_PHYS_PAGES" in os.sysconf_names:
            yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups() -> Iterator[int]:
    """Available bytes of the process's control groups: the limit minus memory that cannot be reclaimed."""
    try:
        entries = [line.split(":", 2) for line in (_PROC / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        if controllers == "":  # version 2
            root, names = _GROUPS, ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current")
        elif "memory" in controllers.split(","):
            root, names = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "", "")
        else:
            continue
        folder = root / path.strip("/")
        # In a container the path is the host's, and the container's own group is the root.
        for group in [folder, *folder.parents] if folder.is_dir() else [root]:
            limit, used = _number(group / names[0]), _number(group / names[1])
            if limit is not None and used is not None:
                swap = (_number(group / names[2]) or 0) - (_number(group / names[3]) or 0) if names[2] else 0
                yield limit - used + _cached(group) + max(swap, 0)
            if group == root:
                break


def _cached(group: Path) -> int:
    """Pages of files, which can be reclaimed."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))
    except (OSError, ValueError, IndexError):
        return 0


def _own_limit() -> Iterator[int]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        try:
            pages = int((_PROC / "self/statm").read_text().split()[0])
            yield soft - pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            yield soft


def _number(path: Path) -> int | None:
    """The number in a file; None if it is absent or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


TrainingConfig = PretrainConfig | FinetuneConfig


def parameters_by_part(learner: nn.Module) -> dict[str, int]:
    """Parameters of a learner by part ("backbone", "heads.pooler", ...), tied ones once."""
    return {
        part: sum(tensor.numel() for tensor in tensors.values())
        for part, tensors in by_part(dict(learner.named_parameters())).items()
    }


def trainable_by_role(learner: ModelWithHeads) -> dict[str, dict[str, int]]:
    """Parameters by role, tied ones once: trainable at any time of the run (`trainable`), all (`total`), of the
    backbone, added by the tuning method (`method`), of the heads (`head`), and of the objective."""
    by_role = {role: {"trainable": 0, "total": 0} for role in ("backbone", "method", "head")}
    for name, parameter in learner.named_parameters():
        part = part_of(name)
        role = "method" if name in learner.added else "head" if part.startswith("heads.") else part
        counts = by_role.setdefault(role, {"trainable": 0, "total": 0})
        counts["total"] += parameter.numel()
        counts["trainable"] += parameter.numel() * (name in learner.learning)
    return by_role


def planned_teachers(config: RunConfig) -> list[BaseLearner]:
    """The learners of a run's teachers, from their configurations, on the meta device."""
    models = [TeacherSpec(path, saved_teacher(path, config.offline)).model for path in config.distill.checkpoints]
    learned = cast(TrainingConfig, config).learns
    with torch.device("meta"):
        return [learned.learner(build(model, config.seed), None, config.seed) for model in models if model is not None]


def configuration_of_peers(config: TrainingConfig, distill: CodistillationConfig) -> TrainingConfig:
    """The run's configuration with the model of its peers."""
    return config.model_copy(update={"model": model_of_peers(config, distill)})


def planned_learner(config: TrainingConfig) -> BaseLearner:
    """The learner of a run, on the meta device."""
    with torch.device("meta"):
        return assemble(config, None)[0]


def require_memory(config: TrainingConfig, precision: Precision) -> None:
    """Raise UserError, before any allocation, if a run does not fit into memory: see `too_large`."""
    problem = too_large(config, precision)
    if problem is not None:
        raise problem


def too_large(config: TrainingConfig, precision: Precision) -> UserError | None:
    """A message if a run's weights, gradients and optimizer state exceed the available memory: those of all processes
    on a machine that compute on its CPU, divided under parallel=fsdp. Activations are not counted: they depend on the
    batch, which can be split."""
    cpu, rank = torch.device("cpu"), rank_info(os.environ)
    # Weights are created on the host and trained on the device.
    for device, trained in {cpu: False, precision.device: True}.items():
        available = available_bytes(device)
        # All processes of the machine share the host's memory; each has a device.
        processes = rank.local_size if device == cpu else 1
        shards = rank.size if trained and config.parallel == "fsdp" else 1
        needed = _needed_bytes(config, trained) * processes // shards
        if available is not None and needed > available:
            parts = "weights, gradients and optimizer" if trained else "weights"
            parts = (f"shards of {parts}" if shards > 1 else parts) + (f" in {processes} processes" * (processes > 1))
            sizes = f"{parts} need {size(needed)}, {size(available)} are available"
            hint = _smaller(config, trained, available * shards // processes)
            return UserError(f"model={config.model.name} is too large for {device}: {sizes}", hint)
    return None


def _needed_bytes(config: TrainingConfig, trained: bool) -> int:
    """Bytes of everything a run holds: its learner, its teachers, and its peers with their copies."""
    needed, distill = _bytes_of_learner(config, trained), config.distill
    needed += VALUE_BYTES * sum(map(values_of, planned_teachers(config)))
    if not isinstance(distill, CodistillationConfig):
        return needed
    peers = configuration_of_peers(config, distill)
    needed += (distill.learners - 1) * _bytes_of_learner(peers, trained)
    if distill.refresh_steps is not None:
        needed += _bytes_of_learner(config, False) + (distill.learners - 1) * _bytes_of_learner(peers, False)
    return needed


def _bytes_of_learner(config: TrainingConfig, trained: bool) -> int:
    """Bytes of a run's weights; trained: with their gradients and the optimizer's state."""
    learner = planned_learner(config)
    weights = VALUE_BYTES * sum(parameter.numel() for parameter in learner.parameters())
    weights += sum(buffer.nbytes for buffer in learner.buffers())
    tuned_by = config.tuned_by
    if tuned_by is not None and tuned_by.needs_start:
        weights += VALUE_BYTES * sum(tensor.numel() for tensor in learner.backbone.parameters() if tensor.requires_grad)
    if not trained:
        return weights
    learned = {
        name: tuple(parameter.shape) for name, parameter in learner.named_parameters() if parameter.requires_grad
    }
    moments = sum(config.optimizer.state_size(name, shape) for name, shape in learned.items())
    return weights + VALUE_BYTES * (sum(prod(shape) for shape in learned.values()) + moments)


def values_of(learner: nn.Module) -> int:
    """Number of values in a module's parameters."""
    return sum(parameter.numel() for parameter in learner.parameters())


def _smaller(config: TrainingConfig, trained: bool, available: int) -> str:
    """Overrides with which a model fits into the available bytes: one larger size at its default, all larger sizes at
    theirs, or fewer layers."""
    model = config.model
    fields = type(model).model_fields
    larger = {
        key: field.default
        for key, field in fields.items()
        if isinstance(field.default, int) and getattr(model, key) > field.default
    }

    def fits(sizes: JsonMapping) -> bool:
        try:
            smaller = type(model)(**{key: getattr(model, key) for key in fields} | dict(sizes))
        except ValidationError:  # a width that the other sizes do not divide
            return False
        return _needed_bytes(config.model_copy(update={"model": smaller}), trained) <= available

    for sizes in [*({key: default} for key, default in larger.items()), larger]:
        if fits(sizes):
            return "set " + " ".join(f"model.{key}={value}" for key, value in sizes.items())
    low, high = 0, model.num_layers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits({"num_layers": middle}) else (low, middle)
    return f"set model.num_layers={low}, or a smaller model" if low else "use a smaller model: `lmtool list model`"


def saved_values(config: RunConfig, learner: ModelWithHeads) -> int | None:
    """Number of parameters in a checkpoint of a tuned run, which saves only its delta; None for complete
    checkpoints."""
    tuning = learner.tuning
    if tuning is None or config.checkpoint in (None, "none"):
        return None
    delta = tuning.delta(learner)
    return sum(parameter.numel() for name, parameter in learner.named_parameters() if name in delta)


def model_of_peers(config: TrainingConfig, distill: CodistillationConfig) -> ModelConfig:
    """The peers' model: the configured one, that of their checkpoint, or the run's. UserError if it cannot be read."""
    if distill.model is not None or distill.checkpoint is None:
        return distill.model or config.model
    saved = saved_config(distill.checkpoint, config.offline)
    model = section(distill.checkpoint, saved, Choice("model"))
    assert isinstance(model, ModelConfig)
    return model
