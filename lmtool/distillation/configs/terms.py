"""Configuration of the distillation terms. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.needs import Offer, Requirement
from lmtool.config.tables import component
from lmtool.distillation.configs.base import LayerMap, ModelPair, TermConfig
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.nn.configs import Side


@component("distill/term", "hard", builder="lmtool.distillation.terms.outputs:Hard")
class HardConfig(TermConfig):
    """The teacher's hard labels: the task's loss on the teacher's predictions."""

    of_labels: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    stored: ClassVar[bool] = True


@component("distill/term", "soft", builder="lmtool.distillation.terms.outputs:Soft")
class SoftConfig(TermConfig):
    """Soft targets (Hinton, Vinyals and Dean 2015): T^2 KL(teacher || student), both at temperature T; the squared
    error of values."""

    averages: ClassVar[bool] = True
    stored: ClassVar[bool] = True

    temperature: float = Field(2.0, gt=0, description="temperature that divides both sets of logits; 2 for DistilBERT")


class StateTermConfig(TermConfig):
    """The base of terms over states: both models must have layers."""

    teaches_heads: ClassVar[bool] = False

    def needs_of_term(self, name: str, layers: LayerMap | None) -> Iterator[Requirement]:
        yield Requirement(_COMMON_STACK, "distill.terms", "distill.terms", "use terms over predictions: distill=soft")


@component("distill/term", "states", builder="lmtool.distillation.terms.layers:States")
class StatesConfig(StateTermConfig):
    """Output states (DistilBERT, Sanh et al. 2019): 1 - cosine of the last hidden states, after the final norm."""

    stored: ClassVar[bool] = True


@component("distill/term", "hidden", builder="lmtool.distillation.terms.layers:Hidden")
class HiddenConfig(StateTermConfig):
    """Hidden states (TinyBERT, Jiao et al. 2020): mean squared error by the layer map, summed over layers."""

    compares_layers: ClassVar[bool] = True


@component("distill/term", "patience", builder="lmtool.distillation.terms.layers:Patience")
class PatienceConfig(StateTermConfig):
    """Patience (Sun et al. 2019): squared error of the normalized states of the class token, by the layer map."""

    compares_layers: ClassVar[bool] = True


@component("distill/term", "embeddings", builder="lmtool.distillation.terms.layers:Embedded")
class EmbeddingsConfig(StateTermConfig):
    """Embeddings (TinyBERT, Jiao et al. 2020): mean squared error of the first layer's inputs."""


# The terms over self-attention.


_STATES = "use terms over states: distill.terms.hidden.weight=1"


def _heads(pair: ModelPair) -> tuple[int, int]:
    """Heads of a layer in student and teacher; 0 without heads."""
    student, teacher = (model.num_heads if isinstance(model, TransformerConfig) else 0 for model in pair)
    return student, teacher


def _widths(pair: ModelPair) -> tuple[int, int]:
    """Total width of the heads in student and teacher."""
    student, teacher = (
        model.num_heads * model.width_of_head if isinstance(model, TransformerConfig) else 0 for model in pair
    )
    return student, teacher


def _without_heads(pair: ModelPair) -> str:
    bare = next(model.name for model, heads in zip(pair, _heads(pair), strict=True) if not heads)
    return f"model={bare} has no attention heads"


def _other_attention_mask(pair: ModelPair) -> str:
    student, teacher = (model.architecture.replace("_", "-") for model in pair)
    return f"tokens of the student attend as in an {student}, tokens of the teacher as in an {teacher}"


def _other_heads(pair: ModelPair) -> str:
    student, teacher = _heads(pair)
    return f"the student has {student} attention heads per layer, the teacher {teacher}; they are compared one by one"


def _of_pair(holds: Callable[[ModelPair], bool], lacking: Callable[[ModelPair], str]) -> Offer[ModelPair]:
    return Offer("pair", holds, lacking, wording="{reason}: {lacking}")


_COMMON_STACK = _of_pair(lambda pair: bool(pair.sides), ModelPair.without_common_stack)
_ATTENTION_HEADS = _of_pair(lambda pair: all(_heads(pair)), _without_heads)
_COMMON_ARCHITECTURE = _of_pair(
    lambda pair: pair.student.architecture == pair.teacher.architecture, _other_attention_mask
)
_AS_MANY_HEADS = _of_pair(lambda pair: len({*_heads(pair)}) == 1, _other_heads)


def _as_many_heads(pair: ModelPair) -> str:
    heads = _heads(pair)[1]
    return f"set model.num_heads={heads}" if pair.student.hidden_size % heads == 0 else _STATES


class AttentionTermConfig(TermConfig):
    """The base of terms over attention: both models must have the same attention mask."""

    teaches_heads: ClassVar[bool] = False
    compares_layers: ClassVar[bool] = True

    def needs_of_term(self, name: str, layers: LayerMap | None) -> Iterator[Requirement]:
        key, typed = "distill.terms", f"distill.terms.{name}"
        yield Requirement(_ATTENTION_HEADS, key, typed, _STATES)
        yield Requirement(_COMMON_ARCHITECTURE, key, typed, _STATES)
        if any(0 in pair for _, *pair in layers or ()):
            embeddings = "layer 0 of distill.layers is the embeddings, which have no attention"
            yield Requirement(_of_pair(lambda pair: False, lambda pair: embeddings), key, typed, "leave layer 0 out")
        yield from self.needs_of_heads(name)

    def needs_of_heads(self, name: str) -> Iterator[Requirement]:
        """The numbers of heads must match."""
        yield Requirement(_AS_MANY_HEADS, "distill.terms", f"distill.terms.{name}", _as_many_heads)


@component("distill/term", "attention", builder="lmtool.distillation.terms.layers:AttentionScores")
class AttentionConfig(AttentionTermConfig):
    """Attention (TinyBERT, Jiao et al. 2020): mean squared error of the scores before the softmax, by the layer map."""


@component("distill/term", "relations", builder="lmtool.distillation.terms.layers:Relations")
class RelationsConfig(AttentionTermConfig):
    """Relations (MiniLM, Wang et al. 2020): KL of attention, and of the relations between the values of a layer."""

    relations: tuple[Literal["attention", "queries", "keys", "values"], ...] = Field(
        ("attention", "values"),
        min_length=1,
        description="MiniLM: [attention, values]; MiniLMv2: [queries, keys, values], with relation_heads",
    )
    relation_heads: int | None = Field(
        None,
        ge=1,
        description="relation heads that the vectors are split into; null: attention heads, equal in both models. "
        "MiniLMv2 uses 48 for a width of 768",
    )

    @model_validator(mode="after")
    def _attention_has_heads(self) -> RelationsConfig:
        if self.relation_heads is not None and "attention" in self.relations:
            raise ValueError(
                f"relation_heads={self.relation_heads} splits vectors, but attention uses the model's own heads; "
                "set relations=[queries,keys,values]"
            )
        return self

    def needs_of_heads(self, name: str) -> Iterator[Requirement]:
        key, typed, heads = "distill.terms", f"distill.terms.{name}", self.relation_heads
        if heads is None:
            yield Requirement(_AS_MANY_HEADS, key, typed, _common_relation_heads)
            return
        undivided = f"its {heads} relation_heads do not divide the width of both"
        divided = _of_pair(
            lambda pair: not any(width % heads for width in _widths(pair)),
            lambda pair: f"{undivided}, {_widths(pair)[0]} and {_widths(pair)[1]}",
        )
        yield Requirement(divided, key, typed, _divisor)


def _common_relation_heads(pair: ModelPair) -> str:
    key = "distill.terms.relations"
    return f"set {key}.relation_heads={math.gcd(*_heads(pair))} {key}.relations=[queries,keys,values]"


def _divisor(pair: ModelPair) -> str:
    return f"set distill.terms.relations.relation_heads=N, a divisor of {math.gcd(*_widths(pair))}"


AlignedLayers = tuple[Side, int, int]
"""Side of the batch, layer of the student, layer of the teacher."""


def below_the_last(layers: LayerMap, student: ModelConfig) -> list[AlignedLayers]:
    """The aligned pairs below the student's last layer, where an intervention affects later computation; if there are
    none, the embeddings of both."""
    pairs: list[AlignedLayers] = []
    for side, aligned in layers.sides.items():
        below: list[AlignedLayers] = [
            (side, layer, teacher_layer)
            for layer, teacher_layer in sorted(aligned.items())
            if layer < student.depths[side]
        ]
        pairs += below or [(side, 0, 0)]
    return pairs


@component("distill/term", "interchange", builder="lmtool.distillation.terms.outputs:Interchange")
class InterchangeConfig(TermConfig):
    """Interchange interventions (Geiger et al. 2022; Wu et al. 2022): the teacher's predictions when the states of some
    tokens are swapped for those of another text, after aligned layers."""

    compares_layers: ClassVar[bool] = True

    temperature: float = Field(2.0, gt=0, description="temperature that divides both sets of logits")
    proportion: float = Field(
        0.3, gt=0, le=1, description="length of the swapped span of tokens, as a fraction of the shorter text"
    )
    at: Literal["middle", "all"] = Field(
        "middle",
        description="layer among those that distill.layers aligns, except the last: middle, or all (any of them). "
        "With all, each text uses one layer per step; if the last layer is the only one, the embeddings are used",
    )
    dimensions: tuple[float, float] = Field(
        (0.0, 1.0), description="range of the swapped dimensions, as fractions of the width of a hidden state"
    )

    def sites(self, layers: LayerMap, student: ModelConfig) -> list[AlignedLayers]:
        """The interventions' layers in both models."""
        below = below_the_last(layers, student)
        if self.at == "all":
            return below
        sides = [[pair for pair in below if pair[0] == side] for side in layers.sides]
        return [pairs[(len(pairs) - 1) // 2] for pairs in sides]

    @model_validator(mode="after")
    def _dimensions_fit(self) -> InterchangeConfig:
        if not 0 <= self.dimensions[0] < self.dimensions[1] <= 1:
            first, last = self.dimensions
            raise ValueError(f"dimensions=[{first:g},{last:g}]: give two increasing fractions of a width, from 0 to 1")
        return self
