"""Configuration of the model families. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from lmtool.config.base import Component
from lmtool.config.registry import Choice, component
from lmtool.models import recipes
from lmtool.nn.configs import BlockPart, LearnedPositionsConfig, PositionsConfig, Side

Pooling = Literal["first", "last", "mean", "max"]
Summary = Literal["pooled_first", "pooled_last", "pooled_mean", "first", "last", "mean", "max"]
"""How a text's hidden states are pooled. With `pooled_`, the pooler follows."""
FormFields = dict[str, Any]


@dataclass(frozen=True)
class SequenceForm:
    """How a head predicts a class or a value for a text.

    Attributes:
        text_format: Name in `lmtool.data.formats` of the special tokens around texts.
        pooling: Hidden state of the first or last token, or mean or maximum over all tokens.
        pooled: Whether the pooler, a dense layer with an activation, precedes the head.
        bias: Whether the output layer has a bias.
        dense: Whether the head has a dense layer before its output layer.
    """

    text_format: str
    pooling: Pooling
    pooled: bool
    bias: bool = True
    dense: bool = False


# Upper bounds catch typing errors and keep products from overflowing. The deepest transformer has 1,000 layers (Wang et
# al. 2022, DeepNet), the largest vocabulary a million entries (Liang et al. 2023, XLM-V).
Vocabulary = Annotated[
    int, Field(ge=8, le=10_000_000, description="rows of the token embedding; at least the tokenizer's vocabulary size")
]
Layers = Annotated[int, Field(ge=1, le=1000, description="number of layers")]
Width = Annotated[int, Field(ge=4, le=1_000_000)]
HiddenSize = Annotated[Width, Field(description="width of the hidden states; a multiple of num_heads")]
FeedForwardSize = Annotated[Width, Field(description="inner width of the feed-forward block")]
Heads = Annotated[int, Field(ge=1, le=1_000_000, description="attention heads per layer")]
Positions = Annotated[int, Field(ge=8, le=100_000_000, description="maximum sequence length in tokens")]
LearnedRows = Annotated[
    Positions, Field(description="maximum sequence length in tokens; learned positions have as many rows")
]
PositionsChoice = Annotated[
    PositionsConfig,
    Choice("model/positions"),
    Field(description="type of position encoding; `lmtool list model/positions`"),
]
DropoutRate = Annotated[float, Field(ge=0, lt=1, description="dropout rate after the embedding and the sublayers")]
AttentionDropout = Annotated[float, Field(ge=0, lt=1, description="dropout rate of the attention weights")]
SegmentTypes = Annotated[int, Field(ge=1, le=1_000_000)]


class ModelConfig(Component):
    """Base class of all families with their common fields. Published values of other sections: `conf/recipe/`."""

    group: ClassVar[str] = "model"
    hf_model_type: ClassVar[str | None] = None
    """`model_type` of the family in transformers' config.json; None if transformers lacks it."""
    published: ClassVar[str | None] = None
    """Repository on the hub with published weights of the default sizes, for families that a task may start from if
    neither `checkpoint` nor `model` is set."""
    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder", "bidirectional_lm"]] = "encoder"
    text_format: ClassVar[str] = "bert"
    """Name in `lmtool.data.formats` of the special tokens around a text or a pair of texts."""
    sequence_format: ClassVar[str | None] = None
    """Name of the special tokens for text classification; None for `text_format`."""
    summary: ClassVar[Summary] = "pooled_first"
    """How a text is pooled for classification."""
    finetuning_lm_weight: ClassVar[float] = 0.0
    """The weight that task.auxiliary_lm=null stands for: of a language modeling loss, as the paper finetuned."""
    contextual: ClassVar[bool] = True
    """Whether the hidden state of a token depends on other tokens."""
    transformers_form: ClassVar[FormFields | None] = None
    """Fields of `SequenceForm` that differ in transformers' text classifier; None if transformers has none."""
    token_states: ClassVar[Literal["inputs", "outputs"] | None] = "inputs"
    """Side of a batch whose states token classification uses; None if the family does not support this task."""
    supports_prefix_attention: ClassVar[bool] = True
    """Whether the first tokens of a text can attend to each other in a decoder; false for recurrent models."""
    query_stream: ClassVar[bool] = False
    """Whether the model has a query stream for permutation LM, which predicts tokens without attending to them."""
    shares_layers: ClassVar[bool] = False
    """Whether all layers have the same parameters."""
    has_biases: ClassVar[bool] = True
    """Whether linear layers and norms have biases."""
    start_role: ClassVar[str | None] = None
    """Role of the decoder's start token in an encoder-decoder."""
    adjustable_fields: ClassVar[tuple[str, ...]] = ("dropout", "initializer_std")
    """Fields that may differ from those of the loaded checkpoint, because they do not change shapes."""

    name: str = Field(description="Model family.")
    vocab_size: Vocabulary = 30522
    num_layers: Layers = 12
    hidden_size: Width = Field(768, description="Width of the hidden states.")
    max_positions: Positions = 512
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout rate")
    initializer_std: float = Field(
        0.02, gt=0, description="standard deviation of initial weights (normal or truncated normal, as published)"
    )

    @property
    def text_summary(self) -> Summary:
        """How a text is pooled for classification: `summary`, unless a field of the configuration changes it."""
        return self.summary

    @property
    def segment_types(self) -> int:
        """Number of segment types; 0 without segments."""
        return 0

    @property
    def reads_prefixes(self) -> bool:
        """Whether the first tokens of a text can attend to each other."""
        return self.architecture != "decoder" or self.supports_prefix_attention

    @property
    def untied_output(self) -> bool:
        """Whether the language model's output layer is untied from the token embedding."""
        return False

    @property
    def gated(self) -> bool:
        """Whether feed-forward layers have a gate (`fc_gate`)."""
        return False

    @property
    def layers_of_decoder(self) -> int:
        """Number of decoder layers in an encoder-decoder."""
        return 0

    @property
    def has_limited_positions(self) -> bool:
        """Whether the positions have a maximum number, of which virtual tokens use some."""
        return False

    @property
    def has_uniform_width(self) -> bool:
        """Whether the hidden states after the embedding and after all layers have the same width."""
        return True

    @property
    def inner_size(self) -> int:
        """Inner width of a layer, for estimates of memory and time."""
        return 4 * self.hidden_size

    @property
    def carries_state(self) -> bool:
        """Whether the model carries state between segments of joined text; see `models.base.StatefulBackbone`."""
        return False

    @property
    def max_memory_length(self) -> int:
        """Maximum number of tokens of earlier segments that a token attends to."""
        return 0

    @property
    def is_recurrent(self) -> bool:
        """Whether all that a decoder knows of earlier tokens is a state of fixed size."""
        return self.carries_state and self.memory_states is None

    @property
    def memory_states(self) -> int | None:
        """Number of cached states per layer in training; None if the carried state has another form."""
        return None

    @property
    def depths(self) -> dict[Side, int]:
        """Number of layers of the stack that reads each side of a batch; empty if the model is no stack of layers."""
        return {}

    def metadata(self) -> dict[str, int]:
        """Returns the sizes shown on screens and in reports."""
        return {"layers": self.num_layers, "width": self.hidden_size}

    def remark(self, max_length: int) -> str | None:
        """Returns a remark if a run with this maximum length may not do what the user expects, or None."""
        return None

    def scaled(self, width: float, depth: float) -> Self:
        """Returns a smaller model of the family, for ELECTRA's generator. width, depth: fractions of the sizes."""
        sizes = {
            "hidden_size": max(4, round(self.hidden_size * width)),
            "num_layers": max(1, round(self.num_layers * depth)),
        }
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | sizes)

    def sequence_form(
        self, head: str | None = None, pooling: str | None = None, head_layers: int | None = None
    ) -> SequenceForm:
        """Returns the form of a task's head over texts.

        Args:
            head: "transformers"; "text_to_text" or "prompt", which add no head; otherwise the paper's head.
            pooling: "first", "mean", "max" or "last"; "auto" or None for the family's.
            head_layers: 1 or 2; None for the family's.

        Raises:
            ValueError: If transformers has no classifier of this family.
        """
        default, pooled = self.text_summary.removeprefix("pooled_"), self.text_summary.startswith("pooled_")
        headless = head in ("text_to_text", "prompt")
        text_format = self.text_format if headless else self.sequence_format or self.text_format
        form = SequenceForm(text_format, cast(Pooling, default), pooled)
        if head == "transformers":
            if self.transformers_form is None:
                raise ValueError(f"transformers has no text classifier for model={self.name}")
            form = replace(form, **self.transformers_form)
        if pooling not in (None, "auto", form.pooling):
            # The pooler was trained on the family's pooling, so it does not fit another one.
            form = replace(form, pooling=cast(Pooling, pooling), pooled=False)
        if head_layers == 1:
            return replace(form, pooled=False)
        return replace(form, dense=head_layers == 2 and not form.pooled)

    def recipe(self) -> dict[str, Any]:
        """Returns the sections that `auto` stands for, as `recipes.recipe_of`."""
        return recipes.recipe_of(type(self), self.hidden_size)


class TransformerConfig(ModelConfig):
    """Base class of transformers, which have attention heads, feed-forward layers, positions and norms."""

    adjustable_fields: ClassVar[tuple[str, ...]] = (*ModelConfig.adjustable_fields, "attention_dropout", "norm_epsilon")
    position_kinds: ClassVar[tuple[str, ...] | None] = None
    """Kinds of positions that the family supports; None for all."""

    hidden_size: HiddenSize = 768
    num_heads: Heads = 12
    feedforward_size: FeedForwardSize = 3072
    max_positions: LearnedRows = 512
    positions: PositionsChoice = LearnedPositionsConfig()
    dropout: DropoutRate = 0.1
    attention_dropout: AttentionDropout = 0.1
    norm_epsilon: float = Field(1e-12, gt=0, description="added to the variance in layer norms")

    @model_validator(mode="after")
    def _heads_fit(self) -> TransformerConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}")
        return self

    @property
    def depths(self) -> dict[Side, int]:
        return {"inputs": self.num_layers}

    @property
    def width_of_head(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def key_value_heads(self) -> int:
        """Number of key heads, which is also that of value heads."""
        return self.num_heads

    @property
    def has_limited_positions(self) -> bool:
        return self.positions.has_limit

    @property
    def inner_size(self) -> int:
        return self.feedforward_size

    def metadata(self) -> dict[str, int]:
        return {**super().metadata(), "heads": self.num_heads}

    def fields_for_heads(self, heads: int) -> dict[str, int]:
        """Returns the other fields that have to change with this number of heads, by name."""
        return {}

    def scaled(self, width: float, depth: float) -> Self:
        """As in the base class. Heads are scaled too; vocabulary, positions and embedding width are unchanged."""
        heads = max(1, round(self.num_heads * width))
        head_size = max(1, round(self.hidden_size * width / heads))
        # Some positions need heads of even width; hidden_size is at least 4.
        head_size = max(head_size + (head_size % 2 if self.positions.even_heads else 0), -(-4 // heads))
        sizes = {
            "num_heads": heads,
            **self.fields_for_heads(heads),
            "hidden_size": heads * head_size,
            "feedforward_size": max(4, round(self.feedforward_size * width)),
            "num_layers": max(1, round(self.num_layers * depth)),
        }
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | sizes)


class StudiedConfig(TransformerConfig):
    """Base class of transformers whose layers may lack parts, to study what the parts are for."""

    without: tuple[BlockPart, ...] | None = Field(
        None,
        description="parts of the block left out, for a study: residual, norm, scaling, feed_forward, projections. "
        "residual: a sublayer's output replaces its input; norm: all norms of the backbone; scaling: the factor "
        "1/sqrt(d) of the scores; projections: queries, keys and values are the states themselves. null: none. Such a "
        "model has no class in transformers",
    )

    @model_validator(mode="after")
    def _states_have_as_many_heads(self) -> Self:
        if "projections" in (self.without or ()) and self.key_value_heads != self.num_heads:
            raise ValueError(
                f"without=[projections]: queries and keys are the same states, but num_heads={self.num_heads} and "
                f"num_key_value_heads={self.key_value_heads}"
            )
        return self


class SegmentedConfig(TransformerConfig):
    """An encoder with segment embeddings for the two texts of a pair."""

    transformers_form: ClassVar[FormFields | None] = {}

    segments: SegmentTypes = Field(2, description="rows of the token type (segment) embedding")

    @property
    def segment_types(self) -> int:
        return self.segments


def describe_architectures(architectures: Iterable[str]) -> str:
    """Returns architectures in words, such as "a decoder or an encoder-decoder"."""
    articles = (f"{'an' if kind.startswith('enc') else 'a'} {kind.replace('_', '-')}" for kind in architectures)
    return " or ".join(articles) or "no known architecture"


@component("model", "bert", builder="lmtool.models.bert:Bert.build")
class BertConfig(StudiedConfig, SegmentedConfig):
    """BERT (Devlin et al. 2019): post-norm encoder with learned positions and segments. Defaults: base, uncased."""

    hf_model_type: ClassVar[str | None] = "bert"
    published: ClassVar[str | None] = "google-bert/bert-base-uncased"
    adjustable_fields: ClassVar[tuple[str, ...]] = (*SegmentedConfig.adjustable_fields, "lowercase")

    name: Literal["bert"] = Field("bert", description="BERT.")
    lowercase: bool = Field(True, description="whether tokenizer=auto lowercases text (as in the uncased models)")

    def recipe(self) -> dict[str, Any]:
        prescribed = super().recipe()
        return {**prescribed, "tokenizer": {**prescribed["tokenizer"], "lowercase": self.lowercase}}


@component("model", "gpt", builder="lmtool.models.gpt:Gpt.build")
class GptConfig(StudiedConfig):
    """GPT-2's architecture (Radford et al. 2019): pre-norm decoder with learned positions. Defaults: small."""

    descriptions: ClassVar[dict[str, str]] = {
        "initializer_std": "std of initial weights (normal), over sqrt(2 num_layers) at sublayer outputs"
    }
    hf_model_type: ClassVar[str | None] = "gpt2"
    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Summary] = "last"
    transformers_form: ClassVar[FormFields | None] = {"text_format": "plain", "bias": False}

    name: Literal["gpt"] = Field("gpt", description="GPT-2's architecture.")
    vocab_size: Vocabulary = 50257
    max_positions: LearnedRows = 1024
    norm_epsilon: float = Field(1e-5, gt=0)


@component("model", "gpt1", builder="lmtool.models.gpt1:Gpt1.build")
class Gpt1Config(TransformerConfig):
    """GPT (Radford et al. 2018): post-norm decoder with learned positions."""

    hf_model_type: ClassVar[str | None] = "openai-gpt"
    finetuning_lm_weight: ClassVar[float] = 0.5
    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    sequence_format: ClassVar[str | None] = "gpt1"
    summary: ClassVar[Summary] = "last"
    transformers_form: ClassVar[FormFields | None] = {"text_format": "plain", "bias": False}

    name: Literal["gpt1"] = Field("gpt1", description="GPT of 2018.")
    vocab_size: Vocabulary = 40478
    norm_epsilon: float = Field(1e-5, gt=0)
