"""`lmtool export` of the tuned weights without their base: for lmtool (format=delta), or as a PEFT adapter
(format=peft)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import builder_module, command_line, entry_of
from lmtool.data.formats import with_format
from lmtool.errors import CheckFailed, UserError
from lmtool.models.configs import ModelConfig
from lmtool.reporting.console import Output
from lmtool.reporting.text import size
from lmtool.resolver.commands import ExportConfig
from lmtool.runs.checkpoints import read_weights, save_tensors, tensor_names
from lmtool.runs.finding import CARRIED, CONFIG, DATA, MODEL, OPTIMIZER, find, read_manifest
from lmtool.system.files import user_path, write_manifest
from lmtool.system.secrets import masked
from lmtool.weights.assemble import assemble
from lmtool.weights.base import Base, saved_base
from lmtool.weights.comparing import (
    LIBRARY_TOLERANCE,
    ROUNDING_TOLERANCE,
    CheckpointComparison,
    compare_outputs,
    difference,
    relative_difference,
    tokenize_as_transformers,
)
from lmtool.weights.conversion.parity import exported_format, outputs_of, tokenizer_settings
from lmtool.weights.exporting import Export, export_of, write_folder_atomically, write_json, write_tokenizer_files
from lmtool.weights.folders import hf_folder
from lmtool.weights.padded_model import LoadedCheckpoint, load
from lmtool.weights.peft.adapter import LABEL_KEYS, open_with_peft, read_adapter, task_type_of, write_adapter, writer_of
from lmtool.weights.peft.maps import HFBase, TunedModel, hf_linears
from lmtool.weights.reading import Weights, read, read_base, to_hf_names
from lmtool.weights.saved_model import fold_checkpoint, saved_config, saved_model

# Texts on which PEFT and lmtool are compared.
SAMPLE = ("The dog sleeps.", "What a lovely film, what an awful film; the dog saw it too.")

_NOT_WRITTEN = "the folder was not written; omit format= to export merged weights, and report this"


def export_tuned(config: ExportConfig) -> None:
    """Writes the tuned weights of a checkpoint without its base. Raises UserError if the checkpoint has no base."""
    tuned, base = tuned_checkpoint(config)
    folder = user_path(config.output)
    if config.format == "delta":
        weights, saved = read(config.checkpoint, config.offline), saved_config(config.checkpoint, config.offline)
        _write_delta(tuned, folder, fold_checkpoint(weights, read_weights(tuned), saved), config.offline)
        kind = "for lmtool"
    else:
        kind = _export_adapter(config, tuned, base, folder)
    sizes = size(sum(file.stat().st_size for file in folder.iterdir()))
    Output().line(f"{folder} · {kind} · {sizes} without the weights of {base.checkpoint} (sha256 {base.sha256[:16]})")


def _write_delta(
    tuned: Path, output: Path, folded: tuple[Mapping[str, Tensor], JsonObject] | None, offline: bool
) -> None:
    """Copies a tuned checkpoint without the files that only resuming needs. folded: weights and configuration to write
    instead."""

    def fill(draft: Path) -> None:
        manifest = read_manifest(tuned)
        for name in manifest.files:
            if name not in (OPTIMIZER, CARRIED, DATA):
                (draft / name).write_bytes(manifest.read_bytes(name))
        if folded is not None:
            tensors, config = folded
            save_tensors(tensors, draft / MODEL)
            write_json(draft / CONFIG, config)
        write_manifest(draft, manifest.metadata)
        read(str(draft), offline)

    write_folder_atomically(output, fill)


def tuned_checkpoint(config: ExportConfig) -> tuple[Path, Base]:
    """Returns the folder of the tuned checkpoint and its base. Raises UserError if the checkpoint is complete and so
    has no base."""
    folder = find(config.checkpoint) if hf_folder(config.checkpoint, config.offline) is None else None
    base = None if folder is None else saved_base(folder)
    if folder is None or base is None:
        raise UserError(
            f"format={config.format}: checkpoint={config.checkpoint} is complete and has no base",
            "omit format=; a run with tuning=full or checkpoint=none has no smaller export",
        )
    return folder, base


def head_to_export(saved: Mapping[str, object], tensors: Mapping[str, Tensor]) -> JsonMapping | None:
    """Returns the `task` section if its head is to be exported; None if the checkpoint has no such head, because the
    language model generates the answers."""
    task = saved.get("task")
    if not isinstance(task, dict) or not any(name.startswith(f"heads.{task['name']}.") for name in tensors):
        return None
    return task


def _export_adapter(config: ExportConfig, tuned: Path, base: Base, folder: Path) -> str:
    """Returns a description of the adapter for the screen."""
    checkpoint = config.checkpoint
    loaded = load(checkpoint, offline=config.offline)
    parts, tokenizer = loaded.model.parts, loaded.tokenizer
    assert tokenizer is not None and parts.tuning is not None
    section = json.loads(parts.tuning.fold(parts).model_dump_json())
    writer_of(section["name"])
    state, tuned_names = parts.state_dict(), tensor_names(tuned)
    base_tensors = {name: tensor for name, tensor in state.items() if name not in parts.added_names}
    added_tensors = {name: tensor for name, tensor in state.items() if name in parts.added_names}
    task = head_to_export(loaded.saved, base_tensors)
    tokenizer = tokenizer if task is None else tokenizer.with_padding()
    export = export_of(loaded.config, base_tensors, task, tokenizer)
    hf_base = HFBase(
        loaded.config, export.lmtool_tensors, export.hf_tensors, hf_linears(loaded.config, export.lmtool_tensors)
    )
    trained_ids = {id(tensor) for name, tensor in base_tensors.items() if name in tuned_names}
    _require_readable_base(loaded, export.architecture, base, config.offline)
    trained_names = _hf_names(
        loaded.config, export, {name for name, tensor in export.lmtool_tensors.items() if id(tensor) in trained_ids}
    )
    # `_hf_names` converts only names that depend on the family. The names of heads also depend on the class.
    trained_names += [
        name for name, tensor in export.hf_tensors.items() if id(tensor) in trained_ids and name not in trained_names
    ]
    tuned_model = TunedModel(section, added_tensors, hf_base, task_type_of(export.architecture), trained_names)
    format_name = exported_format(loaded.config, task, tokenizer)
    tokenizer = tokenizer if format_name is None else with_format(tokenizer, format_name)
    settings = tokenizer_settings(loaded.config, loaded.saved, task, tokenizer)
    labels = {key: export.config[key] for key in LABEL_KEYS if key in export.config}
    card = _card(checkpoint, base, export, folder, section["name"])

    def complete(draft: Path) -> None:
        write_tokenizer_files(draft, tokenizer, settings, card)
        _require_same(loaded, draft, added_tensors, hf_base, checkpoint)
        _compare_with_peft(loaded, draft, export, read_base(base, tuned_names, checkpoint, config.offline))

    write_adapter(tuned_model, *_hub_name(base), labels, folder, complete)
    if (command := _base_export_command(base)) is not None:
        Output().line(f"the base is a run of lmtool: for transformers, run {command}")
    return f"for PEFT on {export.architecture}"


def _require_readable_base(loaded: LoadedCheckpoint, architecture: str, base: Base, offline: bool) -> None:
    """Raises UserError if transformers would initialize a new backbone for the adapter's class, whose names have
    another prefix than the base's."""
    hf_format = builder_module(entry_of(loaded.config)).HF_FORMAT
    model_class = hf_format.named_class({"architectures": [architecture]})
    hugging_face = hf_folder(base.addresses[0], offline)
    names = [] if hugging_face is None else hugging_face.config.get("architectures") or []
    if hf_format.prefix and model_class.prefix and architecture not in names:
        raise UserError(
            f"format=peft: transformers does not load the backbone of {base.checkpoint} into {architecture}, whose "
            f"prefix is {model_class.prefix}, not {hf_format.prefix}: a new backbone would be initialized",
            "omit format= to export merged weights",
        )


def _hf_names(model: ModelConfig, export: Export, names: Collection[str]) -> list[str]:
    """The names, in transformers, of the exported tensors that contain one of the named tensors of lmtool."""
    # A tensor of transformers may join several of lmtool's. It contains a named tensor if any of its values is 1.
    marks = {
        name: (torch.ones_like if name in names else torch.zeros_like)(tensor)
        for name, tensor in export.lmtool_tensors.items()
    }
    renamed = to_hf_names(model, marks)
    return [name for name, mark in renamed.items() if name in export.hf_tensors and bool(mark.any())]


def _base_export_command(base: Base) -> str | None:
    if "://" in base.checkpoint or hf_folder(base.checkpoint) is not None:
        return None
    return command_line("export", f"checkpoint={masked(base.checkpoint)}", "output=FOLDER")


def _hub_name(base: Base) -> tuple[str, str | None]:
    if base.revision is None:
        return masked(base.checkpoint), None
    return base.checkpoint.removeprefix("hf://").partition("@")[0], base.revision


def _require_same(
    loaded: LoadedCheckpoint, folder: Path, added_tensors: Mapping[str, Tensor], base: HFBase, checkpoint: str
) -> None:
    restored = read_adapter(folder).restore(base)
    parts = loaded.model.parts
    base_tensors = {name: tensor for name, tensor in parts.state_dict().items() if name not in added_tensors}
    saved = {**loaded.saved, "tuning": restored.section}
    weights = Weights({**base_tensors, **restored.added_tensors}, folder, checkpoint)
    copy, _ = assemble(saved_model(checkpoint, saved, weights.tensors), loaded.tokenizer, trained=weights)
    comparison = CheckpointComparison({}, [], [])
    compare_outputs(comparison, parts, copy)
    differences = [*comparison.layer_differences.values(), comparison.logits_difference or 0.0]
    differences += [difference(tensor, base.tensors[name]) for name, tensor in restored.changed_tensors.items()]
    if not max(differences) <= ROUNDING_TOLERANCE:  # also true for NaN
        raise CheckFailed(
            f"the adapter differs from checkpoint={checkpoint}: outputs differ by {max(differences):.3g}", _NOT_WRITTEN
        )


def _compare_with_peft(loaded: LoadedCheckpoint, folder: Path, export: Export, base: Weights) -> None:
    """PEFT applies the adapter to a transformers model with the base's weights; its logits must be lmtool's."""
    if not all(find_spec(package) for package in ("peft", "transformers")):
        Output().line("not compared with PEFT, which is not installed: pip install peft")
        return
    rows = tokenize_as_transformers(folder, SAMPLE)
    if loaded.config.architecture == "encoder_decoder" and loaded.model.parts.task is None:
        rows["decoder_input_ids"] = rows["input_ids"][:, :2]
    with torch.no_grad():
        lmtool_outputs = loaded.model(**rows)
    expected = lmtool_outputs.hidden if lmtool_outputs.logits is None else lmtool_outputs.logits
    try:
        hf_tensors = to_hf_names(loaded.config, base.tensors)
        model = open_with_peft(folder, export.architecture, export.config, hf_tensors)
        with torch.no_grad():
            logits = next(iter(outputs_of(model, export.architecture, rows).values()))
    except Exception as error:  # versions of PEFT raise many kinds of errors
        problem = str(error).strip().partition("\n")[0]
        raise CheckFailed(f"PEFT cannot open the adapter: {type(error).__name__}: {problem}", _NOT_WRITTEN) from error
    logits = logits[:, -expected.shape[1] :]  # omits the logits of virtual tokens, which come first
    real = rows["attention_mask"].bool() if expected.ndim == 3 and "decoder_input_ids" not in rows else slice(None)
    largest = relative_difference(expected[real], logits[real])
    Output().line(f"opened with PEFT: logits differ by {largest:.3g} of the largest, on {len(SAMPLE)} texts")
    if not largest <= LIBRARY_TOLERANCE:
        raise CheckFailed("PEFT computes other logits from the adapter", _NOT_WRITTEN)


def _card(checkpoint: str, base: Base, export: Export, folder: Path, method: str) -> str:
    summary = {
        "method": f"tuning={method}",
        "base": base.checkpoint,
        "sha256 of the base's weights": base.sha256,
        "model": export.architecture,
        "made by": command_line("export", f"checkpoint={checkpoint}", "format=peft"),
    }
    rows = "".join(f"| {name} | {masked(str(value))} |\n" for name, value in summary.items())
    name, revision = _hub_name(base)
    command = _base_export_command(base)
    base_folder, before = (name, "") if command is None else ("FOLDER", f"# before: {command}\n")
    arguments: JsonObject = {
        key: export.config[key] for key in ("num_labels", "label2id", "problem_type") if key in export.config
    }
    if arguments:
        arguments["id2label"] = {int(number): label for number, label in export.config["id2label"].items()}
        arguments["pad_token_id"] = export.config.get("pad_token_id")
    arguments |= {"revision": revision} if revision else {}
    keys = "".join(f",\n    {key}={value!r}" for key, value in arguments.items())
    usage = f"""```python
from peft import PeftModel
from transformers import AutoTokenizer, {export.architecture}

{before}base = {export.architecture}.from_pretrained({base_folder!r}{keys})
model = PeftModel.from_pretrained(base, {folder.name!r}).eval()
tokenizer = AutoTokenizer.from_pretrained({folder.name!r})
```"""
    return f"---\nlibrary_name: peft\n---\n\n# {Path(checkpoint).name}\n\n{usage}\n\n| | |\n|---|---|\n{rows}"
