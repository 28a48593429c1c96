"""Configuration of word vectors and convolutional networks. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from lmtool.config.tables import component
from lmtool.models.configs import ModelConfig, Positions, Vocabulary, Width

_VOCABULARY = "Rows of the token embedding; at least the tokenizer's entries."
_LONGEST = "Maximum sequence length in tokens; no weight depends on it."


@component("model", "word_vectors", builder="lmtool.models.word_vectors:build")
class WordVectorsConfig(ModelConfig):
    """Static word vectors (Mikolov et al. 2013; Pennington et al. 2014): a word has the same vector in every text.
    Defaults: the vocabulary and width of Mikolov et al. 2013."""

    text_format: ClassVar[str] = "plain"
    summary: ClassVar[Literal["pooled_first", "first", "last", "mean", "max"]] = "mean"
    contextual: ClassVar[bool] = False
    free_fields: ClassVar[tuple[str, ...]] = (*ModelConfig.free_fields, "max_positions")

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


@component("model", "cnn", builder="lmtool.models.cnn:build")
class CnnConfig(ModelConfig):
    """A convolutional network over windows of words (Collobert et al. 2011; Kim 2014). Defaults: Kim's."""

    summary: ClassVar[Literal["pooled_first", "first", "last", "mean", "max"]] = "max"
    free_fields: ClassVar[tuple[str, ...]] = (*ModelConfig.free_fields, "max_positions")

    name: Literal["cnn"] = Field("cnn", description="A convolutional network over windows of words.")
    vocab_size: Vocabulary = 30_000
    num_layers: int = Field(1, ge=1, le=1000, description="convolutional layers")
    embedding_size: Width = Field(
        300, description="width of the word vectors; projected to hidden_size if the two differ"
    )
    hidden_size: Width = Field(
        300, description="width of the hidden states: all filters, split as evenly as possible over the widths"
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
            raise ValueError(f"filter_widths={list(widths)}: different numbers from 1 to 1000")
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
