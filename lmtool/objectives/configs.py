"""What pretraining learns, as configuration. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.tables import component


class ObjectiveConfig(Config):
    """The base of every pretraining objective."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """The architectures it trains: encoder, decoder, encoder_decoder."""
    roles: ClassVar[tuple[str, ...]] = ()
    """The special tokens it needs of the vocabulary."""

    name: str = Field(description="Which objective.")

    @property
    def predicted_fraction(self) -> float:
        """Share of the tokens at which the vocabulary is computed."""
        return 1.0


@component("objective", "mlm", builder="lmtool.objectives.mlm:MaskedLanguageModel")
class MlmConfig(ObjectiveConfig):
    """Masked language modelling (Devlin et al. 2019), with or without next-sentence prediction."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    roles: ClassVar[tuple[str, ...]] = ("cls", "sep", "mask")

    name: Literal["mlm"] = Field("mlm", description="Masked language modelling.")
    probability: float = Field(0.15, gt=0, lt=1, description="Share of the non-special tokens that are predicted.")
    mask: float = Field(0.8, ge=0, le=1, description="Share of the predicted tokens that are replaced by [MASK].")
    random: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the predicted tokens that are replaced by a token drawn uniformly from the vocabulary "
        "without its special tokens; it may be the same token. The rest stays as it is.",
    )
    select: Literal["exact", "bernoulli"] = Field(
        "exact",
        description="exact: round(probability x tokens) of each example, at least one. bernoulli: each token by "
        "itself.",
    )
    masking: Literal["dynamic", "static"] = Field(
        "dynamic",
        description="dynamic: new masks every epoch (RoBERTa). static: `duplicates` sets of masks, repeated in turn "
        "(BERT).",
    )
    duplicates: int = Field(
        10,
        ge=1,
        description="Sets of masks (and of pairs) under masking=static; epoch e uses set e mod duplicates.",
    )
    whole_word: bool = Field(False, description="Mask all pieces of a word together, within the same budget.")
    pairs: Literal["none", "nsp"] = Field(
        "none",
        description="nsp: two segments an example, the second random in half of them, and a second loss that "
        "tells which. none: one run of text.",
    )
    short_sequence_probability: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the pairs that aim at a random shorter length; read with pairs=nsp only.",
    )

    @property
    def predicted_fraction(self) -> float:
        return self.probability

    @model_validator(mode="after")
    def _branches_fit(self) -> MlmConfig:
        if self.mask + self.random > 1 + 1e-9:
            raise ValueError(f"mask={self.mask} and random={self.random} add up to more than 1")
        return self


@component("objective", "clm", builder="lmtool.objectives.clm:CausalLanguageModel")
class ClmConfig(ObjectiveConfig):
    """Causal language modelling: every token from the ones before it (GPT, GPT-2)."""

    architectures: ClassVar[tuple[str, ...]] = ("decoder",)
    roles: ClassVar[tuple[str, ...]] = ("eos",)

    name: Literal["clm"] = Field("clm", description="Causal language modelling.")
