"""A folder of PEFT: adapter_config.json and adapter_model.safetensors, written and read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtool.config.saved import JsonObject
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.runs.checkpoints import save_tensors
from lmtool.weights.exporting import write_folder_atomically
from lmtool.weights.folders import read_object
from lmtool.weights.peft import lora
from lmtool.weights.peft.maps import HFBase, Restored, Tuned
from lmtool.weights.peft.settings import CONFIG, AdapterSettings, PromptSettings, settings_of
from lmtool.weights.reading import read_file

TENSOR = "prompt_embeddings"
PROMPT_SUFFIXES = (TENSOR,)
_VIRTUAL, _PREFIX = "backbone.embed.virtual.weight", "backbone.prefix.weight"
_KIND = {_VIRTUAL: "PROMPT_TUNING", _PREFIX: "PREFIX_TUNING"}
_USED = {_VIRTUAL: {"CAUSAL_LM": "decoder", "SEQ_2_SEQ_LM": "encoder_decoder"}, _PREFIX: {"CAUSAL_LM": "decoder"}}
"""The architecture by PEFT's name for what the model is used for."""
_OTHERWISE = {
    (_VIRTUAL, "transformer"): "transformers scales the vectors of tokens, but none that it is handed",
    (_PREFIX, "gpt1"): "transformers takes no keys of earlier tokens",
}
"""Families that PEFT, or what is below it, reads in another way."""


def _incompatibility(name: str, task_type: str | None, model: ModelConfig) -> str | None:
    """Why PEFT reads the tensor of this name differently from lmtool, or None."""
    if task_type is None or _USED.get(name, {}).get(task_type) != model.architecture:
        return "only prompts of language models that write text, and prefixes of decoders that do, are read alike there"
    return _OTHERWISE.get((name, model.name))


def prompt_to_peft(tuned: Tuned) -> tuple[JsonObject, dict[str, Tensor]]:
    """PEFT's configuration and its one tensor. UserError if PEFT reads texts differently."""
    name, model = next(iter(tuned.tensors)), tuned.base.model
    reason = _incompatibility(name, None if len(tuned.tensors) > 1 or tuned.learned else tuned.task_type, model)
    if reason is not None:
        raise UserError(
            f"PEFT reads tuning={tuned.section['name']} of model={model.name} with this head in another way: {reason}",
            "format=delta writes what was tuned for lmtool",
        )
    prompt, sizes = tuned.tensors[name], _sizes(name, model)
    config = {
        "peft_type": _KIND[name],
        "num_virtual_tokens": len(prompt),
        "num_transformer_submodules": 1,
        **sizes,
    }
    return config, {TENSOR: prompt}


def _sizes(name: str, model: Any) -> dict[str, int]:
    """PEFT's names for a transformer's sizes. A prefix has the heads of keys and values."""
    prefix = name == _PREFIX
    heads = model.key_value_heads if prefix else model.num_heads
    width = heads * model.width_of_head if prefix else model.hidden_size
    return {"token_dim": width, "num_attention_heads": heads, "num_layers": model.num_layers}


def prompt_from_peft(settings: PromptSettings, tensors: Mapping[str, Tensor], base: HFBase) -> Restored:
    """The inverse: an encoder's result as prompts without an encoder. UserError if PEFT reads texts differently, or if
    the tensor does not match the configuration."""
    name = _PREFIX if settings.peft_type == "PREFIX_TUNING" else _VIRTUAL
    stacks = settings.num_transformer_submodules or (2 if settings.task_type == "SEQ_2_SEQ_LM" else 1)
    reason = _incompatibility(name, settings.task_type, base.model)
    if reason is None and stacks > 1:
        reason = "num_transformer_submodules=2 puts them in front of the decoder's text too"
    if reason is not None:
        raise UserError(
            f"{CONFIG}: lmtool reads peft_type={settings.peft_type}, task_type={settings.task_type} of "
            f"model={base.model.name} in another way than PEFT: {reason}",
            "use it with PEFT",
        )
    sizes = _sizes(name, base.model)
    count, width, depth = settings.num_virtual_tokens, sizes["token_dim"], sizes["num_layers"]
    expected = (count, 2 * depth * width if name == _PREFIX else width)
    if tensors[TENSOR].shape != expected:
        raise UserError(
            f"{CONFIG}: num_virtual_tokens={count}, and {TENSOR} is {tuple(tensors[TENSOR].shape)}; its base reads "
            f"{expected}",
            "give the base that it was trained on, or save the adapter again",
        )
    section = {"name": "prompt", "length": count, "init": "random"}
    if name == _PREFIX:
        section = {"name": "prefix", "length": count, "reparametrize": False}
    return Restored(section, {name: tensors[TENSOR]}, {})


WEIGHTS, LABELS = "adapter_model.safetensors", "labels.json"
"""The second is lmtool's: PEFT has no file for the names of labels, and transformers takes a folder with a config.json
for a complete model."""
LABEL_KEYS = ("num_labels", "id2label", "label2id", "problem_type")
"""The keys of a config.json that stand in it."""
_PREFIX_IN_PEFT = "base_model.model."
_HEADS: dict[str | None, tuple[str, ...]] = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""The modules that PEFT always keeps complete, by what the model is used for."""
_BASE_LAYER = ".base_layer"
"""Where PEFT puts the map that it edits."""
Layout = tuple[JsonObject, dict[str, Tensor]]
WRITERS: dict[str, Callable[[Tuned], Layout]] = {
    "lora": lora.lora_to_peft,
    "ia3": lora.ia3_to_peft,
    "prompt": prompt_to_peft,
    "ptuning": prompt_to_peft,
    "prefix": prompt_to_peft,
}
"""By the name of the tuning method."""
READERS: dict[str, Callable[[Any, Mapping[str, Tensor], HFBase], Restored]] = {
    "LORA": lora.lora_from_peft,
    "IA3": lora.ia3_from_peft,
    "PROMPT_TUNING": prompt_from_peft,
    "P_TUNING": prompt_from_peft,
    "PREFIX_TUNING": prompt_from_peft,
}
"""By PEFT's type."""
TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "LMHeadModel": "CAUSAL_LM",
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "MTModel": "SEQ_2_SEQ_LM",
}
"""PEFT's name for what a class of transformers is used for, by the end of the class."""


def task_type_of(architecture: str) -> str | None:
    """PEFT's name for the use of a transformers class, or None."""
    return next((name for suffix, name in TASK_TYPES.items() if architecture.endswith(suffix)), None)


def writer_of(method: str) -> Callable[[Tuned], Layout]:
    """The function that writes a tuning method in PEFT's format. UserError if PEFT lacks the method."""
    if method not in WRITERS:
        raise UserError(
            f"tuning={method} has no layout in PEFT; these have: {', '.join(WRITERS)}",
            "format=delta writes what was tuned for lmtool",
        )
    return WRITERS[method]


def write_adapter(
    tuned: Tuned,
    base: str,
    revision: str | None,
    labels: Mapping[str, object],
    output: Path,
    write_files: Callable[[Path], None],
) -> None:
    """Write the folder, all of it or nothing. base: a folder or a name on the hub. labels: a classifier's, as in
    config.json. write_files: writes further files. UserError for a method that PEFT lacks or implements
    differently."""
    _require_linears(tuned)
    config, tensors = writer_of(str(tuned.section["name"]))(tuned)
    modules, saved = _saved_modules(tuned)
    written = {path if path == TENSOR else _PREFIX_IN_PEFT + path: tensor for path, tensor in tensors.items()}
    for path in dict.fromkeys([*saved, *tuned.learned]):
        module, _, kind = path.rpartition(".")
        edited = kind == "bias" and module in config.get("target_modules", ())
        name = f"{module}{_BASE_LAYER}.{kind}" if edited else path
        written[_PREFIX_IN_PEFT + name] = tuned.base.tensors[path]
    config |= {
        "task_type": tuned.task_type,
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "modules_to_save": modules or None,
    }

    def fill(draft: Path) -> None:
        save_tensors(written, draft / WEIGHTS)
        for name, content in ((CONFIG, config), (LABELS, labels)):
            if content:
                (draft / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        write_files(draft)

    write_folder_atomically(output, fill)


def _require_linears(tuned: Tuned) -> None:
    """Raise UserError if a tuned layer is no module of the transformers model, so that PEFT cannot reach it."""
    linears = {part.name for place in tuned.base.maps for part in place.parts}
    modules = {name.rpartition(".")[0] for name in tuned.tensors}
    missing = sorted(
        name for name in modules - linears if name.rpartition(".")[2].endswith(("_proj", "_in", "_out", "_gate"))
    )
    if missing:
        raise UserError(
            f"in transformers {missing[0].removeprefix('backbone.')} of this model is no linear module, which PEFT "
            f"could reach; nor are {len(missing) - 1} others that were tuned",
            "format=delta writes what was tuned for lmtool; tuning.projections=[fc_in,fc_out] tunes what PEFT reaches",
        )


def _saved_modules(tuned: Tuned) -> tuple[list[str], list[str]]:
    """The modules that PEFT stores completely, identified by the ends of their paths: its heads, trained or not, and
    others whose weights were trained; and all tensors in them. A bias trained alone is stored as a tensor."""
    heads = _HEADS.get(tuned.task_type, ())
    learned = {path.rpartition(".")[0] for path in tuned.learned if path.endswith(".weight")}
    modules = [*heads, *sorted(module for module in learned if not _is_within(module, heads))]
    return modules, [path for path in tuned.base.tensors if _is_within(path.rpartition(".")[0], modules)]


def _is_within(module: str, ends: Sequence[str]) -> bool:
    """Whether the path of a module, or of one that contains it, has one of these ends."""
    parts = module.split(".")
    return any(".".join(parts[: depth + 1]).endswith(tuple(ends)) for depth in range(len(parts)))


def is_adapter(folder: Path) -> bool:
    """Whether a folder is in PEFT's format."""
    return (folder / CONFIG).is_file()


@dataclass(frozen=True)
class Adapter:
    """What a folder of PEFT holds. updates: the tensors of its method, others: those of heads and of what else learned,
    both by the names they have in the published model. labels: of its classifier, as a config.json has them; empty
    where it does not say."""

    folder: Path
    settings: AdapterSettings
    labels: JsonObject
    updates: dict[str, Tensor]
    others: dict[str, Tensor]

    def restored(self, base: HFBase) -> Restored:
        """As lmtool has it. UserError where it does not fit its base."""
        known = base.with_values({name: tensor for name, tensor in self.others.items() if name in base.tensors})
        try:
            restored = READERS[self.settings.peft_type](self.settings, self.updates, known)
        except UserError as error:
            raise UserError(f"{self.folder}: {error.message}", error.hint) from error
        return Restored(restored.section, restored.added, {**self.others, **restored.changed})


def read_adapter(folder: Path) -> Adapter:
    """A folder of PEFT. UserError where a file is missing or damaged, and for a method that lmtool does not read."""
    settings = settings_of(folder / CONFIG, read_object(str(folder), folder / CONFIG))
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} lacks {WEIGHTS}", "save the adapter again, with safetensors")
    prompt = isinstance(settings, PromptSettings)
    # A model in front of which there are virtual tokens is not wrapped twice.
    inside = _PREFIX_IN_PEFT.partition(".")[0] + "." if prompt else _PREFIX_IN_PEFT
    tensors = {
        name.removeprefix(inside): tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in read_file(folder / WEIGHTS).items()
    }
    ends = {"LORA": lora.LORA_SUFFIXES, "IA3": lora.IA3_SUFFIXES}.get(settings.peft_type, PROMPT_SUFFIXES)
    updates = {name: tensor for name, tensor in tensors.items() if name.endswith(ends)}
    if not updates:
        raise UserError(f"{folder / WEIGHTS} has no tensor that ends with {ends[0]}", "save the adapter again, whole")
    whole = next((name for name, tensor in updates.items() if not tensor.is_floating_point()), None)
    if whole is not None:
        raise UserError(f"{folder / WEIGHTS}: {whole} holds {updates[whole].dtype}, and no fractions", "save it again")
    others = {name.replace(_BASE_LAYER, ""): tensor for name, tensor in tensors.items() if name not in updates}
    for copy in (".original_module.", ".modules_to_save."):
        # With bias="all" the file also has the biases of a head's two copies; the head itself is complete beside them.
        others = {name: others[name] for name in others if copy not in name or name.replace(copy, ".") not in others}
    path = folder / LABELS
    labels = read_object(str(folder), path) if path.is_file() else {}
    kept = {key: labels[key] for key in ("id2label", "problem_type") if key in labels}
    return Adapter(folder, settings, kept, updates, others)


@torch.no_grad()
def peft_logits(
    folder: Path,
    architecture: str,
    config: Mapping[str, object],
    base: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
) -> Tensor:
    """What PEFT itself gives with a folder: its logits of rows, those of virtual tokens too. architecture: the class of
    transformers. config: its config.json. base: its published tensors. Whatever the libraries raise."""
    import peft
    import transformers

    level, kind = transformers.logging.get_verbosity(), getattr(transformers, architecture)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = kind.config_class.from_dict(dict(config))
            model = kind.from_pretrained(None, config=settings, state_dict=dict(base))
            output = peft.PeftModel.from_pretrained(model, folder).eval()(**rows)
    finally:
        transformers.logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    return next(output[name] for name in ("logits", "prediction_logits", "last_hidden_state") if name in output)
