"""The encoder families beside BERT, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.models.configs import BertConfig, SegmentedConfig, TransformerConfig

_VOCABULARY = "Rows of the token embedding; at least the tokenizer's entries."
_EMBEDDING_SIZE = "Width of the embedding tables; a linear map takes it to hidden_size where the two differ."


@component("model", "roberta", builder="lmtool.models.roberta:build")
class RobertaConfig(SegmentedConfig):
    """RoBERTa (Liu et al. 2019): BERT's layers over byte-level BPE, without segments of its own. Defaults: base."""

    default_tokenizer: ClassVar[dict[str, Any]] = {"name": "bytebpe", "special_tokens": "roberta"}
    default_objective: ClassVar[dict[str, Any]] = {"name": "mlm"}
    # Liu et al. 2019, table 9 (base): 6e-4, betas .9 and .98, epsilon 1e-6, decay .01, no clipping, 24,000 of 500,000
    # steps of warm-up, linear decay.
    default_optimizer: ClassVar[dict[str, Any]] = {
        "name": "adamw",
        "lr": 6e-4,
        "betas": (0.9, 0.98),
        "epsilon": 1e-6,
        "weight_decay": 0.01,
        "clip_norm": None,
    }
    default_schedule: ClassVar[dict[str, Any]] = {"name": "linear", "warmup_fraction": 0.048}
    learning_rates: ClassVar[dict[int, float]] = {1024: 4e-4}  # large: table 9
    text_format: ClassVar[str] = "roberta"

    name: Literal["roberta"] = Field("roberta", description="RoBERTa.")
    vocab_size: int = Field(50265, ge=8, description=_VOCABULARY)
    segments: int = Field(1, ge=1, description="Rows of the segment table; the published one has a single row.")
    norm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance in layer norms.")


@component("model", "spanbert", builder="lmtool.models.spanbert:build")
class SpanbertConfig(SegmentedConfig):
    """SpanBERT (Joshi et al. 2020): BERT's architecture, cased, trained on spans. Defaults: base."""

    default_tokenizer: ClassVar[dict[str, Any]] = {"name": "wordpiece", "lowercase": False}
    default_objective: ClassVar[dict[str, Any]] = {"name": "span"}
    # Joshi et al. 2020, 4.2: 1e-4, betas .9 and .999, epsilon 1e-8, decay .1, 10,000 of 2,400,000 steps of warm-up,
    # linear decay.
    default_optimizer: ClassVar[dict[str, Any]] = {
        "name": "adamw",
        "lr": 1e-4,
        "betas": (0.9, 0.999),
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
    }
    default_schedule: ClassVar[dict[str, Any]] = {"name": "linear", "warmup_fraction": 0.004}

    name: Literal["spanbert"] = Field("spanbert", description="SpanBERT.")
    vocab_size: int = Field(28996, ge=8, description=_VOCABULARY)


@component("model", "distilbert", builder="lmtool.models.distilbert:build")
class DistilbertConfig(TransformerConfig):
    """DistilBERT (Sanh et al. 2019): half of BERT's layers, no segments, no pooler."""

    transformers_form: ClassVar[dict[str, Any] | None] = {}
    default_tokenizer: ClassVar[dict[str, Any]] = {"name": "wordpiece"}
    default_objective: ClassVar[dict[str, Any]] = {"name": "mlm"}
    # The optimizer of its distillation (train.py of the published code); it was not pretrained alone.
    default_optimizer: ClassVar[dict[str, Any]] = {
        "name": "adamw",
        "lr": 5e-4,
        "betas": (0.9, 0.98),
        "epsilon": 1e-6,
        "weight_decay": 0.0,
        "clip_norm": 5.0,
    }
    default_schedule: ClassVar[dict[str, Any]] = {"name": "linear", "warmup_fraction": 0.05}

    name: Literal["distilbert"] = Field("distilbert", description="DistilBERT.")
    num_layers: int = Field(6, ge=1, description="Layers.")


@component("model", "albert", builder="lmtool.models.albert:build")
class AlbertConfig(SegmentedConfig):
    """ALBERT (Lan et al. 2020): one layer applied num_layers times, a narrow embedding. Defaults: base, version 2."""

    default_tokenizer: ClassVar[dict[str, Any]] = {
        "name": "sentencepiece",
        "special_tokens": "albert",
        "lowercase": True,
    }
    # Lan et al. 2020, 3.1 and 4.1: n-grams of at most three words, and the order of two segments.
    default_objective: ClassVar[dict[str, Any]] = {
        "name": "span",
        "lengths": "harmonic",
        "longest": 3,
        "replace": "token",
        "boundary": False,
        "pairs": "sop",
    }
    # BERT's optimizer, for batches of a few hundred texts at most. Lan et al. 2020, 4.1, take LAMB at 0.00176 for
    # batches of 4096 (optimizer=lamb optimizer.lr=0.00176); at 16 texts a batch that learned a quarter as much.
    default_optimizer: ClassVar[dict[str, Any]] = BertConfig.default_optimizer
    # 3,125 of 125,000 steps (the published code).
    default_schedule: ClassVar[dict[str, Any]] = {"name": "linear", "warmup_fraction": 0.025}

    name: Literal["albert"] = Field("albert", description="ALBERT.")
    vocab_size: int = Field(30000, ge=8, description=_VOCABULARY)
    embedding_size: int = Field(128, ge=4, description=_EMBEDDING_SIZE)
    num_layers: int = Field(12, ge=1, description="Times the one layer is applied.")
    activation: Literal["gelu", "gelu_tanh"] = Field(
        "gelu_tanh", description="Of the feed-forward part and the head: gelu (version 1), its approximation (2)."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of activations dropped after embedding and sublayers.")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Share of attention weights dropped in training.")


@component("model", "electra", builder="lmtool.models.electra:build")
class ElectraConfig(SegmentedConfig):
    """ELECTRA (Clark et al. 2020): BERT's layers, the embedding's width free; the discriminator, and its generator with
    other sizes. Defaults: base."""

    default_tokenizer: ClassVar[dict[str, Any]] = {"name": "wordpiece"}
    default_objective: ClassVar[dict[str, Any]] = {"name": "rtd"}
    # Clark et al. 2020, table 6 (base): 2e-4, betas .9 and .999, epsilon 1e-6, decay .01, 10,000 of 766,000 steps of
    # warm-up, linear decay; clipping at 1.0 is in the published code.
    default_optimizer: ClassVar[dict[str, Any]] = {
        "name": "adamw",
        "lr": 2e-4,
        "betas": (0.9, 0.999),
        "epsilon": 1e-6,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
    }
    default_schedule: ClassVar[dict[str, Any]] = {"name": "linear", "warmup_fraction": 0.013}
    learning_rates: ClassVar[dict[int, float]] = {256: 5e-4}  # small: table 6

    # Clark et al. 2020, table 6: a generator of a third in base, of a quarter in small and large; large masks 25%.
    objectives: ClassVar[dict[int, dict[str, Any]]] = {768: {"generator_size": 1 / 3}, 1024: {"probability": 0.25}}
    """What the objective of a published width has besides, by `hidden_size`."""

    name: Literal["electra"] = Field("electra", description="ELECTRA.")
    embedding_size: int = Field(768, ge=4, description=_EMBEDDING_SIZE)

    def suggested_objective(self) -> dict[str, Any]:
        return {**self.default_objective, **self.objectives.get(self.hidden_size, {})}
