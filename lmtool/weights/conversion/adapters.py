"""`lmtool import` of a PEFT adapter: writes a tuned checkpoint that refers to the adapter's base."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.config.registry import Choice, builder_module, entry_of
from lmtool.errors import CheckFailed, UserError
from lmtool.models.configs import ModelConfig
from lmtool.models.published import HFConfig, default_label
from lmtool.reporting.console import Output
from lmtool.reporting.text import count
from lmtool.resolver.commands import ImportConfig
from lmtool.system.files import user_path
from lmtool.system.terminal import listing
from lmtool.tokenizers.folders import has_tokenizer
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import part_of
from lmtool.weights.exporting import ImportedModel, write_import
from lmtool.weights.folders import HFFolder, hf_folder
from lmtool.weights.padded_model import load
from lmtool.weights.peft.adapter import TASK_TYPES, Adapter, read_adapter
from lmtool.weights.peft.maps import HFBase, hf_linears
from lmtool.weights.peft.settings import CONFIG, MERGE, TargetedSettings
from lmtool.weights.reading import Weights, base_of_weights, read, to_hf_names, to_lmtool_names
from lmtool.weights.saved_model import decode_section, merge_tuned, saved_config, sequence_form_of
from lmtool.weights.task_heads import HEADS, TaskHead, head_of_class

_TOKENS = "backbone.embed.token.weight"


def import_adapter(config: ImportConfig, folder: Path) -> None:
    """Writes the checkpoint, reads it back, and prints what it contains. Raises UserError if the adapter in the folder
    does not fit its base, and CheckFailed if the checkpoint, read back, differs from the adapter."""
    adapter = read_adapter(folder)
    address = _base_address(adapter)
    saved = saved_config(address, config.offline)
    start = merge_tuned(read(address, config.offline), saved)
    model = decode_section(address, saved, Choice("model"))
    base_folder, head = _base_folder(adapter, address, start, model, config.offline)
    base = _hf_base(adapter, base_folder, start, model)
    restored = adapter.restore(base)
    tensors = {
        **restored.added_tensors,
        **_changed_tensors(adapter, base_folder, base, start, restored.changed_tensors),
    }
    tuning = json.loads(decode_section(str(folder), {"tuning": restored.section}, Choice("tuning")).model_dump_json())
    base_tensors = _base_tensors(start, tensors, head)
    all_tensors = {**base_tensors, **tensors}
    settings: JsonObject = {"generation": saved["generation"]} if "generation" in saved else {}
    has_label_names = True
    if head is not None:
        labeled, has_label_names = _with_labels(base_folder, adapter, all_tensors, head)
        settings |= labeled.classifier_config()
        _require_heads(adapter, model, settings["task"], all_tensors, head)
    tokenizer_folder = folder if has_tokenizer(folder) else start.folder
    tokenizer = Tokenizer.load(tokenizer_folder) if has_tokenizer(tokenizer_folder) else None
    base_record = None if start.merged else base_of_weights(address, start, base_tensors, tokenizer)
    source = {"checkpoint": config.checkpoint, "base": address, "revision": start.revision}
    output = user_path(config.output)
    new_tensors = tensors if base_record is not None else all_tensors
    write_import(ImportedModel(new_tensors, model, tokenizer, source, settings, tuning, base_record), output)
    _require_same(load(str(output), offline=True).model.parts.state_dict(), all_tensors, output)
    values = count(sum(tensor.numel() for tensor in tensors.values()))
    Output().line(f"{output} · model={model.name} · tuning={tuning['name']} · {values} values on top of {address}")
    merged_names = sorted(name for name in restored.changed_tensors if name not in adapter.saved)
    if merged_names:
        Output().line(
            f"merged into the base, because tuning={tuning['name']} cannot represent them: {listing(merged_names, 3)}"
        )
    if adapter.settings.unread_keys:
        Output().line(f"not read in {CONFIG}: {', '.join(adapter.settings.unread_keys)}")
    if not has_label_names and (labels := settings.get("task", {}).get("labels")):
        Output().line(f"the adapter has no label names; they are assumed to be {', '.join(map(str, labels))}")


def _base_address(adapter: Adapter) -> str:
    name, revision = adapter.settings.base_model_name_or_path, adapter.settings.revision
    if not name:
        raise UserError(
            f"{adapter.folder / CONFIG} has no base_model_name_or_path",
            "set the key to the folder or hub name of the model that the adapter was trained on",
        )
    if user_path(name).exists():
        return name
    return f"hf://{name}@{revision}" if revision else f"hf://{name}"


def _base_folder(
    adapter: Adapter, address: str, start: Weights, model: ModelConfig, offline: bool
) -> tuple[HFFolder, TaskHead | None]:
    task_type = adapter.settings.task_type
    suffix = next((class_suffix for class_suffix, name in TASK_TYPES.items() if name == task_type), None)
    hf_format = builder_module(entry_of(model)).HF_FORMAT
    settings = hf_folder(address, offline)
    config = dict(hf_format.to_hf_config(model) if settings is None else settings.config)
    if any(head.suffix == suffix for head in HEADS.values()):
        names = [entry.name for entry in hf_format.classes if entry.name.endswith(str(suffix))]
        if not names:
            raise UserError(
                f"task_type={task_type} in {CONFIG}: model={model.name} has no class ...{suffix} in transformers", MERGE
            )
        config["architectures"] = names[:1]
    elif suffix is not None:
        config["architectures"] = []
    return HFFolder(address, start.folder, HFConfig(config), start.revision), head_of_class(config)


def _hf_base(adapter: Adapter, base_folder: HFFolder, start: Weights, model: ModelConfig) -> HFBase:
    """The prefix of classes with a head is removed if the adapter names the modules that it targets, without the
    prefix."""
    renamed = to_lmtool_names(_mark_as_tied(base_folder), adapter.saved)
    tensors = {**start.tensors, **{name: tensor for name, tensor in renamed.items() if name.startswith("heads.")}}
    base = HFBase(model, tensors, to_hf_names(model, tensors), hf_linears(model, tensors))
    prefix = base_folder.family().prefix
    has_targets = isinstance(adapter.settings, TargetedSettings)
    has_prefix = any(name.startswith(prefix) for name in adapter.updates)
    return base.without_prefix(prefix) if has_targets and not has_prefix else base


def _mark_as_tied(base_folder: HFFolder) -> HFFolder:
    """Returns the same folder, marked as tied, so that the key map accepts any subset of the tied tensors."""
    return replace(base_folder, config=HFConfig({**base_folder.config, "tie_word_embeddings": True}))


def _changed_tensors(
    adapter: Adapter, base_folder: HFFolder, base: HFBase, start: Weights, changed_tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the heads and trained modules that differ from the base's, under lmtool's names. changed_tensors: under
    transformers' names."""
    renamed = to_lmtool_names(_mark_as_tied(base_folder), {**base.tensors, **changed_tensors})
    before = start.tensors
    changes = {name: tensor for name, tensor in renamed.items() if name not in before or not tensor.equal(before[name])}
    for name, tensor in changes.items():
        if not name.startswith("heads.") and (name not in before or tensor.shape != before[name].shape):
            raise UserError(
                f"{adapter.folder}: lmtool's model has no tensor {name} with the shape {tuple(tensor.shape)}", MERGE
            )
    untied = any(name.endswith("lm.output.weight") for name in renamed)
    untied = untied or adapter.settings.ensure_weight_tying
    if _TOKENS in changes and head_of_class(base_folder.config) is None and not untied:
        raise UserError(
            f"{adapter.folder}: the token embedding was trained, but not the output layer that is tied to it in the "
            "base",
            MERGE,
        )
    return changes


def _base_tensors(start: Weights, tensors: Mapping[str, Tensor], head: TaskHead | None) -> dict[str, Tensor]:
    """With a task's head, only the backbone, the pooler and this head are read from the base."""
    parts = {part_of(name) for name in start.tensors}
    if head is not None:
        parts &= {"backbone", "heads.pooler", f"heads.{head.name}"}
    return {name: tensor for name, tensor in start.tensors.items() if part_of(name) in parts and name not in tensors}


def _with_labels(
    base_folder: HFFolder, adapter: Adapter, tensors: Mapping[str, Tensor], head: TaskHead
) -> tuple[HFFolder, bool]:
    labeled = replace(base_folder, config=HFConfig({**base_folder.config, **adapter.labels}))
    rows = tensors.get(f"heads.{head.name}.output.weight")
    if rows is not None and len(labeled.label_names()) != len(rows):
        labels_by_id = {str(number): default_label(number) for number in range(len(rows))}
        labeled = replace(labeled, config=HFConfig({**labeled.config, "id2label": labels_by_id}))
    names = labeled.label_names()
    return labeled, names != [default_label(number) for number in range(len(names))]


def _require_heads(
    adapter: Adapter, model: ModelConfig, task: Mapping[str, object], tensors: Mapping[str, Tensor], head: TaskHead
) -> None:
    expected = [f"heads.{head.name}"] + (
        ["heads.pooler"] if not head.scores_tokens and sequence_form_of(model, task).pooled else []
    )
    missing = [part for part in expected if not any(part_of(name) == part for name in tensors)]
    if missing:
        raise UserError(
            f"{adapter.folder}: task_type={adapter.settings.task_type} needs {missing[0]}, which neither the adapter "
            "nor its base has",
            "save the adapter with the head in modules_to_save, or use a base that has the head",
        )


def _require_same(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], output: Path) -> None:
    for name, tensor in expected.items():
        if name in state and not state[name].equal(tensor):
            raise CheckFailed(
                f"{output} differs from the adapter in {name}", "delete this folder, and keep the adapter"
            )
