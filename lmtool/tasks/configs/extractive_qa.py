"""Extractive question answering, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.tasks.configs.base import TaskConfig

AnswerMetric = Literal[
    "exact_match",
    "f1",
    "has_answer_exact_match",
    "has_answer_f1",
    "no_answer_accuracy",
    "best_exact_match",
    "best_f1",
]


@component("task", "extractive_qa", builder="lmtool.tasks.kinds.extractive_qa:ExtractiveQa")
class ExtractiveQaConfig(TaskConfig):
    """The answer to a question, as a piece of a context."""

    layouts: ClassVar[tuple[str, ...]] = ("squad", "table", "parquet")
    default_max_length: ClassVar[int] = 384

    kind: Literal["extractive_qa"] = Field("extractive_qa", description="The answer to a question, a piece of a text.")
    name: str = Field(
        "extractive_qa",
        description="The task's name: its head is heads.NAME.",
        pattern=r"^[a-z][a-z0-9_]*$",
    )
    text: tuple[str, ...] = Field(
        ("question", "context"),
        min_length=2,
        max_length=2,
        description="The columns that are read: the question, and the text that it is about.",
    )
    label: str = Field("answers", description="The column of the answers: their text and answer_start.")
    unanswerable: bool = Field(
        False,
        description="Whether a question may have no answer in its context (SQuAD 2.0), which is then predicted and "
        "scored as well.",
    )
    bad_answers: Literal["refuse", "skip"] = Field(
        "refuse",
        description="What to do with an answer that does not stand in its context at answer_start: refuse the data, "
        "or skip and count the row.",
    )
    question_tokens: int = Field(64, ge=1, description="Tokens of a question, at most; longer ones are cut.")
    stride: int = Field(
        128,
        ge=0,
        description="Tokens that neighbouring windows of a long context share, as transformers' doc_stride; at most "
        "half of a window is taken.",
    )
    answer_tokens: int = Field(30, ge=1, description="Tokens of a predicted answer, at most.")
    n_best: int = Field(20, ge=1, description="Answers that are kept of each question, with their probabilities.")
    null_threshold: float | None = Field(
        None,
        description="No answer is predicted where its score is better than the best answer's by more than this. Null: "
        "tuned for f1 on the development set, and stored in the checkpoint.",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the head's output layer.")
    metrics: tuple[AnswerMetric, ...] = Field(
        ("exact_match", "f1"),
        min_length=1,
        description="Scores that are reported, shares of 1. has_answer_... and no_answer_accuracy: of the questions "
        "that have an answer, and of the others; best_...: with the threshold that is best for this score.",
    )
    metric: AnswerMetric = Field("f1", description="The score that chooses the best checkpoint.")

    def completed(self, tensors: dict[str, Any]) -> dict[str, Any]:
        name, head = f"heads.{self.name}.null_threshold", tensors.get(f"heads.{self.name}.output.weight")
        if not self.unanswerable or name in tensors or head is None:
            return tensors
        return {**tensors, name: head.new_zeros(()).double()}

    @model_validator(mode="after")
    def _metrics_fit(self) -> ExtractiveQaConfig:
        of_null = [name for name in self.metrics if name not in ("exact_match", "f1")]
        if of_null and not self.unanswerable:
            raise ValueError(f"metrics names {of_null[0]}, which is of data with unanswerable=true")
        if self.null_threshold is not None and not self.unanswerable:
            raise ValueError(f"null_threshold={self.null_threshold} is of data with unanswerable=true")
        return self
