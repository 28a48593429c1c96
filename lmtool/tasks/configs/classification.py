"""Configuration of classification and multiple choice. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from lmtool.config.base import JsonMapping
from lmtool.config.registry import component
from lmtool.errors import Problem
from lmtool.models.configs import ModelConfig, describe_architectures
from lmtool.tasks.configs.base import (
    ANSWER,
    PROMPT,
    BestMetric,
    ClassMetric,
    ClassMetrics,
    ClassNames,
    Metrics,
    PromptedConfig,
    TaskName,
    require_classes,
)
from lmtool.tasks.configs.sequence import FORM, ClassLossConfig, SequenceConfig, WindowedConfig

DEMONSTRATIONS = 16
"""Sampled demonstrations per prediction, as in the paper."""


@component("task", "classification", builder="lmtool.tasks.kinds.classification:Classification")
class ClassificationConfig(PromptedConfig, WindowedConfig):
    """One of several classes for a text or a pair of texts."""

    descriptions: ClassVar[dict[str, str]] = {
        "head": "paper; transformers: as in its ...ForSequenceClassification; text_to_text: generate the label "
        "(T5); prompt: the language model's head predicts the class's word in the prompt; null: the checkpoint's, "
        "else paper",
        "prompt": "the task as a prompt, for task.head=prompt and for `lmtool evaluate shots=`",
    }

    head_fields: ClassVar[tuple[str, ...]] = (
        *FORM,
        "symmetric",
        "prompt",
        "label_words",
        "demonstrations",
        "demonstration_rows",
    )
    has_classes: ClassVar[bool] = True
    fills_prompts: ClassVar[bool] = True
    labels_as_text: ClassVar[bool] = True
    of_outputs: ClassVar[tuple[str, ...]] = (*WindowedConfig.of_outputs, "loss.class_weights", "loss.focal_gamma")

    kind: Literal["classification"] = Field(
        "classification", description="One of several classes for a text or a pair of texts."
    )
    name: TaskName = "classification"
    labels: ClassNames = None
    metrics: ClassMetrics = ("accuracy",)
    metric: BestMetric[ClassMetric] = "accuracy"
    loss: ClassLossConfig = Field(
        default_factory=lambda: ClassLossConfig.model_validate({}), description="Smoothing and weights of the loss"
    )
    label_words: dict[str, str] = Field(
        {}, description="task.head=text_to_text: map from class to the text for it; other classes: their names"
    )
    shots_per_class: int | None = Field(
        None,
        ge=1,
        description="rows per class to train on, and as many for selection, both sampled by the seed; null: all. Both "
        "come from the training rows; the development splits are scored once, at the end (Gao et al. 2021, section 3)",
    )
    auxiliary_mlm: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="task.head=prompt, encoders: weight of an auxiliary masked LM loss (published: 1e-4); 0: none. It "
        "trains on the unlabeled rows that shots_per_class leaves, otherwise on the training texts; the task's loss "
        "has the remaining weight (Schick and Schuetze 2021, section 3.4)",
    )
    demonstrations: int = Field(
        0,
        ge=0,
        description="task.head=prompt: labeled rows shown with each text; number of samples joined per prediction "
        "(published: 16, the value of true); 0: none. One labeled training row of each class, sampled anew every "
        "epoch (Gao et al. 2021, section 6)",
    )
    demonstration_rows: dict[str, tuple[tuple[str, ...], ...]] | None = Field(
        None,
        description="map from class to its demonstration rows; null: training rows, at most 16 per class. Each row "
        "holds the text columns; the rows are saved with the checkpoint",
    )

    @field_validator("demonstrations", mode="before")
    @classmethod
    def _as_published(cls, value: object) -> object:
        return DEMONSTRATIONS if value is True else 0 if value is False else value

    def pretrained_heads(self, model: ModelConfig) -> tuple[str, ...]:
        if self.head != PROMPT:
            return ()
        return ("masked_lm",) if model.architecture == "encoder" else ("lm",)

    @property
    def few_shots(self) -> int | None:
        return self.shots_per_class

    @property
    def has_auxiliary_mlm(self) -> bool:
        return self.auxiliary_mlm > 0

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.labels

    @property
    def needs_two_classes(self) -> bool:
        return "f1" in self.metrics

    @property
    def words(self) -> tuple[str, ...]:
        """The verbalizer's words, in class order."""
        return tuple(self.prompt.words.get(label, label.replace("_", " ")) for label in self.labels or ())

    @property
    def written_labels(self) -> tuple[str, ...]:
        """The words that a text-to-text model writes, in class order."""
        return tuple(self.label_words.get(label, label) for label in self.labels or ())

    def text_format(self, model: ModelConfig) -> str:
        if self.head != PROMPT:
            return super().text_format(model)
        return "plain" if model.architecture == "decoder" else model.text_format

    def with_head(self, form: JsonMapping) -> ClassificationConfig:
        form = {"symmetric": False, **form}
        if form.get("head") != PROMPT:
            fields = (*FORM, "symmetric", "label_words")
            return self.model_copy(update={name: form[name] for name in fields if name in form})
        values = {**self.model_dump(), **form}
        return type(self).model_validate_json(json.dumps(values))

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, section)
        if self.head != PROMPT:
            return
        yield from self.template_conflicts(model, section)
        actual = f"model={model.name} is {describe_architectures([model.architecture])}"
        if self.auxiliary_mlm and model.architecture != "encoder":
            message = f"{section}.auxiliary_mlm={self.auxiliary_mlm:g} trains masked language modeling; {actual}"
            yield Problem("task.auxiliary_mlm", message, "omit it, or use an encoder: model=bert")
        if self.demonstrations and model.architecture not in ("encoder", "decoder"):
            message = f"{section}.demonstrations={self.demonstrations} adds texts around a predicted word; {actual}"
            yield Problem("task.demonstrations", message, "omit it, or use an encoder or a decoder")

    def conflicts(self, section: str) -> Iterator[Problem]:
        yield from super().conflicts(section)
        if self.head == PROMPT:
            problems = self.template_problem(section), self.ambiguous(section)
        else:
            labels = self._ambiguous("label_words", self.written_labels, section)
            problems = self._prompt_field_problem(section), labels
        yield from (problem for problem in problems if problem is not None)

    def ambiguous(self, section: str) -> Problem | None:
        """Returns the reason why the words do not distinguish the classes, if any. section: as in `conflicts`."""
        return self._ambiguous("prompt.words", self.words, section)

    def _ambiguous(self, field: str, words: tuple[str, ...], section: str) -> Problem | None:
        field_words = self.prompt.words if field == "prompt.words" else self.label_words
        unknown = [name for name in field_words if self.labels is not None and name not in self.labels]
        if unknown:
            return Problem(
                f"task.{field}",
                f"{section}.{field} names {unknown[0]!r}, which is not a label of task={self.name}",
                f"use the labels {', '.join((self.labels or ())[:8])}",
            )
        if len(set(words)) < len(words):
            return Problem(
                f"task.{field}",
                f"task={self.name}: two classes have the same word in {', '.join(words)}",
                f"give each class its own word: {section}.{field}={{CLASS: WORD, ...}}",
            )
        return None

    def _prompt_field_problem(self, section: str) -> Problem | None:
        for field in ("auxiliary_mlm", "demonstrations", "demonstration_rows"):
            value = getattr(self, field)
            if value:
                value_text = value if field != "demonstration_rows" else "..."
                message = f"{section}.{field}={value_text} applies to texts read as prompts"
                return Problem(f"task.{field}", message, f"set {section}.head={PROMPT} too")
        return None

    @model_validator(mode="after")
    def _labels_fit(self) -> ClassificationConfig:
        require_classes(self.labels, self.loss.class_weights)
        if self.labels is not None and "f1" in self.metrics and len(self.labels) != 2:
            raise ValueError(f"metrics names f1, which needs two classes; there are {len(self.labels)}: use macro_f1")
        return self

    @model_validator(mode="after")
    def _rows_fit(self) -> ClassificationConfig:
        if self.shots_per_class is not None and self.train_examples is not None:
            raise ValueError(
                f"shots_per_class={self.shots_per_class} and train_examples={self.train_examples} both limit the "
                "training rows: give one of them"
            )
        for name, rows in (self.demonstration_rows or {}).items():
            if self.labels is not None and name not in self.labels:
                raise ValueError(
                    f"demonstration_rows names {name!r}, which is not a label: {', '.join(self.labels[:8])}"
                )
            if not rows or any(len(row) != len(self.text) for row in rows):
                raise ValueError(f"demonstration_rows: each row of {name} must have the texts {', '.join(self.text)}")
        return self


@component("task", "multiple_choice", builder="lmtool.tasks.kinds.multiple_choice:MultipleChoice")
class MultipleChoiceConfig(PromptedConfig, SequenceConfig):
    """The best of several choices of a row."""

    descriptions: ClassVar[dict[str, str]] = {
        "label": "label column: the name of the correct choice's column, or its number from 0"
    }

    kind: Literal["multiple_choice"] = Field("multiple_choice", description="The best of several choices of a row.")
    name: TaskName = "multiple_choice"
    text: tuple[str, ...] = Field(
        ("text", "choice1", "choice2"),
        min_length=3,
        description="input columns: those before the choices, then the choices. Each choice is read as a pair: the "
        "first columns joined by spaces, and the choice",
    )
    choices: int = Field(2, ge=2, description="number of choice columns, the last of the input columns")
    continued: bool = Field(False, description="true: the column before the choices is the beginning of each choice")
    wordings: dict[str, str] = Field({}, description="replacements for values of the columns before the choices")
    metrics: Metrics[Literal["accuracy"]] = ("accuracy",)
    metric: BestMetric[Literal["accuracy"]] = "accuracy"

    @property
    def default_template(self) -> str:
        """The columns before the choices joined with spaces, then the choice."""
        return "".join(f"{{{name}}} " for name in self.text[: -self.choices]) + f"{{{ANSWER}}}"

    @model_validator(mode="after")
    def _text_before_choices(self) -> MultipleChoiceConfig:
        context_count = len(self.text) - self.choices - self.continued
        if context_count < 1:
            requirement = "a text before the choices" + (", and the beginning of each" if self.continued else "")
            raise ValueError(f"text={list(self.text)} names {self.choices} choices; there must be {requirement}")
        if self.prompt.words:
            raise ValueError("prompt.words apply to classes; here each choice is an answer")
        return self
