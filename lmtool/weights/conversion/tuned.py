"""`lmtool export` of what was tuned alone: as lmtool reads it beside its base (format=delta), or as PEFT does
(format=peft)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtool.config.checkpoint import find
from lmtool.config.plugins import command_line
from lmtool.config.tables import builder_module, entry_of
from lmtool.data.formats import with_format
from lmtool.errors import CheckFailed, UserError
from lmtool.models.configs import ModelConfig
from lmtool.reporting.console import Output
from lmtool.reporting.text import size
from lmtool.resolver.schema.run import ExportConfig
from lmtool.runs.checkpoints import read_weights, tensor_names
from lmtool.system.secrets import masked
from lmtool.weights.assemble import assemble
from lmtool.weights.bases import Base, saved_base
from lmtool.weights.comparing import OTHER_CODE, ROUNDING, Comparison, compare_outputs, difference, tokenized
from lmtool.weights.conversion.texts import layout_of, reading_of
from lmtool.weights.exporting import Export, export_of, write_delta, write_reading
from lmtool.weights.folders import published_folder
from lmtool.weights.load import Loaded, load, saved_config, saved_model
from lmtool.weights.merging import folded
from lmtool.weights.peft.adapter import LABEL_KEYS, peft_logits, read_adapter, task_type_of, write_adapter, writer_of
from lmtool.weights.peft.maps import published_maps
from lmtool.weights.peft.tuned import PublishedBase, Tuned
from lmtool.weights.reading import Weights, read, read_base, their_names

SAMPLE = ("The dog sleeps.", "What a lovely film, what an awful film; the dog saw it too.")


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
    """Write PEFT's layout, read it again here and there, and compare the outputs. What was written, in words."""
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
    tokenizer = tokenizer if task is None else tokenizer.with_padding()
    export = export_of(loaded.config, plain, task, tokenizer)
    stands_on = PublishedBase(loaded.config, export.kept, export.tensors, published_maps(loaded.config, export.kept))
    learned = {id(tensor) for name, tensor in plain.items() if name in own}
    _require_readable_base(loaded, export.architecture, base, config.offline)
    changed = _published_names(loaded.config, export, {n for n, tensor in export.kept.items() if id(tensor) in learned})
    # Heads have the names of their class, which may not be those of the family's other classes.
    changed += [name for name, tensor in export.tensors.items() if id(tensor) in learned and name not in changed]
    told = Tuned(section, added, stands_on, task_type_of(export.architecture), changed)
    layout = layout_of(loaded.config, task, tokenizer)
    tokenizer = tokenizer if layout is None else with_format(tokenizer, layout)
    reading = reading_of(loaded.config, loaded.saved, task, tokenizer)
    labels = {key: export.config[key] for key in LABEL_KEYS if key in export.config}
    card = _card(checkpoint, base, export, folder, section["name"])
    further = partial(write_reading, tokenizer=tokenizer, reading=reading, card=card)
    write_adapter(told, *_named(base), labels, folder, further)
    _require_same(loaded, folder, added, stands_on, checkpoint)
    _open_with_peft(loaded, folder, export, read_base(base, own, checkpoint, config.offline))
    if (command := _exports_base(base)) is not None:
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


def _published_names(model: ModelConfig, export: Export, names: Collection[str]) -> list[str]:
    """The published tensors that ours of these names are in."""
    marks = {
        name: (torch.ones_like if name in names else torch.zeros_like)(tensor) for name, tensor in export.kept.items()
    }
    published = their_names(model, marks)
    return [name for name, mark in published.items() if name in export.tensors and bool(mark.any())]


def _exports_base(base: Base) -> str | None:
    """What is typed before transformers reads the base: of a run of lmtool; None where it is published."""
    if "://" in base.checkpoint or published_folder(base.checkpoint) is not None:
        return None
    return command_line("export", f"checkpoint={masked(base.checkpoint)}", "output=FOLDER")


def _named(base: Base) -> tuple[str, str | None]:
    """What PEFT calls the base: a folder, or its name on the hub; and the commit there."""
    if base.revision is None:
        return masked(base.checkpoint), None
    return base.checkpoint.removeprefix("hf://").partition("@")[0], base.revision


def _require_same(
    loaded: Loaded, folder: Path, added: Mapping[str, Tensor], base: PublishedBase, checkpoint: str
) -> None:
    """CheckFailed where the folder, read again, gives other outputs."""
    restored = read_adapter(folder).restored(base)
    parts = loaded.model.parts
    rest = {name: tensor for name, tensor in parts.state_dict().items() if name not in added}
    saved = {**loaded.saved, "tuning": restored.section}
    weights = Weights({**rest, **restored.added}, folder, checkpoint)
    copy, _ = assemble(saved_model(checkpoint, saved, weights.tensors), loaded.tokenizer, trained=weights)
    comparison = Comparison({}, [], [])
    compare_outputs(comparison, parts, copy)
    differences = [*comparison.layers.values(), comparison.logits or 0.0]
    differences += [difference(tensor, base.tensors[name]) for name, tensor in restored.changed.items()]
    if not max(differences) <= ROUNDING:  # a difference that is no number is one
        raise CheckFailed(
            f"{folder} is not what was tuned: outputs differ by {max(differences):.3g}", "keep the checkpoint"
        )


def _open_with_peft(loaded: Loaded, folder: Path, export: Export, base: Weights) -> None:
    """Compare what PEFT predicts with the folder, on a model of transformers with the base's weights. CheckFailed where
    that is not what lmtool predicts. Says so where PEFT is not installed."""
    if not all(find_spec(package) for package in ("peft", "transformers")):
        Output().line("not opened with PEFT, which is not installed here: pip install peft")
        return
    rows = tokenized(folder, SAMPLE)
    if loaded.config.architecture == "encoder_decoder" and loaded.model.parts.task is None:
        rows["decoder_input_ids"] = rows["input_ids"][:, :2]
    with torch.no_grad():
        ours = loaded.model(**rows)
    expected = ours.hidden if ours.logits is None else ours.logits
    try:
        theirs = their_names(loaded.config, base.tensors)
        logits = peft_logits(folder, export.architecture, export.config, theirs, rows)
    except Exception as error:  # whatever PEFT, of whatever version, does not like
        problem = str(error).strip().partition("\n")[0]
        raise CheckFailed(
            f"PEFT does not open {folder}: {type(error).__name__}: {problem}", "keep it, and tell us"
        ) from error
    logits = logits[:, -expected.shape[1] :]  # without those of virtual tokens
    real = rows["attention_mask"].bool() if expected.ndim == 3 and "decoder_input_ids" not in rows else slice(None)
    apart = difference(expected[real], logits[real]) / max(1.0, float(expected.abs().max()))
    Output().line(f"opened with PEFT: logits differ by {apart:.3g} of the largest, on {len(SAMPLE)} texts")
    if not apart <= OTHER_CODE:
        raise CheckFailed(f"PEFT reads another model in {folder}", "keep the checkpoint")


def _card(checkpoint: str, base: Base, export: Export, folder: Path, method: str) -> str:
    """README.md of the folder: what it is, and how it is opened."""
    made_by = command_line("export", f"checkpoint={checkpoint}", "format=peft")
    metadata = {
        "method": f"tuning={method}",
        "base": base.checkpoint,
        "sha256 of the base's weights": base.sha256,
        "model": export.architecture,
        "made by": made_by,
    }
    rows = "".join(f"| {name} | {masked(str(value))} |\n" for name, value in metadata.items())
    name, revision = _named(base)
    command = _exports_base(base)
    folder_of_base, before = (name, "") if command is None else ("FOLDER", f"# before: {command}\n")
    given: dict[str, Any] = {
        key: export.config[key] for key in ("num_labels", "label2id", "problem_type") if key in export.config
    }
    if given:
        given["id2label"] = {int(number): label for number, label in export.config["id2label"].items()}
        given["pad_token_id"] = export.config.get("pad_token_id")
    given |= {"revision": revision} if revision else {}
    keys = "".join(f",\n    {key}={value!r}" for key, value in given.items())
    usage = f"""```python
from peft import PeftModel
from transformers import AutoTokenizer, {export.architecture}

{before}base = {export.architecture}.from_pretrained({folder_of_base!r}{keys})
model = PeftModel.from_pretrained(base, {folder.name!r}).eval()
tokenizer = AutoTokenizer.from_pretrained({folder.name!r})
```"""
    return f"---\nlibrary_name: peft\n---\n\n# {Path(checkpoint).name}\n\n{usage}\n\n| | |\n|---|---|\n{rows}"
