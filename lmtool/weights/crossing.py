"""A checkpoint's weights in another family: where both compute with the same blocks, what differs is the mask, the rows
in front of a table of positions, the number of segments, and biases that one of them lacks.

Blocks are compared as they are built, module by module: their classes, and every number or function that they hold.
What computes another formula is refused. The mask may be another one: an encoder becomes a decoder of the same blocks,
and the other way round (Weller et al. 2025, "Seq vs Seq: An Open Suite of Paired Encoders and Decoders").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lmtool.config.nearest import nearest
from lmtool.config.tables import build, lookup, names
from lmtool.errors import UserError
from lmtool.models.base import OneStack
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.nn.dropout import Dropout
from lmtool.nn.positions import Learned
from lmtool.types import Packed
from lmtool.weights.comparing import difference
from lmtool.weights.heads import CheckpointModel

POSITION, SEGMENT, TABLE = "backbone.embed.position.weight", "backbone.embed.segment.weight", "embed.segment"
# Of these a family has its own number; their tables are cut or grow.
_RESIZED = frozenset({"name", "segments"})
# Held by modules, and no part of a formula: which way a stack reads, what it keeps, the rows of tables.
_FREE = frozenset(
    {"training", "causal", "side", "recomputes", "offset", "max_positions", "num_embeddings", "states_read"}
)
_SHARED = ("position", "depth", "leave", "run", "read")
_SHOWN = 4  # differences in a message
_BIAS = " has no bias, and had one"
_NUMBERED = (str, int, float, bool, tuple, type(None))


@dataclass
class Crossing:
    """The new model, and what became of the tensors, by name. taken: as they are. resized, new: how. left_out: of the
    checkpoint. masks: how the tokens saw each other, and how they do now, where that differs."""

    model: CheckpointModel
    config: ModelConfig
    taken: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    masks: tuple[str, str] | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        changed = {"resized": self.resized, "new": self.new, "left_out": self.left_out}
        return {"taken": self.taken, **changed, "masks": self.masks}


def crossed(source: CheckpointModel, name: str, tensors: Mapping[str, Tensor]) -> Crossing:
    """The model of another family with these weights. name: of the family. tensors: all of the checkpoint.

    UserError where there is no such family, where it computes with other blocks, and where it is the checkpoint's own.
    """
    config = config_of(source, name)
    model = CheckpointModel(build(config, 0), source.state_dict())
    problems = _once(_of_stacks(source.backbone, model.backbone))
    if problems:
        more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        shown = "; ".join(problems[:_SHOWN])
        raise UserError(
            f"model={name} computes with other blocks than {source.backbone.config.name}: {shown}{more}",
            "its weights would mean something else there; train it from random weights, or distil from the checkpoint",
        )
    # A head reads states of its own mask.
    alike = config.architecture == source.backbone.config.architecture
    kept = {head for head in model.heads if alike and head in source.heads}
    kept -= {head for head in kept if list(_of_modules(source.heads[head], model.heads[head]))}
    for head in set(model.heads) - kept:
        del model.heads[head]
    crossing = Crossing(model, config)
    _fill(crossing, source)
    own = {*crossing.taken, *crossing.resized}
    crossing.left_out = [name for name in tensors if name not in own]
    before, after = (type(_stack(part).mask(0, Packed(torch.arange(2), (2,)))).__name__ for part in (source, model))
    crossing.masks = None if before == after else (before, after)
    return crossing


@torch.no_grad()
def largest_difference(source: CheckpointModel, crossing: Crossing) -> float:
    """Of hidden states, between the two models: over one text where the mask is the same, else over texts of a token,
    which sees itself either way."""
    length = min(source.backbone.longest_text, crossing.model.backbone.longest_text, 24)
    tokens = torch.arange(length) * 7919 % source.backbone.config.vocab_size
    sample = Packed(tokens, (length,) if crossing.masks is None else (1,) * length)
    return difference(*(part.eval().hidden(sample) for part in (source, crossing.model)))


def _stack(model: CheckpointModel) -> OneStack:
    assert isinstance(model.backbone, OneStack)
    return model.backbone


def config_of(source: CheckpointModel, name: str) -> ModelConfig:
    """The configuration of a family with the sizes of a checkpoint's. UserError where it cannot have them."""
    old, entry = source.backbone.config, lookup("model", name)
    if entry is None:
        close = nearest(name, names("model"))
        raise UserError(
            f"model={name} is no family", f"did you mean model={close}?" if close else "see `lmtool list model`"
        )
    if name == old.name:
        raise UserError(f"model={name} is the checkpoint's own family", "give another one, or leave model= out")
    family: Any = entry.config
    known = type(old).model_fields.keys() - _RESIZED
    sizes = {key: getattr(old, key) for key in family.model_fields if key in known}
    if "embedding_size" in family.model_fields:
        sizes["embedding_size"] = source.backbone.embed.token.weight.shape[1]
    if "num_key_value_heads" in family.model_fields and isinstance(old, TransformerConfig):
        sizes["num_key_value_heads"] = old.key_value_heads
    try:
        return family(**sizes)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its sizes"
        raise UserError(
            f"model={name} cannot be like model={old.name} of the checkpoint: {where}: {first['msg']}",
            "give another family",
        ) from error


def _once(problems: Iterator[str]) -> list[str]:
    """Those of all layers once, missing biases last."""
    unique = dict.fromkeys(re.sub(r"layers\.\d+", "layers.*", problem) for problem in problems)
    return sorted(unique, key=lambda problem: problem.endswith(_BIAS))


def _of_stacks(source: nn.Module, model: nn.Module) -> Iterator[str]:
    """What two backbones compute in another way, in words."""
    if not isinstance(source, OneStack) or not isinstance(model, OneStack):
        yield "one of them is no single stack of layers"
        return
    if not all(getattr(type(source), part) is getattr(type(model), part) for part in _SHARED):
        yield "its layers are run in another way"
    yield from _of_modules(source, model)
    position = model.embed.position
    if source.embed.segment is not None and model.embed.segment is None and not isinstance(position, Learned):
        yield f"{TABLE} is in the checkpoint alone"


def _of_modules(source: nn.Module, model: nn.Module) -> Iterator[str]:
    before, after = (dict(part.named_modules()) for part in (source, model))
    for name in dict.fromkeys([*before, *after]):
        own, its = before.get(name), after.get(name)
        if name == TABLE or isinstance(own, Dropout) or isinstance(its, Dropout):
            continue
        if own is None or its is None:
            where = "the checkpoint" if its is None else "the family"
            yield f"{name} ({type(own or its).__name__}) is in {where} alone"
        elif isinstance(own, OneStack):
            continue
        elif type(own) is not type(its):
            yield f"{name} is {type(its).__name__}, and was {type(own).__name__}"
        else:
            yield from _of_class(name, own, its)


def _of_class(name: str, own: nn.Module, its: nn.Module) -> Iterator[str]:
    """What two modules of one class hold."""
    before, after = _metadata(own), _metadata(its)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{name} has {key}={_word(after.get(key))}, and had {_word(before.get(key))}"
    if getattr(own, "bias", None) is not None and getattr(its, "bias", None) is None:
        yield f"{name}{_BIAS}"


def _metadata(module: nn.Module) -> dict[str, Any]:
    """The numbers and functions that a module holds."""
    known = {key: value for key, value in vars(module).items() if not key.startswith("_") and key not in _FREE}
    return {key: value for key, value in known.items() if isinstance(value, _NUMBERED) or callable(value)}


def _word(value: Any) -> str:
    """A number, or the name of a function."""
    if isinstance(value, partial):
        return f"{_word(value.func)} {' '.join(map(str, value.keywords.values()))}"
    return str(getattr(value, "__name__", value))


@torch.no_grad()
def _fill(crossing: Crossing, source: CheckpointModel) -> None:
    """Copy the weights into the new model."""
    given: Mapping[str, Tensor] = source.state_dict()
    for name, tensor in crossing.model.state_dict().items():
        known = given.get(name)
        if known is None:
            # Modules are equal but for a bias that the checkpoint lacks, and its table of segments.
            tensor.zero_()
            crossing.new[name] = "zero"
            continue
        values, how = known, ""
        if name == POSITION:
            values, how = _positions(source, crossing.model, given)
        elif name == SEGMENT and len(known) != len(tensor):
            rows = [row if row < len(known) else 0 for row in range(len(tensor))]
            values, how = known[rows], f"{len(tensor)} rows, and were {len(known)}; the first stands for those it lacks"
        tensor.copy_(values)
        if how:
            crossing.resized[name] = how
        else:
            crossing.taken.append(name)


def _positions(source: CheckpointModel, model: CheckpointModel, given: Mapping[str, Tensor]) -> tuple[Tensor, str]:
    """The rows of learned positions, which begin elsewhere, and carry the segment of a text where the family has no
    table of these."""
    was, now = source.backbone.embed.position, model.backbone.embed.position
    if not isinstance(was, Learned) or not isinstance(now, Learned):
        return given[POSITION], ""
    values, changes = was.weight[was.offset :], []
    if SEGMENT in given and model.backbone.embed.segment is None:
        values = values + given[SEGMENT][0]
        changes.append("the first row of the segments is added")
    if was.offset != now.offset:
        changes.append(f"position 0 is in row {now.offset}, and was in row {was.offset}")
    ahead = was.weight[: now.offset] if was.offset == now.offset else values.new_zeros(now.offset, values.shape[1])
    return torch.cat([ahead, values]), "; ".join(changes)
