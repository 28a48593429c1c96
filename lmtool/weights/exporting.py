"""A checkpoint of lmtool as a folder that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtool.config.tables import builder_module, entry_of
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.models.keymap import Tied
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.checkpoints import save_tensors
from lmtool.weights.folders import CONFIG
from lmtool.weights.heads import CLASSIFIER
from lmtool.weights.loading import part_of


@dataclass(frozen=True)
class Export:
    """What goes into the folder. kept: our tensors that have a place in it. left_out: parts that have none."""

    architecture: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    kept: dict[str, Tensor]
    left_out: tuple[str, ...]


def export_of(
    model: ModelConfig, tensors: Mapping[str, Tensor], task: Mapping[str, Any] | None, tokenizer: Tokenizer
) -> Export:
    """The published form of a checkpoint's tensors. task: the section of a finetuned checkpoint, with its labels.

    UserError for a family, or a variant of one, that has no published form.
    """
    family = builder_module(entry_of(model))
    if not hasattr(family, "published_config"):
        raise UserError(f"model={model.name} has no published form", "export a model of a family that transformers has")
    renamed = dict(tensors)
    if task is not None:
        own = f"heads.{task['name']}."
        renamed = {
            f"heads.{CLASSIFIER}.{name[len(own) :]}" if name.startswith(own) else name: one
            for name, one in tensors.items()
        }
    heads = {part_of(name).removeprefix("heads.") for name in renamed if name.startswith("heads.")}
    needed, architecture = next((needed, name) for needed, name in family.ARCHITECTURES if set(needed) <= heads)
    wanted = {"backbone", "heads.lm", *(f"heads.{one}" for one in needed or ("pooler",))}
    kept = {name: one for name, one in renamed.items() if part_of(name) in wanted}
    published = family.to_published(kept)
    # A name of ours that is still there has no place.
    kept = {name: one for name, one in kept.items() if name not in published}
    published = {name: one for name, one in published.items() if not name.startswith(("heads.", "backbone."))}
    tied: Tied | None = getattr(family, "TIED", None)
    apart = tied is not None and tied.output in published
    if tied is not None and apart:
        published = tied.separate(published)
    left_out = {part_of(name) for name in renamed} - {part_of(name) for name in kept}
    config = {
        **family.published_config(model),
        "architectures": [architecture],
        "dtype": "float32",
        **({"tie_word_embeddings": False} if apart else {}),
        **special_ids(model, tokenizer),
    }
    if task is not None and CLASSIFIER in needed:
        config |= _labels(task)
    return Export(architecture, config, published, kept, tuple(sorted(left_out)))


def special_ids(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of special tokens as a config.json names them."""
    found = {f"{role}_token_id": tokenizer.roles[role] for role in ("pad", "bos", "eos") if role in tokenizer.roles}
    if isinstance(model, EncoderDecoderConfig):
        found["decoder_start_token_id"] = tokenizer.role(model.start_role)
    return found


def _labels(task: Mapping[str, Any]) -> dict[str, Any]:
    """Classes by number, or a value."""
    labels = task.get("labels")
    if not labels:
        return {"problem_type": "regression", "num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {
        "problem_type": "single_label_classification",
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def write_export(export: Export, model: ModelConfig, tokenizer: Tokenizer, card: str, output: Path) -> None:
    """Write the folder, whole or not at all. OSError where the disk refuses."""

    def fill(draft: Path) -> None:
        save_tensors(export.tensors, draft / "model.safetensors")
        _write_json(draft / CONFIG, export.config)
        tokenizer.save(draft)
        settings = json.loads((draft / "tokenizer_config.json").read_text(encoding="utf-8"))
        _write_json(draft / "tokenizer_config.json", {**settings, "model_max_length": model.max_positions})
        if model.architecture != "encoder":
            _write_json(draft / "generation_config.json", special_ids(model, tokenizer))
        (draft / "README.md").write_text(card, encoding="utf-8")

    whole_folder(output, fill)


def whole_folder(output: Path, fill: Callable[[Path], None]) -> None:
    """A new folder that appears when `fill` has filled it. UserError where one with contents is there."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output={output} is there already and not empty", "give a new folder")
    draft = output.parent / f".{output.name}.{os.getpid()}"
    try:
        draft.mkdir(parents=True)
        fill(draft)
        if output.is_dir():
            output.rmdir()
        draft.rename(output)
    except OSError as error:
        raise UserError(f"output={output}: {error.strerror or error}", "give a folder that can be written") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
