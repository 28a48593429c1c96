"""Configuration of the families before transformers: recurrent and convolutional networks, and word vectors. Imports
no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from lmtool.config.registry import component
from lmtool.models.configs import Layers, ModelConfig, Positions, Summary, Vocabulary, Width
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.nn.configs import Side


@component("model", "lstm", builder="lmtool.models.lstm:LstmDecoder.build")
class LstmConfig(ModelConfig):
    """An LSTM language model (Dai and Le 2015): embedding, LSTM layers, untied output layer. Defaults: theirs with
    1,024 units."""

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder"]] = "decoder"
    text_format: ClassVar[str] = "gpt"
    summary: ClassVar[Summary] = "last"
    supports_prefix_attention: ClassVar[bool] = False

    name: Literal["lstm"] = Field("lstm", description="An LSTM language model.")
    num_layers: Layers = Field(1, description="LSTM layers")
    embedding_size: Width = Field(512, description="width of the token vectors")
    hidden_size: Width = Field(1024, description="hidden units per layer")
    max_positions: Positions = Field(8192, description="maximum sequence length in tokens; no weight depends on it")
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout rate after the embedding and each layer")
    initializer_std: float = Field(
        1.0,
        gt=0,
        description="the standard deviation of initial weights is initializer_std / sqrt(inputs)",
    )

    @property
    def untied_output(self) -> bool:
        return True

    @property
    def carries_state(self) -> bool:
        return True

    @property
    def has_uniform_width(self) -> bool:
        return self.embedding_size == self.hidden_size

    @property
    def depths(self) -> dict[Side, int]:
        return {"inputs": self.num_layers}

    def metadata(self) -> dict[str, int]:
        return {**super().metadata(), "embedding": self.embedding_size}


@component("model", "rnn_attention", builder="lmtool.models.rnn_attention:RnnAttention.build")
class RnnAttentionConfig(EncoderDecoderConfig):
    """A recurrent encoder-decoder with attention (Bahdanau et al. 2015). Defaults: theirs (appendix A.2.3)."""

    # For token classification, the decoder reads the same text as the encoder, as in BART (Lewis et al. 2020, 3.2).
    token_states: ClassVar[Literal["inputs", "outputs"] | None] = "outputs"

    name: Literal["rnn_attention"] = Field("rnn_attention", description="A recurrent encoder-decoder with attention.")
    vocab_size: Vocabulary = 30000
    num_layers: Layers = Field(1, description="encoder layers, each bidirectional; the decoder has one layer")
    embedding_size: Width = Field(620, description="width of the token vectors")
    hidden_size: Width = Field(1000, description="hidden units per recurrent layer and direction")
    attention_size: Width = Field(1000, description="hidden width of the additive attention")
    output_size: Width = Field(500, description="input width of the output layer, after maxout over pairs")
    reset: Literal["before", "after"] = Field(
        "before",
        description="before: the reset gate multiplies the state, as published; after: the state's product, as in "
        "torch.nn.GRU",
    )
    max_positions: Positions = Field(8192, description="maximum sequence length in tokens; no weight depends on it")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate after the embedding and each layer")
    initializer_std: float = Field(
        0.01,
        gt=0,
        description="standard deviation of initial weights (normal); recurrent: orthogonal; attention: smaller",
    )

    @property
    def untied_output(self) -> bool:
        return True

    @property
    def has_uniform_width(self) -> bool:
        return False

    @property
    def layers_of_decoder(self) -> int:
        return 1

    def metadata(self) -> dict[str, int]:
        return {**super().metadata(), "embedding": self.embedding_size, "output": self.output_size}


_Filter = tuple[Annotated[int, Field(ge=1, le=100)], Annotated[int, Field(ge=1, le=100_000)]]


@component("model", "elmo", builder="lmtool.models.elmo:Elmo.build")
class ElmoConfig(ModelConfig):
    """ELMo (Peters et al. 2018): character convolutions and LSTMs in both directions. Defaults: the published model."""

    descriptions: ClassVar[dict[str, str]] = {
        "initializer_std": "standard deviation of heads; that of other weights depends on their shape, as published"
    }

    architecture: ClassVar[Literal["encoder", "decoder", "encoder_decoder", "bidirectional_lm"]] = "bidirectional_lm"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean"]] = "mean"
    adjustable_fields: ClassVar[tuple[str, ...]] = (
        *ModelConfig.adjustable_fields,
        *("max_positions", "cell_clip", "projection_clip", "start_token"),
    )

    name: Literal["elmo"] = Field("elmo", description="ELMo.")
    vocab_size: Vocabulary = Field(
        793_471, description="predicted words: those of the One Billion Word benchmark; the input may be any word"
    )
    num_layers: Layers = Field(2, description="LSTM layers per direction; all but the first have a residual connection")
    hidden_size: Width = Field(1024, multiple_of=2, description="width of the hidden states; each direction has half")
    cell_size: Width = Field(4096, description="cell width of an LSTM, projected to half of hidden_size")
    cell_clip: float | None = Field(3.0, gt=0, description="clipping bound of the cell values")
    projection_clip: float | None = Field(3.0, gt=0, description="clipping bound of the projected values")
    word_length: int = Field(
        50, ge=4, le=1000, description="symbols per word, including one at the start and one at the end"
    )
    character_size: Width = Field(16, description="width of the symbol embedding")
    filters: tuple[_Filter, ...] = Field(
        ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024)),
        min_length=1,
        description="[width, number] of each convolution",
    )
    highways: int = Field(2, ge=0, le=100, description="number of highway layers")
    max_positions: Positions = Field(100_000, description="maximum sequence length in tokens; no weight depends on it")
    start_token: bool = Field(
        False,
        description="begin texts with <S>, as published weights read them; texts always end with </S>. `lmtool import` "
        "sets it; objective=bilm reads running text without <S>",
    )

    @property
    def text_format(self) -> str:  # type: ignore[override]
        return "elmo" if self.start_token else "gpt"

    @property
    def depths(self) -> dict[Side, int]:
        return {"inputs": self.num_layers}

    @property
    def inner_size(self) -> int:
        return 4 * self.cell_size

    @model_validator(mode="after")
    def _filters_fit_a_word(self) -> ElmoConfig:
        widest = max(width for width, _ in self.filters)
        if widest > self.word_length:
            raise ValueError(f"filters: a width of {widest} exceeds word_length={self.word_length}")
        return self


@component("model", "word_vectors", builder="lmtool.models.word_vectors:WordVectorModel.build")
class WordVectorsConfig(ModelConfig):
    """Static word vectors (Mikolov et al. 2013; Pennington et al. 2014): a word has the same vector in every text.
    Defaults: the vocabulary and width of Mikolov et al. 2013."""

    text_format: ClassVar[str] = "plain"
    summary: ClassVar[Summary] = "mean"
    contextual: ClassVar[bool] = False
    adjustable_fields: ClassVar[tuple[str, ...]] = (*ModelConfig.adjustable_fields, "max_positions")

    name: Literal["word_vectors"] = Field("word_vectors", description="Static word vectors.")
    vocab_size: Vocabulary = 692_000
    num_layers: int = Field(0, ge=0, le=0, description="no layers: the model is an embedding table")
    hidden_size: Width = Field(300, description="width of the vectors")
    max_positions: Positions = Field(100_000, description="maximum text length in tokens; no weight depends on it")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate before a task's head")
    initializer_std: float = Field(
        0.001, gt=0, description="standard deviation of initial vectors (normal), about that of word2vec's uniform ones"
    )

    def metadata(self) -> dict[str, int]:
        return {"width": self.hidden_size}

    def scaled(self, width: float, depth: float) -> Self:
        return self.model_copy(update={"hidden_size": max(4, round(self.hidden_size * width))})


@component("model", "cnn", builder="lmtool.models.cnn:Cnn.build")
class CnnConfig(ModelConfig):
    """A convolutional network over windows of words (Collobert et al. 2011; Kim 2014). Defaults: Kim's."""

    summary: ClassVar[Summary] = "max"
    adjustable_fields: ClassVar[tuple[str, ...]] = (*ModelConfig.adjustable_fields, "max_positions")

    name: Literal["cnn"] = Field("cnn", description="A convolutional network over windows of words.")
    vocab_size: Vocabulary = 30_000
    num_layers: int = Field(1, ge=1, le=1000, description="convolutional layers")
    embedding_size: Width = Field(
        300, description="width of the word vectors; projected to hidden_size if the two differ"
    )
    hidden_size: Width = Field(
        300, description="number of filters, which is the width of the hidden states; split evenly among filter_widths"
    )
    filter_widths: tuple[int, ...] = Field(
        (3, 4, 5), min_length=1, description="filter widths in words; an even width covers one more word to the right"
    )
    max_positions: Positions = Field(512, description="maximum text length in tokens; no weight depends on it")
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout rate before a task's head")
    initializer_std: float = Field(
        0.1, gt=0, description="standard deviation of initial word vectors (normal); Kim's are uniform within 0.25"
    )

    @field_validator("filter_widths")
    @classmethod
    def _widths_differ(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(widths)) != len(widths) or min(widths) < 1 or max(widths) > 1000:
            raise ValueError(f"filter_widths={list(widths)}: each must be from 1 to 1000, and none may occur twice")
        return widths

    @model_validator(mode="after")
    def _filters_fit(self) -> Self:
        if self.hidden_size < len(self.filter_widths):
            raise ValueError(
                f"hidden_size={self.hidden_size} is smaller than the number of filter widths, {len(self.filter_widths)}"
            )
        return self

    def scaled(self, width: float, depth: float) -> Self:
        hidden = max(4, len(self.filter_widths), round(self.hidden_size * width))
        return self.model_copy(update={"hidden_size": hidden, "num_layers": max(1, round(self.num_layers * depth))})
