"""Configuration of the encoder-decoder families. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.registry import component
from lmtool.models.configs import (
    AttentionDropout,
    FeedForwardSize,
    FormFields,
    Heads,
    HiddenSize,
    Layers,
    ModelConfig,
    Positions,
    PositionsChoice,
    Summary,
    TransformerConfig,
    Vocabulary,
)
from lmtool.nn.configs import Side, SinusoidalPositionsConfig, T5PositionsConfig


class EncoderDecoderConfig(ModelConfig):
    """Base class of encoder-decoders; `num_layers` is the number of encoder layers."""

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
    """An encoder-decoder of two transformers."""

    decoder_layers: Layers | None = Field(None, description="decoder layers; null: as many as in the encoder")

    @property
    def layers_of_decoder(self) -> int:
        return self.num_layers if self.decoder_layers is None else self.decoder_layers


@component("model", "t5", builder="lmtool.models.t5:T5.build")
class T5Config(TwoTransformersConfig):
    """T5 (Raffel et al. 2020): pre-norm encoder-decoder with relative positions. The defaults are T5-base, version
    1.0."""

    descriptions: ClassVar[dict[str, str]] = {
        "num_layers": "encoder layers",
        "hidden_size": "width of the hidden states",
        "max_positions": "maximum sequence length in tokens",
        "dropout": "dropout rate after the embedding, in and after sublayers, and after the stacks",
    }

    hf_model_type: ClassVar[str | None] = "t5"
    published: ClassVar[str | None] = "google-t5/t5-base"

    transformers_form: ClassVar[FormFields | None] = {"pooled": True}
    # Token classification uses only the encoder, as in transformers' T5ForTokenClassification.
    token_states: ClassVar[Literal["inputs", "outputs"] | None] = "inputs"
    has_biases: ClassVar[bool] = False

    name: Literal["t5"] = Field("t5", description="T5, versions 1.0 and 1.1.")
    vocab_size: Vocabulary = 32128
    head_size: Heads = Field(
        64, description="width of an attention head; num_heads x head_size may differ from hidden_size"
    )
    feedforward: Literal["relu", "gated_gelu"] = Field("relu", description="relu (version 1.0), or gated_gelu (1.1)")
    tied: bool = Field(
        True,
        description="true (version 1.0): the output layer shares the token embedding; false (1.1): separate weights. "
        "If tied, the hidden states are scaled by 1/sqrt(hidden_size)",
    )
    positions: PositionsChoice = T5PositionsConfig()
    norm_epsilon: float = Field(1e-6, gt=0, description="added to the mean square in the norms")
    initializer_std: float = Field(
        1.0, gt=0, description="factor on the published initial standard deviations, 1/sqrt(number of inputs)"
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> T5Config:
        """Accepts any number of heads, because head_size is a separate field."""
        return self

    @property
    def width_of_head(self) -> int:
        return self.head_size

    @property
    def gated(self) -> bool:
        return self.feedforward == "gated_gelu"

    @property
    def untied_output(self) -> bool:
        return not self.tied


class PostNormConfig(TwoTransformersConfig):
    """Base class of models with biases, and with norms after the sublayers."""

    adjustable_fields: ClassVar[tuple[str, ...]] = (*TwoTransformersConfig.adjustable_fields, "activation_dropout")

    activation_dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate inside the feed-forward block")
    norm_epsilon: float = Field(1e-5, gt=0)


@component("model", "bart", builder="lmtool.models.bart:Bart.build")
class BartConfig(PostNormConfig):
    """BART (Lewis et al. 2020): post-norm encoder-decoder with learned positions. The defaults are BART-base."""

    descriptions: ClassVar[dict[str, str]] = {
        "hidden_size": "width of the hidden states",
        "dropout": "dropout rate at the input of each layer and of the softmax",
    }

    hf_model_type: ClassVar[str | None] = "bart"

    text_format: ClassVar[str] = "bart"
    transformers_form: ClassVar[FormFields | None] = {"pooled": True}
    # For token classification, the decoder reads the same text as the encoder (Lewis et al. 2020, 3.2).
    token_states: ClassVar[Literal["inputs", "outputs"] | None] = "outputs"
    start_role: ClassVar[str] = "eos"

    name: Literal["bart"] = Field("bart", description="BART.")
    vocab_size: Vocabulary = 50265
    num_layers: Layers = Field(6, description="encoder layers")
    max_positions: Positions = Field(
        1024, description="maximum sequence length in tokens; the table of positions has two extra rows"
    )
    activation_dropout: float = Field(0.1, ge=0, lt=1)


@component("model", "transformer", builder="lmtool.models.transformer:Transformer.build")
class Transformer2017Config(PostNormConfig):
    """The transformer (Vaswani et al. 2017): post-norm encoder-decoder with sinusoidal positions. The defaults are
    the base model."""

    descriptions: ClassVar[dict[str, str]] = {
        "max_positions": "maximum sequence length in tokens",
        "dropout": "dropout rate at the input of each layer and of the softmax",
    }

    hf_model_type: ClassVar[str | None] = "marian"

    name: Literal["transformer"] = Field("transformer", description="The transformer of 2017.")
    vocab_size: Vocabulary = 37000
    num_layers: Layers = Field(6, description="encoder layers")
    hidden_size: HiddenSize = 512
    num_heads: Heads = 8
    feedforward_size: FeedForwardSize = 2048
    positions: PositionsChoice = SinusoidalPositionsConfig()
    attention_dropout: AttentionDropout = 0.0
    initializer_std: float = Field(
        1.0,
        gt=0,
        description="factor on the initial standard deviations, sqrt(2 / (inputs + outputs))",
    )
