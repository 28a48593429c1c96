"""The terms of distillation, as configuration. Imports no torch."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.distillation.configs.base import LayerMap, TermConfig, shared_sides
from lmtool.errors import Problem, UserError
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.nn.configs import Side

# The terms over what a teacher predicts. Imports no torch.


@component("distill/term", "hard", builder="lmtool.distillation.terms.outputs:Hard")
class HardConfig(TermConfig):
    """The teacher's hard labels: the loss of the task against what the teacher predicts."""

    of_labels: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    stored: ClassVar[bool] = True


@component("distill/term", "soft", builder="lmtool.distillation.terms.outputs:Soft")
class SoftConfig(TermConfig):
    """Soft targets (Hinton, Vinyals and Dean 2015): T^2 KL(teacher || student), both at temperature T; of values the
    squared error."""

    averages: ClassVar[bool] = True
    stored: ClassVar[bool] = True

    temperature: float = Field(2.0, gt=0, description="What logits of both are divided by; 2 for DistilBERT.")


# The terms over the states of layers. Imports no torch.


class StateTermConfig(TermConfig):
    """The base of terms over states: both models have layers."""

    teaches_heads: ClassVar[bool] = False

    def misfit(self, student: ModelConfig, teacher: ModelConfig, layers: LayerMap | None) -> Problem | None:
        try:
            shared_sides(student, teacher)
        except UserError as error:
            return Problem("distill.terms", error.message, error.hint)
        return None


@component("distill/term", "states", builder="lmtool.distillation.terms.layers:States")
class StatesConfig(StateTermConfig):
    """Output states (DistilBERT, Sanh et al. 2019): 1 - cosine of the last hidden states, behind the final norm."""

    stored: ClassVar[bool] = True


@component("distill/term", "hidden", builder="lmtool.distillation.terms.layers:Hidden")
class HiddenConfig(StateTermConfig):
    """Hidden states (TinyBERT, Jiao et al. 2020): mean squared error by the layer map, summed over layers."""

    compares_layers: ClassVar[bool] = True


@component("distill/term", "patience", builder="lmtool.distillation.terms.layers:Patience")
class PatienceConfig(StateTermConfig):
    """Patience (Sun et al. 2019): squared error of the unit vectors of the class token's states, by the layer map."""

    compares_layers: ClassVar[bool] = True


@component("distill/term", "embeddings", builder="lmtool.distillation.terms.layers:Embedded")
class EmbeddingsConfig(StateTermConfig):
    """Embeddings (TinyBERT, Jiao et al. 2020): mean squared error of what the first layer reads."""


# The terms over self-attention. Imports no torch.


_STATES = "take terms over states: distill.terms.hidden.weight=1"


class AttentionTermConfig(TermConfig):
    """The base of terms over attention: both models attend to the same tokens."""

    teaches_heads: ClassVar[bool] = False
    compares_layers: ClassVar[bool] = True

    def misfit(self, student: ModelConfig, teacher: ModelConfig, layers: LayerMap | None) -> Problem | None:
        problem, hint = None, _STATES
        bare = next((model for model in (student, teacher) if not isinstance(model, TransformerConfig)), None)
        embeddings = [own for _, own, its in layers or () if own == 0 or its == 0]
        if bare is not None:
            problem = f"model={bare.name} has no attention heads"
        elif student.architecture != teacher.architecture:
            own, its = (model.architecture.replace("_", "-") for model in (student, teacher))
            problem = f"a token of the student sees what one of an {own} sees, the teacher's what one of an {its} sees"
        elif embeddings:
            problem, hint = "layer 0 of distill.layers is the embeddings, which do not attend", "leave layer 0 out"
        elif isinstance(student, TransformerConfig) and isinstance(teacher, TransformerConfig):
            return self.misfit_of_heads(student, teacher)
        return None if problem is None else self.problem(problem, hint)

    def misfit_of_heads(self, student: TransformerConfig, teacher: TransformerConfig) -> Problem | None:
        """Why heads cannot be compared one by one, if they cannot."""
        own, its = student.num_heads, teacher.num_heads
        if own == its:
            return None
        fitting = student.hidden_size % its == 0
        return self.problem(
            f"the student has {own} attention heads a layer, the teacher {its}; they are compared one by one",
            f"give model.num_heads={its}" if fitting else _STATES,
        )

    def problem(self, message: str, hint: str) -> Problem:
        """Under the term's own key."""
        return Problem("distill.terms", f"distill.terms.{self.term}: {message}", hint)

    term: ClassVar[str]


@component("distill/term", "attention", builder="lmtool.distillation.terms.layers:Attention")
class AttentionConfig(AttentionTermConfig):
    """Attention (TinyBERT, Jiao et al. 2020): mean squared error of the scores before the softmax, by the layer map."""

    term: ClassVar[str] = "attention"


@component("distill/term", "relations", builder="lmtool.distillation.terms.layers:Relations")
class RelationsConfig(AttentionTermConfig):
    """Relations (MiniLM, Wang et al. 2020): KL of attention, and of how the values of a layer relate to each other."""

    term: ClassVar[str] = "relations"

    relations: tuple[Literal["attention", "queries", "keys", "values"], ...] = Field(
        ("attention", "values"),
        min_length=1,
        description="Which are compared, each with weight 1: attention and values are MiniLM's, queries, keys and "
        "values MiniLMv2's.",
    )
    relation_heads: int | None = Field(
        None,
        ge=1,
        description="Parts that the vectors of all heads are cut into, whatever the heads (MiniLMv2: 48 of 768 wide). "
        "Null: the heads, of which both models need the same number.",
    )

    @model_validator(mode="after")
    def _attention_has_heads(self) -> RelationsConfig:
        if self.relation_heads is not None and "attention" in self.relations:
            raise ValueError(
                f"relation_heads={self.relation_heads} regroups vectors, and attention is by the model's own heads; "
                "give relations=[queries,keys,values]"
            )
        return self

    def misfit_of_heads(self, student: TransformerConfig, teacher: TransformerConfig) -> Problem | None:
        parts = self.relation_heads
        if parts is None:
            misfit = super().misfit_of_heads(student, teacher)
            key = "distill.terms.relations"
            shared = math.gcd(student.num_heads, teacher.num_heads)
            hint = f"give {key}.relation_heads={shared} {key}.relations=[queries,keys,values]"
            return None if misfit is None else Problem(misfit.key, misfit.message, hint)
        widths = [model.num_heads * model.width_of_head for model in (student, teacher)]
        if not any(width % parts for width in widths):
            return None
        message = f"its {parts} relation_heads do not divide the width of both, {widths[0]} and {widths[1]}"
        divisor = f"give distill.terms.{self.term}.relation_heads=N, a divisor of {math.gcd(*widths)}"
        return self.problem(message, divisor)


# The term over what models predict when states of another text are put into them. Imports no torch.


AlignedLayers = tuple[Side, int, int]
"""Side of the batch that is read, layer of the student, layer of the teacher."""


def below_the_last(layers: LayerMap, student: ModelConfig) -> list[AlignedLayers]:
    """The pairs of a map at which something is computed with what an intervention puts there: those below the student's
    last layer; where there are none, the embeddings of both."""
    pairs: list[AlignedLayers] = []
    for side, aligned in layers.sides.items():
        below: list[AlignedLayers] = [
            (side, own, its) for own, its in sorted(aligned.items()) if own < student.depths[side]
        ]
        pairs += below or [(side, 0, 0)]
    return pairs


@component("distill/term", "interchange", builder="lmtool.distillation.terms.outputs:Interchange")
class InterchangeConfig(TermConfig):
    """Interchange interventions (Geiger et al. 2022; Wu et al. 2022): what the teacher predicts of a text when the
    states of another one's tokens are put in the place of its own, behind layers that are aligned."""

    compares_layers: ClassVar[bool] = True

    temperature: float = Field(2.0, gt=0, description="What logits of both are divided by.")
    proportion: float = Field(
        0.3, gt=0, le=1, description="Length of the span of tokens that is swapped, as a share of the shorter text."
    )
    at: Literal["middle", "all"] = Field(
        "middle",
        description="Of the layers that distill.layers aligns, the last one aside: the middle one, or all, of which "
        "each text has one in each step. Where the last is the only one: the embeddings.",
    )
    dimensions: tuple[float, float] = Field(
        (0.0, 1.0), description="Which dimensions of a state are swapped: from this share of its width to that."
    )

    def sites(self, layers: LayerMap, student: ModelConfig) -> list[AlignedLayers]:
        """Where both models are intervened on."""
        below = below_the_last(layers, student)
        if self.at == "all":
            return below
        sides = [[pair for pair in below if pair[0] == side] for side in layers.sides]
        return [pairs[(len(pairs) - 1) // 2] for pairs in sides]

    @model_validator(mode="after")
    def _dimensions_fit(self) -> InterchangeConfig:
        if not 0 <= self.dimensions[0] < self.dimensions[1] <= 1:
            first, last = self.dimensions
            raise ValueError(f"dimensions=[{first:g},{last:g}]: two shares of a width, from 0 to 1, the smaller first")
        return self
