"""The rules of distillation: whether a student can learn from its teachers. Imports no torch.

A teacher that reads the student's packed batches needs the student's vocabulary and text format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.distillation.configs.base import DistillConfig, ModelPair
from lmtool.distillation.teacher_configs import TeacherSpec, differing_tokenizer, needs_one_vocabulary, task_of
from lmtool.errors import Problem
from lmtool.learners.configs import LearnedConfig, ObjectiveConfig
from lmtool.models.configs import ModelConfig
from lmtool.system.files import user_path
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.mixture import GlueConfig, MixtureTaskConfig
from lmtool.tasks.configs.sequence import WindowedConfig
from lmtool.tokenizers.configs import TokenizerConfig

Saved = Mapping[str, JsonObject]
"""Each teacher's saved configuration, keyed by its path as typed."""
_OTHER_TEACHER = "use another teacher"


def refuse_conflicts(distill: DistillConfig) -> Iterator[Problem]:
    """No value contradicts another one, or has no effect."""
    yield from distill.conflicts()


def require_fitting_task(distill: DistillConfig, learned: LearnedConfig, model: ModelConfig) -> Iterator[Problem]:
    """The objective or the task, and its model, can be learned in this mode."""
    yield from islice(distill.conflicts_with_learned(learned, model), 1)


def refuse_fsdp(distill: DistillConfig, parallel: str) -> Iterator[Problem]:
    """The mode works with sharded weights, if parallel=fsdp shards them."""
    if parallel == "fsdp":
        yield from islice(distill.conflicts_with_fsdp(), 1)


def refuse_both_orders(distill: DistillConfig, task: TaskConfig, model: ModelConfig) -> Iterator[Problem]:
    """A model that reads both orders of a pair has one output for two texts, which no other model has."""
    for member in task.member_configs() if distill.name != "none" else ():
        if isinstance(member, WindowedConfig) and member.reads_both_orders(model):
            message = f"distill={distill.name}: model={model.name} reads both orders of the texts of {member.name}"
            yield Problem("task.symmetric", message, "set task.symmetric=false, or distill=none")


def refuse_annealed_sampling(distill: DistillConfig, task: TaskConfig) -> Iterator[Problem]:
    """The weights of the losses of distillation are those of the first epoch."""
    if isinstance(task, MixtureTaskConfig) and task.annealed and distill.name != "none":
        message = (
            f"task.sampling=annealed changes the losses' weights in each epoch, those of distill={distill.name} stay"
        )
        yield Problem("task.sampling", message, "set task.sampling=temperature, or distill=none")


def refuse_phases(distill: DistillConfig, phases: Sequence[JsonObject]) -> Iterator[Problem]:
    """A distilled run has no phases: teacher outputs are stored for one configuration of examples."""
    if distill.name != "none" and phases:
        hint = "set phases=[], and start a separate run for each phase from the checkpoint of the previous phase"
        yield Problem("phases", f"distill={distill.name}: a distilled run has no phases", hint)


def refuse_generated_inputs(distill: DistillConfig, model: ModelConfig, learned: LearnedConfig) -> Iterator[Problem]:
    """Teacher and student must read the same texts, so the student must not generate its inputs."""
    if next(distill.conflicts_with_learned(learned, model), None) is not None:
        return  # reported by require_fitting_task
    for member in learned.member_configs() if _same_texts(distill, learned) else ():
        part = task_of(member) or member
        if part.makes_inputs:
            setting, instead = "task.scheduled_sampling", "task.scheduled_sampling.schedule=none"
            if isinstance(part, ObjectiveConfig):
                setting, instead = f"objective={part.name}", "objective=mlm"
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


def require_teachers(distill: DistillConfig) -> Iterator[Problem]:
    """A distillation method that needs a teacher must have one in training."""
    problem = distill.missing_teacher()
    if problem is not None:
        yield problem


def require_label_file(distill: DistillConfig) -> Iterator[Problem]:
    """The file with the teacher's hard labels must exist."""
    path = distill.label_file
    if path is not None and not user_path(path).is_file():
        hint = f"lmtool predict checkpoint=TEACHER input=ROWS output={path}"
        yield Problem("distill.predictions", f"distill.predictions={path}: no such file", hint)


def require_one_student_start(distill: DistillConfig, checkpoint: str | None) -> Iterator[Problem]:
    """A student's weights start from a checkpoint or from layers of its teacher, not from both."""
    if distill.starts_from_teacher and checkpoint not in (None, "none"):
        yield Problem(
            "distill.initialize",
            f"checkpoint={checkpoint} and distill.initialize both set the initial weights of the student",
            "set distill.initialize=none, or checkpoint=none",
        )


def require_trained_heads_for_patience(distill: DistillConfig, patience: int | None) -> Iterator[Problem]:
    """Early stopping compares scores, which need trained heads."""
    if patience is not None and not distill.teaches_heads:
        yield Problem(
            "patience",
            f"patience={patience}: with distill.gold=0 and only terms that compare layers, the heads are not trained, "
            "so the scores that patience compares do not improve",
            "set patience=null, or distill.gold=0.5",
        )


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


def require_comparable_layers(distill: DistillConfig, model: ModelConfig, teachers: Saved) -> Iterator[Problem]:
    """The layers that the loss terms compare must exist in both models."""
    for teacher in _specs(distill, teachers):
        if teacher.model is not None:
            yield from distill.conflicts_of_pair(ModelPair(model, teacher.model))


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
    """A teacher that predicts whole rows of a task may have another tokenizer."""
    read_tokens = isinstance(learned, ObjectiveConfig) or _same_texts(distill, learned)
    return _specs(distill, teachers) if read_tokens else []


def _text_format(model: ModelConfig) -> tuple[str, str, str | None]:
    return model.architecture, model.text_format, model.start_role


def _trained_for(teacher: TeacherSpec) -> str:
    tasks, objectives = list(teacher.tasks()), [part.title for part in teacher.objectives()]
    if tasks or objectives:
        return f"was trained for {', '.join(dict.fromkeys([*objectives, *tasks]))}"
    return "is a language model without a head for a task"


def _other_head(section: JsonMapping, task: TaskConfig) -> str:
    if section.get("kind") != task.kind:
        return (
            f"its task {section.get('name')} is of kind {section.get('kind')}, but the student's is of kind {task.kind}"
        )
    labels, expected = section.get("labels") or (), task.class_names or ()
    return f"its labels are {', '.join(map(str, labels))}, but the student's are {', '.join(expected)}"
