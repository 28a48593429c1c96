"""Reads and writes PEFT adapters: folders with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from lmtool.config.saved import JsonObject
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.runs.checkpoints import save_tensors
from lmtool.system.files import user_path
from lmtool.weights.comparing import quiet_transformers
from lmtool.weights.exporting import write_folder_atomically
from lmtool.weights.folders import TOKENIZER, Address, MissingFile, read_object
from lmtool.weights.peft.lora import (
    IA3_SUFFIXES,
    LORA_EMBEDDING,
    LORA_SUFFIXES,
    ia3_from_peft,
    ia3_to_peft,
    lora_from_peft,
    lora_to_peft,
)
from lmtool.weights.peft.maps import HFBase, RestoredAdapter, TunedModel
from lmtool.weights.peft.settings import (
    CONFIG,
    DELTA,
    DISAGREE,
    SAVE_AGAIN,
    WEIGHTS,
    AdapterSettings,
    PromptSettings,
    settings_of,
)
from lmtool.weights.reading import read_file

PROMPT_TENSOR = "prompt_embeddings"
_PROMPT_SUFFIXES = (PROMPT_TENSOR,)
_VIRTUAL, _PREFIX = "backbone.embed.virtual.weight", "backbone.prefix.weight"
_PEFT_TYPES = {_VIRTUAL: "PROMPT_TUNING", _PREFIX: "PREFIX_TUNING"}
_ARCHITECTURES = {
    _VIRTUAL: {"CAUSAL_LM": "decoder", "SEQ_2_SEQ_LM": "encoder_decoder"},
    _PREFIX: {"CAUSAL_LM": "decoder"},
}
"""For each tensor, by PEFT's task type, the architecture in which lmtool and PEFT use the tensor in the same way."""
_INCOMPATIBLE = {
    (_VIRTUAL, "transformer"): "transformers scales token embeddings, but not embeddings that are passed in",
    (_PREFIX, "gpt1"): "transformers has no cache of keys and values for this model",
}
"""The families in which PEFT or transformers uses the tensor differently, with the reason."""


def _incompatibility(name: str, task_type: str | None, model: ModelConfig) -> str | None:
    """Returns the reason why PEFT uses the tensor of this name differently from lmtool, or None."""
    if task_type is None or _ARCHITECTURES.get(name, {}).get(task_type) != model.architecture:
        return "PEFT and lmtool agree only on prompts of generative language models and prefixes of generative decoders"
    return _INCOMPATIBLE.get((name, model.name))


def prompt_to_peft(tuned: TunedModel) -> tuple[JsonObject, dict[str, Tensor]]:
    """Converts a prompt or prefix to PEFT's configuration and tensor. Raises UserError if PEFT would compute other
    outputs."""
    name, model = next(iter(tuned.tensors)), tuned.base.model
    reason = _incompatibility(name, None if len(tuned.tensors) > 1 or tuned.trained else tuned.task_type, model)
    if reason is not None:
        raise UserError(
            f"PEFT would not give lmtool's outputs for tuning={tuned.section['name']} of model={model.name} with this "
            f"head: {reason}",
            DELTA,
        )
    prompt, sizes = tuned.tensors[name], _sizes(name, model)
    config = {
        "peft_type": _PEFT_TYPES[name],
        "num_virtual_tokens": len(prompt),
        "num_transformer_submodules": 1,
        **sizes,
    }
    return config, {PROMPT_TENSOR: prompt}


def _sizes(name: str, model: ModelConfig) -> dict[str, int]:
    """Returns the sizes of a model under PEFT's keys. For a prefix, these are the sizes of the key and value heads."""
    assert isinstance(model, TransformerConfig)
    is_prefix = name == _PREFIX
    heads = model.key_value_heads if is_prefix else model.num_heads
    width = heads * model.width_of_head if is_prefix else model.hidden_size
    return {"token_dim": width, "num_attention_heads": heads, "num_layers": model.num_layers}


def prompt_from_peft(settings: PromptSettings, tensors: Mapping[str, Tensor], base: HFBase) -> RestoredAdapter:
    """Converts a prompt or prefix from PEFT; `READERS` describes the parameters. A prompt that an encoder computed in
    training becomes a prompt without an encoder."""
    name = _PREFIX if settings.peft_type == "PREFIX_TUNING" else _VIRTUAL
    submodules = settings.num_transformer_submodules or (2 if settings.task_type == "SEQ_2_SEQ_LM" else 1)
    reason = _incompatibility(name, settings.task_type, base.model)
    if reason is None and submodules > 1:
        reason = "num_transformer_submodules=2 adds virtual tokens to the decoder's input as well"
    if reason is not None:
        raise UserError(
            f"{CONFIG}: lmtool uses peft_type={settings.peft_type}, task_type={settings.task_type} of "
            f"model={base.model.name} differently from PEFT: {reason}",
            "use the adapter with PEFT",
        )
    sizes = _sizes(name, base.model)
    count, width, depth = settings.num_virtual_tokens, sizes["token_dim"], sizes["num_layers"]
    expected = (count, 2 * depth * width if name == _PREFIX else width)
    if tensors[PROMPT_TENSOR].shape != expected:
        raise UserError(
            f"{CONFIG}: {PROMPT_TENSOR} has the shape {tuple(tensors[PROMPT_TENSOR].shape)}; "
            f"num_virtual_tokens={count} and the base require {expected}",
            DISAGREE,
        )
    section = {"name": "prompt", "length": count, "init": "random"}
    if name == _PREFIX:
        section = {"name": "prefix", "length": count, "reparametrize": False}
    return RestoredAdapter(section, {name: tensors[PROMPT_TENSOR]}, {})


LABELS = "labels.json"
"""lmtool's file for label names. PEFT does not store label names, and they cannot be in config.json, because
transformers treats a folder with config.json as a complete model."""
LABEL_KEYS = ("num_labels", "id2label", "label2id", "problem_type")
"""The keys of config.json that labels.json contains."""
_PREFIX_IN_PEFT = "base_model.model."
_SAVED_COPY = re.compile(r"\.(original_module|modules_to_save(\.default)?)\.")
_HEADS: dict[str | None, tuple[str, ...]] = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Names of the modules that PEFT always stores completely, by task type: the heads."""
_BASE_LAYER = ".base_layer"
"""PEFT wraps a layer that it edits; this is the name of the original layer in the wrapper."""
PeftContent = tuple[JsonObject, dict[str, Tensor]]
"""The content of adapter_config.json, and the tensors by transformers' names."""
WRITERS: dict[str, Callable[[TunedModel], PeftContent]] = {
    "lora": lora_to_peft,
    "ia3": ia3_to_peft,
    "prompt": prompt_to_peft,
    "ptuning": prompt_to_peft,
    "prefix": prompt_to_peft,
}
"""The function that converts a tuned model to PEFT's format, by tuning method."""
READERS: dict[str, Callable[[Any, Mapping[str, Tensor], HFBase], RestoredAdapter]] = {
    "LORA": lora_from_peft,
    "IA3": ia3_from_peft,
    "PROMPT_TUNING": prompt_from_peft,
    "P_TUNING": prompt_from_peft,
    "PREFIX_TUNING": prompt_from_peft,
}
"""The function that converts an adapter from PEFT's format, by `peft_type`. Its arguments are the adapter's settings,
the adapter's tensors under transformers' names, and the base. It raises UserError if the tensors do not match the
settings or the base, or if lmtool cannot compute the same outputs."""
TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "LMHeadModel": "CAUSAL_LM",
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "MTModel": "SEQ_2_SEQ_LM",
}
"""PEFT's task type by the suffix of a transformers class."""


def task_type_of(architecture: str) -> str | None:
    """Returns PEFT's task type for a transformers class, or None."""
    return next((name for suffix, name in TASK_TYPES.items() if architecture.endswith(suffix)), None)


def writer_of(method: str) -> Callable[[TunedModel], PeftContent]:
    """Returns the function that converts a tuning method to PEFT's format. Raises UserError if PEFT lacks the
    method."""
    if method not in WRITERS:
        raise UserError(f"tuning={method} has no counterpart in PEFT; allowed: {', '.join(WRITERS)}", DELTA)
    return WRITERS[method]


def write_adapter(
    tuned: TunedModel,
    base: str,
    revision: str | None,
    labels: Mapping[str, object],
    output: Path,
    complete: Callable[[Path], None],
) -> None:
    """Writes the folder of an adapter, completely or not at all.

    Args:
        tuned: The tuned model.
        base: Folder or hub name of the base.
        revision: The base's commit on the hub, or None.
        labels: The label keys of config.json; empty if the model has no labels.
        output: The new folder.
        complete: Adds further files, such as those of the tokenizer, to the draft of the folder, and may raise
            CheckFailed if the draft is not what was exported.

    Raises:
        UserError: If PEFT lacks the method or implements it differently, or if the folder cannot be written.
    """
    _require_linears(tuned)
    config, tensors = writer_of(str(tuned.section["name"]))(tuned)
    modules, saved = _saved_modules(tuned)
    peft_tensors = {
        path if path == PROMPT_TENSOR else _PREFIX_IN_PEFT + path: tensor for path, tensor in tensors.items()
    }
    for path in dict.fromkeys([*saved, *tuned.trained]):
        module, _, kind = path.rpartition(".")
        edited = kind == "bias" and module in config.get("target_modules", ())
        name = f"{module}{_BASE_LAYER}.{kind}" if edited else path
        peft_tensors[_PREFIX_IN_PEFT + name] = tuned.base.tensors[path]
    config |= {
        "task_type": tuned.task_type,
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "modules_to_save": modules or None,
    }

    def fill(draft: Path) -> None:
        save_tensors(peft_tensors, draft / WEIGHTS)
        for name, content in ((CONFIG, config), (LABELS, labels)):
            if content:
                (draft / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        complete(draft)

    write_folder_atomically(output, fill)


def _require_linears(tuned: TunedModel) -> None:
    """Raises UserError if tuning edited a layer that PEFT cannot edit, because it is not a linear module in
    transformers."""
    linears = {part.name for linear in tuned.base.linears for part in linear.parts}
    modules = {name.rpartition(".")[0] for name in tuned.tensors}
    missing = sorted(
        name for name in modules - linears if name.rpartition(".")[2].endswith(("_proj", "_in", "_out", "_gate"))
    )
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(
            f"PEFT cannot adapt the tuned layer {missing[0].removeprefix('backbone.')}{more}, which is not a linear "
            "module in Hugging Face transformers",
            f"{DELTA}; for PEFT, finetune again with tuning.projections=[fc_in,fc_out]",
        )


def _saved_modules(tuned: TunedModel) -> tuple[list[str], list[str]]:
    """Returns the modules that PEFT stores completely, and the names of all their tensors.

    These modules are the heads, trained or not, and all other modules with a trained weight. They are named by suffixes
    of their paths. A bias that is trained without the weight of its module is not included; it is stored separately.
    """
    heads = _HEADS.get(tuned.task_type, ())
    trained = {path.rpartition(".")[0] for path in tuned.trained if path.endswith(".weight")}
    modules = [*heads, *sorted(module for module in trained if not _is_within(module, heads))]
    return modules, [path for path in tuned.base.tensors if _is_within(path.rpartition(".")[0], modules)]


def _is_within(module: str, suffixes: Sequence[str]) -> bool:
    """Returns whether the path of a module, or of a module that contains it, ends with one of these suffixes."""
    parts = module.split(".")
    return any(".".join(parts[: depth + 1]).endswith(tuple(suffixes)) for depth in range(len(parts)))


def adapter_folder(checkpoint: str, offline: bool = False) -> Path | None:
    """Returns the folder of a PEFT adapter, after downloading it if it is on the hub; None if `checkpoint=` names
    anything else."""
    if "://" not in checkpoint:
        folder = user_path(checkpoint)
        return folder if (folder / CONFIG).is_file() else None
    address = Address.of("checkpoint", checkpoint, "use a folder, or hf://org/name@revision")
    try:
        folder = address.file(CONFIG, offline).parent
    except MissingFile:
        return None
    for name in (WEIGHTS, LABELS, *TOKENIZER):
        with suppress(MissingFile):  # the cache has one folder per commit
            address.file(name, offline, folder.name)
    return folder


@dataclass(frozen=True)
class Adapter:
    """The content of a PEFT adapter.

    Attributes:
        folder: The adapter's folder.
        settings: The decoded adapter_config.json.
        labels: The label keys of config.json; empty if the adapter stores no labels.
        updates: The tensors of the tuning method, under transformers' names.
        saved: All other tensors, those of heads and of modules that were trained completely, under transformers' names.
    """

    folder: Path
    settings: AdapterSettings
    labels: JsonObject
    updates: dict[str, Tensor]
    saved: dict[str, Tensor]

    def restore(self, base: HFBase) -> RestoredAdapter:
        """Converts the adapter to a tuning method of lmtool. Raises UserError if the adapter does not fit its base."""
        base = base.with_values({name: tensor for name, tensor in self.saved.items() if name in base.tensors})
        try:
            restored = READERS[self.settings.peft_type](self.settings, self.updates, base)
        except UserError as error:
            raise UserError(f"{self.folder}: {error.message}", error.hint) from error
        return RestoredAdapter(restored.section, restored.added_tensors, {**self.saved, **restored.changed_tensors})


def read_adapter(folder: Path) -> Adapter:
    """Reads a PEFT adapter. Raises UserError if a file is missing or damaged, or if lmtool does not support the
    method."""
    settings = settings_of(folder / CONFIG, read_object(folder / CONFIG))
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} lacks {WEIGHTS}", "save the adapter again, with safetensors")
    prompt = isinstance(settings, PromptSettings)
    # PEFT wraps a model with virtual tokens in one module, and a model with edited layers in two.
    prefix = _PREFIX_IN_PEFT.partition(".")[0] + "." if prompt else _PREFIX_IN_PEFT
    tensors = {
        name.removeprefix(prefix): tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in read_file(folder / WEIGHTS).items()
    }
    embeddings = [name.partition(LORA_EMBEDDING)[0] for name in tensors if LORA_EMBEDDING in name]
    if embeddings:
        raise UserError(
            f"{folder}: the adapter updates {embeddings[0]}, an embedding; lmtool supports LoRA on linear layers only",
            "use the adapter with PEFT, or train one whose target_modules are linear layers",
        )
    suffixes = {"LORA": LORA_SUFFIXES, "IA3": IA3_SUFFIXES}.get(settings.peft_type, _PROMPT_SUFFIXES)
    updates = {name: tensor for name, tensor in tensors.items() if name.endswith(suffixes)}
    if not updates:
        raise UserError(f"{folder / WEIGHTS} has no tensor that ends with {suffixes[0]}", SAVE_AGAIN)
    integer = next((name for name, tensor in updates.items() if not tensor.is_floating_point()), None)
    if integer is not None:
        raise UserError(
            f"{folder / WEIGHTS}: the tensor {integer} has dtype {updates[integer].dtype}, not a floating-point type",
            SAVE_AGAIN,
        )
    saved = {name.replace(_BASE_LAYER, ""): tensor for name, tensor in tensors.items() if name not in updates}
    # With bias="all" the file contains the biases of a head three times: in the complete head, and in two copies.
    saved = {
        name: saved[name] for name in saved if not _SAVED_COPY.search(name) or _SAVED_COPY.sub(".", name) not in saved
    }
    path = folder / LABELS
    labels = read_object(path) if path.is_file() else {}
    labels = {key: labels[key] for key in ("id2label", "problem_type") if key in labels}
    return Adapter(folder, settings, labels, updates, saved)


def open_with_peft(
    folder: Path, architecture: str, config: Mapping[str, object], base: Mapping[str, Tensor]
) -> nn.Module:
    """Opens an adapter with PEFT, in evaluation mode. Exceptions of PEFT and transformers are not caught.

    Args:
        folder: The adapter's folder.
        architecture: The transformers class of the base.
        config: Content of the base's config.json.
        base: The base's tensors under transformers' names.
    """
    import peft
    import transformers

    model_class = getattr(transformers, architecture)
    with quiet_transformers():
        settings = model_class.config_class.from_dict(dict(config))
        model = model_class.from_pretrained(None, config=settings, state_dict=dict(base))
        return cast(nn.Module, peft.PeftModel.from_pretrained(model, folder).eval())
