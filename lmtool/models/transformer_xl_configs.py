"""Transformer-XL, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lmtool.config.tables import Choice, component
from lmtool.models.configs import Heads, Layers, Positions, TransformerConfig, Vocabulary, Width
from lmtool.nn.configs import NoPositionsConfig, PositionsConfig

Memory = Annotated[int, Field(ge=0, le=100_000_000)]


@component("model", "transformer_xl", builder="lmtool.models.transformer_xl:build")
class TransformerXlConfig(TransformerConfig):
    """Transformer-XL (Dai et al. 2019): a decoder by distances, with a memory of the segments before, and an adaptive
    softmax over words. Defaults: base, for WikiText-103."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "last"
    sees_prefixes: ClassVar[bool] = False
    position_kinds: ClassVar[tuple[str, ...] | None] = ("none",)
    free_fields: ClassVar[tuple[str, ...]] = (
        *TransformerConfig.free_fields, "memory_length", "evaluation_memory_length", "clamp_distance", "same_length"
    )  # fmt: skip

    name: Literal["transformer_xl"] = Field("transformer_xl", description="Transformer-XL.")
    vocab_size: Vocabulary = Field(267735, description="Rows of the token embedding; at least the tokenizer's entries.")
    num_layers: Layers = Field(16, description="Layers.")
    hidden_size: Width = Field(410, description="Width of the hidden states; a multiple of num_heads.")
    num_heads: Heads = Field(10, description="Attention heads a layer.")
    feedforward_size: Width = Field(2100, description="Width inside the feed-forward part.")
    max_positions: Positions = Field(
        1024, description="Longest sequence in tokens, with its memory; distances have no table, and no other end."
    )
    positions: Annotated[PositionsConfig, Choice("model/positions")] = Field(
        NoPositionsConfig(), description="How the model knows where a token stands: by distances alone."
    )
    memory_length: Memory = Field(
        150,
        description="States of each layer that are kept of the segments before, without gradient, and seen by the next "
        "(mem_len); 0 for none.",
    )
    evaluation_memory_length: Memory | None = Field(
        640, description="The same in evaluation, where a longer one helps. Null: as in training."
    )
    clamp_distance: Annotated[int, Field(ge=1)] | None = Field(
        400, description="Distance from which on all are alike in evaluation (clamp_len). Null: none."
    )
    same_length: bool = Field(
        True, description="Whether in evaluation every token sees as many others, the length of the memory."
    )
    cutoffs: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (20000, 40000, 200000),
        description="First ids of the clusters of rare tokens in the adaptive softmax, rising (Grave et al. 2017); "
        "those beyond the vocabulary are left out. Empty: a plain softmax.",
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Share of attention weights dropped in training.")
    norm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance in layer norms.")

    @model_validator(mode="after")
    def _cutoffs_rise(self) -> Self:
        if list(self.cutoffs) != sorted(set(self.cutoffs)):
            raise ValueError(f"cutoffs={list(self.cutoffs)} do not rise")
        return self

    @property
    def carries_state(self) -> bool:
        return self.remembers > 0

    @property
    def remembers(self) -> int:
        return max(self.memory_length, self.evaluated_memory)

    @property
    def evaluated_memory(self) -> int:
        """Of evaluation."""
        return self.memory_length if self.evaluation_memory_length is None else self.evaluation_memory_length

    @property
    def clusters(self) -> tuple[int, ...]:
        """The cutoffs within the vocabulary."""
        return tuple(first for first in self.cutoffs if first < self.vocab_size)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "memory": self.memory_length}
