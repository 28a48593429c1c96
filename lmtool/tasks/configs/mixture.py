"""Configuration of task mixtures, GLUE, and tasks as pretraining objectives or text. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lmtool.config.base import JsonObject
from lmtool.config.decode import title_of, with_member_values
from lmtool.config.registry import Choice, component, lookup, names
from lmtool.data.configs import DataConfig
from lmtool.errors import Problem
from lmtool.learners.configs import ObjectiveConfig, member_problem, mixture_conflicts_with_fsdp
from lmtool.models.configs import ModelConfig, describe_architectures
from lmtool.tasks.configs.base import BestMetric, TaskConfig
from lmtool.tasks.configs.sequence import TEXT_TO_TEXT

Member = Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]


@component("task", "glue", builder="lmtool.tasks.mixture:Glue")
class GlueConfig(TaskConfig):
    """The tasks of GLUE, one run each (Wang et al. 2019)."""

    descriptions: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("text", "label", "header", "aliases", "files", "validation"), "each task's own"),
        "embedded": "none",
        "test": "each task's own; predicted into the leaderboard files",
    }

    kind: Literal["glue"] = Field("glue", description="The tasks of GLUE, one run each.")
    name: str = Field("glue", description="common name of the runs", pattern=r"^[a-z][a-z0-9_]*$")
    path: str | None = Field(
        None, description="a folder with one subfolder per task (cola, CoLA, mnli_10k, ...); missing tasks are listed"
    )
    hub: str | None = Field("nyu-mll/glue", description="used if no path is set; each task's own YAML names its data")
    members: tuple[Member | JsonObject, ...] = Field(
        ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"),
        min_length=1,
        description="in the order of their runs; task.with.NAME.KEY=VALUE sets a key of one task",
    )
    metrics: tuple[Literal["average"], ...] = Field(
        ("average",), min_length=1, description="mean of the tasks' scores, without WNLI"
    )
    metric: Literal["average"] = Field("average", description="the score in glue.json")

    @classmethod
    def filled(cls, data: JsonObject) -> JsonObject:
        return with_member_values(data)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(map(title_of, self.members))

    @model_validator(mode="after")
    def _members_of_glue(self) -> GlueConfig:
        unknown = [name for name in self.names if name not in get_args(Member)]
        if unknown:
            raise ValueError(f"members: {unknown[0]} is not a GLUE task; allowed: {', '.join(get_args(Member))}")
        return self


_TASK = Choice("task", key="kind")


@component("task", "mixture", builder="lmtool.tasks.mixture:MixedTasks")
class MixtureTaskConfig(TaskConfig):
    """Several tasks that share a model, each with its own head (Caruana 1997), or all written by one language model
    (Raffel et al. 2020, section 2.4)."""

    members_key: ClassVar[str] = "task.members"
    scores_tokens: ClassVar[bool] = True
    repeats: ClassVar[bool] = True

    kind: Literal["mixture"] = Field("mixture", description="Several tasks in one run.")
    name: str = Field("mixture", description="common name of the tasks", pattern=r"^[a-z][a-z0-9_]*$")
    members: tuple[JsonObject, ...] = Field(
        min_length=2,
        description="names of tasks, or sections: [sst2, {kind: classification, name: mine, path: FOLDER}]; "
        "task.with.NAME.KEY=VALUE sets a key of one task. Each name occurs once",
    )
    sampling: Literal["proportional", "uniform", "temperature", "capped", "annealed"] = Field(
        "proportional",
        description="weights for members of n rows: proportional (n), uniform, temperature (n^(1/temperature)), "
        "capped (the smaller of n and cap), annealed (n^alpha, alpha from 1 in the first epoch to 0.2 in the last). "
        "Raffel et al. 2020, section 3.5.2; annealed: Stickland and Murray 2019. Losses of members have equal "
        "weights",
    )
    temperature: float = Field(2.0, ge=1, description="for sampling=temperature; 1: proportional")
    cap: int = Field(2**19, ge=1, description="for sampling=capped, in rows (2^19)")
    annealing_epochs: int | None = Field(
        None, ge=1, description="for sampling=annealed: epochs until alpha is 0.2; null: max_epochs"
    )
    head: Literal["text_to_text"] | None = Field(
        None, description="text_to_text: generate the labels of all members (T5); null: each member's own"
    )
    rows: tuple[int, ...] | None = Field(None, description="training rows per member; null: counted")

    text: tuple[()] = Field((), description="each member's own: task.with.NAME.text=")
    label: Literal[""] = Field("", description="each member's own: task.with.NAME.label=")
    path: None = Field(None, description="each member's own: task.with.NAME.path=")
    hub: None = Field(None, description="each member's own: task.with.NAME.hub=")
    embedded: None = Field(None, description="each member's own: task.with.NAME.embedded=")
    header: None = Field(None, description="each member's own: task.with.NAME.header=")
    aliases: dict[str, str] = Field({}, max_length=0, description="each member's own: task.with.NAME.aliases=")
    files: dict[str, str] = Field({}, max_length=0, description="each member's own: task.with.NAME.files=")
    ragged_rows: Literal["refuse"] = Field("refuse", description="each member's own: task.with.NAME.ragged_rows=")
    validation: tuple[()] = Field((), description="each member's own: task.with.NAME.validation=")
    test: tuple[()] = Field((), description="each member's own: task.with.NAME.test=")
    train_examples: None = Field(None, description="each member's own: task.with.NAME.train_examples=")
    dropout: None = Field(None, description="each member's own: task.with.NAME.dropout=")

    metrics: tuple[Literal["average"], ...] = Field(
        ("average",),
        min_length=1,
        description="mean of the members' metrics; metrics out of 100 (bleu, chrf) are scaled to 1",
    )
    metric: BestMetric[Literal["average"]] = "average"

    @classmethod
    def filled(cls, data: JsonObject) -> JsonObject:
        return with_member_values(data)

    @classmethod
    def default_length(cls, section: JsonObject) -> int:
        """Returns the longest default of the members."""
        entries = [
            lookup("task", str(part.get("kind"))) for part in section.get("members") or () if isinstance(part, dict)
        ]
        lengths = [entry.config.default_max_length for entry in entries if entry is not None]  # type: ignore[attr-defined]
        return max(lengths, default=cls.default_max_length)

    def member_configs(self) -> tuple[TaskConfig, ...]:
        """Returns the member tasks."""
        parts = [_TASK.validate(member) for member in self.members]
        tasks = tuple(part for part in parts if isinstance(part, TaskConfig))
        if self.head is None:
            return tasks
        return tuple(task.with_head({"head": self.head}) if "head" in task.head_fields else task for task in tasks)

    def replace_members(self, members: tuple[TaskConfig, ...]) -> MixtureTaskConfig:
        return self.model_copy(update={"members": tuple(member.model_dump(mode="json") for member in members)})

    def select_members(self, members: Sequence[TaskConfig]) -> MixtureTaskConfig:
        train_rows = dict(zip((member.name for member in self.member_configs()), self.rows or (), strict=False))
        rows = tuple(train_rows[member.name] for member in members) if train_rows else None
        return self.replace_members(tuple(members)).model_copy(update={"rows": rows})

    @property
    def annealed(self) -> bool:
        return self.sampling == "annealed"

    def fractions(self, epoch: int = 0) -> tuple[float, ...]:
        """Returns sampling rates of the members in an epoch, which sum to 1. Raises ValueError if the rows have not
        been counted."""
        if self.rows is None:
            raise ValueError(
                "the training rows are not counted yet: build the mixture from the config of its loaded data"
            )
        weight_of = {
            "proportional": lambda count: float(count),
            "uniform": lambda count: 1.0,
            "temperature": lambda count: count ** (1 / self.temperature),
            "capped": lambda count: float(min(count, self.cap)),
            "annealed": lambda count: count ** (1 - 0.8 * min(epoch / max((self.annealing_epochs or 1) - 1, 1), 1)),
        }[self.sampling]
        sizes = [weight_of(count) for count in self.rows]
        return tuple(size / sum(sizes) for size in sizes)

    def text_format(self, model: ModelConfig) -> str:
        return self.member_configs()[0].text_format(model)

    @property
    def learns_texts(self) -> bool:
        return self.head is not None

    @property
    def generates_text(self) -> bool:
        return any(member.generates_text for member in self.member_configs())

    def conflicts_with_fsdp(self) -> Iterator[Problem]:
        yield from mixture_conflicts_with_fsdp("task", [member.name for member in self.member_configs()])

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        return iter(())  # only members have conflicts

    def conflicts(self, section: str) -> Iterator[Problem]:
        for member in self.member_configs() if self.head == TEXT_TO_TEXT else ():
            if not member.labels_as_text and member.head_kind != TEXT_TO_TEXT:
                message = (
                    f"task.head={TEXT_TO_TEXT}: the labels of the member {member.name} ({member.kind}) cannot be "
                    "written as text"
                )
                yield Problem("task.head", message, f"remove {member.name} from task.members, or omit task.head=")
        yield from self._metric_problems()
        if self.annealed and self.annealing_epochs is None:
            message = "task.sampling=annealed changes the weights from epoch to epoch, but max_epochs is not set"
            yield Problem("task.annealing_epochs", message, "set max_epochs=25, or task.annealing_epochs=25")

    def _metric_problems(self) -> Iterator[Problem]:
        from lmtool.learners.metrics import smaller_is_better  # imports numpy, which no other configuration needs

        for member in self.member_configs():
            if smaller_is_better(member.metric):
                others = [metric for metric in member.metrics if not smaller_is_better(metric)]
                key = f"task.with.{member.name}.metric"
                message = f"{key}={member.metric}: lower is better; mixtures average higher-is-better metrics"
                yield Problem("task.members", message, f"set {key}={others[0] if others else 'NAME'}")

    @model_validator(mode="after")
    def _members_fit(self) -> MixtureTaskConfig:
        for member in self.members:
            try:
                _TASK.validate(member)
            except (ValidationError, PydanticCustomError) as error:
                raise ValueError(f"members: {title_of(member)}: {member_problem(error, names('task'))}") from error
        members = self.member_configs()
        titles = [member.name for member in members]
        repeated = next((title for title in titles if titles.count(title) > 1), None)
        if repeated is not None:
            raise ValueError(
                f"members={titles}: {repeated} is named twice; give one of them another name, as a section: {{kind: "
                f"{members[titles.index(repeated)].kind}, name: {repeated}_2, path: FOLDER}}"
            )
        nested = [member.name for member in members if isinstance(member, (MixtureTaskConfig, GlueConfig))]
        if nested:
            raise ValueError(f"members={titles}: {nested[0]} is a group of tasks; name each of them")
        if self.rows is not None and len(self.rows) != len(titles):
            raise ValueError(f"rows={list(self.rows)}: one number is required for each of the {len(titles)} members")
        return self


@component("objective", "task", builder="lmtool.tasks.mixture:learner")
class TaskObjectiveConfig(ObjectiveConfig):
    """A labeled task as one of the pretraining objectives (Raffel et al. 2020, section 3.5.3)."""

    name: Literal["task"] = Field("task", description="A task.")
    task: Annotated[TaskConfig, Choice("task", key="kind")] = Field(
        description="keys of `lmtool finetune` under task=: kind, name, path or hub, text, label, ...; `lmtool list "
        "task`"
    )

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        if model.architecture not in self.task.architectures:
            expected, actual = map(describe_architectures, (self.task.architectures, [model.architecture]))
            message = f"objective={self.name} trains {expected}; model={model.name} is {actual}"
            yield Problem("objective", message, self.model_hint)

    @property
    def title(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def predicted_fraction(self) -> float:
        """Zero: no token is predicted."""
        return 0.0


def tasks_of(objective: ObjectiveConfig) -> tuple[TaskConfig, ...]:
    """Returns the tasks of an objective and its members."""
    return tuple(member.task for member in objective.member_configs() if isinstance(member, TaskObjectiveConfig))


@component("data", "task", builder="lmtool.tasks.loading:TaskText")
class TaskTextConfig(DataConfig):
    """The unlabeled texts of a task (task-adaptive pretraining, Gururangan et al. 2020)."""

    downloads: ClassVar[bool] = True  # the task may be read from the hub

    name: Literal["task"] = Field("task", description="The texts of a task.")
    task: Annotated[TaskConfig, Choice("task", key="kind")] = Field(
        description="the name of a shipped task, or a section with kind and path; data.task.KEY sets its keys. Labels "
        "are not read"
    )
    validation_fraction: float = Field(
        0.02,
        gt=0,
        lt=1,
        description="fraction of the rows held out if there is no development split; the same rows for every seed",
    )

    def reads_file(self, file: PurePath) -> bool:
        return self.task.reads_file(file)
