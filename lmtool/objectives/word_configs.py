"""What is learned of single words, as configuration. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.learners.configs import ObjectiveConfig


@component("objective", "skip_gram", builder="lmtool.objectives.skip_gram:SkipGram")
class SkipGramConfig(ObjectiveConfig):
    """Skip-gram with negative sampling (word2vec, Mikolov et al. 2013): a word's vector tells the words around it from
    others."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    contextual: ClassVar[bool] = False
    phase_fields: ClassVar[tuple[str, ...]] = ("window", "subsample")

    name: Literal["skip_gram"] = Field("skip_gram", description="Skip-gram with negative sampling.")
    window: int = Field(
        5, ge=1, le=1000, description="Words on either side that are predicted at most; of each word 1 to so many."
    )
    negatives: int = Field(5, ge=1, le=1000, description="Words drawn beside each word that is predicted.")
    subsample: float = Field(
        1e-3,
        gt=0,
        le=1,
        description="A word of a larger share f of the text is left out of it at random, but for "
        "sqrt(subsample / f) of its places.",
    )
    power: float = Field(
        0.75, ge=0, le=1, description="Negatives are drawn in proportion to a word's count to this power."
    )

    @property
    def predicted_fraction(self) -> float:
        """Words that a word predicts, mean, where none is left out of the text."""
        return self.window + 1.0

    @property
    def places(self) -> dict[str, float]:
        """Pairs of a token with those and with negatives."""
        return {"heads.skip_gram": self.predicted_fraction * (1 + self.negatives)}
