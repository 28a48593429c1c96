"""Maps between tensor names in our checkpoints and in transformers: tables of pairs, used in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lmtool.errors import UserError

EMPTY: Mapping[str, object] = MappingProxyType({})
"""An empty config.json."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class KeyMap:
    """Pairs of module paths (ours, transformers'). `*` matches the number of a layer. The last part of a tensor's name
    (`.weight`, `.bias`) does not change. The first matching pair is used."""

    def __init__(self, pairs: tuple[tuple[str, str], ...]):
        self.pairs = pairs
        self._hf_paths = [(_pattern(ours), theirs) for ours, theirs in pairs]
        self._our_paths = [(_pattern(theirs), ours) for ours, theirs in pairs]

    def to_hf(self, name: str) -> str | None:
        """Returns transformers' name of a tensor, given ours, or None."""
        return _rename(name, self._hf_paths)

    def from_hf(self, name: str) -> str | None:
        """Returns our name of a tensor, given transformers', or None."""
        return _rename(name, self._our_paths)


def encoder_pairs(name: str) -> tuple[tuple[str, str], ...]:
    """Returns the pairs of an encoder that is modeled on BertModel in transformers. name: the first part of its tensor
    names there."""
    layer, hf_layer = "backbone.layers.*.", f"{name}.encoder.layer.*."
    return (
        ("backbone.embed.token", f"{name}.embeddings.word_embeddings"),
        ("backbone.embed.position", f"{name}.embeddings.position_embeddings"),
        ("backbone.embed.segment", f"{name}.embeddings.token_type_embeddings"),
        ("backbone.embed.norm", f"{name}.embeddings.LayerNorm"),
        (layer + "self_attn.q_proj", hf_layer + "attention.self.query"),
        (layer + "self_attn.k_proj", hf_layer + "attention.self.key"),
        (layer + "self_attn.v_proj", hf_layer + "attention.self.value"),
        (layer + "self_attn.out_proj", hf_layer + "attention.output.dense"),
        (layer + "norm1", hf_layer + "attention.output.LayerNorm"),
        (layer + "ffn.fc_in", hf_layer + "intermediate.dense"),
        (layer + "ffn.fc_out", hf_layer + "output.dense"),
        (layer + "norm2", hf_layer + "output.LayerNorm"),
    )


@dataclass(frozen=True)
class Tied:
    """The names of tied tensors. A model in transformers has them once, but its file may contain several copies.

    Attributes:
        token: The token embedding.
        output: The output layer of a head.
        head: Prefix of the names of that head.
        tables: Other copies of the token embedding.
        bias: Two names of the output layer's bias in a file: the one that the `KeyMap` contains, and the one whose
            values are used if the file has both, as in transformers.
    """

    token: str
    output: str
    head: str = ""
    tables: tuple[str, ...] = ()
    bias: tuple[str, str] | None = None

    def resolve(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, object], predicts: bool | None = None
    ) -> dict[str, Tensor]:
        """Returns the tensors of a file without copies, as in transformers 5.

        The output layer is kept if it differs from the token embedding, or if config.json says that it is not tied
        (`tie_word_embeddings`). If the token embedding is missing, a copy takes its place. predicts: whether the class
        of the model predicts tokens; None: it does if the file has tensors of `head`.

        Raises UserError if a class that predicts tokens lacks its untied output layer, or if the copies in `tables`
        differ from the token embedding.
        """
        unique = dict(tensors)
        copies = [*self.tables, self.output, *([] if self.bias is None else [self.bias[1]])]
        has_own_output = config.get("tie_word_embeddings") is False
        if predicts is None:
            predicts = bool(self.head) and any(name.startswith(self.head) for name in unique)
        if has_own_output and predicts:
            for name in copies:
                if name not in unique:
                    raise UserError(
                        f"tie_word_embeddings=false in config.json, but the weights have no {name}",
                        "copy the weights again, since the output layer is missing; set tie_word_embeddings=true only "
                        "if the model's documentation says that the output layer is tied",
                    )
        for name in (*self.tables, self.output):
            copy = unique.get(name)
            if copy is None:
                continue
            original = unique.setdefault(self.token, copy)
            if original.equal(copy):
                if name != self.output or not has_own_output:
                    del unique[name]
            elif name != self.output or copy.shape != original.shape:
                raise UserError(
                    f"{name} {tuple(copy.shape)} differs from {self.token} {tuple(original.shape)}; lmtool "
                    "supports only one token embedding",
                    "use another checkpoint",
                )
        if self.bias is not None and self.bias[1] in unique:
            unique[self.bias[0]] = unique.pop(self.bias[1])
        return unique

    def separate(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors and the copies that a file of transformers contains in addition. tensors: tensors without
        copies."""
        copies = dict.fromkeys(self.tables, self.token) | ({} if self.bias is None else {self.bias[1]: self.bias[0]})
        return {**tensors, **{name: tensors[original].clone() for name, original in copies.items()}}


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.escape(path).replace(r"\*", r"(\d+)") + r"(\.[a-z_]+|)")


def _rename(name: str, table: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, path in table:
        match = pattern.fullmatch(name)
        if match:
            *layer_number, suffix = match.groups()
            return (path.replace("*", layer_number[0]) if layer_number else path) + suffix
    return None


def join_projections(tensors: Mapping[str, Tensor], heads: int = 1) -> dict[str, Tensor]:
    """Concatenates the projections of queries, keys and values of each attention, in this order, into one tensor `qkv`,
    as in GPT-2. heads: concatenates those of each of this many heads, as in DeBERTa."""
    joined: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        attention, _, projection = module.rpartition(".")
        if projection == "q_proj":
            parts = [tensors[f"{attention}.{part}.{kind}"].unflatten(0, (heads, -1)) for part in _PROJECTIONS]
            joined[f"{attention}.qkv.{kind}"] = torch.cat(parts, 1).flatten(0, 1)
        elif projection not in _PROJECTIONS:
            joined[name] = tensor
    return joined


def split_projections(tensors: Mapping[str, Tensor], heads: int = 1) -> dict[str, Tensor]:
    """Returns the inverse of `join_projections`."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".qkv." in name:
            by_head = tensor.unflatten(0, (heads, -1))
            for projection, part in zip(_PROJECTIONS, by_head.chunk(3, 1), strict=True):
                split[name.replace("qkv", projection)] = part.flatten(0, 1).clone()
        else:
            split[name] = tensor
    return split
