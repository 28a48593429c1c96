"""`lmtool import model=`: copies the weights of a pretrained checkpoint into a model of another family that computes
the same function."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.config.registry import build, lookup, names
from lmtool.errors import CheckFailed, UserError, nearest
from lmtool.models.base import OneStack
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.nn.dropout import Dropout
from lmtool.nn.positions import Learned
from lmtool.reporting.console import Output
from lmtool.resolver.commands import ImportConfig
from lmtool.session.trained import classifies
from lmtool.system.files import user_path
from lmtool.system.secrets import masked
from lmtool.types import Packed
from lmtool.weights.comparing import ROUNDING_TOLERANCE, relative_difference, same_tensors
from lmtool.weights.exporting import ImportedModel, require_new, write_import
from lmtool.weights.folders import hf_folder
from lmtool.weights.padded_model import load
from lmtool.weights.reading import read
from lmtool.weights.saved_model import CheckpointModel

POSITION, SEGMENT, SEGMENT_MODULE = "backbone.embed.position.weight", "backbone.embed.segment.weight", "embed.segment"
# Configuration fields that may differ between the families; the segment table is truncated or extended.
_RESIZED = frozenset({"name", "segments"})
# Attributes of modules that may differ, because they do not change the formula: direction, recomputation, table sizes.
_MAY_DIFFER = frozenset(
    {"training", "causal", "side", "recomputes", "offset", "max_positions", "num_embeddings", "concatenated_layers"}
)
# Methods of a backbone that must be the same functions in both families.
_SAME_METHODS = ("position", "applied_layers", "leave", "run", "read")
_MAX_REPORTED = 4  # differences in a message
_LOSES_BIAS = " loses its bias"
_COMPARABLE = (str, int, float, bool, tuple, type(None))


@dataclass
class ArchitectureConversion:
    """A converted model, with a record of what happened to each tensor.

    Attributes:
        copied: Names of the tensors that were copied unchanged.
        resized: Names of the tensors whose rows were changed, each with a description of the changes.
        initial_values: Names of the tensors that the source lacks, each with its initial value.
        left_out: Names of the source's tensors that were not copied.
        masks: Class names of the attention mask before and after, if it changed.
    """

    model: CheckpointModel
    config: ModelConfig
    copied: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)
    initial_values: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    masks: tuple[str, str] | None = None

    def plain(self) -> JsonObject:
        """Returns the content of crossed.json."""
        tensor_names = {"resized": self.resized, "new": self.initial_values, "left_out": self.left_out}
        return {"taken": self.copied, **tensor_names, "masks": self.masks}


def convert_architecture(source: CheckpointModel, name: str, tensors: Mapping[str, Tensor]) -> ArchitectureConversion:
    """Builds a model of the family `name` with the weights of a checkpoint. Raises UserError if the family does not
    exist, is the checkpoint's family, or does not compute the same function. tensors: all tensors of the checkpoint,
    of which those that are not copied are listed."""
    config = config_of(source, name)
    model = CheckpointModel(build(config, 0), source.state_dict())
    differences = _merge_layers(_stack_differences(source.backbone, model.backbone))
    if differences:
        more = f" (and {len(differences) - _MAX_REPORTED} more)" if len(differences) > _MAX_REPORTED else ""
        message = "; ".join(differences[:_MAX_REPORTED])
        raise UserError(
            f"model={name} does not compute the same function as model={source.backbone.config.name}: {message}{more}",
            f"train model={name} from random weights, or distill from the checkpoint",
        )
    # A head fits only hidden states that were computed with the attention mask of its training.
    same_architecture = config.architecture == source.backbone.config.architecture
    shared_heads = {head for head in model.heads if same_architecture and head in source.heads}
    shared_heads -= {head for head in shared_heads if list(_module_differences(source.heads[head], model.heads[head]))}
    for head in set(model.heads) - shared_heads:
        del model.heads[head]
    conversion = ArchitectureConversion(model, config)
    _copy_weights(conversion, source)
    copied = {*conversion.copied, *conversion.resized}
    conversion.left_out = [name for name in tensors if name not in copied]
    stacks = (cast(OneStack, part.backbone) for part in (source, model))
    before, after = (type(stack.mask(0, Packed(torch.arange(2), (2,)))).__name__ for stack in stacks)
    conversion.masks = None if before == after else (before, after)
    return conversion


@torch.no_grad()
def largest_difference(source: CheckpointModel, conversion: ArchitectureConversion) -> float:
    """Returns the largest relative difference of the hidden states of both models on a sample: one text if the mask is
    the same, otherwise texts of one token, which any mask lets attend to itself."""
    length = min(source.backbone.longest_text, conversion.model.backbone.longest_text, 24)
    # Multiples of a prime, so that tokens are spread over the vocabulary.
    tokens = torch.arange(length) * 7919 % source.backbone.config.vocab_size
    sample = Packed(tokens, (length,) if conversion.masks is None else (1,) * length)
    return relative_difference(*(part.eval().hidden(sample) for part in (source, conversion.model)))


def config_of(source: CheckpointModel, name: str) -> ModelConfig:
    """Returns the configuration of another family with the sizes of a checkpoint. Raises UserError if the family does
    not exist, is the checkpoint's family, or does not support the sizes."""
    old, entry = source.backbone.config, lookup("model", name)
    if entry is None:
        close = nearest(name, names("model"))
        raise UserError(
            f"model={name} does not exist", f"did you mean model={close}?" if close else "see `lmtool list model`"
        )
    if name == old.name:
        raise UserError(f"the checkpoint already has model={name}", "set another model=, or omit it")
    family = cast(type[ModelConfig], entry.config)
    shared = type(old).model_fields.keys() - _RESIZED
    sizes = {key: getattr(old, key) for key in family.model_fields if key in shared}
    if "embedding_size" in family.model_fields:
        sizes["embedding_size"] = source.backbone.embed.token.weight.shape[1]
    if "num_key_value_heads" in family.model_fields and isinstance(old, TransformerConfig):
        sizes["num_key_value_heads"] = old.key_value_heads
    try:
        return family(**sizes)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"])) or "its sizes"
        raise UserError(
            f"model={name} does not support the sizes of the checkpoint (model={old.name}): {path}: {first['msg']}",
            "set another model=",
        ) from error


def _merge_layers(differences: Iterator[str]) -> list[str]:
    """Merges differences that occur in several layers into one for "layers.*". Missing biases come last."""
    unique = dict.fromkeys(re.sub(r"layers\.\d+", "layers.*", problem) for problem in differences)
    return sorted(unique, key=lambda problem: problem.endswith(_LOSES_BIAS))


def _stack_differences(source: nn.Module, model: nn.Module) -> Iterator[str]:
    if not isinstance(source, OneStack) or not isinstance(model, OneStack):
        yield "one of the two models is not a single stack of layers"
        return
    if not all(getattr(type(source), part) is getattr(type(model), part) for part in _SAME_METHODS):
        yield "the layers are run differently"
    yield from _module_differences(source, model)
    position = model.embed.position
    if source.embed.segment is not None and model.embed.segment is None and type(position) is not Learned:
        yield f"{SEGMENT_MODULE} is only in the checkpoint"


def _module_differences(source: nn.Module, model: nn.Module) -> Iterator[str]:
    before, after = (dict(part.named_modules()) for part in (source, model))
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if name == SEGMENT_MODULE or isinstance(old, Dropout) or isinstance(new, Dropout):
            continue
        if old is None or new is None:
            place = "the checkpoint" if new is None else "the family"
            yield f"{name} ({type(old or new).__name__}) is only in {place}"
        elif isinstance(old, OneStack):
            continue
        elif type(old) is not type(new):
            yield f"{name} is {type(new).__name__}, was {type(old).__name__}"
        else:
            yield from _attribute_differences(name, old, new)


def _attribute_differences(name: str, old: nn.Module, new: nn.Module) -> Iterator[str]:
    before, after = _settings(old), _settings(new)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{name} has {key}={_plain(after.get(key))}, had {_plain(before.get(key))}"
    if getattr(old, "bias", None) is not None and getattr(new, "bias", None) is None:
        yield f"{name}{_LOSES_BIAS}"


def _settings(module: nn.Module) -> JsonObject:
    public = {key: value for key, value in vars(module).items() if not key.startswith("_") and key not in _MAY_DIFFER}
    return {key: value for key, value in public.items() if isinstance(value, _COMPARABLE) or callable(value)}


def _plain(value: object) -> str:
    if isinstance(value, partial):
        return f"{_plain(value.func)} {' '.join(map(str, value.keywords.values()))}"
    return str(getattr(value, "__name__", value))


@torch.no_grad()
def _copy_weights(conversion: ArchitectureConversion, source: CheckpointModel) -> None:
    tensors: Mapping[str, Tensor] = source.state_dict()
    for name, tensor in conversion.model.state_dict().items():
        source_tensor = tensors.get(name)
        if source_tensor is None:
            # The modules are equal except for a bias or a segment table that the checkpoint lacks.
            tensor.zero_()
            conversion.initial_values[name] = "zero"
            continue
        values, change = source_tensor, ""
        if name == POSITION:
            values, change = _positions(source, conversion.model, tensors)
        elif name == SEGMENT and len(source_tensor) != len(tensor):
            old_rows = len(source_tensor)
            rows = [row if row < old_rows else 0 for row in range(len(tensor))]
            values, change = (
                source_tensor[rows],
                f"{len(tensor)} rows, was {old_rows}; new rows are copies of the first",
            )
        tensor.copy_(values)
        if change:
            conversion.resized[name] = change
        else:
            conversion.copied.append(name)


def _positions(source: CheckpointModel, model: CheckpointModel, tensors: Mapping[str, Tensor]) -> tuple[Tensor, str]:
    """Returns the new table of learned positions, and its changes. For a family without segments, the vector of the
    first segment is added to every position."""
    old, new = source.backbone.embed.position, model.backbone.embed.position
    if not isinstance(old, Learned) or not isinstance(new, Learned):
        return tensors[POSITION], ""
    values, changes = old.weight[old.offset :], []
    if SEGMENT in tensors and model.backbone.embed.segment is None:
        values = values + tensors[SEGMENT][0]
        changes.append("the first segment's vector is added")
    if old.offset != new.offset:
        changes.append(f"position 0 is in row {new.offset}, was in row {old.offset}")
    first_rows = old.weight[: new.offset] if old.offset == new.offset else values.new_zeros(new.offset, values.shape[1])
    return torch.cat([first_rows, values]), "; ".join(changes)


REPORT = "crossed.json"
_MASKS = {"Full": "tokens attend to the whole text", "Causal": "tokens attend to themselves and earlier tokens"}


def import_architecture(config: ImportConfig, name: str) -> None:
    """Writes a checkpoint as a model of another family, reads it back, and prints what happened to each tensor. Raises
    UserError if the checkpoint was finetuned, or if the family does not compute the same function, and CheckFailed if
    the hidden states differ, or if the checkpoint is read back with other tensors."""
    for key, value in (("tokenizer", config.tokenizer), ("data", config.data)):
        if value is not None:
            raise UserError(
                f"model={name} and {key}={value} cannot be combined",
                f"import with model={name} first, then import the result with the new {key}",
            )
    folder = user_path(config.output)
    require_new(folder)
    hugging_face = hf_folder(config.checkpoint, config.offline)
    loaded, weights = load(config.checkpoint, offline=config.offline), read(config.checkpoint, config.offline)
    tuned = loaded.saved.get("tuning") or loaded.saved.get("task")
    if tuned or (hugging_face is not None and classifies(hugging_face, weights)):
        raise UserError(
            f"model={name}: checkpoint={config.checkpoint} was finetuned",
            "use the pretrained checkpoint from which it was finetuned, and finetune the result",
        )
    conversion = convert_architecture(loaded.model.parts, name, weights.tensors)
    tensors = conversion.model.state_dict()
    source = {"checkpoint": config.checkpoint, "revision": weights.revision}
    report = {REPORT: {"checkpoint": masked(config.checkpoint), "model": name, **conversion.plain()}}
    write_import(ImportedModel(tensors, conversion.config, loaded.tokenizer, source, files=report), folder)

    reloaded = load(str(folder), offline=True).model.parts.state_dict()
    difference = largest_difference(loaded.model.parts, conversion)
    _report(folder, loaded.config.name, conversion, difference)
    if not same_tensors(tensors, reloaded):
        raise CheckFailed(f"{folder} differs from what was written", "check the disk, and keep the checkpoint")
    if not difference < ROUNDING_TOLERANCE:
        message = f"the hidden states of model={name} differ from the checkpoint's by {difference:.3g}"
        raise CheckFailed(message, f"keep the checkpoint, and do not use {folder}")


def _report(folder: Path, before: str, conversion: ArchitectureConversion, difference: float) -> None:
    output = Output()
    output.line(f"{folder} · model={conversion.config.name} with the weights of model={before}")
    rows = [("copied", _modules(conversion.copied))]
    rows += [("resized", f"{name}: {change}") for name, change in conversion.resized.items()]
    rows += [("new", f"{_modules(conversion.initial_values)}: zero")] if conversion.initial_values else []
    rows.append(("left out", _modules(conversion.left_out)))
    sample = "the same text"
    if conversion.masks is not None:
        rows.append(("mask", " · was: ".join(_MASKS.get(mask, mask) for mask in reversed(conversion.masks))))
        sample = "texts of one token"
    rows.append(("states", f"largest difference {difference:.3g} over {sample}"))
    output.rows(rows)


def _modules(names: Iterable[str]) -> str:
    """Lists modules with the number of their tensors. Layers are merged into "layers.*"."""
    counts = Counter(re.sub(r"layers\.\d+", "layers.*", name.rpartition(".")[0]) for name in names)
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "nothing"
