"""`lmtool import` of a folder of PEFT: what was tuned, beside the base that it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtool.commands.configs import ImportConfig
from lmtool.config.tables import Choice, builder_module, entry_of
from lmtool.errors import CheckFailed, UserError
from lmtool.models.configs import ModelConfig
from lmtool.models.published import PublishedConfig, unnamed
from lmtool.reporting.console import Output
from lmtool.reporting.text import count
from lmtool.tokenizers.published import has_tokenizer
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import part_of
from lmtool.weights.bases import Base, digest
from lmtool.weights.folders import PublishedFolder, published_folder
from lmtool.weights.importing import write_import
from lmtool.weights.load import load, saved_config, section
from lmtool.weights.merging import merged
from lmtool.weights.peft.adapter import CONFIG, READERS, TASK_TYPES, read_adapter, require_maps, updates_of
from lmtool.weights.peft.maps import published_maps
from lmtool.weights.reading import Weights, our_names, read
from lmtool.weights.task_heads import HEADS


def import_adapter(config: ImportConfig, folder: Path) -> None:
    """Write the checkpoint, read it again, print what is in it. UserError where the adapter does not fit its base."""
    settings, tensors = read_adapter(folder)
    address = _base_of(folder, settings)
    saved = saved_config(address, config.offline)
    start = merged(read(address, config.offline), saved)
    model = section(address, saved, Choice("model"))
    updates = updates_of(tensors)
    described = _described(address, start, model, settings, config.offline)
    heads = {} if described is None else our_names(described, {n: t for n, t in tensors.items() if n not in updates})
    backbone = {name: tensor for name, tensor in start.tensors.items() if name.startswith("backbone.")}
    lost = [name for name in tensors if name not in updates] if described is None else []
    lost += [name for name in heads if not name.startswith("heads.")]
    if lost:
        raise UserError(f"{folder}: lmtool has no place for its {lost[0]}", "merge it with PEFT, and import the model")
    maps = published_maps(model, {**backbone, **heads}, _maps_in(backbone))
    require_maps(updates, maps)
    tuning, added = READERS[settings["peft_type"]](settings, updates, maps)
    tuning = json.loads(section(str(folder), {"tuning": tuning}, Choice("tuning")).model_dump_json())
    own = {**added, **heads}
    parts = _parts(start, own, described is not None)
    held = {name: tensor for name, tensor in start.tensors.items() if part_of(name) in parts and name not in own}
    place = folder if has_tokenizer(folder) else start.folder
    tokenizer = Tokenizer.load(place) if has_tokenizer(place) else None
    base = None
    if not start.merged:
        path = None if start.revision is not None else str(start.folder.expanduser().resolve())
        fingerprint = "" if tokenizer is None else tokenizer.fingerprint
        base = Base(address, path, start.revision, tuple(sorted(parts)), digest(held), fingerprint)
    source = {"checkpoint": config.checkpoint, "base": address, "revision": start.revision}
    published = {} if described is None else dict(_labelled(described, heads).classifier_config())
    published |= {"generation": saved["generation"]} if "generation" in saved else {}
    output = Path(config.output).expanduser()
    written = own if base is not None else {**held, **own}
    write_import(written, model, tokenizer, source, output, published, tuning, base)
    _require_same(load(str(output), offline=True).model.parts.state_dict(), {**held, **own}, output)
    numbers = count(sum(tensor.numel() for tensor in own.values()))
    Output().line(f"{output} · model={model.name} · tuning={tuning['name']} · {numbers} values beside {address}")
    if labels := published.get("task", {}).get("labels"):
        Output().line(f"PEFT keeps no names of labels; they are taken for one of {', '.join(map(str, labels))}")


def _base_of(folder: Path, settings: Mapping[str, Any]) -> str:
    """The base that an adapter names, as `checkpoint=` takes it. UserError where it names none."""
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{folder / CONFIG} names no base_model_name_or_path",
            "write the folder, or the name on the hub, of the model that it was trained on there",
        )
    if Path(name).expanduser().exists():
        return name
    return f"hf://{name}@{revision}" if revision else f"hf://{name}"


def _described(
    address: str,
    start: Weights,
    model: ModelConfig,
    settings: Mapping[str, Any],
    offline: bool,
) -> PublishedFolder | None:
    """The base as a published folder with the adapter's head; None where it has none."""
    suffix = next((end for end, name in TASK_TYPES.items() if name == settings.get("task_type")), None)
    if suffix not in {head.suffix for head in HEADS.values()}:
        return None
    family = builder_module(entry_of(model))
    published = published_folder(address, offline)
    config = dict(family.published_config(model) if published is None else published.config)
    names = [name for _, name in family.ARCHITECTURES if name.endswith(str(suffix))]
    if not names:
        raise UserError(
            f"task_type={settings['task_type']} in its {CONFIG}: model={model.name} has no class ...{suffix}",
            "merge it with PEFT, and import the model",
        )
    config["architectures"] = names[:1]
    return PublishedFolder(address, start.folder, PublishedConfig(config), start.revision)


def _labelled(described: PublishedFolder, heads: Mapping[str, Tensor]) -> PublishedFolder:
    """The same with as many labels as the head has rows: PEFT does not keep their names."""
    rows = [len(tensor) for name, tensor in heads.items() if name.endswith("output.weight")]
    named = dict(described.config.get("id2label") or {})
    if not rows or len(named) == rows[0]:
        return described
    labels = {str(number): unnamed(number) for number in range(rows[0])}
    return replace(described, config=PublishedConfig({**described.config, "id2label": labels}))


def _maps_in(backbone: Mapping[str, Tensor]) -> list[str]:
    """The linear maps in the layers of a backbone, by their names."""
    matrices = [name for name, tensor in backbone.items() if tensor.ndim == 2 and name.endswith("_proj.weight")]
    matrices += [name for name in backbone if ".layers." in name and ".ffn.fc_" in name and name.endswith(".weight")]
    return [name.removesuffix(".weight") for name in matrices if ".layers." in name]


def _parts(start: Weights, own: Mapping[str, Tensor], has_head: bool) -> set[str]:
    """The parts of the base that the checkpoint is beside: with a head of its own, those that are below it."""
    parts = {part_of(name) for name in start.tensors}
    return parts & {"backbone", "heads.pooler"} if has_head else parts


def _require_same(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], output: Path) -> None:
    """CheckFailed where the checkpoint, read again, has other tensors."""
    for name, tensor in wanted.items():
        if name in state and not state[name].equal(tensor):
            raise CheckFailed(f"{output} is not what was imported: {name} differs", "keep the adapter")
