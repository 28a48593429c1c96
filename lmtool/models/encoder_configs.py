"""The encoder families beside BERT, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import Choice, component
from lmtool.models.configs import (
    Layers,
    Positions,
    SegmentedConfig,
    SegmentTypes,
    Summary,
    TransformerConfig,
    Vocabulary,
    Width,
)
from lmtool.nn.configs import NoPositionsConfig, PositionsConfig, RotaryPositionsConfig

_VOCABULARY = "rows of the token embedding; at least the tokenizer's vocabulary size"
_EMBEDDING_SIZE = "width of the embedding tables; projected to hidden_size if the two differ"


@component("model", "roberta", builder="lmtool.models.roberta:build")
class RobertaConfig(SegmentedConfig):
    """RoBERTa (Liu et al. 2019): BERT's layers over byte-level BPE, without segments of its own. Defaults: base."""

    published_type: ClassVar[str | None] = "roberta"

    text_format: ClassVar[str] = "roberta"

    name: Literal["roberta"] = Field("roberta", description="RoBERTa.")
    vocab_size: Vocabulary = 50265
    segments: SegmentTypes = Field(1, description="rows of the segment embedding; the published model has one")
    norm_epsilon: float = Field(1e-5, gt=0)


@component("model", "spanbert", builder="lmtool.models.spanbert:build")
class SpanbertConfig(SegmentedConfig):
    """SpanBERT (Joshi et al. 2020): BERT's architecture, cased, trained on spans. Defaults: base."""

    name: Literal["spanbert"] = Field("spanbert", description="SpanBERT.")
    vocab_size: Vocabulary = 28996


@component("model", "distilbert", builder="lmtool.models.distilbert:build")
class DistilbertConfig(TransformerConfig):
    """DistilBERT (Sanh et al. 2019): half of BERT's layers, no segments, no pooler."""

    published_type: ClassVar[str | None] = "distilbert"

    transformers_form: ClassVar[dict[str, Any] | None] = {}

    name: Literal["distilbert"] = Field("distilbert", description="DistilBERT.")
    num_layers: Layers = 6


@component("model", "albert", builder="lmtool.models.albert:build")
class AlbertConfig(SegmentedConfig):
    """ALBERT (Lan et al. 2020): one layer applied num_layers times, a narrow embedding. Defaults: base, version 2."""

    published_type: ClassVar[str | None] = "albert"

    shares_layers: ClassVar[bool] = True

    name: Literal["albert"] = Field("albert", description="ALBERT.")
    vocab_size: Vocabulary = 30000
    embedding_size: Width = Field(128, description=_EMBEDDING_SIZE)
    num_layers: Layers = Field(12, description="number of times the shared layer is applied")
    activation: Literal["gelu", "gelu_tanh"] = Field(
        "gelu_tanh", description="activation of the feed-forward block and the head: gelu (version 1) or gelu_tanh (2)"
    )
    dropout: float = Field(0.0, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)


@component("model", "electra", builder="lmtool.models.electra:build")
class ElectraConfig(SegmentedConfig):
    """ELECTRA (Clark et al. 2020): BERT's layers, the embedding's width free; the discriminator, and its generator with
    other sizes. Defaults: base."""

    published_type: ClassVar[str | None] = "electra"

    name: Literal["electra"] = Field("electra", description="ELECTRA.")
    embedding_size: Width = Field(768, description=_EMBEDDING_SIZE)


@component("model", "modernbert", builder="lmtool.models.modernbert:build")
class ModernbertConfig(TransformerConfig):
    """ModernBERT (Warner et al. 2024): a pre-norm encoder whose layers are local but for every third. Defaults:
    base."""

    descriptions: ClassVar[dict[str, str]] = {
        "initializer_std": "std of initial weights (truncated normal), over sqrt(2 num_layers) at sublayer outputs",
    }

    published_type: ClassVar[str | None] = "modernbert"

    transformers_form: ClassVar[dict[str, Any] | None] = {}
    free_fields: ClassVar[tuple[str, ...]] = (*TransformerConfig.free_fields, "max_positions", "classifier_pooling")
    has_biases: ClassVar[bool] = False

    name: Literal["modernbert"] = Field("modernbert", description="ModernBERT.")
    vocab_size: Vocabulary = 50368
    num_layers: Layers = 22
    feedforward_size: Width = 1152
    max_positions: Positions = Field(8192, description="maximum sequence length in tokens")
    positions: Annotated[PositionsConfig, Choice("model/positions")] = RotaryPositionsConfig(base=160_000.0)
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
        "cls",
        description="input of a text classifier's pooler: the first token (cls) or the mean over all tokens",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout rate of the attention outputs")
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    norm_epsilon: float = Field(1e-5, gt=0)

    @property
    def gated(self) -> bool:
        return True

    @property
    def text_summary(self) -> Summary:
        return "pooled_mean" if self.classifier_pooling == "mean" else self.summary


@component("model", "bigbird", builder="lmtool.models.bigbird:build")
class BigbirdConfig(SegmentedConfig):
    """BigBird (Zaheer et al. 2020), its internal construction: BERT's layers, whose blocks of tokens see the ends of a
    text, a window and random blocks. Defaults: base."""

    descriptions: ClassVar[dict[str, str]] = {
        "positions": "type of position encoding: learned, sinusoidal, rotary or none",
    }

    published_type: ClassVar[str | None] = "big_bird"

    position_kinds: ClassVar[tuple[str, ...] | None] = ("learned", "sinusoidal", "rotary", "none")

    name: Literal["bigbird"] = Field("bigbird", description="BigBird.")
    vocab_size: Vocabulary = 50358
    max_positions: Positions = 4096
    block_size: int = Field(64, ge=1, le=1_000_000, description="tokens per block")
    random_blocks: int = Field(
        3,
        ge=1,
        le=1000,
        description="random blocks per block, besides the ends and neighbors; up to 2*this + 5 blocks: dense",
    )
    pattern_seed: int = Field(
        0, ge=0, le=1_000_000, description="seed of the first layer's random blocks; each further layer adds one"
    )

    @property
    def dense_length(self) -> int:
        """Tokens of the longest text that is dense."""
        return (2 * self.random_blocks + 5) * self.block_size

    def remark(self, max_length: int) -> str | None:
        if max_length > self.dense_length:
            return None
        return (
            f"max_length={max_length}: no text is seen by blocks, all are dense: model={self.name} has blocks of "
            f"{self.block_size} tokens, and texts of up to {self.dense_length} are dense; a larger max_length= or a "
            "smaller model.block_size= changes that"
        )


class DisentangledConfig(TransformerConfig):
    """What the generations of DeBERTa share: scores of contents and relative positions, apart."""

    position_kinds: ClassVar[tuple[str, ...] | None] = ("none", "learned")
    transformers_form: ClassVar[dict[str, Any] | None] = {}

    positions: Annotated[PositionsConfig, Choice("model/positions")] = Field(
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
        """Terms beside the contents' by whose number the scores are scaled: transformers counts different ones."""
        return len(set(self.scores))


@component("model", "deberta", builder="lmtool.models.deberta:build")
class DebertaConfig(DisentangledConfig):
    """DeBERTa (He et al. 2021): relative places with maps of their own. Defaults: base."""

    published_type: ClassVar[str | None] = "deberta"

    name: Literal["deberta"] = Field("deberta", description="DeBERTa, its first version.")
    vocab_size: Vocabulary = 50265
    max_distance: Positions = Field(
        512, description="distance in tokens, to either side, beyond which all distances are the same"
    )

    @property
    def scaled_terms(self) -> int:
        """Here transformers counts a term that is named twice twice, and adds it once."""
        return len(self.scores)


@component("model", "deberta_v3", builder="lmtool.models.deberta_v3:build")
class DebertaV3Config(DisentangledConfig):
    """DeBERTa V3 (He et al. 2023): relative places in buckets, read by the maps of the contents. Defaults: base."""

    published_type: ClassVar[str | None] = "deberta-v2"

    name: Literal["deberta_v3"] = Field("deberta_v3", description="DeBERTa, its second and third version.")
    vocab_size: Vocabulary = 128100
    buckets: int = Field(
        256,
        ge=4,
        le=100_000,
        multiple_of=2,
        description="distance buckets to either side; half of them hold one distance each",
    )
    max_distance: Positions = Field(512, description="distance in tokens from which all share the last bucket")


@component("model", "xlnet", builder="lmtool.models.xlnet:build")
class XlnetConfig(TransformerConfig):
    """XLNet (Yang et al. 2019): relative attention with segments, pretrained in two streams. Defaults: base."""

    published_type: ClassVar[str | None] = "xlnet"

    position_kinds: ClassVar[tuple[str, ...] | None] = ("none",)
    text_format: ClassVar[str] = "xlnet"
    summary: ClassVar[Summary] = "pooled_last"
    transformers_form: ClassVar[dict[str, Any] | None] = {}
    free_fields: ClassVar[tuple[str, ...]] = (*TransformerConfig.free_fields, "max_positions", "memory_length")
    query_stream: ClassVar[bool] = True

    name: Literal["xlnet"] = Field("xlnet", description="XLNet.")
    vocab_size: Vocabulary = 32000
    max_positions: Positions = Field(
        512,
        description="maximum sequence length in tokens; distances have no table, so it may be raised later",
    )
    positions: Annotated[PositionsConfig, Choice("model/positions")] = Field(
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
        """Those of its texts; attention knows whether two tokens are of the same one."""
        return 3

    @property
    def carries_state(self) -> bool:
        return self.remembers > 0

    @property
    def memory_states(self) -> int:
        return self.memory_length

    @property
    def remembers(self) -> int:
        return self.memory_length
