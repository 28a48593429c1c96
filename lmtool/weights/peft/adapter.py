"""Reads and writes PEFT adapters: folders with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.runs.checkpoints import save_tensors
from lmtool.system.files import user_path
from lmtool.tokenizers.configs import TOKENIZER_FILES
from lmtool.weights.comparing import quiet_transformers
from lmtool.weights.exporting import write_folder_atomically, write_json
from lmtool.weights.folders import Address, MissingFile, read_object
from lmtool.weights.peft.maps import HFBase, HFLinear, LinearSlice, RestoredAdapter, TunedModel
from lmtool.weights.peft.settings import (
    CONFIG,
    DELTA,
    DISAGREE,
    MERGE,
    SAVE_AGAIN,
    WEIGHTS,
    AdapterSettings,
    Ia3Settings,
    LoraSettings,
    PromptSettings,
    settings_of,
)
from lmtool.weights.reading import read_file

_A, _B, _MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
_NAMES = {
    "a_RI": "lora_A.weight",
    "b_OR": "lora_B.weight",
    "magnitude_O": "lora_magnitude_vector",
    "bias_O": "lora_B.bias",
}
"""PEFT's names for the tensors of an update, by the attribute of `_Update`."""
LORA_SUFFIXES = tuple(f".{name}" for name in _NAMES.values())
LORA_EMBEDDING = ".lora_embedding_"
"""What follows the name of an embedding in the tensors of its update, which lmtool does not support."""


def lora_to_peft(tuned: TunedModel) -> tuple[JsonObject, dict[str, Tensor]]:
    """Converts LoRA or DoRA to PEFT's configuration and tensors.

    If transformers joins several edited layers in one, their updates become one block-diagonal update, whose rank is
    the sum of their ranks. Outputs without an update have zeros in B, and with DoRA the magnitude of the base's weight.
    """
    section, tensors = tuned.section, tuned.tensors
    rank, rank_stabilized = section["rank"], bool(section["rank_stabilised"])
    ranks: dict[str, int] = {}
    peft_tensors: dict[str, Tensor] = {}
    for linear in tuned.base.linears:
        parts = [part for part in linear.parts if f"{part.name}.{_A}" in tensors]
        if not parts:
            continue
        ranks[linear.module] = rank * len(parts)
        first_b_OR = tensors[f"{parts[0].name}.{_B}"]
        b_OR = first_b_OR.new_zeros(linear.outputs, rank * len(parts))
        for number, part in enumerate(parts):
            b_OR[part.rows_O, rank * number : rank * (number + 1)] = tensors[f"{part.name}.{_B}"]
        rows = [tensors[f"{part.name}.{_A}"][:, part.columns_I] for part in parts]
        update = {"a_RI": torch.cat(rows), "b_OR": b_OR}
        if section["dora"]:
            update["magnitude_O"] = torch.linalg.vector_norm(tuned.base.weight_OI(linear.module), dim=1)
            for part in parts:
                update["magnitude_O"][part.rows_O] = tensors[f"{part.name}.{_MAGNITUDE}"]
        peft_tensors |= {f"{linear.module}.{_NAMES[kind]}": tensor for kind, tensor in update.items()}
    other_ranks = {module: number for module, number in ranks.items() if number != rank}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _integer_if_integral(section["alpha"]),
        "lora_dropout": section["dropout"],
        "use_rslora": rank_stabilized,
        "use_dora": section["dora"],
        "bias": section["bias"],
        "fan_in_fan_out": any(linear.transposed for linear in tuned.base.linears if linear.module in ranks),
        "target_modules": list(ranks),
        "rank_pattern": other_ranks,
        # Joined updates have a larger rank. The scale, alpha / rank or alpha / sqrt(rank), must not change with it.
        "alpha_pattern": {
            module: _integer_if_integral(section["alpha"] * (number / rank) ** (0.5 if rank_stabilized else 1))
            for module, number in other_ranks.items()
        },
    }
    return config, peft_tensors


@dataclass(frozen=True)
class _Update:
    """The update of a linear layer: the matrix scale * B @ A, which is added to the weight. a_RI: A. b_OR: B.
    magnitude_O: DoRA's magnitudes of the outputs. bias_O: PEFT's bias of B."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None = None
    bias_O: Tensor | None = None

    def select(self, layer: LinearSlice) -> _Update:
        a_RI = self.a_RI.new_zeros(self.a_RI.shape)
        a_RI[:, layer.columns_I] = self.a_RI  # a permutation of the inputs
        magnitude_O = None if self.magnitude_O is None else self.magnitude_O[layer.rows_O]
        return _Update(a_RI, self.b_OR[layer.rows_O], self.scale, magnitude_O)

    def changes(self, norm_O: Tensor) -> bool:
        return bool(self.b_OR.any()) or (self.magnitude_O is not None and not self.magnitude_O.allclose(norm_O))

    def merge(self, weight_OI: Tensor) -> Tensor:
        updated_OI = torch.addmm(weight_OI, self.b_OR, self.a_RI, alpha=self.scale)
        if self.magnitude_O is None:
            return updated_OI
        return updated_OI * (self.magnitude_O / torch.linalg.vector_norm(updated_OI, dim=1))[:, None]


def lora_from_peft(settings: LoraSettings, tensors: Mapping[str, Tensor], base: HFBase) -> RestoredAdapter:
    """Converts LoRA or DoRA from PEFT; `READERS` of adapter.py describes the parameters.

    lmtool uses one rank and one scale for all layers: updates of a smaller rank are padded with zeros, and differences
    in scale are multiplied into B. Updates of layers that lmtool's method does not edit are merged into the base.
    """
    updates = dict(_updates(settings, tensors, base))
    modules = (linear.module for linear in base.linears)
    missing = [module for module in modules if module not in updates and settings.targets(module)]
    if missing and settings.target_modules != "all-linear":
        raise UserError(f"{CONFIG} targets {missing[0]}, but the adapter has no tensors for it", SAVE_AGAIN)
    changed_tensors: dict[str, Tensor] = {}
    lmtool_updates: dict[str, _Update] = {}
    for module, update in updates.items():
        if update.bias_O is not None:
            changed_tensors[f"{module}.bias"] = base.tensors[f"{module}.bias"] + update.scale * update.bias_O
        linear, weight_OI = base.by_module.get(module), base.weight_OI(module)
        if linear is None:
            changed_tensors[f"{module}.weight"] = base.to_stored_layout(module, update.merge(weight_OI))
            continue
        norm_O = torch.linalg.vector_norm(weight_OI, dim=1)
        for part in linear.parts:
            part_update = update.select(part)
            # A part of a joined layer gets an update only if the joined update changes it.
            if len(linear.parts) == 1 or part_update.changes(norm_O[part.rows_O]):
                lmtool_updates[part.name] = part_update
    if not lmtool_updates:
        raise UserError(f"{WEIGHTS} contains only updates of layers that lmtool's tuning methods do not edit", MERGE)
    return _with_one_rank(settings, lmtool_updates, base, changed_tensors)


def _with_one_rank(
    settings: LoraSettings, updates: Mapping[str, _Update], base: HFBase, changed_tensors: dict[str, Tensor]
) -> RestoredAdapter:
    """Layers without an update get an update of zero if their projection (q_proj, ...) occurs in `updates`."""
    rank = max(len(update.a_RI) for update in updates.values())
    scale = max(update.scale for update in updates.values())
    projections = sorted({name.rpartition(".")[2] for name in updates})
    added_tensors: dict[str, Tensor] = {}
    parts = [(linear.module, part) for linear in base.linears for part in linear.parts]
    for module, part in (pair for pair in parts if pair[1].name.rpartition(".")[2] in projections):
        weight_OI = base.weight_OI(module)[part.rows_O]
        zero_update = _Update(weight_OI.new_zeros(0, weight_OI.shape[1]), weight_OI.new_zeros(len(weight_OI), 0), scale)
        update = updates.get(part.name, zero_update)
        missing_rank = rank - len(update.a_RI)
        added_tensors[f"{part.name}.{_A}"] = torch.cat(
            [update.a_RI, update.a_RI.new_zeros(missing_rank, update.a_RI.shape[1])]
        )
        scaled_OR = update.b_OR if update.scale == scale else update.b_OR * (update.scale / scale)
        added_tensors[f"{part.name}.{_B}"] = torch.cat(
            [scaled_OR, scaled_OR.new_zeros(len(scaled_OR), missing_rank)], dim=1
        )
        if settings.use_dora:
            norm_O = torch.linalg.vector_norm(weight_OI, dim=1)
            added_tensors[f"{part.name}.{_MAGNITUDE}"] = norm_O if update.magnitude_O is None else update.magnitude_O
    section = {
        "name": "lora",
        "rank": rank,
        "alpha": scale * (rank**0.5 if settings.use_rslora else rank),
        "dropout": settings.lora_dropout,
        "projections": projections,
        "rank_stabilised": settings.use_rslora,
        "dora": settings.use_dora,
        "bias": settings.bias,
    }
    return RestoredAdapter(section, added_tensors, changed_tensors)


def _updates(settings: LoraSettings, tensors: Mapping[str, Tensor], base: HFBase) -> Iterator[tuple[str, _Update]]:
    modules = dict.fromkeys(name.removesuffix(end) for name in tensors for end in LORA_SUFFIXES if name.endswith(end))
    expected = {
        "a_RI",
        "b_OR",
        *(["magnitude_O"] if settings.use_dora else []),
        *(["bias_O"] if settings.lora_bias else []),
    }
    for module in modules:
        update = {kind: tensors[f"{module}.{name}"] for kind, name in _NAMES.items() if f"{module}.{name}" in tensors}
        outputs, inputs = base.weight_OI(module).shape
        reason, rank = None, settings.rank(module)
        if update.keys() != expected:
            kinds = sorted(_NAMES[kind] for kind in expected ^ update.keys())
            reason = f"the adapter has {module} with{'' if update.keys() > expected else 'out'} {', '.join(kinds)}"
        elif not settings.targets(module):
            reason = f"the adapter updates {module}, which is not in target_modules"
        elif bool(update["a_RI"].shape != (rank, inputs)) or bool(update["b_OR"].shape != (outputs, rank)):
            shapes = f"{tuple(update['b_OR'].shape)} x {tuple(update['a_RI'].shape)}"
            reason = f"the update of {module} is {shapes}; expected {outputs} outputs, {inputs} inputs, rank {rank}"
        elif any(update[kind].shape != (outputs,) for kind in expected - {"a_RI", "b_OR"}):
            reason = f"the update of {module} has a magnitude or bias of another size than {outputs} outputs"
        elif settings.lora_bias and f"{module}.bias" not in base.tensors:
            raise UserError(
                f"lora_bias=true: the update of {module} has a bias, which the layer lacks", "use the adapter with PEFT"
            )
        if reason is not None:
            raise UserError(f"{CONFIG} and {WEIGHTS} disagree: {reason}", DISAGREE)
        yield module, _Update(scale=settings.scale(module), **update)


def _integer_if_integral(value: float) -> float:
    """PEFT declares alpha as an integer."""
    return int(value) if float(value).is_integer() else value


_SCALE = "ia3"
_OUTPUTS, _INPUTS = ("k_proj", "v_proj"), ("fc_out",)
"""Names of the layers whose outputs (IA)3 scales, and of the layers whose inputs it scales."""
IA3_SUFFIXES = (".ia3_l",)


def ia3_to_peft(tuned: TunedModel) -> tuple[JsonObject, dict[str, Tensor]]:
    """Converts (IA)3 to PEFT's configuration and tensors.

    If transformers joins several layers in one, the outputs of layers that (IA)3 does not edit are scaled by 1. Raises
    UserError if PEFT would not scale a bias that lmtool scales.
    """
    tensors = tuned.tensors
    targets, feedforward = [], []
    peft_tensors: dict[str, Tensor] = {}
    for linear in tuned.base.linears:
        parts = [part for part in linear.parts if f"{part.name}.{_SCALE}" in tensors]
        if not parts:
            continue
        if parts[0].name.endswith(_OUTPUTS) and tuned.base.has_separate_bias(linear):
            raise UserError(
                f"transformers adds the biases of {parts[0].name.removeprefix('backbone.')} after {linear.module}, so "
                "PEFT does not scale them",
                f"{DELTA}; omit format= to export merged weights",
            )
        targets.append(linear.module)
        if parts[0].name.endswith(_INPUTS):
            feedforward.append(linear.module)
            peft_tensors[f"{linear.module}.ia3_l"] = tensors[f"{parts[0].name}.{_SCALE}"][None, parts[0].columns_I]
            continue
        scale_O = torch.ones(linear.outputs)
        for part in parts:
            scale_O[part.rows_O] = tensors[f"{part.name}.{_SCALE}"]
        peft_tensors[f"{linear.module}.ia3_l"] = scale_O[:, None]
    config = {
        "peft_type": "IA3",
        "target_modules": targets,
        "feedforward_modules": feedforward,
        "fan_in_fan_out": any(linear.transposed for linear in tuned.base.linears if linear.module in targets),
    }
    return config, peft_tensors


def ia3_from_peft(settings: Ia3Settings, tensors: Mapping[str, Tensor], base: HFBase) -> RestoredAdapter:
    """Converts (IA)3 from PEFT; `READERS` of adapter.py describes the parameters. Scales that lmtool's method does not
    have are merged into the base."""
    dims = {f".{kind}.weight": 0 for kind in _OUTPUTS} | {f".{kind}.weight": 1 for kind in _INPUTS}
    added_tensors = {
        f"{name.removesuffix('.weight')}.{_SCALE}": torch.ones(tensor.shape[dim])
        for name, tensor in base.lmtool_tensors.items()
        for suffix, dim in dims.items()
        if ".layers." in name and name.endswith(suffix)
    }
    changed_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(IA3_SUFFIXES[0])
        weight_OI, inputs = base.weight_OI(module).clone(), settings.scales_inputs(module)
        expected = (1, weight_OI.shape[1]) if inputs else (len(weight_OI), 1)
        if not settings.targets(module) or tensor.shape != expected:
            reason = f"{name} has the shape {tuple(tensor.shape)}, not {expected}"
            if not settings.targets(module):
                reason = f"{module} is not in target_modules"
            raise UserError(f"{CONFIG} and {WEIGHTS} disagree: {reason}", DISAGREE)
        scale, linear = tensor.flatten(), base.by_module.get(module)
        # A scale of outputs does not apply to biases that are added after the module.
        if linear is None or (not inputs and base.has_separate_bias(linear)):
            merged_scale = scale
        else:
            merged_scale = _take_scales(linear, scale, inputs, added_tensors)
        if bool((merged_scale == 1).all()):
            continue
        factor = merged_scale if inputs else merged_scale[:, None]
        changed_tensors[f"{module}.weight"] = base.to_stored_layout(module, weight_OI * factor)
        if not inputs and f"{module}.bias" in base.tensors:
            changed_tensors[f"{module}.bias"] = base.tensors[f"{module}.bias"] * merged_scale
    return RestoredAdapter({"name": "ia3"}, added_tensors, changed_tensors)


def _take_scales(linear: HFLinear, scale: Tensor, inputs: bool, added_tensors: dict[str, Tensor]) -> Tensor:
    """Copies the scales that lmtool's method has into `added_tensors`. Returns `scale` with 1 in their place, to be
    merged into the base."""
    merged_scale = scale.clone()
    for part in linear.parts:
        if inputs and part.name.endswith(_INPUTS):
            added_tensors[f"{part.name}.{_SCALE}"][part.columns_I] = scale
            return torch.ones_like(merged_scale)
        if not inputs and part.name.endswith(_OUTPUTS):
            added_tensors[f"{part.name}.{_SCALE}"] = scale[part.rows_O]
            merged_scale[part.rows_O] = 1.0
    return merged_scale


PROMPT_TENSOR = "prompt_embeddings"
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
    """Writes the folder of an adapter, completely or not at all. base, revision: folder or hub name of the base, and
    its commit. labels: the label keys of config.json. complete: adds further files, such as those of the tokenizer, to
    the draft of the folder, and may raise CheckFailed. Raises UserError if PEFT lacks the method or implements it
    differently, or if the folder cannot be written."""
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
                write_json(draft / name, content)
        complete(draft)

    write_folder_atomically(output, fill)


def _require_linears(tuned: TunedModel) -> None:
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
    """Returns suffixes of the modules that PEFT stores completely (heads, and modules with a trained weight), and all
    their tensors."""
    heads = _HEADS.get(tuned.task_type, ())
    trained = {path.rpartition(".")[0] for path in tuned.trained if path.endswith(".weight")}
    modules = [*heads, *sorted(module for module in trained if not _is_within(module, heads))]
    return modules, [path for path in tuned.base.tensors if _is_within(path.rpartition(".")[0], modules)]


def _is_within(module: str, suffixes: Sequence[str]) -> bool:
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
    for name in (WEIGHTS, LABELS, *TOKENIZER_FILES):
        with suppress(MissingFile):  # the cache has one folder per commit
            address.file(name, offline, folder.name)
    return folder


@dataclass(frozen=True)
class Adapter:
    """The content of a PEFT adapter.

    Attributes:
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
        changed = {name: tensor for name, tensor in self.saved.items() if name in base.tensors}
        base = replace(base, tensors={**base.tensors, **changed})
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
    suffixes = {"LORA": LORA_SUFFIXES, "IA3": IA3_SUFFIXES}.get(settings.peft_type, (PROMPT_TENSOR,))
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
    """Opens an adapter with PEFT, in evaluation mode. architecture: the transformers class of the base. config, base:
    the base's config.json, and its tensors under transformers' names. Exceptions of PEFT and transformers are not
    caught."""
    import peft
    import transformers

    model_class = getattr(transformers, architecture)
    with quiet_transformers():
        settings = model_class.config_class.from_dict(dict(config))
        model = model_class.from_pretrained(None, config=settings, state_dict=dict(base))
        return cast(nn.Module, peft.PeftModel.from_pretrained(model, folder).eval())
