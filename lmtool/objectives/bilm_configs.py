"""Bidirectional language modelling, as configuration. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.learners.configs import ObjectiveConfig


@component("objective", "bilm", builder="lmtool.objectives.bilm:BidirectionalLanguageModel")
class BilmConfig(ObjectiveConfig):
    """Bidirectional language modelling (Peters et al. 2018): every word from those before it, and from those behind
    it."""

    architectures: ClassVar[tuple[str, ...]] = ("bidirectional_lm",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos", "unk")

    name: Literal["bilm"] = Field("bilm", description="Bidirectional language modelling.")
    negatives: int | None = Field(
        8192,
        ge=1,
        description="Words beside the true one over which training computes its softmax, drawn log-uniformly for each "
        "step, the same for both directions; the words of the vocabulary stand in the order of their frequency. Null, "
        "or a number beyond the vocabulary: all words. Evaluation has all.",
    )

    @property
    def places(self) -> dict[str, float]:
        """Each word in two directions."""
        return {"heads.lm": 2.0}
