"""Classes of spans and of pairs of spans, as configuration. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.tasks.configs.base import TaskConfig


@component("task", "span_classification", builder="lmtool.tasks.kinds.span_classification:SpanClassification")
class SpanClassificationConfig(TaskConfig):
    """One of several classes for a span of a text, or for a pair of spans."""

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

    @model_validator(mode="after")
    def _labels_fit(self) -> SpanClassificationConfig:
        if self.labels is not None and (len(self.labels) < 2 or len(set(self.labels)) != len(self.labels)):
            raise ValueError(f"labels={list(self.labels)}: at least two different names")
        return self
