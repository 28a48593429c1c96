"""The terms over self-attention. Imports no torch."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.distillation.configs.base import TermConfig
from lmtool.distillation.configs.layers import LayerMap
from lmtool.errors import Problem
from lmtool.models.configs import ModelConfig, TransformerConfig

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


@component("distill/term", "attention", builder="lmtool.distillation.terms.attention:Attention")
class AttentionConfig(AttentionTermConfig):
    """Attention (TinyBERT, Jiao et al. 2020): mean squared error of the scores before the softmax, by the layer map."""

    term: ClassVar[str] = "attention"


@component("distill/term", "relations", builder="lmtool.distillation.terms.attention:Relations")
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
