"""The labelled data of a command, and the head that its checkpoint has for their classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmtool.config.checkpoint import saved_steps
from lmtool.errors import UserError
from lmtool.resolver.schema.run import EvaluateConfig, FinetuneConfig
from lmtool.session.start import starts_from
from lmtool.session.trained import Trained
from lmtool.tasks.configs import MixtureTaskConfig, TaskConfig
from lmtool.tasks.configs.sequence import SequenceConfig
from lmtool.tasks.labels import TakenHead, sections_of, taken_head
from lmtool.tasks.loading import TaskData, load_task, target_rows
from lmtool.tasks.mixture import MixedData, with_members
from lmtool.weights.folders import published_folder
from lmtool.weights.load import saved_config
from lmtool.weights.sentence_encoders import sentence_encoder
from lmtool.weights.task_heads import HEADS

LabelledData = TaskData | MixedData


def data_to_learn(config: FinetuneConfig) -> tuple[FinetuneConfig, LabelledData, dict[str, TakenHead]]:
    """The configuration with its task as it is learned: with the labels as found, for a checkpoint must know their
    names, and the form of its head; so are the members of a mixture. The data; and by task the head that is learned
    further, where the checkpoint that the run starts from has one for these labels."""
    origin = starts_from(config)
    try:
        saved = {} if origin is None else saved_config(origin, config.offline)
    except UserError:
        resumes = config.run_dir is not None and saved_steps(Path(config.run_dir) / "checkpoints")
        if not resumes and config.branch is None:
            raise
        saved = {}  # the run resumes: its own configuration has the labels, and the form of the head
    sections, members, heads = sections_of(saved), dict[str, TaskData](), dict[str, TakenHead]()
    for part in config.task.parts():
        data, taken = _to_learn(config, part, sections, origin)
        members[part.name] = data
        heads |= {} if taken is None else {part.name: taken}
    joined = with_members(config.task, members)
    return config.model_copy(update={"task": joined.config}), joined, heads


def _to_learn(
    config: FinetuneConfig, task: TaskConfig, sections: Mapping[str, dict[str, Any]], origin: str | None
) -> tuple[TaskData, TakenHead | None]:
    """The data of one task, and the head that it takes from a checkpoint with tasks of these sections."""
    data = load_task(task, config.seed, config.cache_dir, config.offline)
    if task.adapts is not None:
        others = target_rows(task, config.cache_dir, config.offline)
        data = replace(data, unlabelled=others, facts={**data.facts, "target_rows": len(others)})
    task, taken = data.config, None
    # A published classifier's task has no name; a run's head is its task's.
    section = next((sections[name] for name in (task.name, *HEADS) if name in sections), None)
    if section is not None:
        taken = taken_head(section, task)
    if taken is not None and not task.takes_head(taken.form, config.model):
        taken = None
    elif taken is not None:
        task = task.with_head(taken.form)
    facts = data.facts
    if taken is None and origin is not None and isinstance(task, SequenceConfig) and task.pooling == "auto":
        task, facts = _pooled_as_published(task, facts, origin, config.offline)
    return replace(data, config=task, facts=facts), taken


def _pooled_as_published(
    task: TaskConfig, facts: dict[str, Any], origin: str, offline: bool
) -> tuple[TaskConfig, dict[str, Any]]:
    """The task and its facts, with the pooling of the sentence encoder that it starts from, where it is one."""
    published = published_folder(origin, offline)
    encoder = None if published is None else sentence_encoder(published, offline)
    if encoder is None:
        return task, facts
    fields = encoder.task_fields(origin)
    without = f", without {' and '.join(encoder.further)}" if encoder.further else ""
    said = f"{fields['pooling']} (the checkpoint's {encoder.file}{without})"
    return task.model_copy(update=fields), {**facts, "pooling": said}


def data_to_score(
    config: EvaluateConfig, trained: Trained, before: FinetuneConfig
) -> tuple[LabelledData, dict[str, TakenHead]]:
    """The data, their task as it is scored, and by task the checkpoint's head under the labels of the data. UserError
    where the two do not go together. Of a mixture's checkpoint all members are scored, or the one that is named."""
    task, known, sections = config.task or before.task, before.task, sections_of(trained.saved)
    if isinstance(task, MixtureTaskConfig) and isinstance(known, MixtureTaskConfig):
        parts = {part.name: part for part in known.parts()}
        pairs = [(part, parts.get(part.name)) for part in task.parts()]
    else:
        asked = [part for part in known.parts() if part.name == task.name or task.same_question(part)]
        alone = known if len(known.parts()) == 1 else None
        pairs = [(task, asked[0] if asked else alone)]
    members, heads = dict[str, TaskData](), dict[str, TakenHead]()
    for part, own in pairs:
        if own is None:
            names = ", ".join(part.name for part in known.parts())
            raise UserError(
                f"checkpoint={config.checkpoint} was trained for {names}; not task={part.name}",
                "leave task= out, or name one of these",
            )
        data, heads[part.name] = _to_score(config, trained, before, part, own, sections[own.name])
        members[part.name] = data
    joined = with_members(task, members)
    if isinstance(joined, MixedData) and isinstance(known, MixtureTaskConfig):
        # The weights of the losses are those of the training.
        joined = replace(joined, config=joined.config.model_copy(update={"rows": known.rows}))
    return joined, heads


def _to_score(
    config: EvaluateConfig,
    trained: Trained,
    before: FinetuneConfig,
    task: TaskConfig,
    known: TaskConfig,
    section: Mapping[str, Any],
) -> tuple[TaskData, TakenHead]:
    """The same of one task. known: what the checkpoint was trained for; section: the same as saved."""
    checkpoint = config.checkpoint
    if trained.foreign:
        task = _own_labels(task, known, checkpoint)
    elif not task.same_question(known):
        reads = f"task={known.name}, which reads {', '.join(known.text)}"
        raise UserError(
            f"checkpoint={checkpoint} was trained for {reads}; not task={task.name} on {', '.join(task.text)}",
            "leave task= out, and give other data with task.path=",
        )
    others = task.path is not None and task.path != known.path
    data = load_task(task, before.seed, config.cache_dir, config.offline, scoring=others)
    taken = taken_head(section, data.config, partial=task.class_names is None)
    if taken is None:
        raise UserError(
            f"checkpoint={checkpoint} gives {_predicted(known)}; task={task.name} has {_predicted(data.config)}",
            "name the task's classes as the checkpoint does, in the order of their numbers in the files: "
            "task=custom task.kind=classification task.labels=[...]",
        )
    scored = data.config.with_head(taken.form)
    if taken.labels is not None:
        if scored.needs_two_classes and len(taken.labels) != 2:
            raise UserError(
                f"task.metrics names f1, which is of two classes; checkpoint={checkpoint} gives {_predicted(known)}",
                "take macro_f1, accuracy or matthews",
            )
        scored = scored.model_copy(update={"labels": taken.labels})
    return replace(data, config=scored), taken


def _own_labels(task: TaskConfig, known: TaskConfig, checkpoint: str) -> TaskConfig:
    """The task whose data a published classifier is scored on. Its classes are those of the data: the checkpoint's say
    nothing of the numbers in a file. UserError where no data are named."""
    if not task.has_data:
        raise UserError(
            f"checkpoint={checkpoint} is a published classifier and names no data to score it on",
            "give task=NAME task.path=FOLDER, or task=custom task.kind=classification task.path=FOLDER",
        )
    same = task.name == known.name and task.class_names == known.class_names
    return task.model_copy(update={"labels": None}) if same and task.has_classes else task


def _predicted(task: TaskConfig) -> str:
    """What a task predicts, for messages."""
    labels = task.class_names
    return f"the classes {', '.join(labels)}" if labels else "a number"
