"""The configurations of permutation language modeling and of skip-gram. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.registry import component
from lmtool.learners.configs import ObjectiveConfig


@component("objective", "plm", builder="lmtool.objectives.plm:PermutationLanguageModel")
class PlmConfig(ObjectiveConfig):
    """Permutation language modeling (XLNet, Yang et al. 2019): some tokens are predicted, in a random order. Each is
    predicted from the predicted tokens before it in this order, and from all tokens that are not predicted."""

    example_model: ClassVar[str] = "xlnet"
    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("sep", "mask")
    query_stream: ClassVar[bool] = True
    phase_fields: ClassVar[tuple[str, ...]] = ("context", "longest", "reuse")
    reads_lanes: ClassVar[bool] = True
    short_window_probability: ClassVar[float] = 0.0
    """Always 0: windows of running text are not shortened; pairs are, by `short_sequence_probability`."""

    name: Literal["plm"] = Field("plm", description="Permutation language modeling.")
    context: int = Field(
        6,
        ge=2,
        le=1000,
        description="one in this many tokens is predicted: a span of n tokens within each n * context tokens",
    )
    longest: int = Field(
        5,
        ge=1,
        le=1000,
        description="maximum tokens of a predicted span; the probability of length n is proportional to 1/n",
    )
    reuse: int = Field(
        0,
        ge=0,
        le=100_000_000,
        description="number of tokens at the start that are permuted separately and do not attend to the rest. The "
        "other tokens attend to all of them. With model.memory_length, their states are cached for the next example, "
        "which begins right after them (XLNet: 256 of 512). 0: one permutation for all tokens",
    )
    pairs: Literal["none", "unscored"] = Field(
        "none",
        description="none: one text; unscored: two segments, the second one random in half of the pairs. As in "
        "next-sentence prediction, but without its loss; reuse must be 0",
    )
    pair_of: Literal["segments", "sentences"] = Field(
        "segments",
        description="segments of several sentences, or single sentences; with pairs=unscored only",
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
    def token_fractions(self) -> dict[str, float]:
        return {"heads.lm": self.predicted_fraction}

    def sampling_epoch(self, epoch: int) -> int:
        """Returns the epoch whose random numbers an epoch uses: always the epoch itself, since masks are never
        static."""
        return epoch

    @model_validator(mode="after")
    def _require_running_text_for_reuse(self) -> PlmConfig:
        if self.pairs != "none" and self.reuse:
            raise ValueError(f"reuse={self.reuse} needs running text: set pairs=none, or reuse=0")
        return self


@component("objective", "skip_gram", builder="lmtool.objectives.skip_gram:SkipGram")
class SkipGramConfig(ObjectiveConfig):
    """Skip-gram with negative sampling (word2vec, Mikolov et al. 2013): the vector of a word distinguishes the words
    around it from random words."""

    example_model: ClassVar[str] = "word_vectors"
    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    contextual: ClassVar[bool] = False
    phase_fields: ClassVar[tuple[str, ...]] = ("window", "subsample")

    name: Literal["skip_gram"] = Field("skip_gram", description="Skip-gram with negative sampling.")
    window: int = Field(
        5,
        ge=1,
        le=1000,
        description="maximum context words on either side; the number for each word is random, from 1 to this maximum",
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
        description="a word of frequency f is retained with probability sqrt(subsample / f); paper: 1e-5",
    )
    power: float = Field(
        0.75, ge=0, le=1, description="negatives are sampled in proportion to the count of a word to this power"
    )

    @property
    def predicted_fraction(self) -> float:
        """The mean number of predicted context words per word, without subsampling: (window + 1) / 2 on each side."""
        return self.window + 1.0

    @property
    def token_fractions(self) -> dict[str, float]:
        """The head scores the pairs of a word with its context words, and with their negatives."""
        return {"heads.skip_gram": self.predicted_fraction * (1 + self.negatives)}
