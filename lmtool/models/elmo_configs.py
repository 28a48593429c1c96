"""ELMo, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.models.configs import Layers, ModelConfig, Positions, Vocabulary, Width
from lmtool.nn.configs import Side

_Filter = tuple[Annotated[int, Field(ge=1, le=100)], Annotated[int, Field(ge=1, le=100_000)]]


@component("model", "elmo", builder="lmtool.models.elmo:build")
class ElmoConfig(ModelConfig):
    """ELMo (Peters et al. 2018): words by their characters, and LSTMs in both directions. Defaults: the original."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder", "bidirectional_lm"]] = "bidirectional_lm"
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "mean"
    free_fields: ClassVar[tuple[str, ...]] = (
        *ModelConfig.free_fields, "max_positions", "cell_clip", "projection_clip"
    )  # fmt: skip

    name: Literal["elmo"] = Field("elmo", description="ELMo.")
    vocab_size: Vocabulary = Field(
        793_471, description="Words that its language model predicts; at least the tokenizer's entries. It reads any."
    )
    num_layers: Layers = Field(2, description="LSTM layers a direction; all but the first add what they read.")
    hidden_size: Width = Field(
        1024, multiple_of=2, description="Width of the hidden states, half of it of each direction."
    )
    cell_size: Width = Field(4096, description="Width of an LSTM's memory, which is projected to half of hidden_size.")
    cell_clip: float | None = Field(3.0, gt=0, description="Bound of the memory's values at every step; null for none.")
    projection_clip: float | None = Field(
        3.0, gt=0, description="Bound of the projected values at every step; null for none."
    )
    word_length: int = Field(
        50, ge=4, le=1000, description="Symbols of a word: its first bytes, and one at its beginning and at its end."
    )
    character_size: Width = Field(16, description="Width of a symbol's vector.")
    filters: tuple[_Filter, ...] = Field(
        ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024)),
        min_length=1,
        description="Convolutions over a word's symbols: width in symbols, and how many there are of it.",
    )
    highways: int = Field(2, ge=0, le=100, description="Highway layers over what the convolutions find.")
    max_positions: Positions = Field(100_000, description="Longest sequence in tokens; no weight depends on it.")

    @property
    def depths(self) -> dict[Side, int]:
        return {"inputs": self.num_layers}

    @property
    def inner_size(self) -> int:
        return 4 * self.cell_size

    @model_validator(mode="after")
    def _filters_fit_a_word(self) -> ElmoConfig:
        widest = max(width for width, _ in self.filters)
        if widest > self.word_length:
            raise ValueError(f"filters: a width of {widest} is more than word_length={self.word_length}")
        return self
