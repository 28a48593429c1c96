"""The term over what models predict when states of another text are put into them. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.distillation.configs.base import TermConfig
from lmtool.distillation.configs.layers import LayerMap
from lmtool.models.configs import ModelConfig
from lmtool.nn.configs import Side

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


@component("distill/term", "interchange", builder="lmtool.distillation.terms.interchange:Interchange")
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
