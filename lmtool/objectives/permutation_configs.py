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
        6, ge=2, le=1000, description="one in this many tokens is predicted: n of them in a context of context x n"
    )
    longest: int = Field(
        5,
        ge=1,
        le=1000,
        description="longest span predicted together; span length n is drawn in proportion to 1/n",
    )
    reuse: int = Field(
        0,
        ge=0,
        le=100_000_000,
        description="tokens at the start that are permuted separately and cannot see the rest. The other tokens see "
        "all of them. With model.memory_length their states are cached for the next example, which continues after "
        "them (XLNet: 256 of 512). 0: one permutation for all tokens",
    )
    pairs: Literal["none", "unscored"] = Field(
        "none",
        description="unscored: two segments, the second one random in half of the pairs; none: one text. As in "
        "next-sentence prediction, but without its loss; not together with reuse",
    )
    pair_of: Literal["segments", "sentences"] = Field(
        "segments",
        description="segments: several sentences each; sentences: one each; with pairs=unscored only",
    )
    short_sequence_probability: float = Field(
        0.1,
        ge=0,
        le=1,
        description="fraction of pairs shortened to a random length; with pairs=unscored only",
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
            raise ValueError(f"reuse={self.reuse} needs running text: set pairs=none, or reuse=0")
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
        5, ge=1, le=1000, description="maximum context words on either side; drawn from 1 to this number for each word"
    )
    negatives: int = Field(
        5,
        ge=1,
        le=1000,
        description="negative samples per predicted word; the paper: 5 to 20 for small texts, 2 to 5 for large ones",
    )
    subsample: float = Field(
        1e-3,
        gt=0,
        le=1,
        description="words of text fraction f are retained with probability sqrt(subsample / f); paper: 1e-5",
    )
    power: float = Field(
        0.75, ge=0, le=1, description="negatives are drawn in proportion to a word's count to this power"
    )

    @property
    def predicted_fraction(self) -> float:
        """Mean number of predictions per word, without subsampling."""
        return self.window + 1.0

    @property
    def places(self) -> dict[str, float]:
        """Pairs of a token with its context words and with negatives."""
        return {"heads.skip_gram": self.predicted_fraction * (1 + self.negatives)}
