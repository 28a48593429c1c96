"""The configurations of a run's teachers, and the rules of distillation: whether a student can learn from them. Imports
no torch.

A teacher that reads the student's packed batches needs the student's vocabulary and text format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtool.config.auto import chosen_class
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.checkpoint import read_checkpoint
from lmtool.config.decode import rule
from lmtool.config.needs import refusal
from lmtool.config.tables import Choice
from lmtool.distillation.configs import DistillConfig
from lmtool.distillation.configs.base import ModelPair
from lmtool.errors import Problem, UserError
from lmtool.learners.configs import LearnedConfig, ObjectiveConfig
from lmtool.models.configs import ModelConfig
from lmtool.resolver.matcher import fitting_objectives
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.system.files import user_path
from lmtool.tasks.configs import GlueConfig, TaskConfig, TaskObjectiveConfig
from lmtool.tasks.labels import LoadedHead, load_head, sections_of
from lmtool.tokenizers.configs import FolderConfig, TokenizerConfig
from lmtool.weights.folders import hf_folder
from lmtool.weights.task_heads import HEADS

Saved = Mapping[str, JsonObject]
"""Each teacher's saved configuration, keyed by its path as typed."""


def read_teachers(data: JsonMapping, problems: list[Problem]) -> dict[str, JsonObject]:
    """Returns the saved configurations of the teachers named in the composed data. The errors of teachers that cannot
    be read are appended to `problems`."""
    section = data.get("distill")
    section = section if isinstance(section, dict) else {}
    paths = section.get("teachers")
    key_of_teacher = {section.get("teacher"): "distill.teacher"}
    key_of_teacher |= dict.fromkeys(paths if isinstance(paths, list | tuple) else (), "distill.teachers")
    saved: dict[str, JsonObject] = {}
    for path, key in key_of_teacher.items():
        if not isinstance(path, str) or path in ("", "???"):
            continue
        try:
            saved[path] = saved_teacher(path, bool(data.get("offline")))
        except UserError as error:
            message = error.message.replace(f"checkpoint={path}", f"{key}={path}")
            problems.append(Problem(key, message, error.hint))
        except OSError as error:  # a name too long for the file system, a folder that may not be entered
            message = f"{key}={path[:100]}: {(error.strerror or str(error)).lower()}"
            problems.append(Problem(key, message, "use a folder that you can read"))
    return saved


def saved_teacher(path: str, offline: bool) -> JsonObject:
    """Returns a teacher's saved configuration. Raises UserError if it cannot be read."""
    published = hf_folder(path, offline)
    saved = read_checkpoint(path) if published is None else published.saved_config()
    tokenizer = saved.get("tokenizer") or {}
    # A checkpoint contains a copy of a tokenizer that was read from a folder. The copy is read, because the folder may
    # no longer exist.
    return {**saved, "tokenizer": {**tokenizer, "path": path}} if tokenizer.get("name") == "folder" else saved


@dataclass(frozen=True)
class TeacherSpec:
    """A teacher's saved configuration. path: its checkpoint, as typed."""

    path: str
    saved: JsonObject

    @property
    def model(self) -> ModelConfig | None:
        return _decode(Choice("model"), self.saved.get("model"))

    @property
    def tokenizer(self) -> TokenizerConfig | None:
        return _decode(Choice("tokenizer"), self.saved.get("tokenizer"))

    @property
    def published(self) -> bool:
        """Whether the teacher is a Hugging Face folder, or was imported from one. The tasks of its heads are then
        unknown."""
        return not {"task", "objective"} & set(self.saved)

    def tasks(self) -> dict[str, JsonObject]:
        """Returns the configuration sections of the teacher's tasks, by name: the finetuned task, tasks used as
        pretraining objectives, and the task of a published classifier."""
        pretraining_tasks = [part.task for part in self.objectives() if isinstance(part, TaskObjectiveConfig)]
        return {**{task.name: task.model_dump(mode="json") for task in pretraining_tasks}, **sections_of(self.saved)}

    def objectives(self) -> tuple[ObjectiveConfig, ...]:
        """Returns the objectives that the teacher was pretrained with."""
        objective = _decode(Choice("objective"), self.saved.get("objective"))
        return () if objective is None else objective.member_configs()

    def head_for(self, task: TaskConfig) -> LoadedHead | None:
        """Returns the teacher's head for a task, or None if its labels are not those of the task. A task whose labels
        are unknown takes the labels of the head."""
        section = self.section_for(task)
        if section is None:
            return None
        if task.has_classes and task.class_names is None and section.get("labels"):
            task = task.model_copy(update={"labels": tuple(section["labels"])})
        return load_head(section, task)

    def section_for(self, task: TaskConfig) -> JsonObject | None:
        """Returns the teacher's section for the task of this name, or else for a published head, whose task has no
        name of its own; None if it has neither."""
        tasks = self.tasks()
        return next((tasks[name] for name in (task.name, *HEADS) if name in tasks), None)

    def teaches(self, part: TaskConfig | ObjectiveConfig) -> bool:
        """Whether the teacher was trained for a task or for a member of the student's objective. A published language
        model does not say what it was trained for, so it may teach any objective and any task that writes text."""
        task = task_of(part)
        if task is not None:
            return self.section_for(task) is not None or (self.published and task.writes_text)
        return self.published or any(objective.name == part.name for objective in self.objectives())

    def without_auxiliaries(self, task: TaskConfig) -> TaskConfig:
        """Returns the student's task without the auxiliary losses that the teacher was not trained with."""
        section, changes = self.section_for(task) or {}, dict[str, Any]()
        if task.domain_adaptation is not None:
            changes["domain"] = None
        if task.language_model_weight and not section.get("auxiliary_lm"):
            changes["auxiliary_lm"] = 0.0
        return task.model_copy(update=changes)


def task_of(part: LearnedConfig) -> TaskConfig | None:
    """Returns the task, also if an objective wraps it; None for other objectives."""
    learned = part.task if isinstance(part, TaskObjectiveConfig) else part
    return learned if isinstance(learned, TaskConfig) else None


def needs_one_vocabulary(distill: DistillConfig, learned: LearnedConfig) -> bool:
    """Whether teacher and student must have the same vocabulary."""
    predicts_rows = isinstance(learned, TaskConfig) and all(member.predicts_rows for member in learned.member_configs())
    return distill.compares and (distill.same_batches or not (distill.compares_rows_only and predicts_rows))


def differing_tokenizer(student: TokenizerConfig, teacher: TokenizerConfig | None) -> str | None:
    """Returns the first field in which two tokenizers certainly differ, or None. Tokenizers in files are compared
    later, when the files are read."""
    if teacher is None or isinstance(student, FolderConfig) or isinstance(teacher, FolderConfig):
        return None
    if student.name != teacher.name:
        return "name"
    fields = [
        name for name in type(student).model_fields if name == "vocab_size" or name not in student.adjustable_fields
    ]
    return next((name for name in fields if getattr(student, name) != getattr(teacher, name)), None)


def _decode(choice: Choice, section: object) -> Any:
    try:
        return None if chosen_class(section, choice) is None else choice.validate(section)
    except (ValidationError, PydanticCustomError):
        return None


# The rules of distillation.

_OTHER_TEACHER = "use another teacher"


@rule(PretrainConfig, "distill", "model", "objective")
@rule(FinetuneConfig, "distill", "model", "task")
def refuse_generated_inputs(distill: DistillConfig, model: ModelConfig, learned: LearnedConfig) -> Iterator[Problem]:
    """Teacher and student must read the same texts, so the student must not generate its inputs."""
    if refusal(distill, learned=learned, model=model) is not None:
        return  # reported by the matcher
    for member in learned.member_configs() if _same_texts(distill, learned) else ():
        part = task_of(member) or member
        if part.makes_inputs:
            setting, instead = "task.scheduled_sampling", "task.scheduled_sampling.schedule=none"
            if isinstance(part, ObjectiveConfig):
                fitting = (
                    objective.name for objective in fitting_objectives(model, None) if not objective.makes_inputs
                )
                setting, instead = f"objective={part.name}", f"objective={next(fitting, 'mlm')}"
            yield Problem(
                "distill",
                f"distill={distill.name}: with {setting} the student generates part of its inputs, so its teacher "
                "would read other texts",
                f"set {instead}, or distill=none",
            )
            return


def _same_texts(distill: DistillConfig, learned: LearnedConfig) -> bool:
    """Whether the teachers read the same token ids as the student, in its batches or from the token store."""
    return distill.same_batches or needs_one_vocabulary(distill, learned)


@rule(RunConfig, "distill", running=True)
def require_teachers(distill: DistillConfig) -> Iterator[Problem]:
    """A distillation method that needs a teacher must have one. Applies only to training: a trained student is used
    without its teacher."""
    problem = distill.missing_teacher()
    if problem is not None:
        yield problem


@rule(RunConfig, "distill", running=True)
def require_label_file(distill: DistillConfig) -> Iterator[Problem]:
    """The file with the teacher's hard labels must exist."""
    path = distill.label_file
    if path is not None and not user_path(path).is_file():
        hint = f"lmtool predict checkpoint=TEACHER input=ROWS output={path}"
        yield Problem("distill.predictions", f"distill.predictions={path}: no such file", hint)


@rule(RunConfig, "distill", "checkpoint", running=True)
def require_one_student_start(distill: DistillConfig, checkpoint: str | None) -> Iterator[Problem]:
    """A student's weights start from a checkpoint or from layers of its teacher, not from both."""
    if distill.starts_from_teacher and checkpoint not in (None, "none"):
        yield Problem(
            "distill.initialize",
            f"checkpoint={checkpoint} and distill.initialize both set the initial weights of the student",
            "set distill.initialize=none, or checkpoint=none",
        )


@rule(RunConfig, "distill", "patience")
def require_trained_heads_for_patience(distill: DistillConfig, patience: int | None) -> Iterator[Problem]:
    """Early stopping compares scores, which need trained heads."""
    if patience is not None and not distill.teaches_heads:
        yield Problem(
            "patience",
            f"patience={patience}: with distill.gold=0 and only terms that compare layers, the heads are not trained, "
            "so the scores that patience compares do not improve",
            "set patience=null, or distill.gold=0.5",
        )


@rule(PretrainConfig, "distill", "objective", "teachers")
def require_objective_of_teachers(
    distill: DistillConfig, objective: ObjectiveConfig, teachers: Saved
) -> Iterator[Problem]:
    """Every teacher was trained with at least one of the student's objectives."""
    for teacher in _specs(distill, teachers):
        if not any(teacher.teaches(member) for member in objective.member_configs()):
            names = ", ".join(member.title for member in objective.member_configs())
            objectives = [member.name for member in teacher.objectives()]
            yield Problem(
                distill.teacher_key,
                f"{distill.teacher_key}={teacher.path} {_trained_for(teacher)}, but the student learns {names}",
                f"set objective={objectives[0]}, or use another teacher" if objectives else _OTHER_TEACHER,
            )


@rule(FinetuneConfig, "distill", "task", "teachers")
def require_task_of_teachers(distill: DistillConfig, task: TaskConfig, teachers: Saved) -> Iterator[Problem]:
    """Every teacher was trained on at least one of the student's tasks, with the same labels."""
    if isinstance(task, GlueConfig) and distill.checkpoints:
        message = f"task={task.name} runs several tasks, and each needs its own teacher"
        yield Problem("distill", message, "name one task, or set task=mixture with distill.teachers=[RUN,RUN2]")
        return
    for teacher in _specs(distill, teachers):
        shared = [member for member in task.member_configs() if teacher.teaches(member)]
        subject = f"{distill.teacher_key}={teacher.path}"
        if not shared:
            names = ", ".join(member.name for member in task.member_configs())
            yield Problem(
                distill.teacher_key,
                f"{subject} {_trained_for(teacher)}, but the student learns task={names}",
                f"lmtool finetune task={names} trains a teacher" if len(task.member_configs()) == 1 else None,
            )
        for member in shared:
            section = teacher.section_for(member)
            if section is not None and teacher.head_for(member) is None:
                yield Problem(distill.teacher_key, f"{subject}: {_other_head(section, member)}", _OTHER_TEACHER)


@rule(PretrainConfig, "distill", "objective", "model", "max_length", "teachers")
@rule(FinetuneConfig, "distill", "task", "model", "max_length", "teachers")
def require_text_format_of_teachers(
    distill: DistillConfig, learned: LearnedConfig, model: ModelConfig, max_length: int, teachers: Saved
) -> Iterator[Problem]:
    """A teacher that reads the student's tokens must have enough positions and the student's text format."""
    for teacher in _token_teachers(distill, learned, teachers):
        other, subject = teacher.model, f"{distill.teacher_key}={teacher.path}"
        if other is None:
            message = f"{subject}: its config.json describes a model that lmtool does not have"
            yield Problem(distill.teacher_key, message, _OTHER_TEACHER)
        elif _text_format(other) != _text_format(model):
            yield Problem(
                distill.teacher_key,
                f"{subject} has model={other.name}, and the student has model={model.name}: their text formats differ, "
                "but the teacher reads the student's batches",
                f"set model={other.name}, or use a teacher of the student's family",
            )
        elif max_length > other.max_positions:
            yield Problem(
                "max_length",
                f"max_length={max_length} is more than the model.max_positions={other.max_positions} of {subject}",
                f"set max_length={other.max_positions}",
            )


@rule(RunConfig, "distill", "model", "teachers")
def require_comparable_layers(distill: DistillConfig, model: ModelConfig, teachers: Saved) -> Iterator[Problem]:
    """The layers that the loss terms compare must exist in both models."""
    for teacher in _specs(distill, teachers):
        if teacher.model is not None:
            yield from distill.refusals_of_pair(ModelPair(model, teacher.model))


@rule(PretrainConfig, "distill", "objective", "model", "tokenizer", "checkpoint", "teachers")
@rule(FinetuneConfig, "distill", "task", "model", "tokenizer", "checkpoint", "teachers")
def require_vocabulary_of_teachers(
    distill: DistillConfig,
    learned: LearnedConfig,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    checkpoint: str | None,
    teachers: Saved,
) -> Iterator[Problem]:
    """A teacher that reads the student's tokens must have the student's vocabulary."""
    random_weights = checkpoint in (None, "none")
    for teacher in _token_teachers(distill, learned, teachers):
        other, vocab_size = teacher.tokenizer, None if teacher.model is None else teacher.model.vocab_size
        subject = f"{distill.teacher_key}={teacher.path}"
        field = differing_tokenizer(tokenizer, other)
        if field is not None:
            actual, required = (f"tokenizer.{field}={getattr(section, field)}" for section in (tokenizer, other))
            hint = "set tokenizer=auto, which uses the teacher's tokenizer"
            message = f"{actual}, but {subject} has {required}: the teacher reads the student's tokens"
            yield Problem("tokenizer", message, hint if random_weights else _OTHER_TEACHER)
        elif vocab_size not in (None, model.vocab_size):
            yield Problem(
                "model.vocab_size",
                f"model.vocab_size={model.vocab_size}, but {subject} has model.vocab_size={vocab_size}: teacher and "
                "student share one vocabulary",
                f"set model.vocab_size={vocab_size}" if random_weights else _OTHER_TEACHER,
            )


def _specs(distill: DistillConfig, teachers: Saved) -> list[TeacherSpec]:
    return [TeacherSpec(path, teachers[path]) for path in distill.checkpoints if path in teachers]


def _token_teachers(distill: DistillConfig, learned: LearnedConfig, teachers: Saved) -> list[TeacherSpec]:
    """Returns the teachers that depend on the student's token ids. A teacher that predicts whole rows of a task may
    have another tokenizer."""
    read_tokens = isinstance(learned, ObjectiveConfig) or _same_texts(distill, learned)
    return _specs(distill, teachers) if read_tokens else []


def _text_format(model: ModelConfig) -> tuple[str, str, str | None]:
    """Returns the properties that determine how a model reads a text."""
    return model.architecture, model.text_format, model.start_role


def _trained_for(teacher: TeacherSpec) -> str:
    tasks, objectives = list(teacher.tasks()), [part.title for part in teacher.objectives()]
    if tasks or objectives:
        return f"was trained for {', '.join(dict.fromkeys([*objectives, *tasks]))}"
    return "is a language model without a head for a task"


def _other_head(section: JsonMapping, task: TaskConfig) -> str:
    """Returns a sentence about the difference between a teacher's head and the head of the student's task."""
    if section.get("kind") != task.kind:
        return (
            f"its task {section.get('name')} is of kind {section.get('kind')}, but the student's is of kind {task.kind}"
        )
    labels, expected = section.get("labels") or (), task.class_names or ()
    return f"its labels are {', '.join(map(str, labels))}, but the student's are {', '.join(expected)}"
