"""Configuration of token and span classification. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.needs import Requirement
from lmtool.config.tables import component
from lmtool.models.configs import WORD_STATES, ModelConfig
from lmtool.nn.configs import Side
from lmtool.tasks.configs.base import BestMetric, ClassNames, TaskConfig, TaskName
from lmtool.tasks.configs.sequence import ClassLossConfig


@component("task", "token_classification", builder="lmtool.tasks.kinds.tokens:TokenClassification")
class TokenClassificationConfig(TaskConfig):
    """A tag for each word of a sentence."""

    descriptions: ClassVar[dict[str, str]] = {
        "path": "folder with train, dev and test files (.conll .tsv .txt .conllu .jsonl .parquet), or one file",
        "header": "names of all CoNLL columns, if words and tags are not in the first and last one",
    }

    has_classes: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("conll", "conllu", "table", "parquet")

    kind: Literal["token_classification"] = Field(
        "token_classification", description="A tag for each word of a sentence."
    )
    name: TaskName = "token_classification"
    text: tuple[str, ...] = Field(
        ("tokens",),
        min_length=1,
        max_length=1,
        description="word column: lists, or texts split at whitespace; CoNLL: the first column. Used for CoNLL "
        "columns without a header; CoNLL-U: the form",
    )
    label: str = Field("tags", description="tag column, one tag per word; CoNLL: the last column")
    labels: tuple[str, ...] | None = Field(
        None,
        description="tag names in order, quoted; null: those found in train. A file may contain the names, or their "
        "numbers from 0. For an entity scheme: O, and B and I of each type",
    )
    scheme: Literal["auto", "bio", "iob1", "iobes", "none"] = Field(
        "auto",
        description="scheme of the files: bio, iob1, iobes (or BILOU), none (single tags); auto: detected in train. "
        "The model learns and predicts bio. iob1: B only between adjacent entities of the same type; none: for "
        "example parts of speech",
    )
    train_on: Literal["all", "first"] = Field(
        "all", description="subwords that learn a word's tag: all (those after a B learn I), or first"
    )
    stride: int = Field(
        64,
        ge=0,
        description="tokens shared by adjacent windows of a long sentence. At most half of a window; each word is "
        "predicted by the window in which it has the most context",
    )
    metrics: tuple[Literal["f1", "precision", "recall", "accuracy"], ...] = Field(
        ("f1", "precision", "recall", "accuracy"),
        min_length=1,
        description="of entities, with exact boundaries and type; accuracy: of words. As conlleval scores them",
    )
    metric: Literal["f1", "accuracy"] = Field(
        "f1", description="metric that selects the best checkpoint; f1 or accuracy"
    )
    loss: ClassLossConfig = Field(
        default_factory=lambda: ClassLossConfig.model_validate({}), description="Smoothing and weights of the loss"
    )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.labels

    def states_read(self, model: ModelConfig) -> Side:
        return model.token_states or super().states_read(model)

    def needs(self) -> Iterator[Requirement]:
        yield from super().needs()
        yield Requirement(WORD_STATES, "task", f"task={self.name} tags words", "set model=bert, model=t5 or model=bart")

    def text_format(self, model: ModelConfig) -> str:
        """The format of transformers' ...ForTokenClassification, which is that of its sequence classifier."""
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
            raise ValueError(f"metrics={list(self.metrics)} score entities; scheme=none supports accuracy only")
        return self


@component("task", "span_classification", builder="lmtool.tasks.kinds.span_classification:SpanClassification")
class SpanClassificationConfig(TaskConfig):
    """One of several classes for a span of a text, or for a pair of spans."""

    has_classes: ClassVar[bool] = True
    default_max_length: ClassVar[int] = 256

    kind: Literal["span_classification"] = Field(
        "span_classification", description="One of several classes for a span of a text, or for a pair of spans."
    )
    name: TaskName = "span_classification"
    text: tuple[str, ...] = Field(
        ("text", "span"),
        min_length=2,
        max_length=3,
        description="input columns: the text, and one or two spans, each [start, end) in characters",
    )
    labels: ClassNames = None
    metrics: tuple[Literal["accuracy", "f1", "macro_f1", "matthews"], ...] = Field(
        ("accuracy",),
        min_length=1,
        description="accuracy, f1 (the second label is the positive class), macro_f1, matthews",
    )
    metric: BestMetric[Literal["accuracy", "f1", "macro_f1", "matthews"]] = "accuracy"

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.labels

    @model_validator(mode="after")
    def _labels_fit(self) -> SpanClassificationConfig:
        if self.labels is not None and (len(self.labels) < 2 or len(set(self.labels)) != len(self.labels)):
            raise ValueError(f"labels={list(self.labels)}: at least two different names")
        return self
