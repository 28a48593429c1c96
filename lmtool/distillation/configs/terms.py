"""Configuration of the distillation terms. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.registry import component
from lmtool.distillation.configs.base import LayerMap, ModelPair, TermConfig
from lmtool.errors import Problem
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.nn.configs import Side
from lmtool.system.terminal import counted


@component("distill/term", "hard", builder="lmtool.distillation.output_terms:Hard")
class HardConfig(TermConfig):
    """Hard labels: the student's own loss, with the teacher's best prediction as the label of each target."""

    supports_labels: ClassVar[bool] = True
    supports_average: ClassVar[bool] = True
    supports_store: ClassVar[bool] = True


@component("distill/term", "soft", builder="lmtool.distillation.output_terms:Soft")
class SoftConfig(TermConfig):
    """Soft targets (Hinton, Vinyals and Dean 2015): T^2 KL(teacher || student) with both at temperature T; for
    regression, the squared error of the predicted values."""

    supports_average: ClassVar[bool] = True
    supports_store: ClassVar[bool] = True

    temperature: float = Field(2.0, gt=0, description="temperature of both softmaxes; DistilBERT uses 2")


class StateTermConfig(TermConfig):
    """The base of terms that compare hidden states. Both models must have layers, in the same kind of stack."""

    teaches_heads: ClassVar[bool] = False

    def conflicts_of_pair(self, name: str, pair: ModelPair, layers: LayerMap | None) -> Iterator[Problem]:
        if not pair.sides:
            message = f"distill.terms: {pair.without_common_stack()}"
            yield Problem("distill.terms", message, "use terms over predictions: distill=soft")


@component("distill/term", "states", builder="lmtool.distillation.layer_terms:States")
class StatesConfig(StateTermConfig):
    """Output states (DistilBERT, Sanh et al. 2019): 1 - cosine similarity of the two models' last hidden states, after
    the final norm."""

    supports_store: ClassVar[bool] = True


@component("distill/term", "hidden", builder="lmtool.distillation.layer_terms:Hidden")
class HiddenConfig(StateTermConfig):
    """Hidden states (TinyBERT, Jiao et al. 2020): mean squared error between the states of each student layer and of
    its teacher layer (distill.layers), summed over layers."""

    compares_layers: ClassVar[bool] = True


@component("distill/term", "patience", builder="lmtool.distillation.layer_terms:Patience")
class PatienceConfig(StateTermConfig):
    """Patient distillation (Sun et al. 2019): squared error between the normalized states of the class token in each
    student layer and in its teacher layer (distill.layers)."""

    compares_layers: ClassVar[bool] = True


@component("distill/term", "embeddings", builder="lmtool.distillation.layer_terms:Embedded")
class EmbeddingsConfig(StateTermConfig):
    """Embeddings (TinyBERT, Jiao et al. 2020): mean squared error between the inputs of both models' first layers."""


# The terms that compare self-attention.


_USE_HIDDEN_STATES = "use terms over states: distill.terms.hidden.weight=1"


def _head_counts(pair: ModelPair) -> tuple[int, int]:
    student, teacher = (model.num_heads if isinstance(model, TransformerConfig) else 0 for model in pair)
    return student, teacher


def _total_head_widths(pair: ModelPair) -> tuple[int, int]:
    student, teacher = (
        model.num_heads * model.width_of_head if isinstance(model, TransformerConfig) else 0 for model in pair
    )
    return student, teacher


def _different_head_counts(name: str, pair: ModelPair, hint: str) -> Iterator[Problem]:
    student, teacher = _head_counts(pair)
    if student != teacher:
        heads = counted(student, "attention head")
        message = f"the student has {heads} per layer, the teacher {teacher}; heads are compared one by one"
        yield Problem("distill.terms", f"distill.terms.{name}: {message}", hint)


class AttentionTermConfig(TermConfig):
    """The base of terms that compare self-attention. Both models must have the same architecture, and with it the same
    attention mask."""

    teaches_heads: ClassVar[bool] = False
    compares_layers: ClassVar[bool] = True

    def conflicts_of_pair(self, name: str, pair: ModelPair, layers: LayerMap | None) -> Iterator[Problem]:
        key, term = "distill.terms", f"distill.terms.{name}"
        student, teacher = (model.architecture.replace("_", "-") for model in pair)
        for model, heads in zip(pair, _head_counts(pair), strict=True):
            if not heads:
                yield Problem(key, f"{term}: model={model.name} has no attention heads", _USE_HIDDEN_STATES)
        if student != teacher:
            message = f"the student's architecture is {student}, but the teacher's architecture is {teacher}"
            yield Problem(key, f"{term}: {message}", _USE_HIDDEN_STATES)
        if any(0 in aligned for _, *aligned in layers or ()):
            message = "layer 0 of distill.layers is the embeddings, which have no attention"
            yield Problem(key, f"{term}: {message}", "omit layer 0 from distill.layers")
        yield from self.conflicts_of_heads(name, pair)

    def conflicts_of_heads(self, name: str, pair: ModelPair) -> Iterator[Problem]:
        """Yields the reasons why the heads cannot be compared. In this base class, their numbers must be equal."""
        heads = _head_counts(pair)[1]
        fits = heads and pair.student.hidden_size % heads == 0
        yield from _different_head_counts(name, pair, f"set model.num_heads={heads}" if fits else _USE_HIDDEN_STATES)


@component("distill/term", "attention", builder="lmtool.distillation.layer_terms:AttentionScores")
class AttentionConfig(AttentionTermConfig):
    """Attention (TinyBERT, Jiao et al. 2020): mean squared error between the attention scores, before the softmax, of
    each student layer and of its teacher layer (distill.layers)."""


@component("distill/term", "relations", builder="lmtool.distillation.layer_terms:Relations")
class RelationsConfig(AttentionTermConfig):
    """Self-attention relations (MiniLM, Wang et al. 2020): KL divergence from the teacher's attention, and from its
    relations between the values of a layer, which are the softmax of their scaled dot products."""

    relations: tuple[Literal["attention", "queries", "keys", "values"], ...] = Field(
        ("attention", "values"),
        min_length=1,
        description="compared relations: [attention, values] in MiniLM; [queries, keys, values] in MiniLMv2. Set "
        "relation_heads with the latter",
    )
    relation_heads: int | None = Field(
        None,
        ge=1,
        description="number of heads that the vectors are split into; null: the attention heads. The number of "
        "attention heads must then be the same in both models; MiniLMv2 uses 48 for a width of 768",
    )

    @model_validator(mode="after")
    def _attention_has_heads(self) -> RelationsConfig:
        if self.relation_heads is not None and "attention" in self.relations:
            raise ValueError(
                f"relation_heads={self.relation_heads} splits the vectors into other heads, but the relation attention "
                "needs the model's attention heads; set relations=[queries,keys,values]"
            )
        return self

    def conflicts_of_heads(self, name: str, pair: ModelPair) -> Iterator[Problem]:
        key, heads = "distill.terms.relations", self.relation_heads
        if heads is None:
            common = math.gcd(*_head_counts(pair))
            hint = f"set {key}.relation_heads={common} {key}.relations=[queries,keys,values]"
            yield from _different_head_counts(name, pair, hint)
            return
        widths = _total_head_widths(pair)
        if any(width % heads for width in widths):
            message = f"the widths {widths[0]} and {widths[1]} cannot both be split into {heads} relation heads"
            hint = f"set {key}.relation_heads=N, a divisor of {math.gcd(*widths)}"
            yield Problem("distill.terms", f"distill.terms.{name}: {message}", hint)


AlignedLayers = tuple[Side, int, int]
"""(side of the batch that the stack reads, layer of the student, layer of the teacher). Layers are counted from 1; 0 is
the embeddings."""


def aligned_below_last(layers: LayerMap, student: ModelConfig) -> list[AlignedLayers]:
    """Returns the aligned layers below the student's last layer, where changed states still pass through a layer; for a
    stack without them, the embeddings of both models."""
    pairs: list[AlignedLayers] = []
    for side, aligned in layers.sides.items():
        below: list[AlignedLayers] = [
            (side, layer, teacher_layer)
            for layer, teacher_layer in sorted(aligned.items())
            if layer < student.depths[side]
        ]
        pairs += below or [(side, 0, 0)]
    return pairs


@component("distill/term", "interchange", builder="lmtool.distillation.output_terms:Interchange")
class InterchangeConfig(TermConfig):
    """Interchange interventions (Geiger et al. 2022; Wu et al. 2022): in both models the hidden states of some tokens
    are replaced, after aligned layers, by states from another text; the student then learns the teacher's changed
    predictions."""

    compares_layers: ClassVar[bool] = True

    temperature: float = Field(2.0, gt=0, description="temperature of both softmaxes")
    proportion: float = Field(
        0.3,
        gt=0,
        le=1,
        description="length of the span of swapped tokens, as a fraction of the shorter text",
    )
    at: Literal["middle", "all"] = Field(
        "middle",
        description="aligned layer after which states are swapped: middle, or all (a random one per text and step). "
        "The student's last layer is never used; if distill.layers aligns no other, the embeddings are used",
    )
    dimensions: tuple[float, float] = Field(
        (0.0, 1.0), description="range of dimensions of a state that are swapped, as fractions of its width"
    )

    def sites(self, layers: LayerMap, student: ModelConfig) -> list[AlignedLayers]:
        """Returns the layers of both models after which states may be swapped: all, or the middle one of each stack."""
        candidates = aligned_below_last(layers, student)
        if self.at == "all":
            return candidates
        stacks = [[aligned for aligned in candidates if aligned[0] == side] for side in layers.sides]
        return [stack[(len(stack) - 1) // 2] for stack in stacks]

    @model_validator(mode="after")
    def _dimensions_fit(self) -> InterchangeConfig:
        if not 0 <= self.dimensions[0] < self.dimensions[1] <= 1:
            start, end = self.dimensions
            raise ValueError(
                f"dimensions=[{start:g},{end:g}] must be two increasing fractions of the width, from 0 to 1"
            )
        return self
