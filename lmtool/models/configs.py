"""The model families, as configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from lmtool.config.needs import Component, Offer
from lmtool.config.tables import Choice, component
from lmtool.models import recipes
from lmtool.nn.configs import LearnedPositionsConfig, PositionsConfig, Side
from lmtool.system.terminal import counted

Place = Literal["first", "last", "mean", "max"]
Summary = Literal["pooled_first", "pooled_last", "pooled_mean", "first", "last", "mean", "max"]
"""The place of a text's summary; pooled: behind the pooler."""


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
SegmentTypes = Annotated[int, Field(ge=1, le=1_000_000)]


class ModelConfig(Component):
    """The sizes every family has, under the same names. What its paper prescribes for the other sections stands in
    `conf/recipe/`."""

    group: ClassVar[str] = "model"
    published_type: ClassVar[str | None] = None
    """The `model_type` in the config.json of a published folder; None where transformers has no such family."""
    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder", "bidirectional_lm"]] = "encoder"
    text_format: ClassVar[str] = "bert"
    """How a text or a pair is laid out: a name in `lmtool.data.formats`."""
    sequence_format: ClassVar[str | None] = None
    """How a text that is classified is laid out, where it is another way."""
    summary: ClassVar[Summary] = "pooled_first"
    """Where a whole text is summed up, for classification."""
    contextual: ClassVar[bool] = True
    """Whether the hidden state of a token depends on the tokens around it."""
    transformers_form: ClassVar[dict[str, Any] | None] = None
    """The fields of `SequenceForm` in which transformers' ...ForSequenceClassification of this family differs; None
    where transformers has no such class."""
    token_states: ClassVar[Literal["inputs", "outputs"] | None] = "inputs"
    """The side of a batch whose hidden states stand for the words of a text, for their classification; None where there
    is no such use of the family."""
    sees_prefixes: ClassVar[bool] = True
    """Whether the first tokens of a text may all see each other in a decoder: not where it reads them in turn."""
    query_stream: ClassVar[bool] = False
    """Whether it has a stream that predicts tokens without seeing them, for permutation language modelling."""
    shares_layers: ClassVar[bool] = False
    """Whether one layer is applied at several depths, so that no depth has parameters of its own."""
    has_biases: ClassVar[bool] = True
    """Whether its linear maps and norms have biases."""
    start_role: ClassVar[str | None] = None
    """The special token that the decoder's input starts with, in an encoder-decoder: a role of the tokenizer."""
    free_fields: ClassVar[tuple[str, ...]] = ("dropout", "initializer_std")
    """Fields that may differ from a checkpoint's: they change no shape."""

    name: str = Field(description="Which family.")
    vocab_size: Vocabulary = Field(
        30522, description="rows of the token embedding; at least the tokenizer's vocabulary size"
    )
    num_layers: Layers = Field(12, description="layers")
    hidden_size: Width = Field(768, description="Width of the hidden states.")
    max_positions: Positions = Field(512, description="Longest sequence in tokens.")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout rate at the input of each layer and of the softmax")
    initializer_std: float = Field(
        0.02, gt=0, description="standard deviation of initial weights (normal or truncated normal, as published)"
    )

    @property
    def text_summary(self) -> Summary:
        """`summary`, where the configuration does not say otherwise."""
        return self.summary

    @property
    def segment_types(self) -> int:
        """The segments that it tells apart; 0 where it knows none."""
        return 0

    @property
    def learned_output(self) -> bool:
        """Whether the language model's output layer is a table of its own, and not that of the token embedding."""
        return False

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part has a gate beside its first map (`fc_gate`)."""
        return False

    @property
    def layers_of_decoder(self) -> int:
        """Layers of the decoder in an encoder-decoder."""
        return 0

    @property
    def table_of_positions(self) -> bool:
        """Whether there is a last position, which virtual tokens bring nearer."""
        return False

    @property
    def even_states(self) -> bool:
        """Whether the states behind the embedding are as wide as those behind every layer."""
        return True

    @property
    def inner_size(self) -> int:
        """Width inside a layer, for estimates of memory and time."""
        return 4 * self.hidden_size

    @property
    def carries_state(self) -> bool:
        """Whether it carries state between segments of joined text, see `models.base.StatefulBackbone`."""
        return False

    @property
    def remembers(self) -> int:
        """Tokens of the segments before that a token sees, at most."""
        return 0

    @property
    def memory_states(self) -> int | None:
        """States of each layer that are kept of the segments before, in training; None where the state is another."""
        return None

    @property
    def depths(self) -> dict[Side, int]:
        """By the side of a batch, how many layers the stack that reads it has whose states can be compared with those
        of another model's; none where the model is no stack of layers."""
        return {}

    def metadata(self) -> dict[str, Any]:
        """Its sizes, for screens and reports."""
        return {"layers": self.num_layers, "width": self.hidden_size}

    def remark(self, max_length: int) -> str | None:
        """What is to be said of a run whose texts have at most so many tokens, where it may not be what is meant."""
        return None

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
        """How a task reads a whole text. head: "transformers", "text_to_text" or "prompt" (as any text), or the
        paper's. pooling: "first", "mean", "max" or "last"; "auto" or None: the family's. head_layers: 1 or 2; None: the
        family's.

        ValueError where transformers has no classifier of this family.
        """
        place, pooled = self.text_summary.removeprefix("pooled_"), self.text_summary.startswith("pooled_")
        as_text = head in ("text_to_text", "prompt")
        layout = self.text_format if as_text else self.sequence_format or self.text_format
        form = SequenceForm(layout, cast(Place, place), pooled)
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

    def recipe(self) -> dict[str, Any]:
        """The sections that `auto` stands for in a run of this model: plain data, decoded like typed ones. See
        `recipes.recipe_of`."""
        return recipes.recipe_of(type(self), self.hidden_size)


class TransformerConfig(ModelConfig):
    """What transformers have besides: attention heads, a feed-forward part, a kind of positions, norms."""

    free_fields: ClassVar[tuple[str, ...]] = (*ModelConfig.free_fields, "attention_dropout", "norm_epsilon")
    position_kinds: ClassVar[tuple[str, ...] | None] = None
    """The kinds of positions the family can have; None: all there are."""

    hidden_size: Width = Field(768, description="width of the hidden states; a multiple of num_heads")
    num_heads: Heads = Field(12, description="attention heads per layer")
    feedforward_size: Width = Field(3072, description="inner width of the feed-forward block")
    max_positions: Positions = Field(
        512, description="maximum sequence length in tokens; learned positions have as many rows"
    )
    positions: Annotated[PositionsConfig, Choice("model/positions")] = Field(
        LearnedPositionsConfig(), description="type of position encoding; `lmtool list model/positions`"
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout rate after the embedding and the sublayers")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="dropout rate of the attention weights")
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
        """Of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values in an attention."""
        return self.num_heads

    @property
    def table_of_positions(self) -> bool:
        return self.positions.ends

    @property
    def inner_size(self) -> int:
        return self.feedforward_size

    def metadata(self) -> dict[str, Any]:
        return {**super().metadata(), "heads": self.num_heads}

    def with_heads(self, heads: int) -> dict[str, int]:
        """What else changes where the family has so many heads."""
        return {}

    def scaled(self, width: float, depth: float) -> Self:
        """The same family with a share of its widths, heads and layers: ELECTRA's generator. What names no width of
        the layers (vocabulary, positions, a width of the embedding) stays."""
        heads = max(1, round(self.num_heads * width))
        head_size = max(1, round(self.hidden_size * width / heads))
        head_size = max(head_size + (head_size % 2 if self.positions.even_heads else 0), -(-4 // heads))
        sizes = {
            "num_heads": heads,
            **self.with_heads(heads),
            "hidden_size": heads * head_size,
            "feedforward_size": max(4, round(self.feedforward_size * width)),
            "num_layers": max(1, round(self.num_layers * depth)),
        }
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | sizes)


class SegmentedConfig(TransformerConfig):
    """An encoder that tells the two texts of a pair apart by a table."""

    transformers_form: ClassVar[dict[str, Any] | None] = {}

    segments: SegmentTypes = Field(2, description="rows of the token type (segment) embedding")

    @property
    def segment_types(self) -> int:
        return self.segments


# What objectives, tasks, tuning methods and distillation may need of a model.


def kinds(architectures: Iterable[str]) -> str:
    """In words: a decoder or an encoder-decoder."""
    articles = (f"{'an' if kind.startswith('enc') else 'a'} {kind.replace('_', '-')}" for kind in architectures)
    return " or ".join(articles) or "no known architecture"


def architecture(*architectures: str) -> Offer[ModelConfig]:
    return Offer(
        "model",
        lambda model: model.architecture in architectures,
        lambda model: f"model={model.name} is {kinds([model.architecture])}",
    )


def number_of_layers(layers: int) -> Offer[ModelConfig]:
    """Of both stacks together."""
    return Offer(
        "model",
        lambda model: layers <= model.num_layers + model.layers_of_decoder,
        lambda model: f"model={model.name} has {counted(model.num_layers + model.layers_of_decoder, 'layer')}",
    )


CONTEXT: Offer[ModelConfig] = Offer("model", lambda model: model.contextual, "reads each word by itself")
SINGLE_TOKENS: Offer[ModelConfig] = Offer("model", lambda model: not model.contextual, "reads the tokens around each")
PREFIXES: Offer[ModelConfig] = Offer(
    "model", lambda model: model.architecture != "decoder" or model.sees_prefixes, "reads in turn"
)
QUERY_STREAM: Offer[ModelConfig] = Offer("model", lambda model: model.query_stream, "has none")
STACK: Offer[ModelConfig] = Offer("model", lambda model: bool(model.depths), "has none")
TRANSFORMER: Offer[ModelConfig] = Offer("model", lambda model: isinstance(model, TransformerConfig), "is none")
LAYERS_OF_EACH_DEPTH: Offer[ModelConfig] = Offer(
    "model", lambda model: not model.shares_layers, "has one layer, applied at every depth"
)
STATES_OF_ONE_WIDTH: Offer[ModelConfig] = Offer(
    "model", lambda model: model.even_states, "has states of several widths"
)
BIASES: Offer[ModelConfig] = Offer("model", lambda model: model.has_biases, "has none")
GATE: Offer[ModelConfig] = Offer("model", lambda model: model.gated, "has no gate in its feed-forward part")
WORD_STATES: Offer[ModelConfig] = Offer(
    "model", lambda model: model.token_states is not None, "has no state that stands for a word"
)
TRANSFORMERS_CLASSIFIER: Offer[ModelConfig] = Offer(
    "model",
    lambda model: model.transformers_form is not None,
    lambda model: f"transformers has no text classifier of model={model.name}",
    wording="{reason}: {lacking}",
)


@component("model", "bert", builder="lmtool.models.bert:build")
class BertConfig(SegmentedConfig):
    """BERT (Devlin et al. 2019): post-norm encoder with learned positions and segments. Defaults: base, uncased."""

    published_type: ClassVar[str | None] = "bert"

    free_fields: ClassVar[tuple[str, ...]] = (*SegmentedConfig.free_fields, "lowercase")

    name: Literal["bert"] = Field("bert", description="BERT.")
    lowercase: bool = Field(
        True,
        description="whether tokenizer=auto lowercases text (as in the uncased models)",
    )

    def recipe(self) -> dict[str, Any]:
        prescribed = super().recipe()
        return {**prescribed, "tokenizer": {**prescribed["tokenizer"], "lowercase": self.lowercase}}


@component("model", "gpt", builder="lmtool.models.gpt:build")
class GptConfig(TransformerConfig):
    """GPT-2's architecture (Radford et al. 2019): pre-norm decoder with learned positions. Defaults: small."""

    descriptions: ClassVar[dict[str, str]] = {
        "initializer_std": "std of initial weights (normal), over sqrt(2 num_layers) at sublayer outputs",
    }

    published_type: ClassVar[str | None] = "gpt2"

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Summary] = "last"
    transformers_form: ClassVar[dict[str, Any] | None] = {"text_format": "plain", "bias": False}

    name: Literal["gpt"] = Field("gpt", description="GPT-2's architecture.")
    vocab_size: Vocabulary = 50257
    max_positions: Positions = 1024
    norm_epsilon: float = Field(1e-5, gt=0)


@component("model", "gpt1", builder="lmtool.models.gpt1:build")
class Gpt1Config(TransformerConfig):
    """GPT (Radford et al. 2018): post-norm decoder with learned positions."""

    published_type: ClassVar[str | None] = "openai-gpt"

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    sequence_format: ClassVar[str | None] = "gpt1"
    summary: ClassVar[Summary] = "last"
    transformers_form: ClassVar[dict[str, Any] | None] = {"text_format": "plain", "bias": False}

    name: Literal["gpt1"] = Field("gpt1", description="GPT of 2018.")
    vocab_size: Vocabulary = 40478
    norm_epsilon: float = Field(1e-5, gt=0)
