"""A folder of PEFT: adapter_config.json and adapter_model.safetensors, written and read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtool.errors import UserError
from lmtool.runs.checkpoints import save_tensors
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.exporting import whole_folder
from lmtool.weights.folders import read_object
from lmtool.weights.peft import ia3, lora, prompts
from lmtool.weights.peft.maps import PublishedMap
from lmtool.weights.peft.tuned import Tuned
from lmtool.weights.reading import read_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_INSIDE = "base_model.model."
_PROMPT = "prompt_embeddings"
_UPDATES = (".lora_A.weight", ".lora_B.weight", ".ia3_l")
Layout = tuple[dict[str, Any], dict[str, Tensor]]
WRITERS: dict[str, Callable[[Tuned], Layout]] = {
    "lora": lora.to_peft,
    "ia3": ia3.to_peft,
    "prompt": prompts.to_peft,
    "ptuning": prompts.to_peft,
    "prefix": prompts.to_peft,
}
"""By the name of the tuning method."""
READERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Tensor], Sequence[PublishedMap]], Layout]] = {
    "LORA": lora.from_peft,
    "IA3": ia3.from_peft,
}
"""By PEFT's type."""
TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "MTModel": "SEQ_2_SEQ_LM",
}
"""PEFT's name for what a class of transformers is used for, by the end of the class."""


def task_type_of(architecture: str) -> str | None:
    """PEFT's name for what a class of transformers is used for; None where it has none."""
    return next((name for suffix, name in TASK_TYPES.items() if architecture.endswith(suffix)), None)


def writer_of(method: str) -> Callable[[Tuned], Layout]:
    """What writes a tuning method's layout. UserError where PEFT has none."""
    if method not in WRITERS:
        raise UserError(
            f"tuning={method} has no layout in PEFT; these have: {', '.join(WRITERS)}",
            "format=delta writes what was tuned for lmtool",
        )
    return WRITERS[method]


def write_adapter(
    tuned: Tuned,
    heads: Mapping[str, Tensor],
    base: str,
    revision: str | None,
    tokenizer: Tokenizer,
    card: str,
    output: Path,
) -> dict[str, Any]:
    """Write the folder, whole or not at all, and return what is in adapter_config.json. heads: the published tensors of
    those that learned. base: a folder or a name on the hub. UserError for a method that PEFT lacks, or has in another
    way."""
    _require_maps_there(tuned)
    config, tensors = writer_of(str(tuned.section["name"]))(tuned)
    written = {path if path == _PROMPT else _INSIDE + path: tensor for path, tensor in {**tensors, **heads}.items()}
    backbone = {place.module.partition(".")[0] for place in tuned.maps}
    config |= {
        "task_type": tuned.task_type,
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "modules_to_save": sorted({_module(path, backbone) for path in heads}) or None,
    }

    def fill(draft: Path) -> None:
        save_tensors(written, draft / WEIGHTS)
        (draft / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        tokenizer.save(draft)
        (draft / "README.md").write_text(card, encoding="utf-8")

    whole_folder(output, fill)
    return config


def _require_maps_there(tuned: Tuned) -> None:
    """UserError where a map that was tuned is none of the published model's, whose modules are what PEFT reaches."""
    there = {part.name for place in tuned.maps for part in place.parts}
    owners = {name.rpartition(".")[0] for name in tuned.tensors}
    lost = sorted(
        name for name in owners - there if name.rpartition(".")[2].endswith(("_proj", "_in", "_out", "_gate"))
    )
    if lost:
        raise UserError(
            f"in transformers {lost[0].removeprefix('backbone.')} of this model is no linear module, which PEFT could "
            f"reach; nor are {len(lost) - 1} others that were tuned",
            "format=delta writes what was tuned for lmtool; tuning.projections=[fc_in,fc_out] tunes what PEFT reaches",
        )


def _module(path: str, backbone: set[str]) -> str:
    """The module that a tensor is saved with: a head as one, of what is inside of the backbone the map."""
    root = path.partition(".")[0]
    return path.rpartition(".")[0] if root in backbone else root


def is_adapter(folder: Path) -> bool:
    """Whether a folder is PEFT's."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> Layout:
    """Its configuration, and its tensors by the names they have in the published model. UserError where a file is
    missing or damaged, and for a method that lmtool does not read."""
    config = dict(read_object(str(folder), folder / CONFIG))
    if config.get("peft_type") not in READERS:
        raise UserError(
            f"{folder / CONFIG}: peft_type={config.get('peft_type')!r}; lmtool reads {', '.join(READERS)}",
            "merge it with PEFT where that can be done (merge_and_unload), save the model, and import that",
        )
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} lacks {WEIGHTS}", "save the adapter again, with safetensors")
    tensors = read_file(folder / WEIGHTS)
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return config, {name.removeprefix(_INSIDE): tensor for name, tensor in wide.items()}


def updates_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of an adapter's tensors those of its method; the others are of heads that learned with it."""
    return {name: tensor for name, tensor in tensors.items() if name.endswith(_UPDATES)}


def require_maps(updates: Mapping[str, Tensor], maps: Sequence[PublishedMap]) -> None:
    """UserError where an adapter changes what is no map in the layers of its base."""
    known = {place.module for place in maps}
    for name in updates:
        module = next(name.removesuffix(end) for end in _UPDATES if name.endswith(end))
        if module not in known:
            raise UserError(
                f"{WEIGHTS}: {name} is an update of {module}, which is no map in the layers of its base",
                "write the base that it was trained on into its adapter_config.json",
            )
