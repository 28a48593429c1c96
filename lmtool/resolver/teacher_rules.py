"""Rules of distillation: whether a mode, its terms and its teachers can teach the student.

A teacher that runs on the student's packed batches has the student's vocabulary, and lays a text out in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmtool.config.needs import refusal
from lmtool.config.rules import rule
from lmtool.distillation.configs import DistillConfig
from lmtool.distillation.configs.base import ModelPair
from lmtool.errors import Problem
from lmtool.learners.configs import LearnedConfig, ObjectiveConfig
from lmtool.models.configs import ModelConfig
from lmtool.resolver.matcher import fitting_objectives
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.resolver.teachers import Saved, TeacherSpec, differing_tokenizer, one_vocabulary, task_of
from lmtool.tasks.configs import GlueConfig, TaskConfig
from lmtool.tokenizers.configs import TokenizerConfig


@rule(PretrainConfig, "distill", "model", "objective")
def distillation_fits(distill: DistillConfig, model: ModelConfig, objective: ObjectiveConfig) -> Iterator[Problem]:
    """What a student learns from a teacher beside, it reads as its teacher does."""
    yield from _other_inputs(distill, model, objective)


@rule(FinetuneConfig, "distill", "model", "task")
def distillation_fits_task(distill: DistillConfig, model: ModelConfig, task: TaskConfig) -> Iterator[Problem]:
    """So with a task."""
    yield from _other_inputs(distill, model, task)


def _other_inputs(distill: DistillConfig, model: ModelConfig, learned: LearnedConfig) -> Iterator[Problem]:
    if refusal(distill, learned=learned, model=model) is not None:
        return  # told already
    for part in learned.parts() if distill.same_batches or one_vocabulary(distill, learned) else ():
        learns = task_of(part) or part
        if learns.makes_inputs:
            written, instead = "task.scheduled_sampling", "task.scheduled_sampling.schedule=none"
            if isinstance(learns, ObjectiveConfig):
                written, instead = f"objective={learns.name}", f"objective={_without_inputs(model)}"
            yield Problem(
                "distill",
                f"distill={distill.name}: with {written} a student makes a part of what it reads as it learns, and its "
                "teacher would read other texts",
                f"set {instead}, or distill=none",
            )
            return


@rule(RunConfig, "distill", running=True)
def teachers_are_named(distill: DistillConfig) -> Iterator[Problem]:
    """What learns from a teacher has one. A trained student is read without it."""
    problem = distill.untaught()
    if problem is not None:
        yield problem


@rule(RunConfig, "distill", running=True)
def predictions_are_there(distill: DistillConfig) -> Iterator[Problem]:
    """So have hard labels of a file."""
    path = distill.label_file
    if path is not None and not Path(path).expanduser().is_file():
        hint = f"lmtool predict checkpoint=TEACHER input=ROWS output={path}"
        yield Problem("distill.predictions", f"distill.predictions={path}: no such file", hint)


@rule(RunConfig, "distill", "checkpoint", running=True)
def a_student_starts_from_one(distill: DistillConfig, checkpoint: str | None) -> Iterator[Problem]:
    """From a checkpoint, or from layers of its teacher. A trained student is read from its own."""
    if distill.starts_from_teacher and checkpoint not in (None, "none"):
        yield Problem(
            "distill.initialize",
            f"checkpoint={checkpoint} and distill.initialize both say what the student starts from",
            "set distill.initialize=none, or checkpoint=none",
        )


@rule(RunConfig, "distill", "patience")
def scores_mean_something(distill: DistillConfig, patience: int | None) -> Iterator[Problem]:
    """A run ends early by scores of heads that learn."""
    if patience is not None and not distill.teaches_heads:
        yield Problem(
            "patience",
            f"patience={patience}: with distill.gold=0 and terms between layers alone heads learn nothing, and their "
            "scores do not say when to stop",
            "set patience=null, or distill.gold=0.5",
        )


@rule(PretrainConfig, "distill", "objective", "teachers")
def teachers_know_the_objective(
    distill: DistillConfig, objective: ObjectiveConfig, teachers: Saved
) -> Iterator[Problem]:
    """Every teacher was trained for something that the student learns."""
    for teacher in _specs(distill, teachers):
        if not any(teacher.teaches(part) for part in objective.parts()):
            names = ", ".join(part.title for part in objective.parts())
            yield Problem(
                distill.teacher_key,
                f"{distill.teacher_key}={teacher.path} {_trained_for(teacher)}, and the student learns {names}",
                _other_learned(teacher, "pretrain"),
            )


@rule(FinetuneConfig, "distill", "task", "teachers")
def teachers_know_the_task(distill: DistillConfig, task: TaskConfig, teachers: Saved) -> Iterator[Problem]:
    """Every teacher was trained for a task of the student's, with the same labels."""
    if isinstance(task, GlueConfig) and distill.checkpoints:
        message = f"task={task.name} is several runs, each with a teacher of its own"
        yield Problem("distill", message, "name one task, or task=mixture with distill.teachers=[RUN,RUN2]")
        return
    for teacher in _specs(distill, teachers):
        shared = [part for part in task.parts() if teacher.teaches(part)]
        if not shared:
            names = ", ".join(part.name for part in task.parts())
            yield Problem(
                distill.teacher_key,
                f"{distill.teacher_key}={teacher.path} {_trained_for(teacher)}, and the student learns task={names}",
                f"lmtool finetune task={names} trains a teacher" if len(task.parts()) == 1 else None,
            )
        for part in shared:
            section = teacher.section_for(part)
            if section is not None and teacher.head_for(part) is None:
                yield Problem(
                    distill.teacher_key, f"{distill.teacher_key}={teacher.path}: {_other_head(section, part)}", _ANOTHER
                )


@rule(RunConfig, "distill", "model", "max_length", "teachers")
def teachers_read_the_batches(
    distill: DistillConfig, model: ModelConfig, max_length: int, teachers: Saved
) -> Iterator[Problem]:
    """A teacher that runs on the student's batches has a position for every token, and reads texts as the student."""
    if distill.same_batches:
        yield from _unreadable(distill, model, max_length, teachers)


def _unreadable(distill: DistillConfig, model: ModelConfig, max_length: int, teachers: Saved) -> Iterator[Problem]:
    for teacher in _specs(distill, teachers):
        theirs, named = teacher.model, f"{distill.teacher_key}={teacher.path}"
        if theirs is None:
            yield Problem(distill.teacher_key, f"{named}: the model in its config.json is none of lmtool's", _ANOTHER)
        elif _reading(theirs) != _reading(model):
            yield Problem(
                distill.teacher_key,
                f"{named} is a model={theirs.name} and the student a model={model.name}: they lay out a text in "
                "different ways, and the teacher reads the student's batches",
                f"use a model= of the teacher's family, such as model={theirs.name}, or a teacher of the student's",
            )
        elif max_length > theirs.max_positions:
            yield Problem(
                "max_length",
                f"max_length={max_length} is more than the model.max_positions={theirs.max_positions} of {named}",
                f"set max_length={theirs.max_positions}",
            )


@rule(RunConfig, "distill", "model", "teachers")
def teachers_fit_model(distill: DistillConfig, model: ModelConfig, teachers: Saved) -> Iterator[Problem]:
    """What a student learns from a teacher's model can be learned with its own."""
    for teacher in _specs(distill, teachers):
        if teacher.model is not None:
            yield from distill.refusals_of_pair(ModelPair(model, teacher.model))


@rule(RunConfig, "distill", "model", "tokenizer", "checkpoint", "teachers")
def teachers_share_the_vocabulary(
    distill: DistillConfig, model: ModelConfig, tokenizer: TokenizerConfig, checkpoint: str | None, teachers: Saved
) -> Iterator[Problem]:
    """A teacher that runs on the student's batches has the student's vocabulary."""
    if distill.same_batches:
        yield from _other_vocabulary(distill, model, tokenizer, checkpoint, teachers)


@rule(PretrainConfig, "distill", "model", "max_length", "tokenizer", "checkpoint", "teachers")
def stored_teachers_read_the_text(
    distill: DistillConfig,
    model: ModelConfig,
    max_length: int,
    tokenizer: TokenizerConfig,
    checkpoint: str | None,
    teachers: Saved,
) -> Iterator[Problem]:
    """What is stored of a teacher is of tokens."""
    if not distill.same_batches:
        yield from _unreadable(distill, model, max_length, teachers)
        yield from _other_vocabulary(distill, model, tokenizer, checkpoint, teachers)


@rule(FinetuneConfig, "distill", "task", "model", "max_length", "tokenizer", "checkpoint", "teachers")
def stored_teachers_read_the_rows(
    distill: DistillConfig,
    task: TaskConfig,
    model: ModelConfig,
    max_length: int,
    tokenizer: TokenizerConfig,
    checkpoint: str | None,
    teachers: Saved,
) -> Iterator[Problem]:
    """Unless the task predicts rows, which a teacher reads with a tokenizer of its own."""
    if not distill.same_batches and one_vocabulary(distill, task):
        yield from _unreadable(distill, model, max_length, teachers)
        yield from _other_vocabulary(distill, model, tokenizer, checkpoint, teachers)


def _other_vocabulary(
    distill: DistillConfig, model: ModelConfig, tokenizer: TokenizerConfig, checkpoint: str | None, teachers: Saved
) -> Iterator[Problem]:
    starts_anew = checkpoint in (None, "none")
    for teacher in _specs(distill, teachers):
        theirs, rows = teacher.tokenizer, None if teacher.model is None else teacher.model.vocab_size
        named = f"{distill.teacher_key}={teacher.path}"
        differing = differing_tokenizer(tokenizer, theirs)
        if differing is not None:
            ours, own = getattr(tokenizer, differing), getattr(theirs, differing)
            message = f"tokenizer.{differing}={ours}, but {named} has tokenizer.{differing}={own}"
            free = "set tokenizer=auto, which takes the teacher's tokenizer"
            yield Problem("tokenizer", f"{message}: it reads the student's tokens", free if starts_anew else _ANOTHER)
        elif rows not in (None, model.vocab_size):
            yield Problem(
                "model.vocab_size",
                f"model.vocab_size={model.vocab_size}, but {named} has model.vocab_size={rows}: both have a row for "
                "each token of one vocabulary",
                f"set model.vocab_size={rows}" if starts_anew else _ANOTHER,
            )


_ANOTHER = "use another teacher"


def _without_inputs(model: ModelConfig) -> str:
    """The nearest objective that goes with a model and makes no part of what it reads."""
    fitting = fitting_objectives(model, None)
    return next((objective.name for objective in fitting if not objective.makes_inputs), "mlm")


def _specs(distill: DistillConfig, teachers: Saved) -> list[TeacherSpec]:
    return [TeacherSpec(path, teachers[path]) for path in distill.checkpoints if path in teachers]


def _reading(model: ModelConfig) -> tuple[str, str, str | None]:
    """What decides how a batch is laid out for a model."""
    return model.architecture, model.text_format, model.start_role


def _trained_for(teacher: TeacherSpec) -> str:
    tasks, objectives = list(teacher.tasks()), [part.title for part in teacher.objectives()]
    if tasks or objectives:
        return f"was trained for {', '.join(dict.fromkeys([*objectives, *tasks]))}"
    return "is a language model without a head for a task"


def _other_learned(teacher: TeacherSpec, verb: str) -> str:
    objectives = [part.name for part in teacher.objectives()]
    return f"set objective={objectives[0]}, or another teacher" if objectives else _ANOTHER


def _other_head(section: Mapping[str, Any], task: TaskConfig) -> str:
    """How a head of the same name differs from what a student's task needs."""
    if section.get("kind") != task.kind:
        return f"its task {section.get('name')} is of kind {section.get('kind')}, the student's of kind {task.kind}"
    theirs, ours = section.get("labels") or (), task.class_names or ()
    return f"its labels are {', '.join(map(str, theirs))}, the student's {', '.join(ours)}"
