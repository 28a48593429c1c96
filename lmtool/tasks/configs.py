"""What finetuning learns, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.tables import Choice, build, component
from lmtool.learners.configs import ObjectiveConfig


class TaskConfig(Config):
    """The base of every task kind: where labelled rows come from, and which columns are read."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "encoder_decoder")

    kind: str = Field(description="Which kind of task.")
    name: str = Field(description="The task's name: its head is heads.NAME.", pattern=r"^[a-z][a-z0-9_]*$")
    text: tuple[str, ...] = Field(
        ("text",),
        min_length=1,
        max_length=2,
        description="The columns that are read: one text, or two for a pair.",
    )
    label: str = Field("label", description="The column that is predicted.")
    path: str | None = Field(
        None,
        description="Local data: a folder with train, dev and test files (.tsv, .csv, .jsonl), or one such file "
        "to train on.",
    )
    hub: str | None = Field(
        None,
        description="Data set read from the hub where no path is given: org/name or org/name:subset.",
    )
    embedded: Literal["pydocs"] | None = Field(
        None,
        description="Data that every machine has, read where no path is given: pydocs.",
    )
    header: tuple[str, ...] | None = Field(None, description="Column names of files that have no header line.")
    aliases: dict[str, str] = Field({}, description="Column names in files, and the names they have here.")
    files: dict[str, str] = Field(
        {},
        description="Names of files without their suffix, and the split they are: train, dev or test.",
    )
    ragged_rows: Literal["refuse", "skip"] = Field(
        "refuse",
        description="What to do with a line of too few or too many columns: refuse the file, or skip and count "
        "the line.",
    )
    validation: tuple[str, ...] = Field(
        ("dev",),
        min_length=1,
        description="The development splits; dev and validation mean the same. Without one, a seeded tenth of train is "
        "held out.",
    )
    test: tuple[str, ...] = Field(("test",), description="The test splits, labelled or not: never trained on.")
    metrics: tuple[str, ...] = Field(min_length=1, description="Scores that are reported.")
    metric: str = Field(description="The score that chooses the best checkpoint.")
    train_examples: int | None = Field(None, ge=1, description="Train on this many rows, a seeded draw. Null: all.")
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Dropout before the head's output layer. Null: the model's.",
    )

    head: Literal["paper", "transformers"] | None = Field(
        None,
        description="How a whole text is read. paper: as in the model's paper. transformers: as its "
        "...ForSequenceClassification does (GPT: no end token, no bias; BART, T5: a dense layer more), which alone can "
        "be exported. Null: as in the checkpoint, where its classes are the task's; else as in the paper.",
    )

    def learner(self, *arguments: Any) -> Any:
        """The learner of this task: `arguments` are backbone, tokenizer and seed."""
        return build(self).learner(*arguments)

    @model_validator(mode="after")
    def _columns_differ(self) -> TaskConfig:
        if len({*self.text, self.label}) != len(self.text) + 1:
            raise ValueError(f"text={list(self.text)} and label={self.label} name a column twice")
        if self.header is not None and len(set(self.header)) != len(self.header):
            raise ValueError(f"header={list(self.header)} names a column twice")
        unknown = sorted(set(self.files.values()) - {"train", "dev", "test"})
        if unknown:
            raise ValueError(f"files names the split {unknown[0]}: one of train, dev, test")
        return self


class ClassLossConfig(Config):
    """The loss of a classification."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of the probability spread over all classes.")
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = Field(
        "none",
        description="none; balanced: training rows / (classes x rows of the class); or one weight a class, in "
        "the order of labels.",
    )

    @model_validator(mode="after")
    def _weights_positive(self) -> ClassLossConfig:
        if isinstance(self.class_weights, tuple) and (not self.class_weights or min(self.class_weights) <= 0):
            raise ValueError(f"class_weights={list(self.class_weights)}: a positive number for each class")
        return self


@component("task", "classification", builder="lmtool.tasks.kinds.classification:Classification")
class ClassificationConfig(TaskConfig):
    """One of several classes for a text or a pair of texts."""

    kind: Literal["classification"] = Field(
        "classification",
        description="One of several classes for a text or a pair of texts.",
    )
    name: str = Field(
        "classification",
        description="The task's name: its head is heads.NAME.",
        pattern=r"^[a-z][a-z0-9_]*$",
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
    loss: ClassLossConfig = Field(
        default_factory=lambda: ClassLossConfig.model_validate({}), description="Smoothing and weights of the loss."
    )

    @model_validator(mode="after")
    def _labels_fit(self) -> ClassificationConfig:
        labels, weights = self.labels, self.loss.class_weights
        if labels is not None:
            if len(labels) < 2 or len(set(labels)) != len(labels):
                raise ValueError(f"labels={list(labels)}: at least two different names")
            if isinstance(weights, tuple) and len(weights) != len(labels):
                raise ValueError(f"loss.class_weights has {len(weights)} weights for {len(labels)} labels")
            if "f1" in self.metrics and len(labels) != 2:
                raise ValueError(f"metrics names f1, which is of two classes; there are {len(labels)}: take macro_f1")
        if self.metric not in self.metrics:
            raise ValueError(f"metric={self.metric} is not in metrics={list(self.metrics)}")
        return self


@component("task", "regression", builder="lmtool.tasks.kinds.regression:Regression")
class RegressionConfig(TaskConfig):
    """One number for a text or a pair of texts, by squared error."""

    kind: Literal["regression"] = Field(
        "regression",
        description="One number for a text or a pair of texts, by squared error.",
    )
    name: str = Field(
        "regression",
        description="The task's name: its head is heads.NAME.",
        pattern=r"^[a-z][a-z0-9_]*$",
    )
    metrics: tuple[Literal["pearson", "spearman", "mse"], ...] = Field(
        ("pearson", "spearman", "mse"),
        min_length=1,
        description="Scores that are reported.",
    )
    metric: Literal["pearson", "spearman", "mse"] = Field(
        "pearson",
        description="The score that chooses the best checkpoint; of mse the smallest.",
    )

    @model_validator(mode="after")
    def _metric_listed(self) -> RegressionConfig:
        if self.metric not in self.metrics:
            raise ValueError(f"metric={self.metric} is not in metrics={list(self.metrics)}")
        return self


@component("objective", "task", builder="lmtool.tasks.members:learner")
class TaskObjectiveConfig(ObjectiveConfig):
    """A labelled task in pretraining, beside other objectives (Raffel et al. 2020, section 3.5.3)."""

    architectures: ClassVar[tuple[str, ...]] = TaskConfig.architectures

    name: Literal["task"] = Field("task", description="A task.")
    task: Annotated[TaskConfig, Choice("task", key="kind")] = Field(
        description="The task, as `lmtool finetune` has it, with its kind and where its data are: "
        "{kind: classification, name: reviews, path: FOLDER}."
    )

    @property
    def title(self) -> str:
        """Tasks go by their own names."""
        return self.task.name

    @property
    def predicted_fraction(self) -> float:
        """No token is predicted."""
        return 0.0


def tasks_of(objective: ObjectiveConfig) -> tuple[TaskConfig, ...]:
    """The tasks that an objective is or has among its members."""
    return tuple(part.task for part in objective.parts() if isinstance(part, TaskObjectiveConfig))
