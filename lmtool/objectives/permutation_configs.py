"""Permutation language modeling and skip-gram, as configuration. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.learners.configs import ObjectiveConfig

# Permutation language modelling, as configuration. Imports no torch.


@component("objective", "plm", builder="lmtool.objectives.plm:PermutationLanguageModel")
class PlmConfig(ObjectiveConfig):
    """Permutation language modelling (XLNet, Yang et al. 2019): some tokens, each from those that come before it in a
    random order, and from all that are not predicted."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("sep", "mask")
    query_stream: ClassVar[bool] = True
    phase_fields: ClassVar[tuple[str, ...]] = ("context", "longest", "reuse")
    reads_lanes: ClassVar[bool] = True
    short_window_probability: ClassVar[float] = 0.0
    """Its windows are as long as the text allows."""

    name: Literal["plm"] = Field("plm", description="Permutation language modelling.")
    context: int = Field(
        6, ge=2, le=1000, description="One in this many tokens is predicted: n of them in a context of context x n (K)."
    )
    longest: int = Field(
        5, ge=1, le=1000, description="Longest run of tokens predicted together; one of n is drawn with a share of 1/n."
    )
    reuse: int = Field(
        0,
        ge=0,
        le=100_000_000,
        description="Tokens at the start of an example that have an order of their own: they see nothing of the rest, "
        "which sees all of them. With model.memory_length their states are kept for the next example, which "
        "begins behind them (XLNet: 256 of 512). 0: one order for all.",
    )
    pairs: Literal["none", "unscored"] = Field(
        "none",
        description="unscored: two segments an example, the second a random one in half of them, as for next-sentence "
        "prediction but without a loss that tells which; not with reuse. none: one run of text.",
    )
    pair_of: Literal["segments", "sentences"] = Field(
        "segments",
        description="segments: runs of sentences that fill the length. sentences: one sentence each. Read with "
        "pairs=unscored only.",
    )
    short_sequence_probability: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the pairs that aim at a random shorter length; read with pairs=unscored only.",
    )

    @property
    def pairs_of_segments(self) -> str | None:
        return None if self.pairs == "none" else self.pairs

    @property
    def reuses_nothing(self) -> bool:
        return self.reuse == 0

    @property
    def predicted_fraction(self) -> float:
        return 1 / self.context

    @property
    def places(self) -> dict[str, float]:
        return {"heads.lm": self.predicted_fraction}

    def drawn_epoch(self, epoch: int) -> int:
        """The epoch whose draws an epoch reads: its own."""
        return epoch

    @model_validator(mode="after")
    def _pairs_are_no_running_text(self) -> PlmConfig:
        if self.pairs != "none" and self.reuse:
            raise ValueError(f"reuse={self.reuse} needs running text: give pairs=none, or reuse=0")
        return self


# What is learned of single words, as configuration. Imports no torch.


@component("objective", "skip_gram", builder="lmtool.objectives.skip_gram:SkipGram")
class SkipGramConfig(ObjectiveConfig):
    """Skip-gram with negative sampling (word2vec, Mikolov et al. 2013): a word's vector tells the words around it from
    others."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    contextual: ClassVar[bool] = False
    phase_fields: ClassVar[tuple[str, ...]] = ("window", "subsample")

    name: Literal["skip_gram"] = Field("skip_gram", description="Skip-gram with negative sampling.")
    window: int = Field(
        5, ge=1, le=1000, description="Maximum context words on either side; drawn from 1 to this number per word."
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
