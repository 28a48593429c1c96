"""Configuration of the encoder families other than BERT. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmtool.config.registry import component
from lmtool.models.configs import (
    AttentionDropout,
    DropoutRate,
    FeedForwardSize,
    FormFields,
    Layers,
    LearnedRows,
    Positions,
    PositionsChoice,
    SegmentedConfig,
    SegmentTypes,
    Summary,
    TransformerConfig,
    Vocabulary,
    Width,
)
from lmtool.nn.configs import NoPositionsConfig, RotaryPositionsConfig


@component("model", "roberta", builder="lmtool.models.roberta:Roberta.build")
class RobertaConfig(SegmentedConfig):
    """RoBERTa (Liu et al. 2019): BERT's layers with byte-level BPE and one segment. Defaults: base."""

    hf_model_type: ClassVar[str | None] = "roberta"

    text_format: ClassVar[str] = "roberta"

    name: Literal["roberta"] = Field("roberta", description="RoBERTa.")
    vocab_size: Vocabulary = 50265
    segments: SegmentTypes = Field(1, description="rows of the segment embedding; the published model has one")
    norm_epsilon: float = Field(1e-5, gt=0)


@component("model", "spanbert", builder="lmtool.models.spanbert:Spanbert.build")
class SpanbertConfig(SegmentedConfig):
    """SpanBERT (Joshi et al. 2020): BERT's architecture, cased, pretrained on spans. Defaults: base."""

    name: Literal["spanbert"] = Field("spanbert", description="SpanBERT.")
    vocab_size: Vocabulary = 28996


@component("model", "distilbert", builder="lmtool.models.distilbert:Distilbert.build")
class DistilbertConfig(TransformerConfig):
    """DistilBERT (Sanh et al. 2019): half of BERT's layers, no segments, no pooler."""

    hf_model_type: ClassVar[str | None] = "distilbert"

    transformers_form: ClassVar[FormFields | None] = {}

    name: Literal["distilbert"] = Field("distilbert", description="DistilBERT.")
    num_layers: Layers = 6


@component("model", "albert", builder="lmtool.models.albert:Albert.build")
class AlbertConfig(SegmentedConfig):
    """ALBERT (Lan et al. 2020): one layer applied num_layers times, a narrow embedding. Defaults: base, version 2."""

    hf_model_type: ClassVar[str | None] = "albert"

    shares_layers: ClassVar[bool] = True

    name: Literal["albert"] = Field("albert", description="ALBERT.")
    vocab_size: Vocabulary = 30000
    embedding_size: Width = Field(
        128, description="width of the embedding tables; projected to hidden_size if the two differ"
    )
    num_layers: Layers = Field(12, description="number of times the shared layer is applied")
    activation: Literal["gelu", "gelu_tanh"] = Field(
        "gelu_tanh", description="activation of the feed-forward block and the head: gelu (version 1) or gelu_tanh (2)"
    )
    dropout: DropoutRate = 0.0
    attention_dropout: AttentionDropout = 0.0


@component("model", "electra", builder="lmtool.models.electra:Electra.build")
class ElectraConfig(SegmentedConfig):
    """ELECTRA (Clark et al. 2020): BERT's layers with a free embedding width, for the discriminator and, with other
    sizes, for its generator. Defaults: base."""

    hf_model_type: ClassVar[str | None] = "electra"

    name: Literal["electra"] = Field("electra", description="ELECTRA.")
    embedding_size: Width = Field(
        768, description="width of the embedding tables; projected to hidden_size if the two differ"
    )


@component("model", "modernbert", builder="lmtool.models.modernbert:Modernbert.build")
class ModernbertConfig(TransformerConfig):
    """ModernBERT (Warner et al. 2024): a pre-norm encoder with global attention in every third layer and local
    attention in the others. Defaults: base."""

    descriptions: ClassVar[dict[str, str]] = {
        "initializer_std": "std of initial weights (truncated normal), over sqrt(2 num_layers) at sublayer outputs"
    }

    hf_model_type: ClassVar[str | None] = "modernbert"

    transformers_form: ClassVar[FormFields | None] = {}
    adjustable_fields: ClassVar[tuple[str, ...]] = (
        *TransformerConfig.adjustable_fields,
        "max_positions",
        "classifier_pooling",
    )
    has_biases: ClassVar[bool] = False

    name: Literal["modernbert"] = Field("modernbert", description="ModernBERT.")
    vocab_size: Vocabulary = 50368
    num_layers: Layers = 22
    feedforward_size: FeedForwardSize = 1152
    max_positions: Positions = 8192
    positions: PositionsChoice = RotaryPositionsConfig(base=160_000.0)
    local_window: int = Field(
        64, ge=1, le=1_000_000, description="tokens on either side that a token attends to in a local layer"
    )
    global_every: Layers = Field(3, description="every n-th layer, from the first on, has global attention")
    local_rotary_base: float = Field(
        10_000.0,
        gt=1,
        description="base of rotary positions in local layers; other positions are the same in all layers",
    )
    classifier_pooling: Literal["cls", "mean"] = Field(
        "cls", description="input of a text classifier's pooler: the first token (cls) or the mean over all tokens"
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout rate of the attention outputs")
    attention_dropout: AttentionDropout = 0.0
    norm_epsilon: float = Field(1e-5, gt=0)

    @property
    def gated(self) -> bool:
        return True

    @property
    def text_summary(self) -> Summary:
        return "pooled_mean" if self.classifier_pooling == "mean" else self.summary


@component("model", "bigbird", builder="lmtool.models.bigbird:Bigbird.build")
class BigbirdConfig(SegmentedConfig):
    """BigBird (Zaheer et al. 2020), internal construction: BERT's layers with block-sparse attention to the first and
    last block, a window and random blocks. Defaults: base."""

    descriptions: ClassVar[dict[str, str]] = {
        "positions": "type of position encoding: learned, sinusoidal, rotary or none"
    }

    hf_model_type: ClassVar[str | None] = "big_bird"

    position_kinds: ClassVar[tuple[str, ...] | None] = ("learned", "sinusoidal", "rotary", "none")

    name: Literal["bigbird"] = Field("bigbird", description="BigBird.")
    vocab_size: Vocabulary = 50358
    max_positions: LearnedRows = 4096
    block_size: int = Field(64, ge=1, le=1_000_000, description="tokens per block")
    random_blocks: int = Field(
        3,
        ge=1,
        le=1000,
        description="random blocks per block, besides the first, the last and the neighboring ones. Texts of at most "
        "2 * random_blocks + 5 blocks have dense attention",
    )
    random_plan: Literal["uniform", "transformers"] = Field(
        "uniform",
        description="uniform: random blocks are any that a block does not see anyway; transformers: the first ones. "
        "transformers chooses among the first 2 * random_blocks + 5 blocks of a text of any length",
    )
    pattern_seed: int = Field(
        0, ge=0, le=1_000_000, description="seed of the first layer's random blocks; each further layer adds one"
    )

    @property
    def dense_length(self) -> int:
        """Maximum length in tokens of a text with dense attention, as in transformers."""
        return (2 * self.random_blocks + 5) * self.block_size

    def remark(self, max_length: int) -> str | None:
        if max_length > self.dense_length:
            return None
        return (
            f"max_length={max_length}: no text is long enough for block-sparse attention; with model.block_size="
            f"{self.block_size}, model={self.name} uses dense attention up to {self.dense_length} tokens; set a larger "
            "max_length= or a smaller model.block_size="
        )


class DisentangledConfig(TransformerConfig):
    """Base class of DeBERTa's versions: disentangled attention to content and relative positions."""

    position_kinds: ClassVar[tuple[str, ...] | None] = ("none", "learned")
    transformers_form: ClassVar[FormFields | None] = {}

    positions: PositionsChoice = Field(
        NoPositionsConfig(),
        description="absolute positions added to the token vectors, besides the relative ones: none or learned",
    )
    scores: tuple[Literal["c2p", "p2c"], ...] = Field(
        ("c2p", "p2c"),
        description="score terms besides content to content: c2p (content to position), p2c (the reverse)",
    )
    norm_epsilon: float = Field(1e-7, gt=0)

    @property
    def scaled_terms(self) -> int:
        """Number of terms besides content to content by which the scores are scaled. As in transformers, a repeated
        term counts once."""
        return len(set(self.scores))


@component("model", "deberta", builder="lmtool.models.deberta:Deberta.build")
class DebertaConfig(DisentangledConfig):
    """DeBERTa (He et al. 2021): relative positions with separate projections. Defaults: base."""

    hf_model_type: ClassVar[str | None] = "deberta"

    name: Literal["deberta"] = Field("deberta", description="DeBERTa, version 1.")
    vocab_size: Vocabulary = 50265
    max_distance: Positions = Field(
        512, description="distance in tokens, to either side, beyond which all distances are the same"
    )

    @property
    def scaled_terms(self) -> int:
        """Number of terms besides content to content by which the scores are scaled. As in transformers, a repeated
        term counts twice, although it is added once."""
        return len(self.scores)


@component("model", "deberta_v3", builder="lmtool.models.deberta_v3:DebertaV3.build")
class DebertaV3Config(DisentangledConfig):
    """DeBERTa V3 (He et al. 2023): relative positions in buckets, with the content's projections. Defaults: base."""

    hf_model_type: ClassVar[str | None] = "deberta-v2"

    name: Literal["deberta_v3"] = Field("deberta_v3", description="DeBERTa, versions 2 and 3.")
    vocab_size: Vocabulary = 128100
    buckets: int = Field(
        256,
        ge=4,
        le=100_000,
        multiple_of=2,
        description="distance buckets to either side; half of them hold one distance each",
    )
    max_distance: Positions = Field(
        512, description="distance in tokens from which on all distances share the last bucket"
    )


@component("model", "xlnet", builder="lmtool.models.xlnet:Xlnet.build")
class XlnetConfig(TransformerConfig):
    """XLNet (Yang et al. 2019): relative attention with segments, pretrained with two streams. Defaults: base."""

    hf_model_type: ClassVar[str | None] = "xlnet"

    position_kinds: ClassVar[tuple[str, ...] | None] = ("none",)
    text_format: ClassVar[str] = "xlnet"
    summary: ClassVar[Summary] = "pooled_last"
    transformers_form: ClassVar[FormFields | None] = {}
    adjustable_fields: ClassVar[tuple[str, ...]] = (
        *TransformerConfig.adjustable_fields,
        "max_positions",
        "memory_length",
    )
    query_stream: ClassVar[bool] = True

    name: Literal["xlnet"] = Field("xlnet", description="XLNet.")
    vocab_size: Vocabulary = 32000
    max_positions: Positions = Field(
        512, description="maximum sequence length in tokens; distances have no table, so it may be raised later"
    )
    positions: PositionsChoice = Field(
        NoPositionsConfig(), description="none: attention already uses relative distances"
    )
    memory_length: int = Field(
        0,
        ge=0,
        le=100_000_000,
        description="cached states of reused tokens for the next example (mem_len; published: 384); 0: none. Used "
        "with objective=plm and reuse; the states carry no gradient. With 0 the examples are independent and may come "
        "in any order",
    )

    @property
    def segment_types(self) -> int:
        """Number of segments in XLNet's text format. Attention only uses whether two tokens have the same segment."""
        return 3

    @property
    def carries_state(self) -> bool:
        return self.max_memory_length > 0

    @property
    def memory_states(self) -> int:
        return self.memory_length

    @property
    def max_memory_length(self) -> int:
        return self.memory_length
