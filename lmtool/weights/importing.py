"""A published folder as a checkpoint of lmtool, with its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtool.config import saved
from lmtool.config.checkpoint import CONFIG, MODEL, STATE
from lmtool.models.configs import ModelConfig
from lmtool.runs.checkpoints import save_tensors
from lmtool.system.files import write_manifest
from lmtool.system.secrets import masked, masked_data
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.bases import BASE, Base
from lmtool.weights.exporting import whole_folder

COMMAND = "import"


def write_import(
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    source: Mapping[str, Any],
    output: Path,
    published: Mapping[str, Any] | None = None,
    tuning: Mapping[str, Any] | None = None,
    base: Base | None = None,
    further: Mapping[str, Any] | None = None,
) -> None:
    """Write the checkpoint folder, whole or not at all. source: where the weights are from, kept masked in its
    config.json, but for the revision: a commit looks like a key, and is none. published: the configuration of a
    published folder (`PublishedFolder.saved_config`, of a text classifier `classifier_config`). tuning: the section of
    the method that the tensors were tuned by. base: what they are beside. further: what stands in JSON files beside it,
    by their names.

    UserError where the folder is not empty or cannot be written.
    """
    config = {
        "version": saved.VERSION,
        "command": COMMAND,
        "seed": 0,
        "source": {**masked_data(dict(source)), "revision": source.get("revision")},
        "model": json.loads(model.model_dump_json()),
    }
    given = published or {}
    config |= {name: given[name] for name in ("task", "max_length", "generation") if name in given}
    config |= {} if tuning is None else {"tuning": dict(tuning)}
    if tokenizer is not None:
        config["tokenizer"] = {**given.get("tokenizer", {}), "name": "folder", "path": masked(str(output))}

    beside = {} if base is None else {BASE: base.to_plain()}
    write_checkpoint(config, tensors, tokenizer, output, {**beside, **(further or {})})


def write_checkpoint(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    output: Path,
    further: Mapping[str, Any],
) -> None:
    """Write a checkpoint of step 0, whole or not at all. further: what stands in JSON files beside it, by their names.

    UserError where the folder is not empty or cannot be written.
    """

    def fill(draft: Path) -> None:
        save_tensors(tensors, draft / MODEL)
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (draft / STATE).write_text(json.dumps({"step": 0}) + "\n", encoding="utf-8")
        for name, content in further.items():
            (draft / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(draft)
        write_manifest(draft, {"step": 0})

    whole_folder(output, fill)
