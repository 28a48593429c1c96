"""Soft prompts and prefixes (`lmtool/tuning/prompt.py`) as PEFT's.

PEFT puts virtual tokens in front of all others, and hands the model vectors instead of tokens: its classifiers then
read another token than lmtool's, or cannot tell where a text ends. So these have its layout where a language model
writes text, and nowhere else. Of an encoder-decoder PEFT has no prefix for the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.weights.peft.settings import CONFIG, PromptSettings
from lmtool.weights.peft.tuned import PublishedBase, Restored, Tuned

TENSOR = "prompt_embeddings"
ENDS = (TENSOR,)
_VIRTUAL, _PREFIX = "backbone.embed.virtual.weight", "backbone.prefix.weight"
_KIND = {_VIRTUAL: "PROMPT_TUNING", _PREFIX: "PREFIX_TUNING"}
_USED = {_VIRTUAL: {"CAUSAL_LM": "decoder", "SEQ_2_SEQ_LM": "encoder_decoder"}, _PREFIX: {"CAUSAL_LM": "decoder"}}
"""The architecture by PEFT's name for what the model is used for."""
_OTHERWISE = {
    (_VIRTUAL, "transformer"): "transformers scales the vectors of tokens, but none that it is handed",
    (_PREFIX, "gpt1"): "transformers takes no keys of earlier tokens",
}
"""Families that PEFT, or what is below it, reads in another way."""


def _problem(name: str, task_type: str | None, model: ModelConfig) -> str | None:
    """Why PEFT does not read the tensor of this name as lmtool does, if it does not."""
    if task_type is None or _USED.get(name, {}).get(task_type) != model.architecture:
        return "only prompts of language models that write text, and prefixes of decoders that do, are read alike there"
    return _OTHERWISE.get((name, model.name))


def to_peft(tuned: Tuned) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """PEFT's configuration, and its one tensor. UserError where a text is read in another way there."""
    name, model = next(iter(tuned.tensors)), tuned.base.model
    problem = _problem(name, None if len(tuned.tensors) > 1 or tuned.learned else tuned.task_type, model)
    if problem is not None:
        raise UserError(
            f"PEFT reads tuning={tuned.section['name']} of model={model.name} with this head in another way: {problem}",
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
    """What PEFT calls the sizes of a transformer. Of a prefix the heads are those of keys and values."""
    prefix = name == _PREFIX
    heads = model.key_value_heads if prefix else model.num_heads
    width = heads * model.width_of_head if prefix else model.hidden_size
    return {"token_dim": width, "num_attention_heads": heads, "num_layers": model.num_layers}


def from_peft(settings: PromptSettings, tensors: Mapping[str, Tensor], base: PublishedBase) -> Restored:
    """The reverse: what an encoder has computed, as prompts without one. UserError where PEFT reads a text in another
    way, and where the tensor is not what the configuration says."""
    name = _PREFIX if settings.peft_type == "PREFIX_TUNING" else _VIRTUAL
    sides = settings.num_transformer_submodules or (2 if settings.task_type == "SEQ_2_SEQ_LM" else 1)
    problem = _problem(name, settings.task_type, base.model)
    if problem is None and sides > 1:
        problem = "num_transformer_submodules=2 puts them in front of the decoder's text too"
    if problem is not None:
        raise UserError(
            f"{CONFIG}: lmtool reads peft_type={settings.peft_type}, task_type={settings.task_type} of "
            f"model={base.model.name} in another way than PEFT: {problem}",
            "use it with PEFT",
        )
    sizes = _sizes(name, base.model)
    count, width, depth = settings.num_virtual_tokens, sizes["token_dim"], sizes["num_layers"]
    wanted = (count, 2 * depth * width if name == _PREFIX else width)
    if tensors[TENSOR].shape != wanted:
        raise UserError(
            f"{CONFIG}: num_virtual_tokens={count}, and {TENSOR} is {tuple(tensors[TENSOR].shape)}; its base reads "
            f"{wanted}",
            "give the base that it was trained on, or save the adapter again",
        )
    section = {"name": "prompt", "length": count, "init": "random"}
    if name == _PREFIX:
        section = {"name": "prefix", "length": count, "reparametrize": False}
    return Restored(section, {name: tensors[TENSOR]}, {})
