"""The encoder-decoder families, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.models.configs import ModelConfig


class EncoderDecoderConfig(ModelConfig):
    """What every encoder-decoder has besides: `num_layers` counts the layers of the encoder."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "encoder_decoder"
    text_format: ClassVar[str] = "t5"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "last"
    start_role: ClassVar[str] = "pad"
    """The special token that the decoder's input starts with: a role of the tokenizer."""

    decoder_layers: int | None = Field(None, ge=1, description="Layers of the decoder. Null: as many as num_layers.")

    @property
    def layers_of_decoder(self) -> int:
        """Layers of the decoder."""
        return self.num_layers if self.decoder_layers is None else self.decoder_layers


@component("model", "t5", builder="lmtool.models.t5:build")
class T5Config(EncoderDecoderConfig):
    """T5 (Raffel et al. 2020): pre-norm encoder-decoder with relative positions. Defaults: base, version 1.0."""

    default_tokenizer: ClassVar[dict[str, Any]] = {"name": "sentencepiece"}
    default_objective: ClassVar[dict[str, Any]] = {"name": "span_corruption"}
    # Raffel et al. 2020, 3.1.2: Adafactor, 1/sqrt(max(n, 10^4)) at step n.
    default_optimizer: ClassVar[dict[str, Any]] = {"name": "adafactor"}
    default_schedule: ClassVar[dict[str, Any]] = {"name": "inverse_sqrt"}
    free_fields: ClassVar[tuple[str, ...]] = (*ModelConfig.free_fields, "max_positions")

    name: Literal["t5"] = Field("t5", description="T5.")
    vocab_size: int = Field(32128, ge=8, description="Rows of the token embedding; at least the tokenizer's entries.")
    head_size: int = Field(64, ge=1, description="Width of an attention head; num_heads x head_size may be any width.")
    feedforward: Literal["relu", "gated_gelu"] = Field(
        "relu", description="The feed-forward part: relu (version 1.0), or a GELU that gates a second map (1.1)."
    )
    tied: bool = Field(
        True,
        description="Whether the output layer is the token embedding, applied to the hidden states scaled by "
        "1/sqrt(hidden_size) (version 1.0), or a table of its own (1.1).",
    )
    max_positions: int = Field(512, ge=8, description="Longest sequence in tokens; no table depends on it.")
    norm_epsilon: float = Field(1e-6, gt=0, description="Added to the mean square in the norms.")
    initializer_std: float = Field(
        1.0, gt=0, description="Factor of the published initial standard deviations (1/sqrt(inputs) of each map)."
    )

    def _heads_fit(self) -> T5Config:
        return self
