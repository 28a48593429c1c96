"""Classes and values of a whole text, or of a pair of texts, as configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.tables import Choice, component
from lmtool.errors import Problem
from lmtool.tasks.configs.base import PROMPT, DomainConfig, TaskConfig

TEXT_TO_TEXT = "text_to_text"
FORM = ("head", "pooling", "head_layers")
"""The fields that a model's `sequence_form` reads."""


class SequenceConfig(TaskConfig):
    """The base of kinds whose rows are one text, or two, and one label."""

    head_fields: ClassVar[tuple[str, ...]] = FORM
    writes_labels: ClassVar[bool] = False
    """Whether labels can be written as texts."""
    prompted: ClassVar[bool] = False
    """Whether a label can be the word that a language model puts in a place of the text."""
    of_summary: ClassVar[tuple[str, ...]] = (
        "pooling", "head_layers", "auxiliary_lm", "dropout", "windows", "domain",
    )  # fmt: skip
    """The fields that mean nothing where no vector stands for the text."""
    of_outputs: ClassVar[tuple[str, ...]] = of_summary
    """The fields that mean nothing where labels are written."""

    text: tuple[str, ...] = Field(
        ("text",),
        min_length=1,
        max_length=2,
        description="The columns that are read: one text, or two for a pair; A+B: those columns with a space between "
        "them, as one text.",
    )
    head: Literal["paper", "transformers", "text_to_text", "prompt"] | None = Field(
        None,
        description="How a whole text is read. paper: as in the model's paper. transformers: as its "
        "...ForSequenceClassification does (GPT: no end token, no bias; BART, T5: a dense layer more), which alone can "
        'be exported. text_to_text: as a text ("sst2 sentence: ..."), for which the label is written as a text (T5). '
        "prompt: as the task's prompt, in which the language model's own head predicts the word of the class. "
        "Null: as in the checkpoint, where its classes are the task's; else as in the paper.",
    )

    pooling: Literal["auto", "first", "mean", "max", "last"] = Field(
        "auto",
        description="What of the last hidden states the head reads: the first token's (through the pooler, where the "
        "family has one), the mean or the maximum over all, or the last token's. auto: as a published sentence "
        "encoder says, else the family's, which alone can be exported.",
    )
    head_layers: Literal[1, 2] | None = Field(
        None,
        description="1: the output layer alone; 2: a dense layer before it, the pooler or a new one with tanh. Null: "
        "the family's, which alone can be exported.",
    )

    auxiliary_lm: float = Field(
        0.0,
        ge=0,
        description="Weight of a language model's loss over the tokens of the text, learned beside the task (Radford "
        "et al. 2018, section 3.2: 0.5); for decoders. 0: none.",
    )

    @property
    def reads(self) -> tuple[str, ...]:
        return self.columns if self.head == TEXT_TO_TEXT else self.text

    @property
    def of_rows(self) -> bool:
        return not self.writes_text and getattr(self, "windows", "none") == "none"

    @property
    def writes_text(self) -> bool:
        return self.head in (TEXT_TO_TEXT, PROMPT)

    def form(self, model: Any) -> Any:
        """How a model of this configuration reads a whole text: its `SequenceForm`."""
        return model.sequence_form(*(getattr(self, name) for name in FORM))

    def text_format(self, model: Any) -> str:
        return self.form(model).text_format

    def takes_head(self, form: Mapping[str, Any], model: Any) -> bool:
        if {TEXT_TO_TEXT, PROMPT} & {self.head, form.get("head")}:
            return self.head in (None, form.get("head"))
        theirs = {name: form[name] for name in FORM if name in form}
        given = {name: getattr(self, name) for name in FORM if getattr(self, name) not in (None, "auto")}
        return model.sequence_form(**{**theirs, **given}) == model.sequence_form(**theirs)

    def misfit(self, model: Any) -> Problem | None:
        if self.head == TEXT_TO_TEXT:
            return self._unwritten(model)
        if self.head == PROMPT:
            return self._unprompted(model)
        domain = getattr(self, "domain", None)
        if self.auxiliary_lm and domain is not None:
            message = f"task.auxiliary_lm={self.auxiliary_lm:g} and task.domain={domain.name}: one auxiliary loss"
            return Problem("task.domain", message, "leave one of them out")
        if self.auxiliary_lm and model.architecture != "decoder":
            return Problem(
                "task.auxiliary_lm",
                f"task.auxiliary_lm={self.auxiliary_lm:g}: model={model.name} reads its text in both directions, and "
                "learns no next token from it",
                "leave it out, or take a decoder: model=gpt",
            )
        if model.architecture == "decoder" and self.pooling == "first":
            return Problem(
                "task.pooling",
                f"task.pooling=first: the first token of a decoder such as model={model.name} sees nothing of the text",
                "give task.pooling=last or task.pooling=mean",
            )
        return None

    def _unwritten(self, model: Any) -> Problem | None:
        """Why labels cannot be written as texts, if they cannot."""
        typed = f"task.head={TEXT_TO_TEXT}"
        if not self.writes_labels:
            return Problem("task.head", f"{typed}: labels of task.kind={self.kind} are not written", "leave it out")
        if model.architecture not in ("decoder", "encoder_decoder"):
            kind = "an encoder" if model.architecture == "encoder" else "no decoder"
            message = f"{typed}: model={model.name} writes no text: it is {kind}"
            return Problem("task.head", message, "take an encoder-decoder or a decoder: model=t5")
        return self._meaningless(self.of_outputs, "is of heads whose outputs are classes or values", "has none")

    def _unprompted(self, model: Any) -> Problem | None:
        """Why labels cannot be words of a prompt, if they cannot."""
        if not self.prompted:
            message = f"task.head={PROMPT} tells classes apart by words; task.kind={self.kind} has none"
            return Problem("task.head", message, "leave it out")
        if model.architecture == "bidirectional_lm":
            message = f"task.head={PROMPT}: model={model.name} predicts a word from one side of it at a time"
            return Problem("task.head", message, "leave it out")
        if not model.contextual:
            message = (
                f"task.head={PROMPT}: model={model.name} reads each word by itself, so that no prompt asks anything"
            )
            return Problem("task.head", message, "give task.head=paper")
        fields = self.of_outputs if model.architecture == "encoder_decoder" else self.of_summary
        return self._meaningless(fields, "is of heads over the whole text", "reads one place of it")

    def _meaningless(self, fields: tuple[str, ...], whose: str, but: str) -> Problem | None:
        """The first of the fields that has a value, which means nothing with this head."""
        for field in fields:
            value, default = self, type(self).model_validate({})
            for name in field.split("."):
                value, default = getattr(value, name), getattr(default, name)
            if value != default:
                shown = getattr(value, "name", value)
                message = f"task.{field}={shown} {whose}; task.head={self.head} {but}"
                return Problem(f"task.{field}", message, "leave it out")
        return None


class WindowedConfig(SequenceConfig):
    """Those whose long texts may be read in windows."""

    windows: Literal["none", "mean", "max"] = Field(
        "none",
        description="How a text longer than max_length is read. none: it is cut. mean, max: in windows that each learn "
        "the row's label, and whose probabilities (values) are averaged, or the largest of each taken. Of a pair the "
        "second text is windowed.",
    )
    stride: int = Field(0, ge=0, description="Tokens shared by adjacent windows; at most half a window applies.")
    domain: Annotated[DomainConfig | None, Choice("task/domain", optional=True)] = Field(
        None,
        description="Unlabelled texts of another domain beside the task's, for which the model is to work too "
        "(task.domain=dann task.domain.target=FOLDER): dann or coral. Null: none.",
    )


class ClassLossConfig(Config):
    """The loss of a classification."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of the probability spread over all classes.")
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = Field(
        "none",
        description="none; balanced: training rows / (classes x rows of the class); or one weight a class, in "
        "the order of labels.",
    )

    focal_gamma: float = Field(
        0.0,
        ge=0,
        description="Exponent of the focal loss: a loss counts (1 - p)^gamma times, p the probability of its label "
        "(Lin et al. 2017: 2). 0: plain. What the sum is divided by stays the same.",
    )

    @model_validator(mode="after")
    def _smoothed_or_focal(self) -> ClassLossConfig:
        if self.focal_gamma and self.label_smoothing:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} and focal_gamma={self.focal_gamma}: smoothing moves the "
                "probability that the focal loss is of: give one of them"
            )
        return self

    @model_validator(mode="after")
    def _weights_positive(self) -> ClassLossConfig:
        if isinstance(self.class_weights, tuple) and (not self.class_weights or min(self.class_weights) <= 0):
            raise ValueError(f"class_weights={list(self.class_weights)}: a positive number for each class")
        return self


class MultiLabelLossConfig(ClassLossConfig):
    """The loss of a multi-label classification: binary cross entropies, their mean over texts and classes."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of a label spread over yes and no.")
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = Field(
        "none",
        description="Weight of a class's loss where a text has the class. balanced: training rows without it / rows "
        "with it; or one weight a class, in the order of labels.",
    )


@component("task", "multi_label", builder="lmtool.tasks.kinds.multi_label:MultiLabel")
class MultiLabelConfig(WindowedConfig):
    """Any number of several classes for a text or a pair of texts."""

    kind: Literal["multi_label"] = Field(
        "multi_label",
        description="Any number of several classes for a text or a pair of texts.",
    )
    name: str = Field(
        "multi_label",
        description="The task's name: its head is heads.NAME.",
        pattern=r"^[a-z][a-z0-9_]*$",
    )
    labels: tuple[str, ...] | None = Field(
        None,
        description="The classes by name, in order; quote them. Null: the sorted values found in train.",
    )
    delimiter: str = Field(
        ",",
        min_length=1,
        description="Between the classes of a row, where the column holds text; a list is read as it is. Nothing in a "
        "cell: none of the classes.",
    )
    thresholds: float | tuple[float, ...] | None = Field(
        None,
        description="The probability from which on a class is predicted: one for all, or one a class. Null: tuned for "
        "each class on the development rows (F1), and stored with the head.",
    )
    metrics: tuple[Literal["micro_f1", "macro_f1", "subset_accuracy"], ...] = Field(
        ("micro_f1", "macro_f1", "subset_accuracy"),
        min_length=1,
        description="Scores that are reported. subset_accuracy: rows all of whose classes are right.",
    )
    metric: Literal["micro_f1", "macro_f1", "subset_accuracy"] = Field(
        "micro_f1",
        description="The score that chooses the best checkpoint.",
    )
    loss: MultiLabelLossConfig = Field(
        default_factory=lambda: MultiLabelLossConfig.model_validate({}),
        description="Smoothing, weights and focus of the loss.",
    )

    @model_validator(mode="after")
    def _labels_fit(self) -> MultiLabelConfig:
        thresholds = self.thresholds if isinstance(self.thresholds, tuple) else (self.thresholds or 0.5,)
        if not all(0 < threshold < 1 for threshold in thresholds):
            raise ValueError(f"thresholds={self.thresholds}: between 0 and 1")
        if self.labels is not None:
            if len(set(self.labels)) != len(self.labels) or not self.labels:
                raise ValueError(f"labels={list(self.labels)}: different names")
            for name, given in (("loss.class_weights", self.loss.class_weights), ("thresholds", self.thresholds)):
                if isinstance(given, tuple) and len(given) != len(self.labels):
                    raise ValueError(f"{name} has {len(given)} numbers for {len(self.labels)} labels")
        return self


@component("task", "regression", builder="lmtool.tasks.kinds.regression:Regression")
class RegressionConfig(WindowedConfig):
    """One number for a text or a pair of texts, by squared error."""

    writes_labels: ClassVar[bool] = True
    of_outputs: ClassVar[tuple[str, ...]] = (*WindowedConfig.of_outputs, "standardize")

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
    standardize: Literal["train"] | tuple[float, float] | None = Field(
        None,
        description="The mean and the standard deviation of the values: the loss is the squared error over the "
        "variance, and a new head starts at the mean. train: those of the training rows. Null: "
        "the squared error itself, as published. Predictions and scores are of the values as they are.",
    )

    @model_validator(mode="after")
    def _deviates(self) -> RegressionConfig:
        if isinstance(self.standardize, tuple) and self.standardize[1] <= 0:
            raise ValueError(f"standardize={list(self.standardize)}: a mean and a positive standard deviation")
        return self
