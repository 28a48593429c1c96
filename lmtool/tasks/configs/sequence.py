"""Configuration of classes and values of whole texts or pairs of texts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from lmtool.config.base import Config, JsonMapping
from lmtool.config.registry import Choice, component
from lmtool.data.configs import Truncation
from lmtool.errors import Problem
from lmtool.models.configs import ModelConfig, SequenceForm, describe_architectures
from lmtool.tasks.configs.base import PROMPT, BestMetric, DomainConfig, Metrics, TaskConfig, TaskName

TEXT_TO_TEXT = "text_to_text"
FORM = ("head", "pooling", "head_layers")
"""The fields that a model's `sequence_form` reads."""


class SequenceConfig(TaskConfig):
    """The base of kinds whose rows are one text or a pair, and one label."""

    head_fields: ClassVar[tuple[str, ...]] = FORM
    of_summary: ClassVar[tuple[str, ...]] = (
        "pooling",
        "head_layers",
        "auxiliary_lm",
        "dropout",
        "truncation",
        "windows",
        "domain",
        "heads",
    )
    """The fields that need a vector of the whole text."""
    of_outputs: ClassVar[tuple[str, ...]] = of_summary
    """The fields that have no effect if labels are generated."""

    text: tuple[str, ...] = Field(("text",), min_length=1, max_length=2)
    head: Literal["paper", "transformers", "text_to_text", "prompt"] | None = Field(
        None,
        description="paper; transformers: as in its ...ForSequenceClassification; null: the checkpoint's, else paper. "
        "paper: as in the model's paper. transformers: GPT without end token and bias, BART and T5 with an additional "
        'dense layer; the only one that can be exported. text_to_text: the input is a text such as "sst2 sentence: '
        "...\". The checkpoint's head is used if its classes are those of the task",
    )

    pooling: Literal["auto", "first", "mean", "max", "last"] = Field(
        "auto",
        description="last hidden states: first, mean, max or last; auto: a sentence encoder's, else the family's. The "
        "first token passes through the pooler if the family has one; only the family's own pooling can be exported",
    )
    head_layers: Literal[1, 2] | None = Field(
        None,
        description="1: output layer only; 2: a dense layer before it; null: the family's. The dense layer is the "
        "pooler, or a new one with tanh; only the family's own number can be exported",
    )

    auxiliary_lm: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="weight of a language modeling loss on the text, for decoders; 0: none; null: 0.5 for gpt1, else "
        "none. Radford et al. 2018, section 3.2; not by default with task.domain or a head that writes text",
    )

    truncation: Truncation = Field(
        "longest_first",
        description="pairs beyond max_length: longest_first, as in transformers; bert, as in BERT's scripts. Both "
        "remove tokens from the longer text. If both texts are shortened to an odd total, longest_first leaves one "
        "more token to the longer text, of equally long ones to the second; bert to the first",
    )

    @property
    def reads(self) -> tuple[str, ...]:
        return self.columns if self.head == TEXT_TO_TEXT else self.text

    @property
    def predicts_rows(self) -> bool:
        return not self.writes_text

    @property
    def writes_text(self) -> bool:
        return self.head in (TEXT_TO_TEXT, PROMPT)

    @property
    def generates_text(self) -> bool:
        return self.head == TEXT_TO_TEXT

    @property
    def head_kind(self) -> str | None:
        return self.head

    @property
    def language_model_weight(self) -> float:
        return self.auxiliary_lm or 0.0

    @property
    def windowed(self) -> str:
        """How texts longer than max_length are read."""
        return "none"

    def form(self, model: ModelConfig) -> SequenceForm:
        """Returns how a model of this configuration encodes a whole text."""
        return model.sequence_form(*(getattr(self, name) for name in FORM))

    def text_format(self, model: ModelConfig) -> str:
        return self.form(model).text_format

    def takes_head(self, form: JsonMapping, model: ModelConfig) -> bool:
        if {TEXT_TO_TEXT, PROMPT} & {self.head, form.get("head")}:
            return self.head in (None, form.get("head"))
        saved = {name: form[name] for name in FORM if name in form}
        configured = {name: getattr(self, name) for name in FORM if getattr(self, name) not in (None, "auto")}
        return model.sequence_form(**{**saved, **configured}) == model.sequence_form(**saved)

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, section)
        subject, architecture = f"{section}.head={self.head}", model.architecture
        if self.head == TEXT_TO_TEXT and self.labels_as_text and architecture not in ("decoder", "encoder_decoder"):
            kind = "an encoder" if architecture == "encoder" else "no decoder"
            message = f"{subject}: model={model.name} does not generate text: it is {kind}"
            yield Problem("task.head", message, "use an encoder-decoder or a decoder: model=t5")
        elif self.head == PROMPT and self.fills_prompts:
            yield from self._prompt_conflicts(model, section)
        elif self.head == "transformers" and model.transformers_form is None:
            message = f"{subject}: transformers has no text classifier for model={model.name}"
            yield Problem("task.head", message, f"set {section}.head=paper")
        if self.auxiliary_lm and not self.writes_text and architecture != "decoder":
            message = (
                f"{section}.auxiliary_lm={self.auxiliary_lm:g} trains next-token prediction; model={model.name} is "
                f"{describe_architectures([architecture])}"
            )
            yield Problem("task.auxiliary_lm", message, "omit it, or use a decoder: model=gpt")
        if self.pooling == "first" and not self.writes_text and architecture == "decoder":
            message = (
                f"{section}.pooling=first: the first token of a decoder such as model={model.name} attends to none of "
                "the text"
            )
            yield Problem("task.pooling", message, f"set {section}.pooling=last or {section}.pooling=mean")

    def _prompt_conflicts(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        subject = f"{section}.head={self.head}"
        if model.architecture == "bidirectional_lm":
            message = f"{subject} predicts a word within a text; model={model.name} predicts a word from one side of "
            yield Problem("task.head", f"{message}the context at a time", "omit it")
        if not model.contextual:
            message = f"{subject} predicts from both sides of the context; model={model.name} reads each word by itself"
            yield Problem("task.head", message, f"set {section}.head=paper")
        if model.architecture == "encoder_decoder":
            outputs = tuple(field for field in self.of_outputs if field not in self.of_summary)
            yield from self._fields_without_effect(
                outputs, section, "applies to heads over the whole text", f"fills a prompt with model={model.name}"
            )

    def conflicts(self, section: str) -> Iterator[Problem]:
        if self.head == TEXT_TO_TEXT:
            yield from self._text_to_text_conflicts(section)
        elif self.head == PROMPT and not self.fills_prompts:
            message = f"{section}.head={PROMPT} names classes by words; {section}.kind={self.kind} has no classes"
            yield Problem("task.head", message, "omit it")
        elif self.head == PROMPT:
            scope = "applies to heads over the whole text"
            yield from self._fields_without_effect(self.of_summary, section, scope, "reads one position")
        elif self.auxiliary_lm and self.domain_adaptation is not None:
            values = f"{section}.auxiliary_lm={self.auxiliary_lm:g} and {section}.domain={self.domain_adaptation}"
            yield Problem("task.domain", f"{values} both add an auxiliary loss", "omit one of them")

    def _text_to_text_conflicts(self, section: str) -> Iterator[Problem]:
        if not self.labels_as_text:
            message = f"{section}.head={TEXT_TO_TEXT}: labels of task.kind={self.kind} cannot be written as text"
            yield Problem("task.head", message, "omit it")
        else:
            scope = "applies to heads that output classes or values"
            yield from self._fields_without_effect(self.of_outputs, section, scope, "has none")

    def _fields_without_effect(
        self, fields: tuple[str, ...], section: str, scope: str, contrast: str
    ) -> Iterator[Problem]:
        for field in fields:
            # The weight 0.0 says the same as null to a head without this loss.
            value, default = self, type(self).model_validate({"auxiliary_lm": 0.0 if self.auxiliary_lm == 0 else None})
            for name in field.split("."):
                value, default = getattr(value, name), getattr(default, name)
            if value != default:
                value_text = value.name if isinstance(value, DomainConfig) else value
                value_text = f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value_text
                message = f"{section}.{field}={value_text} {scope}; {section}.head={self.head} {contrast}"
                yield Problem(f"task.{field}", message, "omit it")
                return


class WindowedConfig(SequenceConfig):
    """The base of kinds whose long texts may be read in windows."""

    head_fields: ClassVar[tuple[str, ...]] = (*FORM, "symmetric")

    windows: Literal["none", "mean", "max"] = Field(
        "none",
        description="long texts; none: cut; mean, max: combine the probabilities (values) over windows. Each window "
        "learns the row's label; mean and max average the windows' outputs or take the largest. In pairs the second "
        "text is split",
    )
    stride: int = Field(0, ge=0, description="tokens shared by adjacent windows")
    symmetric: bool = Field(
        False,
        description="whether the order of a pair's texts means nothing; gpt1 then reads both orders. It adds their "
        "representations before the output layer (Radford et al. 2018, section 3.3; head=paper)",
    )
    domain: Annotated[DomainConfig | None, Choice("task/domain", optional=True)] = Field(
        None, description="dann or coral, with task.domain.target=FOLDER: unlabeled texts from another domain"
    )
    heads: tuple[str, ...] | None = Field(
        None,
        description="column of heads in a dependency tree for each text, for model/positions=tree_depth and "
        "tree_distance. Numbers of words from 1, 0 for the root: a list, or a text split at whitespace, as the words "
        "of the text; null: none",
    )

    @field_validator("heads", mode="before")
    @classmethod
    def _one_column_of_heads(cls, value: object) -> object:
        return cls.one_column(value)

    @property
    def predicts_rows(self) -> bool:
        return super().predicts_rows and self.windows == "none"

    @property
    def head_columns(self) -> dict[str, str]:
        return dict(zip(self.text, self.heads or (), strict=False))

    @property
    def windowed(self) -> str:
        return self.windows

    @property
    def domain_adaptation(self) -> str | None:
        return None if self.domain is None else self.domain.name

    def with_head(self, form: JsonMapping) -> TaskConfig:
        return super().with_head({"symmetric": False, **form})  # a head of an earlier lmtool read one order

    def reads_both_orders(self, model: ModelConfig) -> bool:
        pairs = self.symmetric and len(self.text) == 2 and not self.writes_text
        return pairs and self.text_format(model) == "gpt1"

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, section)
        if self.reads_both_orders(model) and (self.windows != "none" or self.domain is not None):
            windows, domain = f"{section}.windows={self.windows}", f"{section}.domain={self.domain_adaptation}"
            other = windows if self.domain is None else domain
            message = f"{other}: model={model.name} reads the texts of {self.name} in both orders, as a whole"
            yield Problem("task.symmetric", message, f"set {section}.symmetric=false, or omit {other}")

    @model_validator(mode="after")
    def _each_text_has_heads(self) -> WindowedConfig:
        if self.heads is None:
            return self
        if len(self.heads) != len(self.text):
            raise ValueError(f"heads={list(self.heads)}: each of text={list(self.text)} needs one column of heads")
        if len({*self.heads, *self.text, self.label}) != 2 * len(self.text) + 1:
            raise ValueError(f"heads={list(self.heads)}, text={list(self.text)} and label={self.label} share a column")
        if self.columns != self.text:
            raise ValueError(f"text={list(self.text)} joins columns, and joined texts have no dependency tree")
        return self


class ClassLossConfig(Config):
    """The loss of a classification."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="fraction of the probability spread over all classes")
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = Field(
        "none", description="none, balanced (rows / (classes x rows of the class)), or one weight per class: [1.0, 3.0]"
    )

    focal_gamma: float = Field(
        0.0,
        ge=0,
        description="exponent of the focal loss (published: 2.0); 0: plain cross-entropy. Each loss is multiplied by "
        "(1 - p)^gamma, p being the probability of its label (Lin et al. 2017); the divisor stays the number of "
        "labels",
    )

    @model_validator(mode="after")
    def _smoothed_or_focal(self) -> ClassLossConfig:
        if self.focal_gamma and self.label_smoothing:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} and focal_gamma={self.focal_gamma}: smoothing changes the "
                "probability that the focal loss scales by: give one of them"
            )
        return self

    @model_validator(mode="after")
    def _weights_positive(self) -> ClassLossConfig:
        if isinstance(self.class_weights, tuple) and (not self.class_weights or min(self.class_weights) <= 0):
            raise ValueError(f"class_weights={list(self.class_weights)}: weights must be positive")
        return self


class MultiLabelLossConfig(ClassLossConfig):
    """The loss of multi-label classification: the mean binary cross entropy over texts and classes."""

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="fraction of a label spread over yes and no")
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = Field(
        "none", description="for positive labels: none, balanced (negative / positive rows), or one per class"
    )


@component("task", "multi_label", builder="lmtool.tasks.kinds.multi_label:MultiLabel")
class MultiLabelConfig(WindowedConfig):
    """Any number of several classes for a text or a pair of texts."""

    descriptions: ClassVar[dict[str, str]] = {"label": "label column: a list, or text with delimiters"}

    has_classes: ClassVar[bool] = True

    kind: Literal["multi_label"] = Field(
        "multi_label", description="Any number of several classes for a text or a pair of texts."
    )
    name: TaskName = "multi_label"
    labels: tuple[str, ...] | None = Field(
        None, description="class names in order, quoted; null: the sorted values found in train"
    )
    delimiter: str = Field(
        ",",
        min_length=1,
        description="separator of the classes in a cell; an empty cell: no class. Lists are read as they are",
    )
    thresholds: float | tuple[float, ...] | None = Field(
        None,
        description="probability threshold, one for all or one per class; null: tuned per class for F1. Tuned on the "
        "development rows, and saved with the head",
    )
    metrics: tuple[Literal["micro_f1", "macro_f1", "subset_accuracy"], ...] = Field(
        ("micro_f1", "macro_f1", "subset_accuracy"), min_length=1
    )
    metric: BestMetric[Literal["micro_f1", "macro_f1", "subset_accuracy"]] = "micro_f1"
    loss: MultiLabelLossConfig = Field(
        default_factory=lambda: MultiLabelLossConfig.model_validate({}),
        description="Smoothing, weights and focus of the loss",
    )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.labels

    @model_validator(mode="after")
    def _labels_fit(self) -> MultiLabelConfig:
        thresholds = self.thresholds if isinstance(self.thresholds, tuple) else (self.thresholds or 0.5,)
        if not all(0 < threshold < 1 for threshold in thresholds):
            raise ValueError(f"thresholds={self.thresholds}: a threshold must be between 0 and 1")
        if self.labels is not None:
            if len(set(self.labels)) != len(self.labels) or not self.labels:
                raise ValueError(f"labels={list(self.labels)}: labels must differ")
            for name, configured in (("loss.class_weights", self.loss.class_weights), ("thresholds", self.thresholds)):
                if isinstance(configured, tuple) and len(configured) != len(self.labels):
                    raise ValueError(
                        f"{name} needs one number for each of the {len(self.labels)} labels, not {len(configured)}"
                    )
        return self


@component("task", "regression", builder="lmtool.tasks.kinds.regression:Regression")
class RegressionConfig(WindowedConfig):
    """One number for a text or a pair of texts, by squared error."""

    descriptions: ClassVar[dict[str, str]] = {
        "label": "label column: a number",
        "head": "paper; transformers: as in its ...ForSequenceClassification; text_to_text: generate the label "
        "(T5); null: the checkpoint's, else paper",
    }

    of_outputs: ClassVar[tuple[str, ...]] = (*WindowedConfig.of_outputs, "standardize")
    labels_as_text: ClassVar[bool] = True

    kind: Literal["regression"] = Field(
        "regression", description="One number for a text or a pair of texts, by squared error."
    )
    name: TaskName = "regression"
    metrics: Metrics[Literal["pearson", "spearman", "mse"]] = ("pearson", "spearman", "mse")
    metric: Literal["pearson", "spearman", "mse"] = Field(
        "pearson", description="metric that selects the best checkpoint; for mse, lower is better"
    )
    standardize: Literal["train"] | tuple[float, float] | None = Field(
        None,
        description="train: divide the squared error by the variance of the training values and start a new head at "
        "their mean; [mean, deviation]: use these; null: plain squared error, as published. Predictions and metrics "
        "keep the scale of the data",
    )

    @model_validator(mode="after")
    def _deviates(self) -> RegressionConfig:
        if isinstance(self.standardize, tuple) and self.standardize[1] <= 0:
            raise ValueError(
                f"standardize={list(self.standardize)}: the standard deviation, the second number, must be above 0"
            )
        return self
