"""Base configuration of every task kind: rows, columns, prompts, and domain adaptation. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from lmtool.config.base import Config, JsonMapping, JsonObject
from lmtool.config.registry import build, component, lookup
from lmtool.data.compressed import stem_of
from lmtool.data.configs import contains
from lmtool.errors import Problem, nearest
from lmtool.learners.configs import LearnedConfig, needs_uneven_forwards
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.models.configs import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
TaskName = Annotated[str, Field(description="name of the task; its head is heads.NAME", pattern=r"^[a-z][a-z0-9_]*$")]
Metrics = Annotated[tuple[T, ...], Field(min_length=1, description="reported metrics")]
BestMetric = Annotated[T, Field(description="metric that selects the best checkpoint")]
ClassNames = Annotated[
    tuple[str, ...] | None,
    Field(
        description="class names in order; quote names such as yes or 1. null: the sorted values found in train. A "
        "file may contain the names, or their numbers from 0"
    ),
]

ClassMetric = Literal["accuracy", "f1", "macro_f1", "matthews"]
ClassMetrics = Annotated[
    tuple[ClassMetric, ...],
    Field(min_length=1, description="accuracy, f1 (the second label is the positive class), macro_f1, matthews"),
]

_SPLIT = re.compile("(train|test|dev|devel|development|val|valid|validation)(_matched|_mismatched)?")
"""The usual names of split files, without suffix."""
JOINED = "+"
"""Joins the names of columns that are read as one text."""


def joined_columns(name: str) -> list[str]:
    """Returns the columns joined in a name such as A+B."""
    parts = name.split(JOINED)
    return parts if all(parts) else [name]


def require_classes(labels: tuple[str, ...] | None, weights: object = None) -> None:
    """Raises ValueError if there are fewer than two different classes, or if a tuple of weights has another length."""
    if labels is None:
        return
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise ValueError(f"labels={list(labels)}: two or more names are needed, and none may occur twice")
    if isinstance(weights, tuple) and len(weights) != len(labels):
        raise ValueError(
            f"loss.class_weights needs one weight for each of the {len(labels)} labels, not {len(weights)}"
        )


class TaskConfig(LearnedConfig):
    """Base configuration of every task kind: where the labeled rows come from, and which columns are read."""

    group: ClassVar[str] = "task"
    reads_labeled_rows: ClassVar[bool] = True
    reads_text: ClassVar[bool] = False
    architectures: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "encoder_decoder", "bidirectional_lm")
    layouts: ClassVar[tuple[str, ...]] = ("table", "parquet")
    """Supported file layouts (`lmtool.tasks.files`). The first layout that matches a file reads it."""
    head_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that determine the architecture of the head. A head from a checkpoint keeps their saved values."""

    fills_prompts: ClassVar[bool] = False
    """Whether a label can be a word that a language model predicts within a template."""

    labels_as_text: ClassVar[bool] = False
    """Whether the labels are texts or can be written as texts."""

    scores_tokens: ClassVar[bool] = False
    """Whether there is an output per token, rather than per text."""
    default_max_length: ClassVar[int] = 128
    """Default of max_length, in tokens."""

    kind: str = Field(description="Task kind.")
    name: TaskName
    text: tuple[str, ...] = Field(
        ("text",),
        min_length=1,
        description="input columns: one, or two for a pair; a+b: two columns joined into one text",
    )
    label: str = Field("label", description="label column")
    path: str | None = Field(
        None, description="local data: a folder with train, dev and test files (.tsv .csv .jsonl), or one training file"
    )
    hub: str | None = Field(None, description="org/name or org/name:subset on the hub, used if no path is set")
    embedded: Literal["pydocs"] | None = Field(
        None, description="pydocs: the docstrings of Python packages, which every machine has; used if no path is set"
    )
    header: tuple[str, ...] | None = Field(None, description="column names for files without a header line")
    aliases: dict[str, str] = Field({}, description="map from column names in the files to names used here")
    files: dict[str, str] = Field({}, description="map from file names without suffix to train, dev or test")
    ragged_rows: Literal["refuse", "skip"] = Field(
        "refuse", description="line with a wrong number of columns; refuse: error; skip: skip and count it"
    )
    validation: tuple[str, ...] = Field(
        ("dev",), min_length=1, description="development splits; without one, a seeded tenth of train is held out"
    )
    test: tuple[str, ...] = Field(("test",), description="test splits: never used for training")
    metrics: Metrics[str]
    metric: BestMetric[str]
    train_examples: int | None = Field(None, ge=1, description="number of training rows, a seeded sample; null: all")
    dropout: float | None = Field(
        None, ge=0, lt=1, description="dropout rate before the output layer; null: the model's"
    )

    @field_validator("text", mode="before")
    @classmethod
    def one_column(cls, value: object) -> object:
        """Reads the name of one column as a list of one."""
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("validation", "test")
    @classmethod
    def _held_out(cls, splits: tuple[str, ...]) -> tuple[str, ...]:
        train_split = next((split for split in splits if split.lower() == "train"), None)
        if train_split is not None:
            raise ValueError(f"{train_split} is the training split; omit it, and name held-out splits")
        return splits

    def learner(self, *arguments: Any) -> Any:
        """Returns the learner of this task. `arguments`: backbone, tokenizer and seed."""
        return build(self).learner(*arguments)

    @classmethod
    def default_length(cls, section: JsonObject) -> int:
        """Returns the default of max_length. section: the task's configuration before it is decoded."""
        return cls.default_max_length

    def member_configs(self) -> tuple[TaskConfig, ...]:
        """Returns the member tasks: the task itself, except in mixtures."""
        return (self,)

    def replace_members(self, members: tuple[TaskConfig, ...]) -> TaskConfig:
        """Returns a copy with other members, in order."""
        return members[0]

    def select_members(self, members: Sequence[TaskConfig]) -> TaskConfig:
        """Returns a copy with only these members, whose heads may have other architectures than those of this
        configuration."""
        return members[0]

    def text_format(self, model: ModelConfig) -> str:
        """Returns the text format (`lmtool.data.formats`) in which a model of this configuration reads the rows."""
        return model.text_format

    def takes_head(self, form: JsonMapping, model: ModelConfig) -> bool:
        """Whether the head of a checkpoint fits this task. form: the saved values of `head_fields`."""
        return True

    def with_head(self, form: JsonMapping) -> TaskConfig:
        """Returns a copy with the head architecture of a checkpoint. form: the saved values of `head_fields`."""
        return self.model_copy(update=dict(form))

    def differs_only_in_data(self, other: TaskConfig) -> bool:
        """Whether two tasks differ only in their data (AX and MNLI): they read the same number of texts, and either
        their names or both their kinds and class names are equal."""
        labels, other_labels = (set(task.class_names or ()) for task in (self, other))
        same_classes = self.kind == other.kind and bool(labels) and labels == other_labels
        return (self.name == other.name or same_classes) and len(self.text) == len(other.text)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns read from a file."""
        return tuple(part for name in self.text for part in joined_columns(name))

    @property
    def head_columns(self) -> dict[str, str]:
        """The column of heads of each text whose words have a dependency tree, by the text's column."""
        return {}

    @property
    def further_columns(self) -> tuple[str, ...]:
        """The columns that are read besides the texts and the label."""
        return tuple(self.head_columns.values())

    @property
    def reads_trees(self) -> bool:
        return bool(self.head_columns)

    def with_aliases(self, columns: Mapping[str, T]) -> dict[str, T]:
        """Returns the columns of a file by the names of `aliases`; a column that has such a name itself keeps it."""
        renamed = dict(columns)
        for file_name, name in self.aliases.items():
            if file_name in renamed and name not in renamed:
                renamed[name] = renamed.pop(file_name)
        return renamed

    @property
    def reads(self) -> tuple[str, ...]:
        """The text columns of rows, with joined columns under their joined name (A+B)."""
        return self.text

    @property
    def needs_two_classes(self) -> bool:
        """Whether a metric is defined only for two classes."""
        return False

    @property
    def kind_setting(self) -> str:
        """The override that selects the kind."""
        return f"task.kind={self.kind}"

    def reads_file(self, file: PurePath) -> bool:
        """Whether the task reads an existing file, given by its real path: a file at its path, or in a folder there a
        file named after a split."""
        is_split = _SPLIT.fullmatch(stem_of(file).lower()) is not None
        paths = (
            (member.path, is_split or stem_of(file) in (*member.files, *member.validation, *member.test))
            for member in self.member_configs()
        )
        return any(contains(path, file, in_folder) for path, in_folder in paths if path is not None)

    @property
    def has_data(self) -> bool:
        """Whether a source of rows is configured."""
        return any(source is not None for source in (self.path, self.hub, self.embedded))

    @property
    def head_kind(self) -> str | None:
        """How the head reduces a text to one vector, for kinds that have a choice; otherwise None."""
        return None

    @property
    def few_shots(self) -> int | None:
        """Training rows per class; None: all."""
        return None

    @property
    def has_auxiliary_mlm(self) -> bool:
        """Whether masked language modeling is an auxiliary loss."""
        return False

    @property
    def longest_target(self) -> int:
        """The maximum number of tokens in a generated target; 0 for kinds that generate none."""
        return 0

    @property
    def text_generation(self) -> GenerationConfig | None:
        """How texts are generated; None if the task generates none."""
        return None

    def pretrained_heads(self, model: ModelConfig) -> tuple[str, ...]:
        """Returns the names of heads that are useless unless a checkpoint provides their weights."""
        return ()

    @property
    def generates_text(self) -> bool:
        """Whether predictions are generated token by token, which requires a decoder."""
        return False

    @property
    def default_checkpoint(self) -> str:
        """The published weights that finetuning starts from if neither `checkpoint` nor `model` is set."""
        entry = lookup("model", "t5" if self.generates_text else "bert")
        assert entry is not None and issubclass(entry.config, ModelConfig)
        return f"hf://{entry.config.published}"

    def conflicts_with_fsdp(self) -> Iterator[Problem]:
        if self.writes_text:
            reason = f"task={self.name} is scored on texts that the model generates, which works in one process only"
            yield needs_uneven_forwards("task", reason, "use another task or head")

    def with_unstored_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds the head tensors that a published folder does not store."""
        return tensors

    @model_validator(mode="after")
    def _metric_is_listed(self) -> TaskConfig:
        if self.metric not in self.metrics:
            raise ValueError(f"metric={self.metric} is not in metrics={list(self.metrics)}")
        return self

    @model_validator(mode="after")
    def _columns_differ(self) -> TaskConfig:
        if len({*self.text, self.label}) != len(self.text) + 1:
            raise ValueError(f"text={list(self.text)} and label={self.label} name a column twice")
        if self.label in self.columns:
            raise ValueError(f"text={list(self.text)} reads label={self.label}, which is predicted")
        if self.header is not None and len(set(self.header)) != len(self.header):
            raise ValueError(f"header={list(self.header)} names a column twice")
        unknown = sorted(set(self.files.values()) - {"train", "dev", "test"})
        if unknown:
            raise ValueError(f"files names the split {unknown[0]}; it must be train, dev or test")
        return self


ANSWER = "label"
"""The name of the answer's placeholder in a template."""
PROMPT = "prompt"
"""The head that reads a row as a prompt and predicts the word at the answer's placeholder."""


class PromptConfig(Config):
    """A pattern and a verbalizer: the words that stand for the classes (Schick and Schuetze 2021, section 3)."""

    template: str | None = Field(
        None,
        description="{column} and {label}, the answer; null: each column with its name, then the answer. \\n starts a "
        "new line",
    )
    words: dict[str, str] = Field({}, description="map from class to the word for it; other classes: their names")

    @field_validator("template")
    @classmethod
    def _has_one_answer(cls, template: str | None) -> str | None:
        # A shell passes \\n as two characters.
        template = None if template is None else template.replace("\\n", "\n")
        if template is not None and placeholders(template).count(ANSWER) != 1:
            raise ValueError(f"template={template!r}: {{{ANSWER}}}, the answer's placeholder, must occur exactly once")
        return template


def placeholders(template: str) -> list[str]:
    """Returns the placeholders of a template, in order. Raises ValueError if braces do not match."""
    names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    if any(format_spec or conversion for _, _, format_spec, conversion in Formatter().parse(template)):
        raise ValueError(
            f"template={template!r}: a placeholder is a column name in braces, without format or conversion"
        )
    return names


class PromptedConfig(TaskConfig):
    """Base of the kinds that a language model can solve from a prompt, without training."""

    prompt: PromptConfig = Field(
        default_factory=lambda: PromptConfig.model_validate({}),
        description="the task as a prompt, for `lmtool evaluate shots=`",
    )

    @property
    def default_template(self) -> str:
        """The template used if none is set."""
        return "".join(f"{name}: {{{name}}}\n" for name in self.text) + f"{self.label}: {{{ANSWER}}}"

    @property
    def template(self) -> str:
        return self.prompt.template or self.default_template

    def template_problem(self, section: str) -> Problem | None:
        """Returns the error in the columns that the template names, or None. section: as in `conflicts`."""
        if ANSWER in self.reads:
            return Problem(
                "task.text",
                f"task={self.name} reads a column called {ANSWER}, which is the answer's placeholder in a template",
                f"rename it: {section}.aliases={{{ANSWER}: text}} {section}.text=[text]",
            )
        columns = placeholders(self.template)
        if columns == [ANSWER]:
            return Problem(
                "task.prompt.template",
                f"{section}.prompt.template={self.template!r} names no column to read",
                f"name those of task={self.name}: {', '.join(f'{{{name}}}' for name in self.reads)}",
            )
        for name in columns:
            if name not in (*self.reads, ANSWER):
                close = nearest(name, self.reads)
                return Problem(
                    "task.prompt.template",
                    f"{section}.prompt.template names {{{name}}}; task={self.name} reads {', '.join(self.reads)}",
                    f"did you mean {{{close}}}?" if close else f"name only those columns: {section}.prompt.template=",
                )
        return None

    def template_conflicts(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        """Yields the problem of text after the answer, which a decoder does not read before it answers."""
        after = placeholders(self.template.partition(f"{{{ANSWER}}}")[2])
        if after and model.architecture == "decoder":
            key = f"{section}.prompt.template"
            yield Problem(
                "task.prompt.template",
                f"{key}={self.template!r} has {{{ANSWER}}} before {{{after[0]}}}; model={model.name} reads from left "
                "to right",
                f"put the answer last: {key}={self.default_template!r}",
            )


class DomainConfig(Config):
    """Base of the losses for domain adaptation, which align a task's texts with unlabeled texts of another domain."""

    name: str = Field(description="Which loss.")
    target: str = Field(
        min_length=1,
        description="texts from the other domain: a folder with a train file, or one file; labels are not read",
    )
    weight: float = Field(1.0, gt=0, description="weight of the loss, added to the task's")


@component("task/domain", "dann", builder="lmtool.tasks.kinds.sequence:GradientReversal")
class DannConfig(DomainConfig):
    """Gradient reversal (Ganin et al. 2016): the encoder learns features from which a classifier cannot tell the two
    domains apart."""

    name: Literal["dann"] = Field("dann", description="Gradient reversal.")
    steps: int = Field(
        1000,
        ge=1,
        description="steps over which p rises from 0 to 1; the reversed gradient is scaled by 2 / (1 + exp(-10 p)) - 1",
    )
    hidden_size: int = Field(100, ge=1, description="hidden units of the domain classifier")


@component("task/domain", "coral", builder="lmtool.tasks.kinds.sequence:MomentMatching")
class CoralConfig(DomainConfig):
    """Correlation alignment (Sun and Saenko 2016): aligns the covariances of the features of both domains."""

    name: Literal["coral"] = Field("coral", description="Correlation alignment.")
