"""Configuration of Llama, Qwen2 and Transformer-XL. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lmtool.config.registry import component
from lmtool.models.configs import (
    AttentionDropout,
    DropoutRate,
    FeedForwardSize,
    FormFields,
    Heads,
    HiddenSize,
    Layers,
    Positions,
    PositionsChoice,
    StudiedConfig,
    Summary,
    TransformerConfig,
    Vocabulary,
)
from lmtool.nn.configs import NoPositionsConfig, RotaryPositionsConfig


@component("model", "llama", builder="lmtool.models.llama:Llama.build")
class LlamaConfig(StudiedConfig):
    """Llama's architecture (Touvron et al. 2023): pre-norm, rotary positions, gated feed-forward layers, grouped-query
    attention. Defaults: SmolLM2-135M."""

    hf_model_type: ClassVar[str | None] = "llama"

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Summary] = "last"
    transformers_form: ClassVar[FormFields | None] = {"text_format": "plain", "bias": False}
    has_biases: ClassVar[bool] = False

    name: Literal["llama", "llama_encoder", "qwen2"] = Field("llama", description="Llama's architecture.")
    vocab_size: Vocabulary = 49152
    num_layers: Layers = 30
    hidden_size: HiddenSize = 576
    num_heads: Heads = 9
    num_key_value_heads: Heads = Field(3, description="key and value heads; a divisor of num_heads")
    feedforward_size: FeedForwardSize = 1536
    max_positions: Positions = 8192
    positions: PositionsChoice = RotaryPositionsConfig(base=100_000.0)
    tied: bool = Field(
        True, description="true: the output layer shares the token embedding; false: it has its own weights"
    )
    dropout: DropoutRate = 0.0
    attention_dropout: AttentionDropout = 0.0
    norm_epsilon: float = Field(1e-5, gt=0, description="added to the mean square in the norms")

    @model_validator(mode="after")
    def _key_value_heads_fit(self) -> Self:
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_key_value_heads}"
            )
        return self

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads

    @property
    def gated(self) -> bool:
        return True

    @property
    def untied_output(self) -> bool:
        return not self.tied

    def fields_for_heads(self, heads: int) -> dict[str, int]:
        """Returns the number of key-value heads for another number of heads: the largest divisor up to the proportional
        number."""
        scaled = max(heads * self.num_key_value_heads // self.num_heads, 1)
        return {"num_key_value_heads": next(number for number in range(scaled, 0, -1) if heads % number == 0)}

    def metadata(self) -> dict[str, int]:
        return {**super().metadata(), "key-value heads": self.num_key_value_heads}


@component("model", "llama_encoder", builder="lmtool.models.llama:LlamaEncoder.build")
class LlamaEncoderConfig(LlamaConfig):
    """Llama's layers (Touvron et al. 2023) as an encoder: every token attends to the whole text. Defaults:
    SmolLM2-135M's sizes."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "encoder"
    text_format: ClassVar[str] = "roberta"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "mean"
    transformers_form: ClassVar[FormFields | None] = None

    name: Literal["llama_encoder"] = Field("llama_encoder", description="Llama's layers as an encoder.")


@component("model", "qwen2", builder="lmtool.models.qwen2:Qwen2.build")
class Qwen2Config(LlamaConfig):
    """Qwen2's architecture (Yang et al. 2024): Llama's, with biases in the projections of queries, keys and values.
    Defaults: Qwen2.5-0.5B."""

    hf_model_type: ClassVar[str | None] = "qwen2"

    has_biases: ClassVar[bool] = True

    name: Literal["qwen2"] = Field("qwen2", description="Qwen2's architecture.")
    vocab_size: Vocabulary = 151936
    num_layers: Layers = 24
    hidden_size: HiddenSize = 896
    num_heads: Heads = 14
    num_key_value_heads: Heads = Field(2, description="key and value heads; a divisor of num_heads")
    feedforward_size: FeedForwardSize = 4864
    max_positions: Positions = 32768
    positions: PositionsChoice = RotaryPositionsConfig(base=1_000_000.0)
    norm_epsilon: float = Field(1e-6, gt=0)


Memory = Annotated[int, Field(ge=0, le=100_000_000)]


@component("model", "transformer_xl", builder="lmtool.models.transformer_xl:TransformerXl.build")
class TransformerXlConfig(TransformerConfig):
    """Transformer-XL (Dai et al. 2019): a decoder with relative positions, a memory of earlier segments and adaptive
    softmax. Defaults: base, for WikiText-103."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "last"
    supports_prefix_attention: ClassVar[bool] = False
    position_kinds: ClassVar[tuple[str, ...] | None] = ("none",)
    adjustable_fields: ClassVar[tuple[str, ...]] = (
        *TransformerConfig.adjustable_fields,
        *("memory_length", "evaluation_memory_length", "clamp_distance", "same_length"),
    )

    name: Literal["transformer_xl"] = Field("transformer_xl", description="Transformer-XL.")
    vocab_size: Vocabulary = 267735
    num_layers: Layers = 16
    hidden_size: HiddenSize = 410
    num_heads: Heads = 10
    feedforward_size: FeedForwardSize = 2100
    max_positions: Positions = Field(1024, description="maximum sequence length in tokens, including the memory")
    positions: PositionsChoice = Field(NoPositionsConfig(), description="relative positions only")
    memory_length: Memory = Field(
        150, description="memory: cached states per layer from previous segments, in tokens (mem_len)"
    )
    evaluation_memory_length: Memory | None = Field(640, description="the same in evaluation; null: as in training")
    clamp_distance: Annotated[int, Field(ge=1)] | None = Field(
        400, description="in evaluation, all distances beyond this one count as this one (clamp_len); null: no limit"
    )
    same_length: bool = Field(
        True, description="in evaluation every token attends to as many tokens as the memory has in evaluation"
    )
    cutoffs: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (20000, 40000, 200000),
        description="first token id of each cluster of rare tokens, in ascending order (adaptive softmax, Grave et "
        "al. 2017); ids beyond the vocabulary are ignored; empty: a plain softmax",
    )
    attention_dropout: AttentionDropout = 0.0
    norm_epsilon: float = Field(1e-5, gt=0)

    @model_validator(mode="after")
    def _cutoffs_rise(self) -> Self:
        if list(self.cutoffs) != sorted(set(self.cutoffs)):
            raise ValueError(f"cutoffs={list(self.cutoffs)} are not in increasing order")
        return self

    @property
    def carries_state(self) -> bool:
        return self.max_memory_length > 0

    @property
    def memory_states(self) -> int:
        return self.memory_length

    @property
    def max_memory_length(self) -> int:
        return max(self.memory_length, self.evaluation_memory)

    @property
    def evaluation_memory(self) -> int:
        """Length of the memory in evaluation: `evaluation_memory_length`, or that in training."""
        return self.memory_length if self.evaluation_memory_length is None else self.evaluation_memory_length

    @property
    def clusters(self) -> tuple[int, ...]:
        """The cutoffs within the vocabulary."""
        return tuple(cutoff for cutoff in self.cutoffs if cutoff < self.vocab_size)

    def metadata(self) -> dict[str, int]:
        return {**super().metadata(), "memory": self.memory_length}
