"""Classes of words and of spans, as configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.needs import Requirement
from lmtool.config.tables import component
from lmtool.models.configs import WORD_STATES, ModelConfig
from lmtool.nn.configs import Side
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.sequence import ClassLossConfig

# A class for each word of a text, as configuration: names, parts of speech, chunks. Imports no torch.


@component("task", "token_classification", builder="lmtool.tasks.kinds.tokens:TokenClassification")
class TokenClassificationConfig(TaskConfig):
    """A tag for each word of a sentence."""

    has_classes: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("conll", "conllu", "table", "parquet")

    kind: Literal["token_classification"] = Field(
        "token_classification", description="A tag for each word of a sentence."
    )
    name: str = Field(
        "token_classification",
        description="The task's name: its head is heads.NAME.",
        pattern=r"^[a-z][a-z0-9_]*$",
    )
    text: tuple[str, ...] = Field(
        ("tokens",),
        min_length=1,
        max_length=1,
        description="The column of the words: lists, or texts that are divided at white space. Of CoNLL columns the "
        "first, where header does not name them; of CoNLL-U the form.",
    )
    label: str = Field("tags", description="The column of the tags, one a word. Of CoNLL columns the last.")
    labels: tuple[str, ...] | None = Field(
        None,
        description="The tags by name, in order; quote them. A file may hold the names or their numbers from 0. Null: "
        "those found in train; of a scheme O, and B and I of each type.",
    )
    scheme: Literal["auto", "bio", "iob1", "iobes", "none"] = Field(
        "auto",
        description="How the files tag entities; learned and predicted is BIO. iob1: B only between entities of one "
        "type. iobes: also BILOU. none: tags without parts, as of speech. auto: seen in train.",
    )
    train_on: Literal["all", "first"] = Field(
        "all",
        description="Pieces of a word that learn its tag: all (those after the first the I of a B), or the first, "
        "which alone predicts.",
    )
    stride: int = Field(
        64,
        ge=0,
        description="Tokens that neighbouring windows of a long sentence share; at most half of a window is taken. A "
        "word is predicted by the window in which it has most context.",
    )
    metrics: tuple[Literal["f1", "precision", "recall", "accuracy"], ...] = Field(
        ("f1", "precision", "recall", "accuracy"),
        min_length=1,
        description="Scores that are reported. f1, precision, recall: of entities, right where both ends and the type "
        "are (conlleval). accuracy: of words.",
    )
    metric: Literal["f1", "accuracy"] = Field("f1", description="The score that chooses the best checkpoint.")
    loss: ClassLossConfig = Field(
        default_factory=lambda: ClassLossConfig.model_validate({}), description="Smoothing and weights of the loss."
    )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.labels

    def states_read(self, model: ModelConfig) -> Side:
        return model.token_states or super().states_read(model)

    def needs(self) -> Iterator[Requirement]:
        yield from super().needs()
        yield Requirement(
            WORD_STATES, "task", f"task={self.name} tags words", "give model=bert, model=t5 or model=bart"
        )

    def text_format(self, model: Any) -> str:
        """As transformers' ...ForTokenClassification reads a text, which has the format of its text classifier."""
        return model.sequence_form(None if model.transformers_form is None else "transformers").text_format

    @model_validator(mode="after")
    def _labels_fit(self) -> TokenClassificationConfig:
        labels, weights = self.labels, self.loss.class_weights
        if labels is not None:
            if len(labels) < 2 or len(set(labels)) != len(labels):
                raise ValueError(f"labels={list(labels)}: at least two different names")
            if isinstance(weights, tuple) and len(weights) != len(labels):
                raise ValueError(f"loss.class_weights has {len(weights)} weights for {len(labels)} labels")
        if self.scheme == "none" and self.metrics != ("accuracy",):
            raise ValueError(f"metrics={list(self.metrics)} score entities; of scheme=none there is accuracy alone")
        return self


# Classes of spans and of pairs of spans, as configuration. Imports no torch.


@component("task", "span_classification", builder="lmtool.tasks.kinds.span_classification:SpanClassification")
class SpanClassificationConfig(TaskConfig):
    """One of several classes for a span of a text, or for a pair of spans."""

    has_classes: ClassVar[bool] = True
    default_max_length: ClassVar[int] = 256

    kind: Literal["span_classification"] = Field(
        "span_classification",
        description="One of several classes for a span of a text, or for a pair of spans.",
    )
    name: str = Field(
        "span_classification",
        description="The task's name: its head is heads.NAME.",
        pattern=r"^[a-z][a-z0-9_]*$",
    )
    text: tuple[str, ...] = Field(
        ("text", "span"),
        min_length=2,
        max_length=3,
        description="The columns that are read: the text, and one or two spans, each [start, end) in characters.",
    )
    labels: tuple[str, ...] | None = Field(
        None,
        description="The classes by name, in order; quote them. A file may hold the names or their numbers from "
        "0. Null: the sorted values found in train.",
    )
    metrics: tuple[Literal["accuracy", "f1", "macro_f1", "matthews"], ...] = Field(
        ("accuracy",),
        min_length=1,
        description="Scores that are reported. f1 is of the second label against the first.",
    )
    metric: Literal["accuracy", "f1", "macro_f1", "matthews"] = Field(
        "accuracy",
        description="The score that chooses the best checkpoint.",
    )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.labels

    @model_validator(mode="after")
    def _labels_fit(self) -> SpanClassificationConfig:
        if self.labels is not None and (len(self.labels) < 2 or len(set(self.labels)) != len(self.labels)):
            raise ValueError(f"labels={list(self.labels)}: at least two different names")
        return self
