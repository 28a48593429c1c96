"""`lmtool import model=`: a pretrained checkpoint's weights in another family, tensor by tensor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lmtool.config.nearest import nearest
from lmtool.config.saved import JsonObject
from lmtool.config.tables import build, lookup, names
from lmtool.errors import CheckFailed, UserError
from lmtool.models.base import OneStack
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.nn.dropout import Dropout
from lmtool.nn.positions import Learned
from lmtool.reporting.console import Output
from lmtool.resolver.schema.run import ImportConfig
from lmtool.session.trained import classifies
from lmtool.system.secrets import masked
from lmtool.types import Packed
from lmtool.weights.comparing import ROUNDING, difference
from lmtool.weights.exporting import ImportedModel, require_new, write_import
from lmtool.weights.folders import hf_folder
from lmtool.weights.heads import CheckpointModel
from lmtool.weights.load import load
from lmtool.weights.reading import read

POSITION, SEGMENT, TABLE = "backbone.embed.position.weight", "backbone.embed.segment.weight", "embed.segment"
# Sizes that differ by family; their tables are cut or extended.
_RESIZED = frozenset({"name", "segments"})
# Attributes that do not affect a module's formula: direction, recomputation, table sizes.
_FREE = frozenset(
    {"training", "causal", "side", "recomputes", "offset", "max_positions", "num_embeddings", "states_read"}
)
_SHARED = ("position", "depth", "leave", "run", "read")
_MOST_REPORTED = 4  # differences in a message
_BIAS = " has no bias, and had one"
_COMPARABLE = (str, int, float, bool, tuple, type(None))


@dataclass
class ArchitectureConversion:
    """The new model, and what happened to each tensor, by name. taken: copied unchanged. resized, new: with a
    description. left_out: not copied. masks: attention before and after, if it changed."""

    model: CheckpointModel
    config: ModelConfig
    taken: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    masks: tuple[str, str] | None = None

    def plain(self) -> JsonObject:
        """As JSON."""
        changed = {"resized": self.resized, "new": self.new, "left_out": self.left_out}
        return {"taken": self.taken, **changed, "masks": self.masks}


def convert_architecture(source: CheckpointModel, name: str, tensors: Mapping[str, Tensor]) -> ArchitectureConversion:
    """The model of another family with these weights. name: of the family. tensors: all of the checkpoint.

    UserError if there is no such family, if its blocks compute something else, or if it is the checkpoint's own.
    """
    config = config_of(source, name)
    model = CheckpointModel(build(config, 0), source.state_dict())
    differences = _once(_stack_differences(source.backbone, model.backbone))
    if differences:
        more = f" (and {len(differences) - _MOST_REPORTED} more)" if len(differences) > _MOST_REPORTED else ""
        message = "; ".join(differences[:_MOST_REPORTED])
        raise UserError(
            f"model={name} computes with other blocks than {source.backbone.config.name}: {message}{more}",
            "its weights would mean something else there; train it from random weights, or distil from the checkpoint",
        )
    # A head only fits states of the same mask.
    same_architecture = config.architecture == source.backbone.config.architecture
    shared_heads = {head for head in model.heads if same_architecture and head in source.heads}
    shared_heads -= {head for head in shared_heads if list(_module_differences(source.heads[head], model.heads[head]))}
    for head in set(model.heads) - shared_heads:
        del model.heads[head]
    conversion = ArchitectureConversion(model, config)
    _fill(conversion, source)
    copied = {*conversion.taken, *conversion.resized}
    conversion.left_out = [name for name in tensors if name not in copied]
    before, after = (type(_stack(part).mask(0, Packed(torch.arange(2), (2,)))).__name__ for part in (source, model))
    conversion.masks = None if before == after else (before, after)
    return conversion


@torch.no_grad()
def largest_difference(source: CheckpointModel, conversion: ArchitectureConversion) -> float:
    """Largest difference of hidden states: over one text if the mask is the same, otherwise over texts of one token,
    which attends to itself in any case."""
    length = min(source.backbone.longest_text, conversion.model.backbone.longest_text, 24)
    tokens = torch.arange(length) * 7919 % source.backbone.config.vocab_size
    sample = Packed(tokens, (length,) if conversion.masks is None else (1,) * length)
    return difference(*(part.eval().hidden(sample) for part in (source, conversion.model)))


def _stack(model: CheckpointModel) -> OneStack:
    assert isinstance(model.backbone, OneStack)
    return model.backbone


def config_of(source: CheckpointModel, name: str) -> ModelConfig:
    """The family's configuration with a checkpoint's sizes. UserError if it does not support them."""
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


def _once(differences: Iterator[str]) -> list[str]:
    """Each difference once for all layers, missing biases last."""
    unique = dict.fromkeys(re.sub(r"layers\.\d+", "layers.*", problem) for problem in differences)
    return sorted(unique, key=lambda problem: problem.endswith(_BIAS))


def _stack_differences(source: nn.Module, model: nn.Module) -> Iterator[str]:
    """Descriptions of what two backbones compute differently."""
    if not isinstance(source, OneStack) or not isinstance(model, OneStack):
        yield "one of them is no single stack of layers"
        return
    if not all(getattr(type(source), part) is getattr(type(model), part) for part in _SHARED):
        yield "its layers are run in another way"
    yield from _module_differences(source, model)
    position = model.embed.position
    if source.embed.segment is not None and model.embed.segment is None and not isinstance(position, Learned):
        yield f"{TABLE} is in the checkpoint alone"


def _module_differences(source: nn.Module, model: nn.Module) -> Iterator[str]:
    before, after = (dict(part.named_modules()) for part in (source, model))
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if name == TABLE or isinstance(old, Dropout) or isinstance(new, Dropout):
            continue
        if old is None or new is None:
            where = "the checkpoint" if new is None else "the family"
            yield f"{name} ({type(old or new).__name__}) is in {where} alone"
        elif isinstance(old, OneStack):
            continue
        elif type(old) is not type(new):
            yield f"{name} is {type(new).__name__}, and was {type(old).__name__}"
        else:
            yield from _attribute_differences(name, old, new)


def _attribute_differences(name: str, old: nn.Module, new: nn.Module) -> Iterator[str]:
    """Differences between two modules of one class."""
    before, after = _settings(old), _settings(new)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{name} has {key}={_word(after.get(key))}, and had {_word(before.get(key))}"
    if getattr(old, "bias", None) is not None and getattr(new, "bias", None) is None:
        yield f"{name}{_BIAS}"


def _settings(module: nn.Module) -> JsonObject:
    """A module's numeric and function attributes."""
    known = {key: value for key, value in vars(module).items() if not key.startswith("_") and key not in _FREE}
    return {key: value for key, value in known.items() if isinstance(value, _COMPARABLE) or callable(value)}


def _word(value: Any) -> str:
    """A number, or the name of a function."""
    if isinstance(value, partial):
        return f"{_word(value.func)} {' '.join(map(str, value.keywords.values()))}"
    return str(getattr(value, "__name__", value))


@torch.no_grad()
def _fill(conversion: ArchitectureConversion, source: CheckpointModel) -> None:
    """Copy the weights into the new model."""
    tensors: Mapping[str, Tensor] = source.state_dict()
    for name, tensor in conversion.model.state_dict().items():
        known = tensors.get(name)
        if known is None:
            # Modules are equal but for a bias that the checkpoint lacks, and its table of segments.
            tensor.zero_()
            conversion.new[name] = "zero"
            continue
        values, how = known, ""
        if name == POSITION:
            values, how = _positions(source, conversion.model, tensors)
        elif name == SEGMENT and len(known) != len(tensor):
            rows = [row if row < len(known) else 0 for row in range(len(tensor))]
            values, how = known[rows], f"{len(tensor)} rows, and were {len(known)}; the first stands for those it lacks"
        tensor.copy_(values)
        if how:
            conversion.resized[name] = how
        else:
            conversion.taken.append(name)


def _positions(source: CheckpointModel, model: CheckpointModel, tensors: Mapping[str, Tensor]) -> tuple[Tensor, str]:
    """The rows of learned positions, which may start at another row and include the segment if the family has no table
    for it."""
    was, now = source.backbone.embed.position, model.backbone.embed.position
    if not isinstance(was, Learned) or not isinstance(now, Learned):
        return tensors[POSITION], ""
    values, changes = was.weight[was.offset :], []
    if SEGMENT in tensors and model.backbone.embed.segment is None:
        values = values + tensors[SEGMENT][0]
        changes.append("the first row of the segments is added")
    if was.offset != now.offset:
        changes.append(f"position 0 is in row {now.offset}, and was in row {was.offset}")
    ahead = was.weight[: now.offset] if was.offset == now.offset else values.new_zeros(now.offset, values.shape[1])
    return torch.cat([ahead, values]), "; ".join(changes)


REPORT = "crossed.json"
_KIND = {"Full": "every token sees the whole text", "Causal": "a token sees itself and what is before it"}


def import_architecture(config: ImportConfig, name: str) -> None:
    """Write the checkpoint in the family, read it back, and print what happened to each tensor.

    UserError if the checkpoint was tuned, or if the family's blocks compute something else.
    """
    for key in ("tokenizer", "data"):
        if getattr(config, key) is not None:
            raise UserError(
                f"model={name} and {key}={getattr(config, key)}: one of them at a time", "import what comes out again"
            )
    folder = Path(config.output).expanduser()
    require_new(folder)
    folder_on_hub = hf_folder(config.checkpoint, config.offline)
    loaded, weights = load(config.checkpoint, offline=config.offline), read(config.checkpoint, config.offline)
    tuned = loaded.saved.get("tuning") or loaded.saved.get("task")
    if tuned or (folder_on_hub is not None and classifies(folder_on_hub, weights)):
        raise UserError(
            f"model={name}: checkpoint={config.checkpoint} was finetuned",
            "give the pretrained checkpoint, and finetune what comes out",
        )
    conversion = convert_architecture(loaded.model.parts, name, weights.tensors)
    tensors = conversion.model.state_dict()
    source = {"checkpoint": config.checkpoint, "revision": weights.revision}
    report = {REPORT: {"checkpoint": masked(config.checkpoint), "model": name, **conversion.plain()}}
    write_import(ImportedModel(tensors, conversion.config, loaded.tokenizer, source, files=report), folder)

    reloaded = load(str(folder), offline=True).model.parts.state_dict()
    same = reloaded.keys() == tensors.keys() and all(
        torch.equal(tensor, reloaded[name]) for name, tensor in tensors.items()
    )
    difference = largest_difference(loaded.model.parts, conversion)
    _tell(folder, loaded.config.name, conversion, difference)
    if not same or not difference < ROUNDING:
        raise CheckFailed(f"{folder} is not what was written", "see the disk, and keep the checkpoint")


def _tell(folder: Path, before: str, conversion: ArchitectureConversion, difference: float) -> None:
    output = Output()
    output.line(f"{folder} · model={conversion.config.name} with the weights of model={before}")
    rows = [("taken", _these(conversion.taken))]
    rows += [("resized", f"{name}: {how}") for name, how in conversion.resized.items()]
    rows += [("new", f"{_these(conversion.new)}: zero")] if conversion.new else []
    rows.append(("left out", _these(conversion.left_out)))
    sample = "a text of the same tokens"
    if conversion.masks is not None:
        rows.append(("mask", " · was: ".join(_KIND.get(mask, mask) for mask in reversed(conversion.masks))))
        sample = "texts of one token"
    rows.append(("states", f"largest difference {difference:.3g} over {sample}"))
    output.rows(rows)


def _these(names: Iterable[str]) -> str:
    """The modules of these tensors, once for all layers, with counts."""
    counts = Counter(re.sub(r"layers\.\d+", "layers.*", name.rpartition(".")[0]) for name in names)
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "nothing"
