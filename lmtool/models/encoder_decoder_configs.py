"""The encoder-decoder families, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import Choice, component
from lmtool.models.configs import Heads, Layers, ModelConfig, Positions, Summary, TransformerConfig, Vocabulary, Width
from lmtool.nn.configs import PositionsConfig, Side, SinusoidalPositionsConfig, T5PositionsConfig


class EncoderDecoderConfig(ModelConfig):
    """What every encoder-decoder has besides: `num_layers` counts the layers of the encoder."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "encoder_decoder"
    text_format: ClassVar[str] = "t5"
    summary: ClassVar[Summary] = "last"
    token_states: ClassVar[Literal["inputs", "outputs"] | None] = None
    start_role: ClassVar[str] = "pad"

    @property
    def layers_of_decoder(self) -> int:
        return self.num_layers

    @property
    def depths(self) -> dict[Side, int]:
        return {"inputs": self.num_layers, "outputs": self.layers_of_decoder}


class TwoTransformersConfig(EncoderDecoderConfig, TransformerConfig):
    """An encoder-decoder whose stacks are both transformers."""

    decoder_layers: Layers | None = Field(None, description="Layers of the decoder. Null: as many as num_layers.")

    @property
    def layers_of_decoder(self) -> int:
        return self.num_layers if self.decoder_layers is None else self.decoder_layers


@component("model", "t5", builder="lmtool.models.t5:build")
class T5Config(TwoTransformersConfig):
    """T5 (Raffel et al. 2020): pre-norm encoder-decoder with relative positions. Defaults: base, version 1.0."""

    published_type: ClassVar[str | None] = "t5"

    transformers_form: ClassVar[dict[str, Any] | None] = {"pooled": True}
    # As transformers' T5ForTokenClassification: the encoder alone.
    token_states: ClassVar[Literal["inputs", "outputs"] | None] = "inputs"
    has_biases: ClassVar[bool] = False

    name: Literal["t5"] = Field("t5", description="T5, both versions.")
    vocab_size: Vocabulary = Field(32128, description="Rows of the token embedding; at least the tokenizer's entries.")
    head_size: Heads = Field(64, description="Width of an attention head; num_heads x head_size may be any width.")
    feedforward: Literal["relu", "gated_gelu"] = Field(
        "relu", description="The feed-forward part: relu (version 1.0), or a GELU that gates a second map (1.1)."
    )
    tied: bool = Field(
        True,
        description="Whether the output layer is the token embedding, applied to the hidden states scaled by "
        "1/sqrt(hidden_size) (version 1.0), or a table of its own (1.1).",
    )
    positions: Annotated[PositionsConfig, Choice("model/positions")] = Field(
        T5PositionsConfig(), description="How the model knows where a token stands."
    )
    norm_epsilon: float = Field(1e-6, gt=0, description="Added to the mean square in the norms.")
    initializer_std: float = Field(
        1.0, gt=0, description="Factor of the published initial standard deviations (1/sqrt(inputs) of each map)."
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> T5Config:
        """Heads have a width of their own, so any number of them fits."""
        return self

    @property
    def width_of_head(self) -> int:
        return self.head_size

    @property
    def gated(self) -> bool:
        return self.feedforward == "gated_gelu"

    @property
    def learned_output(self) -> bool:
        return not self.tied


class PostNormConfig(TwoTransformersConfig):
    """Norms behind the sublayers, biases everywhere."""

    free_fields: ClassVar[tuple[str, ...]] = (*TwoTransformersConfig.free_fields, "activation_dropout")

    activation_dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of activations dropped inside the feed-forward part."
    )
    norm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance in layer norms.")


@component("model", "bart", builder="lmtool.models.bart:build")
class BartConfig(PostNormConfig):
    """BART (Lewis et al. 2020): post-norm encoder-decoder with learned positions. Defaults: base."""

    published_type: ClassVar[str | None] = "bart"

    text_format: ClassVar[str] = "bart"
    transformers_form: ClassVar[dict[str, Any] | None] = {"pooled": True}
    # Lewis et al. 2020, 3.2: the decoder reads the same text.
    token_states: ClassVar[Literal["inputs", "outputs"] | None] = "outputs"
    start_role: ClassVar[str] = "eos"

    name: Literal["bart"] = Field("bart", description="BART.")
    vocab_size: Vocabulary = Field(50265, description="Rows of the token embedding; at least the tokenizer's entries.")
    num_layers: Layers = Field(6, description="Layers of the encoder.")
    max_positions: Positions = Field(
        1024, description="Longest sequence in tokens; learned positions have two rows more."
    )
    activation_dropout: float = Field(
        0.1, ge=0, lt=1, description="Share of activations dropped inside the feed-forward part."
    )


@component("model", "transformer", builder="lmtool.models.transformer:build")
class Transformer2017Config(PostNormConfig):
    """The transformer (Vaswani et al. 2017): post-norm encoder-decoder with sinusoidal positions. Defaults: base."""

    published_type: ClassVar[str | None] = "marian"

    name: Literal["transformer"] = Field("transformer", description="The transformer of 2017.")
    vocab_size: Vocabulary = Field(37000, description="Rows of the token embedding; at least the tokenizer's entries.")
    num_layers: Layers = Field(6, description="Layers of the encoder.")
    hidden_size: Width = Field(512, description="Width of the hidden states; a multiple of num_heads.")
    num_heads: Heads = Field(8, description="Attention heads a layer.")
    feedforward_size: Width = Field(2048, description="Width inside the feed-forward part.")
    positions: Annotated[PositionsConfig, Choice("model/positions")] = Field(
        SinusoidalPositionsConfig(), description="How the model knows where a token stands."
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Share of attention weights dropped in training.")
    initializer_std: float = Field(
        1.0, gt=0, description="Factor of the initial standard deviations, sqrt(2 / (inputs + outputs)) of each map."
    )
