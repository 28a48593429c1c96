"""The tensors of a checkpoint, whoever wrote it: a published folder, or a run of lmtool."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmtool.config.checkpoint import find
from lmtool.config.tables import builder_module, entry_of, lookup
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.runs.checkpoints import read_weights
from lmtool.weights.bases import Base, saved_base
from lmtool.weights.folders import PublishedFolder, fetched, published_folder, weight_file
from lmtool.weights.pickled import read_pickled
from lmtool.weights.task_heads import CLASSIFIER, head_of_class, is_multi_label
from lmtool.weights.unread import unread


@dataclass(frozen=True)
class Weights:
    """Tensors under our names. folder: where tokenizer files lie too. origin: the `checkpoint=` that named them.
    ignored: what of a published folder is not read (`unread`). revision: the commit on the hub. merged: whether they
    were computed from a tuned checkpoint, so that no file holds them."""

    tensors: dict[str, Tensor]
    folder: Path
    origin: str
    ignored: tuple[str, ...] = ()
    revision: str | None = None
    merged: bool = False


def read(checkpoint: str, offline: bool = False, tuned: tuple[Path, ...] = ()) -> Weights:
    """The weights a `checkpoint=` names, on the CPU; of a tuned run with those of its base. tuned: the checkpoints
    whose base this is. UserError where they are missing, damaged or unreadable."""
    published = published_folder(checkpoint, offline)
    if published is None:
        folder = find(checkpoint)
        own, base = read_weights(folder), saved_base(folder)
        if base is None:
            return Weights(own, folder, checkpoint)
        if folder.resolve() in tuned:
            raise UserError(f"checkpoint={checkpoint} is its own base", "copy the checkpoint again")
        whole = read_base(base, own, checkpoint, offline, (*tuned, folder.resolve()))
        return Weights({**base.held(whole.tensors, own), **own}, folder, checkpoint)
    section = published.model_section()  # a variant that we do not compute is refused here, and its keys are read
    try:
        tensors = our_names(published, read_published(published, offline))
    except UserError as error:
        raise UserError(f"checkpoint={checkpoint}: {error.message}", error.hint) from error
    output = tensors.get(f"heads.{CLASSIFIER}.output.weight")
    if output is not None and is_multi_label(published.config):
        tensors[f"heads.{CLASSIFIER}.thresholds"] = torch.full((len(output),), 0.5, dtype=torch.float64)
    entry = lookup("model", section["name"])
    stacks = getattr(entry.config, "architecture", "encoder") if entry is not None else "encoder"
    ignored = unread(published, stacks != "encoder" and head_of_class(published.config) is None)
    return Weights(wide(tensors), published.path, checkpoint, ignored, published.revision)


def read_base(
    base: Base, own: Collection[str], checkpoint: str, offline: bool = False, tuned: tuple[Path, ...] = ()
) -> Weights:
    """The weights that a tuned checkpoint was tuned on, complete. own: names of the tensors that it has itself.
    checkpoint: what to call it in errors. UserError where its base is gone, or is not what it was."""
    address = base.address()
    if address is None:
        raise UserError(
            f"checkpoint={checkpoint} holds what was tuned of {base.checkpoint} alone, and that is gone: "
            f"{' and '.join(base.addresses)}",
            f"bring it back, or leave a link to where it is now: ln -s FOLDER {base.checkpoint}",
        )
    try:
        weights = read(address, offline, tuned)
    except UserError as error:
        why = f"checkpoint={checkpoint} needs the weights that it was tuned on: {error.message}"
        raise UserError(why, error.hint) from error
    base.require_same(base.held(weights.tensors, own), address, checkpoint)
    return weights


def our_names(published: PublishedFolder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a published folder under our names, theirs where we have no place for them."""
    ours: dict[str, Tensor] = published.family().from_published(tensors, published.config)
    return ours


def their_names(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under the names of a published model of a family; ours where there is no place for them. config: of
    the model."""
    theirs: dict[str, Tensor] = builder_module(entry_of(config)).to_published(tensors, config)
    return theirs


def read_published(folder: PublishedFolder, offline: bool = False) -> dict[str, Tensor]:
    """The tensors of a published folder under their own names, of one file or of several shards."""
    first = weight_file(folder, offline)
    if not first.name.endswith(".index.json"):
        return read_file(first)
    names = shards_of_index(first)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(names.values())):
        path = fetched(folder, shard, offline)
        assert path is not None
        tensors.update(read_file(path))
    missing = sorted(set(names) - set(tensors))
    if missing:
        raise UserError(f"{first}: {missing[0]} (and {len(missing) - 1} more) is in none of its files", "copy it again")
    return tensors


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. UserError where it is damaged."""
    if path.suffix != ".safetensors":
        return read_pickled(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: no whole safetensors file: {error}", "copy it again from where it came") from error


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Half precision as fp32, which training keeps its weights in; others as they are."""
    return {
        name: tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        for name, tensor in tensors.items()
    }


def shards_of_index(path: Path) -> dict[str, str]:
    """The file of each tensor, from the index of shards."""
    try:
        names: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path}: no index of files: {error!r}", "copy it again") from error
    if not isinstance(names, dict) or not _are_text(names.values()):
        raise UserError(f"{path}: its weight_map does not name files", "copy it again")
    return names


def _are_text(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)
