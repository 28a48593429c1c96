"""A family's format in transformers as a declaration: its classes, tensor names and config.json keys, in both
directions.

A family's file declares a `HFFormat` as `HF_FORMAT`; a family with a quirk overrides its methods.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.config.registry import lookup
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig, StudiedConfig, TransformerConfig
from lmtool.models.keymap import EMPTY, KeyMap, Tied, join_projections, split_projections
from lmtool.models.published import ConfigKey, expect, require_positions, section_fields
from lmtool.types import part_of


@dataclass(frozen=True)
class HFClass:
    """A class of transformers.

    Attributes:
        heads: Our names of the heads that the class has in addition to the backbone.
        pairs: Pairs of tensor names (ours, theirs) that take precedence over the family's key map.
        prefix: Prefix of the backbone's tensor names, if it differs from the family's. A class without a head has none.
        predicts: Whether the class predicts tokens.
        unread: Square linear layers that the class has but does not use. They are exported as zeros, so that
            transformers does not report them as missing.
    """

    name: str
    heads: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    prefix: str | None = None
    predicts: bool = False
    unread: tuple[str, ...] = ()

    def unread_tensors(self, hidden_size: int) -> dict[str, Tensor]:
        """Returns the tensors of the layers in `unread`. hidden_size: their width."""
        shapes = {"weight": (hidden_size, hidden_size), "bias": (hidden_size,)}
        return {f"{layer}.{kind}": torch.zeros(shape) for layer in self.unread for kind, shape in shapes.items()}


def token_classifier(name: str, output: str = "classifier", pooler: tuple[tuple[str, str], ...] = ()) -> HFClass:
    """Returns the class `name` (...ForTokenClassification). output: transformers' name of its output layer. pooler:
    pairs of names of the layers before the output layer."""
    return _with_head(name, "token_classifier", output, pooler)


def question_answering(
    name: str, output: str = "qa_outputs", pooler: tuple[tuple[str, str], ...] = (), prefix: str | None = None
) -> HFClass:
    """Returns the class `name` (...ForQuestionAnswering). output, pooler: as in `token_classifier`. prefix: as in
    `HFClass`."""
    return replace(_with_head(name, "question_answering", output, pooler), prefix=prefix)


def multiple_choice(name: str, output: str = "classifier", pooler: tuple[tuple[str, str], ...] = ()) -> HFClass:
    """Returns the class `name` (...ForMultipleChoice), which has the pooler of the family's classifier. pooler: pairs
    of names of the pooler's layers, if they differ from the classifier's."""
    return replace(_with_head(name, "multiple_choice", output, pooler), heads=("pooler", "multiple_choice"))


def _with_head(name: str, head: str, output: str, pooler: tuple[tuple[str, str], ...]) -> HFClass:
    heads = ("pooler", head) if pooler else (head,)
    return HFClass(name, heads, ((f"heads.{head}.output", output), *pooler))


@dataclass(frozen=True)
class HFFormat:
    """A family's format in transformers.

    Attributes:
        model: Our name of the family.
        title: The family's name in messages.
        keys: Pairs of tensor names.
        tied: Tensors that files may contain several times.
        fields: lmtool's field of each key in config.json.
        classes: Candidates for export; the first whose heads the checkpoint has is used.
        unsupported: Classes whose heads lmtool does not support, by name, with the reason.
        unties: Whether `tie_word_embeddings=false` in config.json means that the output layer is untied.
        prefix: Prefix of the backbone's tensor names, which files of a model without a head omit.
        outside_prefixes: Prefixes of tensor names that do not belong to the backbone.
        unread_suffixes: Suffixes of tensor names in files that no model reads.
        required_values: Keys of config.json with a single supported value.
        supported_values: Supported values by key of config.json, for other keys or instead of `required_values`. A
            missing key or null means the first value.
        repeats: Keys of config.json that repeat the value of another key.
        lmtool_constants: Our fields that have only one value in transformers.
        positions: Kind of positions in transformers; None if the family checks its positions itself.
        model_type_of: Our name of the family whose `model_type` is used; None for the family's own.
    """

    model: str
    title: str
    keys: KeyMap
    tied: Tied
    fields: Mapping[str, ConfigKey]
    classes: tuple[HFClass, ...]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    unties: bool = True
    prefix: str = ""
    outside_prefixes: tuple[str, ...] = ()
    unread_suffixes: tuple[str, ...] = ()
    required_values: Mapping[str, object] = field(default_factory=dict)
    supported_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    repeats: Mapping[str, str] = field(default_factory=dict)
    lmtool_constants: Mapping[str, object] = field(default_factory=dict)
    positions: str | None = "learned"
    model_type_of: str | None = None

    @property
    def model_type(self) -> str | None:
        """`model_type` in config.json."""
        entry = lookup("model", self.model_type_of or self.model)
        return entry.config.hf_model_type if entry is not None and issubclass(entry.config, ModelConfig) else None

    def class_of_heads(self, heads: Collection[str]) -> HFClass:
        """Returns the first class whose heads are all in `heads`."""
        return next(entry for entry in self.classes if set(entry.heads) <= set(heads))

    def named_class(self, config: Mapping[str, object]) -> HFClass | None:
        """Returns the first known class that a config.json names, or None."""
        names, known = config.get("architectures"), {entry.name: entry for entry in self.classes}
        return next((known[name] for name in names if name in known), None) if isinstance(names, list) else None

    def to_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Returns our tensors under the names of the transformers class that has their heads. Tied copies are left out.
        A tensor that transformers lacks keeps our name. config: the model's configuration."""
        heads = {part_of(name).removeprefix("heads.") for name in tensors if name.startswith("heads.")}
        keys, prefix = self._keys_and_prefix(self.class_of_heads(heads))
        paths = {name: keys.to_hf(name) for name in tensors}
        return {
            name if (path := paths[name]) is None else self._replace_prefix(path, self.prefix, prefix): tensor
            for name, tensor in tensors.items()
        }

    def from_hf(self, tensors: Mapping[str, Tensor], config: Mapping[str, object] = EMPTY) -> dict[str, Tensor]:
        """Returns the tensors of a transformers model, with or without a head, under our names. config: the content of
        its config.json. Raises UserError like `Tied.resolve`."""
        model_class, prefixes = self.named_class(config), (self.prefix, *self.outside_prefixes)
        keys, prefix = self._keys_and_prefix(model_class)
        # Files of a class without a prefix may have the family's.
        renamed = {self._replace_prefix(name, prefix, self.prefix) if prefix else name: name for name in tensors}
        # The names in the file, by their names with the backbone's prefix.
        names = {path if path.startswith(prefixes) else self.prefix + path: name for path, name in renamed.items()}
        unique = self.tied.resolve(
            {path: tensors[name] for path, name in names.items()},
            config if self.unties else EMPTY,
            None if model_class is None else model_class.predicts,
        )
        return {
            keys.from_hf(path) or names.get(path, path): tensor
            for path, tensor in unique.items()
            if not path.endswith(self.unread_suffixes)
        }

    def _keys_and_prefix(self, model_class: HFClass | None) -> tuple[KeyMap, str]:
        if model_class is None:
            return self.keys, self.prefix
        prefix = self.prefix if model_class.prefix is None else model_class.prefix
        return KeyMap((*model_class.pairs, *self.keys.pairs)), prefix

    def _replace_prefix(self, path: str, prefix: str, new_prefix: str) -> str:
        in_backbone = path.startswith(prefix) and not path.startswith(self.outside_prefixes)
        return new_prefix + path.removeprefix(prefix) if in_backbone else path

    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        """Returns the content of config.json for our configuration. Raises UserError if transformers does not support
        this configuration."""
        if isinstance(config, StudiedConfig) and config.without:
            raise UserError(
                f"model.without=[{','.join(config.without)}]: {self.title} in transformers has all parts of the block",
                "use the run with lmtool, or train a new run with model.without=null",
            )
        if self.positions is not None:
            require_positions(config, self.positions, self.title)
        for name, value in self.lmtool_constants.items():
            if getattr(config, name) != value:
                raise UserError(
                    f"model.{name}={getattr(config, name)}: {self.title} in transformers supports only {value}",
                    f"use the run with lmtool, or train a new run with model.{name}={value}",
                )
        section = {key: getattr(config, name) for key, (name, _) in self.fields.items()}
        repeated = {key: section[other] for key, other in self.repeats.items()}
        return {"model_type": self.model_type, **section, **repeated, **self.required_values}

    def from_hf_config(self, data: Mapping[str, object]) -> JsonObject:
        """Returns the `model` section for the content of a config.json. Raises UserError if lmtool does not support
        it."""
        allowed: dict[str, tuple[Any, ...]] = {"tie_word_embeddings": (True, False)}
        allowed |= {key: (value,) for key, value in self.required_values.items()}
        allowed |= self.supported_values
        section = section_fields(data, self.fields)
        for key, other in self.repeats.items():
            allowed[key] = (section[self.fields[other][0]],)
        expect(data, self.model, **allowed)
        return {"name": self.model, **section, **self.lmtool_constants}


_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class JointProjectionFormat(HFFormat):
    """A format with a joint projection for queries, keys and values, and with linear weights of the shape (inputs,
    outputs), which is the transpose of torch's."""

    def to_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        return _transpose(super().to_hf(join_projections(tensors), config))

    def from_hf(self, tensors: Mapping[str, Tensor], config: Mapping[str, object] = EMPTY) -> dict[str, Tensor]:
        return split_projections(super().from_hf(_transpose(tensors), config))


def _transpose(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.T.contiguous() if name.endswith(_TRANSPOSED) else tensor for name, tensor in tensors.items()}


# For encoders with BERT's config.json keys.
ENCODER_FIELDS = {
    "vocab_size": ("vocab_size", 30522),
    "num_hidden_layers": ("num_layers", 12),
    "hidden_size": ("hidden_size", 768),
    "num_attention_heads": ("num_heads", 12),
    "intermediate_size": ("feedforward_size", 3072),
    "max_position_embeddings": ("max_positions", 512),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "type_vocab_size": ("segments", 2),
    "initializer_range": ("initializer_std", 0.02),
    "layer_norm_eps": ("norm_epsilon", 1e-12),
}
ENCODER_CONSTANT = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
ENCODER_ALLOWED = {"is_decoder": (False,), "add_cross_attention": (False,)}
# For decoders with GPT's config.json keys.
DECODER_FIELDS = {
    "vocab_size": ("vocab_size", 50257),
    "n_layer": ("num_layers", 12),
    "n_embd": ("hidden_size", 768),
    "n_head": ("num_heads", 12),
    "n_positions": ("max_positions", 1024),
    "resid_pdrop": ("dropout", 0.1),
    "attn_pdrop": ("attention_dropout", 0.1),
    "initializer_range": ("initializer_std", 0.02),
    "layer_norm_epsilon": ("norm_epsilon", 1e-5),
}
