"""The saved configurations of teachers: their models, tokenizers, tasks and objectives. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtool.config.base import JsonObject
from lmtool.config.registry import Choice, chosen_class
from lmtool.distillation.configs.base import DistillConfig
from lmtool.learners.configs import LearnedConfig, ObjectiveConfig
from lmtool.models.configs import ModelConfig
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.mixture import TaskObjectiveConfig
from lmtool.tasks.labels import LoadedHead, load_head, sections_of
from lmtool.tokenizers.configs import FolderConfig, TokenizerConfig
from lmtool.weights.folders import saved_configuration
from lmtool.weights.task_heads import HEADS


def saved_teacher(path: str, offline: bool) -> JsonObject:
    """Returns a teacher's saved configuration. Raises UserError if it cannot be read."""
    saved = saved_configuration(path, offline)
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
