"""The model families, as configuration. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.tables import Choice, component
from lmtool.nn.configs import LearnedPositionsConfig, PositionsConfig

ABSOLUTE_STEPS = ("adam", "adamw", "muon")
"""Optimizers whose step does not depend on the size of what it changes: their learning rate goes with the width."""
LARGEST_FITTED = 1e-3
"""The largest rate that fitting to the width gives: published rates are for large batches. Measured on small ones, 700
steps of 2,048 tokens: bert_tiny ends at 6.61 with 6e-4, 6.49 with 1e-3, 6.86 with 2e-3; gpt_tiny has after 300 of them
5.56 with 1e-3 and 5.85 with 3.6e-3."""


Place = Literal["first", "last", "mean", "max"]


@dataclass(frozen=True)
class SequenceForm:
    """How a class or a value is read off a whole text.

    text_format: how the text is laid out, a name in `lmtool.data.formats`. place: the token whose hidden state stands
    for it, or the mean or the maximum over all. pooled: whether the pooler, a dense layer with an activation, comes
    before the head. bias: whether the output layer has one. dense: whether the head has a dense layer of its own.
    """

    text_format: str
    place: Place
    pooled: bool
    bias: bool = True
    dense: bool = False


# Sizes beyond every published model: a slip of the hand is answered at once, and no product of two overflows. The
# deepest transformer has 1,000 layers (Wang et al. 2022, DeepNet), the largest vocabulary a million entries (Liang et
# al. 2023, XLM-V).
Vocabulary = Annotated[int, Field(ge=8, le=10_000_000)]
Layers = Annotated[int, Field(ge=1, le=1000)]
Width = Annotated[int, Field(ge=4, le=1_000_000)]
Heads = Annotated[int, Field(ge=1, le=1_000_000)]
Positions = Annotated[int, Field(ge=8, le=100_000_000)]
Segments = Annotated[int, Field(ge=1, le=1_000_000)]


class ModelConfig(Config):
    """The sizes every family has, under the same names, and what a family asks of the other sections.

    The `default_*` sections are what `auto` stands for in a run of this family: plain data, decoded like typed ones.
    Their learning rates are for the width that is the class's default: see `at_width`.
    """

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "encoder"
    default_tokenizer: ClassVar[dict[str, Any]] = {}
    default_objective: ClassVar[dict[str, Any]] = {}
    default_optimizer: ClassVar[dict[str, Any]] = {}
    default_schedule: ClassVar[dict[str, Any]] = {}
    learning_rates: ClassVar[dict[int, float]] = {}
    """Learning rates of pretraining that are known for other widths, by `hidden_size`: published or measured."""
    # Devlin et al. 2019, A.3: 5e-5 is the largest of their three rates.
    finetune_optimizer: ClassVar[dict[str, Any]] = {"name": "adamw", "lr": 5e-5}
    finetune_learning_rates: ClassVar[dict[int, float]] = {}
    """Those of finetuning."""
    finetune_schedule: ClassVar[dict[str, Any]] = {"name": "linear", "warmup_fraction": 0.1}
    text_format: ClassVar[str] = "bert"
    """How a text or a pair is laid out: a name in `lmtool.data.formats`."""
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "pooled_first"
    """Where a whole text is summed up, for classification."""
    transformers_form: ClassVar[dict[str, Any] | None] = None
    """The fields of `SequenceForm` in which transformers' ...ForSequenceClassification of this family differs; None
    where transformers has no such class."""
    free_fields: ClassVar[tuple[str, ...]] = ("dropout", "initializer_std")
    """Fields that may differ from a checkpoint's: they change no shape."""

    name: str = Field(description="Which family.")
    vocab_size: Vocabulary = Field(30522, description="Rows of the token embedding; at least the tokenizer's entries.")
    num_layers: Layers = Field(12, description="Layers.")
    hidden_size: Width = Field(768, description="Width of the hidden states.")
    max_positions: Positions = Field(512, description="Longest sequence in tokens.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Share of activations dropped in training.")
    initializer_std: float = Field(0.02, gt=0, description="Standard deviation the initial weights are drawn with.")

    @property
    def inner_size(self) -> int:
        """Width inside a layer, for estimates of memory and time."""
        return 4 * self.hidden_size

    def facts(self) -> dict[str, Any]:
        """Its sizes, for screens and reports."""
        return {"layers": self.num_layers, "width": self.hidden_size}

    def scaled(self, width: float, depth: float) -> Self:
        """The same family with a share of its width and layers: ELECTRA's generator."""
        sizes = {
            "hidden_size": max(4, round(self.hidden_size * width)),
            "num_layers": max(1, round(self.num_layers * depth)),
        }
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | sizes)

    def sequence_form(
        self, head: str | None = None, pooling: str | None = None, head_layers: int | None = None
    ) -> SequenceForm:
        """How a task reads a whole text. head: "transformers", or the paper's. pooling: "first", "mean", "max" or
        "last"; "auto" or None: the family's. head_layers: 1 or 2; None: the family's.

        ValueError where transformers has no classifier of this family.
        """
        pooled = self.summary == "pooled_first"
        form = SequenceForm(self.text_format, "first" if self.summary == "pooled_first" else self.summary, pooled)
        if head == "transformers":
            if self.transformers_form is None:
                raise ValueError(f"transformers has no text classifier of model={self.name}")
            form = replace(form, **self.transformers_form)
        if pooling not in (None, "auto", form.place):
            # The pooler reads the token that it was trained on.
            form = replace(form, place=cast(Place, pooling), pooled=False)
        if head_layers == 1:
            return replace(form, pooled=False)
        return replace(form, dense=head_layers == 2 and not form.pooled)

    def suggested_tokenizer(self) -> dict[str, Any]:
        """The section `tokenizer: auto` stands for."""
        return dict(self.default_tokenizer)

    def suggested_objective(self) -> dict[str, Any]:
        """The section `objective: auto` stands for."""
        return dict(self.default_objective)

    def suggested_optimizer(self) -> dict[str, Any]:
        """The section `optimizer: auto` stands for in pretraining."""
        return self.at_width(self.default_optimizer, self.learning_rates)

    def suggested_finetune_optimizer(self) -> dict[str, Any]:
        """The section `optimizer: auto` stands for in finetuning. At widths 256 to 512 the rule gives 1.5e-4 to 7.5e-5,
        within the rates Google lists for its compact BERTs (3e-4, 1e-4, 5e-5, 3e-5; Turc et al. 2019)."""
        return self.at_width(self.finetune_optimizer, self.finetune_learning_rates)

    def at_width(self, optimizer: dict[str, Any], known: dict[int, float] | None = None) -> dict[str, Any]:
        """An optimizer section with its learning rate fitted to this model's width.

        A width with a known rate gets it. A narrower model than the section is for gets a larger rate, in inverse
        proportion to the width (Yang et al. 2022, "Tensor Programs V", for Adam; the published tables of GPT-3,
        RoBERTa and ELECTRA stay within a factor of 1.5 of it), `LARGEST_FITTED` at most. A wider one keeps the rate.
        """
        rate = optimizer.get("lr")
        if rate is None or optimizer.get("name") not in ABSOLUTE_STEPS or optimizer.get("scale_parameter"):
            return dict(optimizer)
        width = type(self).model_fields["hidden_size"].default
        narrower = max(rate, min(rate * width / self.hidden_size, LARGEST_FITTED))
        fitted = (known or {}).get(self.hidden_size, narrower)
        return {**optimizer, "lr": float(f"{fitted:.3g}")}


class TransformerConfig(ModelConfig):
    """What transformers have besides: attention heads, a feed-forward part, a kind of positions, norms."""

    free_fields: ClassVar[tuple[str, ...]] = (*ModelConfig.free_fields, "attention_dropout", "norm_epsilon")
    position_kinds: ClassVar[tuple[str, ...] | None] = None
    """The kinds of positions the family can have; None: all there are."""

    hidden_size: Width = Field(768, description="Width of the hidden states; a multiple of num_heads.")
    num_heads: Heads = Field(12, description="Attention heads a layer.")
    feedforward_size: Width = Field(3072, description="Width inside the feed-forward part.")
    max_positions: Positions = Field(
        512, description="Longest sequence in tokens; learned positions have as many rows."
    )
    positions: Annotated[PositionsConfig, Choice("model/positions")] = Field(
        LearnedPositionsConfig(), description="How the model knows where a token stands."
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Share of activations dropped after embedding and sublayers.")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="Share of attention weights dropped in training.")
    norm_epsilon: float = Field(1e-12, gt=0, description="Added to the variance in layer norms.")

    @model_validator(mode="after")
    def _heads_fit(self) -> TransformerConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}")
        return self

    @property
    def width_of_head(self) -> int:
        """Of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def inner_size(self) -> int:
        return self.feedforward_size

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "heads": self.num_heads}

    def scaled(self, width: float, depth: float) -> Self:
        """The same family with a share of its widths, heads and layers: ELECTRA's generator. What names no width of
        the layers (vocabulary, positions, a width of the embedding) stays."""
        heads = max(1, round(self.num_heads * width))
        head_size = max(1, round(self.hidden_size * width / heads))
        head_size = max(head_size + (head_size % 2 if self.positions.even_heads else 0), -(-4 // heads))
        sizes = {
            "num_heads": heads,
            "hidden_size": heads * head_size,
            "feedforward_size": max(4, round(self.feedforward_size * width)),
            "num_layers": max(1, round(self.num_layers * depth)),
        }
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | sizes)


class SegmentedConfig(TransformerConfig):
    """An encoder that tells the two texts of a pair apart by a table."""

    transformers_form: ClassVar[dict[str, Any] | None] = {}

    segments: Segments = Field(2, description="Rows of the segment table (BERT's token types).")


@component("model", "bert", builder="lmtool.models.bert:build")
class BertConfig(SegmentedConfig):
    """BERT (Devlin et al. 2019): post-norm encoder with learned positions and segments. Defaults: base, uncased."""

    free_fields: ClassVar[tuple[str, ...]] = (*SegmentedConfig.free_fields, "lowercase")
    default_tokenizer: ClassVar[dict[str, Any]] = {"name": "wordpiece"}
    default_objective: ClassVar[dict[str, Any]] = {"name": "mlm", "pairs": "nsp"}
    # Devlin et al. 2019, A.2: Adam 1e-4, betas .9 and .999, L2 .01, 10,000 of 1,000,000 steps of warm-up, linear
    # decay; epsilon 1e-6 and clipping at 1.0 are in the published code (optimization.py).
    default_optimizer: ClassVar[dict[str, Any]] = {
        "name": "adamw",
        "lr": 1e-4,
        "betas": (0.9, 0.999),
        "epsilon": 1e-6,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
    }
    default_schedule: ClassVar[dict[str, Any]] = {"name": "linear", "warmup_fraction": 0.01}
    learning_rates: ClassVar[dict[int, float]] = {128: 1e-3}  # measured: see LARGEST_FITTED
    # Measured on SST-2 from a bert_tiny of its own, accuracy with the rule's 3e-4 and with 1e-3: .662 and .697 (2,000
    # rows, 3 epochs, three seeds), .828 and .836 (all rows, 2 epochs, one seed).
    finetune_learning_rates: ClassVar[dict[int, float]] = {128: 1e-3}

    name: Literal["bert"] = Field("bert", description="BERT.")
    lowercase: bool = Field(
        True,
        description="Whether tokenizer=auto lowercases text (the uncased models); the layers do not depend on it.",
    )

    def suggested_tokenizer(self) -> dict[str, Any]:
        return {**self.default_tokenizer, "lowercase": self.lowercase}


@component("model", "gpt", builder="lmtool.models.gpt:build")
class GptConfig(TransformerConfig):
    """GPT-2's architecture (Radford et al. 2019): pre-norm decoder with learned positions. Defaults: small."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    default_tokenizer: ClassVar[dict[str, Any]] = {"name": "bytebpe"}
    default_objective: ClassVar[dict[str, Any]] = {"name": "clm"}
    # GPT-2's optimizer is unpublished. This is GPT-3 small's (Brown et al. 2020, B and table 2.1), with which
    # open reproductions reach GPT-2's loss: 6e-4, betas .9 and .95, decay .1, clip 1, cosine down to a tenth.
    default_optimizer: ClassVar[dict[str, Any]] = {
        "name": "adamw",
        "lr": 6e-4,
        "betas": (0.9, 0.95),
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
    }
    default_schedule: ClassVar[dict[str, Any]] = {"name": "cosine", "warmup_fraction": 0.01, "final_fraction": 0.1}
    # Brown et al. 2020, table 2.1, the sizes nearest in parameters: medium, large, XL.
    learning_rates: ClassVar[dict[int, float]] = {1024: 3e-4, 1280: 2.5e-4, 1600: 2e-4}
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "last"
    transformers_form: ClassVar[dict[str, Any] | None] = {"text_format": "plain", "bias": False}

    name: Literal["gpt"] = Field("gpt", description="GPT-2's architecture.")
    vocab_size: Vocabulary = Field(50257, description="Rows of the token embedding; at least the tokenizer's entries.")
    max_positions: Positions = Field(
        1024, description="Longest sequence in tokens; learned positions have as many rows."
    )
    norm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance in layer norms.")


@component("model", "gpt1", builder="lmtool.models.gpt1:build")
class Gpt1Config(TransformerConfig):
    """GPT (Radford et al. 2018): post-norm decoder with learned positions."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    default_tokenizer: ClassVar[dict[str, Any]] = {"name": "bpe"}
    default_objective: ClassVar[dict[str, Any]] = {"name": "clm"}
    # Radford et al. 2018, 4.1: Adam with decoupled decay .01, at most 2.5e-4 after 2,000 steps, cosine down to 0; 100
    # epochs of 64 x 512 tokens, about 2.4 million steps. Betas, epsilon and clipping as in the published code.
    default_optimizer: ClassVar[dict[str, Any]] = {
        "name": "adamw",
        "lr": 2.5e-4,
        "betas": (0.9, 0.999),
        "epsilon": 1e-8,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
    }
    default_schedule: ClassVar[dict[str, Any]] = {"name": "cosine", "warmup_fraction": 0.002}
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "last"
    transformers_form: ClassVar[dict[str, Any] | None] = {"text_format": "plain", "bias": False}

    name: Literal["gpt1"] = Field("gpt1", description="GPT of 2018.")
    vocab_size: Vocabulary = Field(40478, description="Rows of the token embedding; at least the tokenizer's entries.")
    norm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance in layer norms.")
