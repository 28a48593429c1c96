"""Tensor names in our checkpoints and in transformers: a table of pairs, read in both directions."""

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
    """Pairs of module paths, ours and transformers'. `*` matches the number of a layer. The last part of a tensor's
    name (`.weight`, `.bias`) does not change."""

    def __init__(self, pairs: tuple[tuple[str, str], ...]):
        self.pairs = pairs
        self._to = [(_pattern(ours), hf_name) for ours, hf_name in pairs]
        self._from = [(_pattern(hf_name), ours) for ours, hf_name in pairs]

    def to_hf(self, name: str) -> str | None:
        """Returns the name of one of our tensors in transformers, or None."""
        return _rename(name, self._to)

    def from_hf(self, name: str) -> str | None:
        """Returns our name of a tensor of transformers, or None."""
        return _rename(name, self._from)


def encoder_pairs(name: str) -> tuple[tuple[str, str], ...]:
    """Returns the pairs of a Hugging Face encoder modeled on BertModel, whose names start with `name`."""
    layer, hf_name = "backbone.layers.*.", f"{name}.encoder.layer.*."
    return (
        ("backbone.embed.token", f"{name}.embeddings.word_embeddings"),
        ("backbone.embed.position", f"{name}.embeddings.position_embeddings"),
        ("backbone.embed.segment", f"{name}.embeddings.token_type_embeddings"),
        ("backbone.embed.norm", f"{name}.embeddings.LayerNorm"),
        (layer + "self_attn.q_proj", hf_name + "attention.self.query"),
        (layer + "self_attn.k_proj", hf_name + "attention.self.key"),
        (layer + "self_attn.v_proj", hf_name + "attention.self.value"),
        (layer + "self_attn.out_proj", hf_name + "attention.output.dense"),
        (layer + "norm1", hf_name + "attention.output.LayerNorm"),
        (layer + "ffn.fc_in", hf_name + "intermediate.dense"),
        (layer + "ffn.fc_out", hf_name + "output.dense"),
        (layer + "norm2", hf_name + "output.LayerNorm"),
    )


@dataclass(frozen=True)
class Tied:
    """Tied tensors: a model in transformers has them once, but its file may contain several copies.

    Attributes:
        token: The token embedding. output: The output layer of a head. head: Prefix of the names of that head. tables:
        Other copies of the token embedding. bias: The two names of the output layer's bias in a file: the one that a
        `KeyMap` maps, and the one whose values are
            used, as in transformers.
    """

    token: str
    output: str
    head: str = ""
    tables: tuple[str, ...] = ()
    bias: tuple[str, str] | None = None

    def resolve(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, object], predicts: bool | None = None
    ) -> dict[str, Tensor]:
        """Removes copies from the tensors of a file, as transformers 5 does. An output layer stays if it differs from
        the token embedding, or if config.json says that it is not tied (`tie_word_embeddings`). A copy takes the place
        of a missing original.

        Args:
            tensors: The tensors of the file.
            config: The content of config.json.
            predicts: Whether the class of the model predicts tokens; None: it does if there are tensors of `head`.

        Raises:
            UserError: If a class that predicts tokens lacks an untied output layer, or if other copies differ.
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
                        "copy the weights again: the output layer is missing; set tie_word_embeddings=true only if the "
                        "model's documentation says that the output layer is tied",
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
                    f"{name} {tuple(copy.shape)} differs from {self.token} {tuple(original.shape)}; lmtool has "
                    "one token embedding",
                    "use another checkpoint",
                )
        if self.bias is not None and self.bias[1] in unique:
            unique[self.bias[0]] = unique.pop(self.bias[1])
        return unique

    def separate(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adds the copies that a file of transformers contains to tensors without copies."""
        copies = dict.fromkeys(self.tables, self.token) | ({} if self.bias is None else {self.bias[1]: self.bias[0]})
        return {**tensors, **{name: tensors[original].clone() for name, original in copies.items()}}


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.escape(path).replace(r"\*", r"(\d+)") + r"(\.[a-z_]+|)")


def _rename(name: str, table: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, path in table:
        match = pattern.fullmatch(name)
        if match:
            *layer, suffix = match.groups()
            return (path.replace("*", layer[0]) if layer else path) + suffix
    return None


def join_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenates the projections of queries, keys and values of each attention, in this order, to one tensor `qkv`,
    as in GPT-2."""
    merged: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        owner, _, projection = module.rpartition(".")
        if projection == "q_proj":
            merged[f"{owner}.qkv.{kind}"] = torch.cat([tensors[f"{owner}.{part}.{kind}"] for part in _PROJECTIONS])
        elif projection not in _PROJECTIONS:
            merged[name] = tensor
    return merged


def split_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the inverse of `join_projections`."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".qkv." in name:
            for projection, part in zip(_PROJECTIONS, tensor.chunk(3), strict=True):
                renamed[name.replace("qkv", projection)] = part.clone()
        else:
            renamed[name] = tensor
    return renamed
