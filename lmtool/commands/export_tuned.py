"""`lmtool export` of what was tuned alone: as lmtool reads it beside its base (format=delta), or as PEFT does
(format=peft)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lmtool.commands.configs import ExportConfig
from lmtool.commands.opening import words
from lmtool.config.checkpoint import find
from lmtool.config.tables import builder_module, entry_of
from lmtool.errors import CheckFailed, UserError
from lmtool.reporting.console import Output
from lmtool.reporting.text import size
from lmtool.runs.checkpoints import read_weights, tensor_names
from lmtool.secrets import masked
from lmtool.tuning.places import layers
from lmtool.weights.assemble import assemble
from lmtool.weights.bases import Base, saved_base
from lmtool.weights.comparing import ROUNDING, Comparison, compare_outputs
from lmtool.weights.exporting import export_of, write_delta
from lmtool.weights.folders import published_folder
from lmtool.weights.heads import CheckpointModel
from lmtool.weights.load import Loaded, load, saved_config, saved_model
from lmtool.weights.merging import folded
from lmtool.weights.peft.adapter import READERS, read_adapter, task_type_of, write_adapter, writer_of
from lmtool.weights.peft.maps import published_maps
from lmtool.weights.peft.tuned import Tuned
from lmtool.weights.reading import Weights, read


def export_tuned(config: ExportConfig) -> None:
    """Write what a tuned run's best checkpoint holds, and nothing that resumes it or that only training needs.
    UserError where it is not tuned."""
    tuned, base = tuned_checkpoint(config)
    folder = Path(config.output).expanduser()
    if config.format == "delta":
        weights, saved = read(config.checkpoint, config.offline), saved_config(config.checkpoint, config.offline)
        write_delta(tuned, folder, folded(weights, read_weights(tuned), saved))
        read(str(folder), config.offline)
        kind = "for lmtool"
    else:
        kind = _export_adapter(config, tuned, base, folder)
    sizes = size(sum(file.stat().st_size for file in folder.iterdir()))
    Output().line(f"{folder} · {kind} · {sizes} beside the weights of {base.checkpoint} (sha256 {base.sha256[:16]})")


def tuned_checkpoint(config: ExportConfig) -> tuple[Path, Base]:
    """The tuned checkpoint that is meant, and its base. UserError where it has none: it holds everything."""
    published = published_folder(config.checkpoint, config.offline)
    folder = None if published is not None else find(config.checkpoint)
    base = None if folder is None else saved_base(folder)
    if folder is None or base is None:
        raise UserError(
            f"format={config.format}: checkpoint={config.checkpoint} holds all its weights, and was tuned on no others",
            "leave format= out; a run of tuning=full, or with checkpoint=none, has no smaller file",
        )
    return folder, base


def head_to_export(saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Mapping[str, Any] | None:
    """The task of a checkpoint whose head is exported; None where its answers are written by the language model."""
    task = saved.get("task")
    if not isinstance(task, dict) or not any(name.startswith(f"heads.{task['name']}.") for name in tensors):
        return None
    return task


def _export_adapter(config: ExportConfig, tuned: Path, base: Base, folder: Path) -> str:
    """Write PEFT's layout, read it again where lmtool does, and compare the outputs. What was written, in words."""
    checkpoint = config.checkpoint
    loaded = load(checkpoint, offline=config.offline)
    parts, tokenizer = loaded.model.parts, loaded.tokenizer
    assert tokenizer is not None and parts.tuning is not None
    section = json.loads(parts.tuning.fold(parts).model_dump_json())
    writer_of(section["name"])
    state, own = parts.state_dict(), tensor_names(tuned)
    plain = {name: tensor for name, tensor in state.items() if name not in parts.added}
    added = {name: tensor for name, tensor in state.items() if name in parts.added}
    task = head_to_export(loaded.saved, plain)
    export = export_of(loaded.config, plain, task, tokenizer if task is None else tokenizer.with_padding())
    _require_readable_base(loaded, export.architecture, base, config.offline)
    maps = published_maps(loaded.config, export.kept, _linear_maps(parts, plain))
    learned = {id(tensor) for name, tensor in plain.items() if name in own}
    heads = {path: tensor for path, tensor in export.tensors.items() if id(tensor) in learned}
    told = Tuned(loaded.config, section, added, maps, task_type_of(export.architecture), list(heads))
    card = _card(checkpoint, base, section["name"], export.architecture)
    written = write_adapter(told, heads, *_named(base), tokenizer, card, folder)
    if written["peft_type"] in READERS:
        _require_same(loaded, folder, added, maps, checkpoint)
    if "://" not in base.checkpoint and published_folder(base.checkpoint) is None:
        command = words(["lmtool", "export", f"checkpoint={base.checkpoint}", "output=FOLDER"])
        Output().line(f"its base is a run of lmtool: transformers reads it after {command}")
    return f"for PEFT on {export.architecture}"


def _require_readable_base(loaded: Loaded, architecture: str, base: Base, offline: bool) -> None:
    """UserError where transformers would draw a new backbone: its class calls it by another prefix than the classes of
    the family do, and the base is a folder of another one."""
    declared = builder_module(entry_of(loaded.config)).PUBLISHED
    model_class = declared.named_class({"architectures": [architecture]})
    published = published_folder(base.addresses[0], offline)
    names = [] if published is None else published.config.get("architectures") or []
    if declared.prefix and model_class.prefix and architecture not in names:
        raise UserError(
            f"format=peft: transformers reads no backbone of {base.checkpoint} into {architecture}, which calls it "
            f"{model_class.prefix}* and not {declared.prefix}*, and draws a new one",
            "leave format= out: the merged weights open as they are",
        )


def _linear_maps(parts: CheckpointModel, plain: Mapping[str, Tensor]) -> list[str]:
    """The linear maps in the layers that are the base's."""
    names = [
        name
        for place in layers(parts.backbone)
        for name, module in place.layer.named_modules(prefix=place.name)
        if isinstance(module, nn.Linear)
    ]
    return [name for name in names if f"{name}.weight" in plain]


def _named(base: Base) -> tuple[str, str | None]:
    """What PEFT calls the base: a folder, or its name on the hub; and the commit there."""
    if base.revision is None:
        return masked(base.checkpoint), None
    return base.checkpoint.removeprefix("hf://").partition("@")[0], base.revision


def _require_same(loaded: Loaded, folder: Path, added: Mapping[str, Tensor], maps: Any, checkpoint: str) -> None:
    """CheckFailed where the folder, read again, gives other outputs."""
    config, tensors = read_adapter(folder)
    section, again = READERS[config["peft_type"]](config, tensors, maps)
    parts = loaded.model.parts
    rest = {name: tensor for name, tensor in parts.state_dict().items() if name not in added}
    saved = {**loaded.saved, "tuning": section}
    weights = Weights({**rest, **again}, folder, checkpoint)
    copy, _ = assemble(saved_model(checkpoint, saved, weights.tensors), loaded.tokenizer, trained=weights)
    comparison = Comparison({}, [], [])
    compare_outputs(comparison, parts, copy)
    differences = [*comparison.layers.values(), comparison.logits or 0.0]
    if not max(differences) <= ROUNDING:  # a difference that is no number is one
        raise CheckFailed(
            f"{folder} is not what was tuned: outputs differ by {max(differences):.3g}", "keep the checkpoint"
        )


def _card(checkpoint: str, base: Base, method: str, architecture: str) -> str:
    """README.md of the folder."""
    made_by = words(["lmtool", "export", f"checkpoint={checkpoint}", "format=peft"])
    facts = {
        "method": f"tuning={method}",
        "base": base.checkpoint,
        "sha256 of the base's weights": base.sha256,
        "model": architecture,
        "made by": made_by,
    }
    rows = "".join(f"| {name} | {masked(str(value))} |\n" for name, value in facts.items())
    return f"---\nlibrary_name: peft\n---\n\n# {Path(checkpoint).name}\n\n| | |\n|---|---|\n{rows}"
