"""A family as transformers publishes it, declared: its classes, the names of its tensors and the keys of its
config.json, both ways.

A family's file declares a `Published` as `PUBLISHED` and offers its methods as functions, or functions of its own
around them where it has a quirk: `to_published`, `from_published`, `published_config`, `from_published_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lmtool.config.tables import lookup
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.models.keymap import EMPTY, KeyMap, Tied, join_projections, split_projections
from lmtool.models.published import expect, require_positions, sizes
from lmtool.types import part_of


@dataclass(frozen=True)
class PublishedClass:
    """A class of transformers.

    heads: ours that it holds besides the backbone. pairs: names (ours, published) of tensors that are its own, and go
    before those of the family's key map. prefix: what its backbone's names begin with, where that is another prefix
    than the family's. predicts: whether it predicts tokens.
    """

    name: str
    heads: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    prefix: str | None = None
    predicts: bool = False


def over_words(name: str, output: str = "classifier", pooler: tuple[tuple[str, str], ...] = ()) -> PublishedClass:
    """A ...ForTokenClassification. output: its linear map. pooler: the pairs of what stands before the map."""
    return _headed(name, "token_classifier", output, pooler)


def of_answers(
    name: str, output: str = "qa_outputs", pooler: tuple[tuple[str, str], ...] = (), prefix: str | None = None
) -> PublishedClass:
    """A ...ForQuestionAnswering, as `over_words`. prefix: as in `PublishedClass`."""
    return replace(_headed(name, "question_answering", output, pooler), prefix=prefix)


def of_choices(name: str, output: str = "classifier", pooler: tuple[tuple[str, str], ...] = ()) -> PublishedClass:
    """A ...ForMultipleChoice, behind the pooler of the family's classifier. pooler: its pairs, where they are others
    than the classifier's."""
    return replace(_headed(name, "multiple_choice", output, pooler), heads=("pooler", "multiple_choice"))


def _headed(name: str, head: str, output: str, pooler: tuple[tuple[str, str], ...]) -> PublishedClass:
    heads = ("pooler", head) if pooler else (head,)
    return PublishedClass(name, heads, ((f"heads.{head}.output", output), *pooler))


@dataclass(frozen=True)
class Published:
    """A family's published form.

    model: its name here. title: in messages.
    classes: those of transformers that it is written as, by the heads of a checkpoint: the first one that fits. unlike:
    further ones by name, and why their heads are not read. unties: whether `tie_word_embeddings=false` means tables of
    their own.
    keys: the names of its tensors. tied: its copies. prefix: what the file of a bare model lacks before its names.
    outside: beginnings of names that never have the prefix. unread: endings of names that files may carry and no model
    reads.
    fields: our field by key of config.json. defaults: what transformers takes for keys that a file leaves out.
    constant: keys that are written with the one value this family computes. allowed: values that are read besides, or
    of further keys; absent and null stand for the first one. repeats: keys that repeat another. fixed: our fields that
    the published code knows one value of. positions: their kind; None where the family says it by itself.
    """

    model: str
    title: str
    keys: KeyMap
    tied: Tied
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    classes: tuple[PublishedClass, ...]
    unlike: Mapping[str, str] = field(default_factory=dict)
    unties: bool = True
    prefix: str = ""
    outside: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    constant: Mapping[str, Any] = field(default_factory=dict)
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    repeats: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    positions: str | None = "learned"

    @property
    def model_type(self) -> str | None:
        """In a config.json."""
        entry = lookup("model", self.model)
        return entry.config.published_type if entry is not None and issubclass(entry.config, ModelConfig) else None

    def class_of_heads(self, heads: Collection[str]) -> PublishedClass:
        """The first class all of whose heads are among these names."""
        return next(entry for entry in self.classes if set(entry.heads) <= set(heads))

    def named_class(self, config: Mapping[str, Any]) -> PublishedClass | None:
        """The class that a config.json names; None where it names none of `classes`."""
        names, known = config.get("architectures"), {entry.name: entry for entry in self.classes}
        return next((known[name] for name in names if name in known), None) if isinstance(names, list) else None

    def to_published(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Our checkpoint's tensors under the names of the class of transformers that holds its heads. Tied copies are
        not written; a tensor without a published name keeps its own. config: of the model."""
        heads = {part_of(name).removeprefix("heads.") for name in tensors if name.startswith("heads.")}
        keys, prefix = self._names_in(self.class_of_heads(heads))
        paths = {name: keys.to_published(name) for name in tensors}
        return {
            name if (path := paths[name]) is None else self._moved(path, self.prefix, prefix): tensor
            for name, tensor in tensors.items()
        }

    def from_published(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = EMPTY) -> dict[str, Tensor]:
        """The reverse; also for a bare model. config: its config.json. UserError as in `Tied.resolve`."""
        model_class, inside = self.named_class(config), (self.prefix, *self.outside)
        keys, prefix = self._names_in(model_class)
        moved = {self._moved(name, prefix, self.prefix): name for name in tensors}
        names = {path if path.startswith(inside) else self.prefix + path: name for path, name in moved.items()}
        full = self.tied.resolve(
            {path: tensors[name] for path, name in names.items()},
            config if self.unties else EMPTY,
            None if model_class is None else model_class.predicts,
        )
        return {
            keys.from_published(path) or names.get(path, path): tensor
            for path, tensor in full.items()
            if not path.endswith(self.unread)
        }

    def _names_in(self, model_class: PublishedClass | None) -> tuple[KeyMap, str]:
        """The key map and the backbone's prefix in a class; None: one that is not known."""
        if model_class is None:
            return self.keys, self.prefix
        prefix = self.prefix if model_class.prefix is None else model_class.prefix
        return KeyMap((*model_class.pairs, *self.keys.pairs)), prefix

    def _moved(self, path: str, prefix: str, other: str) -> str:
        """A name with another prefix, where it is one of the backbone."""
        inside = path.startswith(prefix) and not path.startswith(self.outside)
        return other + path.removeprefix(prefix) if inside else path

    def published_config(self, config: TransformerConfig) -> dict[str, Any]:
        """Our configuration as a config.json. UserError where it has no place in one."""
        if self.positions is not None:
            require_positions(config, self.positions, self.title)
        for name, value in self.fixed.items():
            if getattr(config, name) != value:
                raise UserError(
                    f"model.{name}={getattr(config, name)} has no place in a published {self.title}, which has {value}",
                    f"use the run with lmtool, or train one with model.{name}={value}",
                )
        ours = {key: getattr(config, name) for key, name in self.fields.items()}
        repeated = {key: ours[other] for key, other in self.repeats.items()}
        return {"model_type": self.model_type, **ours, **repeated, **self.constant}

    def from_published_config(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The model section of a config.json. UserError where it is a variant that this family does not compute."""
        allowed = {**{key: (value,) for key, value in self.constant.items()}, **self.allowed}
        section = sizes(data, self.fields, self.defaults)
        for key, other in self.repeats.items():
            allowed[key] = (section[self.fields[other]],)
        expect(data, self.model, **allowed)
        return {"name": self.model, **section, **self.fixed}


_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


@dataclass(frozen=True)
class PublishedJoined(Published):
    """One map for queries, keys and values, and linear maps that are stored as (inputs, outputs), the transpose of
    torch's."""

    def to_published(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        return self._transposed(super().to_published(join_projections(tensors), config))

    def from_published(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = EMPTY) -> dict[str, Tensor]:
        return split_projections(super().from_published(self._transposed(tensors), config))

    def _transposed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: tensor.T.contiguous() if name.endswith(_TRANSPOSED) else tensor for name, tensor in tensors.items()
        }


# Of the encoders whose config.json is written after BERT's.
ENCODER_FIELDS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "intermediate_size": "feedforward_size",
    "max_position_embeddings": "max_positions",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "type_vocab_size": "segments",
    "initializer_range": "initializer_std",
    "layer_norm_eps": "norm_epsilon",
}
ENCODER_DEFAULTS = {
    "vocab_size": 30522, "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
}  # fmt: skip
ENCODER_CONSTANT = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
ENCODER_ALLOWED = {"is_decoder": (False,), "add_cross_attention": (False,), "tie_word_embeddings": (True, False)}
# Of the decoders whose config.json is written after GPT's.
DECODER_FIELDS = {
    "vocab_size": "vocab_size",
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_heads",
    "n_positions": "max_positions",
    "resid_pdrop": "dropout",
    "attn_pdrop": "attention_dropout",
    "initializer_range": "initializer_std",
    "layer_norm_epsilon": "norm_epsilon",
}
DECODER_DEFAULTS = {
    "vocab_size": 50257, "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "resid_pdrop": 0.1,
    "attn_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
