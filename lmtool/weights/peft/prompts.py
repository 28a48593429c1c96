"""Soft prompts and prefixes (`lmtool/tuning/prompt.py`, `ptuning.py`, `prefix.py`) as PEFT's.

PEFT puts virtual tokens in front of all others, and hands the model vectors instead of tokens: its classifiers then
read another token than lmtool's, or cannot tell where a text ends. So these have its layout where a language model
writes text, and nowhere else. Of an encoder-decoder PEFT has no prefix for the encoder.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmtool.errors import UserError
from lmtool.weights.peft.tuned import Tuned

_VIRTUAL, _PREFIX = "backbone.embed.virtual.weight", "backbone.prefix.weight"
_KIND = {_VIRTUAL: "PROMPT_TUNING", _PREFIX: "PREFIX_TUNING"}
_USED = {_VIRTUAL: ("CAUSAL_LM", "SEQ_2_SEQ_LM"), _PREFIX: ("CAUSAL_LM",)}


def to_peft(tuned: Tuned) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """PEFT's configuration, and its one tensor. UserError where a text is read in another way there."""
    name = next(iter(tuned.tensors))
    if len(tuned.tensors) > 1 or tuned.heads or tuned.task_type not in _USED.get(name, ()):
        raise UserError(
            "PEFT reads prompts where lmtool does with language models that write text, and prefixes with decoders "
            f"that do; this is model={tuned.model.name} with another head or task",
            "format=delta writes what was tuned for lmtool",
        )
    model: Any = tuned.model
    prompt = tuned.tensors[name]
    config = {
        "peft_type": _KIND[name],
        "num_virtual_tokens": len(prompt),
        "token_dim": prompt.shape[1] if name == _VIRTUAL else model.num_heads * model.width_of_head,
        "num_transformer_submodules": 1,
        "num_attention_heads": model.num_heads,
        "num_layers": model.num_layers,
    }
    return config, {"prompt_embeddings": prompt}
