"""Configuration of permutation language modeling and skip-gram. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.learners.configs import ObjectiveConfig


@component("objective", "plm", builder="lmtool.objectives.plm:PermutationLanguageModel")
class PlmConfig(ObjectiveConfig):
    """Permutation language modeling (XLNet, Yang et al. 2019): predicts some tokens, each from the preceding ones in a
    random order and from all tokens that are not predicted."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("sep", "mask")
    query_stream: ClassVar[bool] = True
    phase_fields: ClassVar[tuple[str, ...]] = ("context", "longest", "reuse")
    reads_lanes: ClassVar[bool] = True
    short_window_probability: ClassVar[float] = 0.0
    """Always 0: windows are as long as the text allows."""

    name: Literal["plm"] = Field("plm", description="Permutation language modeling.")
    context: int = Field(
        6, ge=2, le=1000, description="One in this many tokens is predicted: n of them in a context of context x n (K)."
    )
    longest: int = Field(
        5,
        ge=1,
        le=1000,
        description="Maximum run of tokens predicted together; length n has probability proportional to 1/n.",
    )
    reuse: int = Field(
        0,
        ge=0,
        le=100_000_000,
        description="Tokens at the start of an example with a separate order: they do not attend to the rest, which "
        "attends to all of them. With model.memory_length their states are cached for the next example, which "
        "begins after them (XLNet: 256 of 512). 0: one order for all.",
    )
    pairs: Literal["none", "unscored"] = Field(
        "none",
        description="unscored: two segments per example, the second a random one in half of them, as for "
        "next-sentence prediction but without its loss; not with reuse. none: running text.",
    )
    pair_of: Literal["segments", "sentences"] = Field(
        "segments",
        description="segments: runs of sentences that fill the length. sentences: one sentence each. Only used with "
        "pairs=unscored.",
    )
    short_sequence_probability: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Fraction of the pairs that aim at a random shorter length; only used with pairs=unscored.",
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

    def sampling_epoch(self, epoch: int) -> int:
        """The epoch whose random numbers an epoch uses: itself."""
        return epoch

    @model_validator(mode="after")
    def _pairs_are_no_running_text(self) -> PlmConfig:
        if self.pairs != "none" and self.reuse:
            raise ValueError(f"reuse={self.reuse} needs running text: give pairs=none, or reuse=0")
        return self


@component("objective", "skip_gram", builder="lmtool.objectives.skip_gram:SkipGram")
class SkipGramConfig(ObjectiveConfig):
    """Skip-gram with negative sampling (word2vec, Mikolov et al. 2013): a word's vector distinguishes its context words
    from random ones."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    contextual: ClassVar[bool] = False
    phase_fields: ClassVar[tuple[str, ...]] = ("window", "subsample")

    name: Literal["skip_gram"] = Field("skip_gram", description="Skip-gram with negative sampling.")
    window: int = Field(
        5, ge=1, le=1000, description="Maximum context words on either side; sampled from 1 to this number per word."
    )
    negatives: int = Field(5, ge=1, le=1000, description="Negatives sampled per predicted word.")
    subsample: float = Field(
        1e-3,
        gt=0,
        le=1,
        description="Words with a frequency f above this threshold are subsampled: an occurrence is retained with "
        "probability sqrt(subsample / f).",
    )
    power: float = Field(
        0.75, ge=0, le=1, description="Negatives are sampled in proportion to a word's count to this power."
    )

    @property
    def predicted_fraction(self) -> float:
        """Mean number of predictions per word, without subsampling."""
        return self.window + 1.0

    @property
    def places(self) -> dict[str, float]:
        """Pairs of a token with its context words and with negatives."""
        return {"heads.skip_gram": self.predicted_fraction * (1 + self.negatives)}
