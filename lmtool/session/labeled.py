"""The labeled data that a command trains or scores on, and the head that its checkpoint has for the data's classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import build
from lmtool.data.examples import Rows, SplitData
from lmtool.data.tables import read_table
from lmtool.errors import UserError
from lmtool.resolver.commands import EvaluateConfig, FinetuneConfig
from lmtool.runs.finding import saved_steps
from lmtool.session.open_run import starts_from
from lmtool.session.trained import Trained
from lmtool.system.files import user_path
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.mixture import MixtureTaskConfig
from lmtool.tasks.configs.sequence import SequenceConfig, WindowedConfig
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.labels import with_joined_columns
from lmtool.tasks.labels import LoadedHead, load_head, sections_of
from lmtool.tasks.loading import TaskData, load_task, target_rows
from lmtool.tasks.mixture import MixedData, with_members
from lmtool.weights.folders import hf_folder
from lmtool.weights.saved_model import saved_config
from lmtool.weights.sentence_encoders import sentence_encoder
from lmtool.weights.task_heads import HEADS

LabeledData = TaskData | MixedData


def data_to_learn(config: FinetuneConfig) -> tuple[FinetuneConfig, LabeledData, dict[str, LoadedHead]]:
    """Reads the labeled data of a finetuning run.

    Returns the configuration, the data, and the heads by task. In the configuration, the labels are those of the data,
    and the settings of each head are filled in. A task has a head if the starting checkpoint has one for its labels;
    training continues from that head.
    """
    origin = starts_from(config)
    try:
        saved = {} if origin is None else saved_config(origin, config.offline)
    except UserError:
        is_resumed = config.run_dir is not None and saved_steps(user_path(config.run_dir) / "checkpoints")
        if not is_resumed and config.branch is None:
            raise
        saved = {}  # the run resumes, and its own configuration has the labels and the form of the head
    sections, members, heads = sections_of(saved), dict[str, TaskData](), dict[str, LoadedHead]()
    for member in config.task.member_configs():
        data, head = _task_to_learn(config, member, sections, origin)
        members[member.name] = data
        heads |= {} if head is None else {member.name: head}
    merged = with_members(config.task, members)
    return config.model_copy(update={"task": merged.config}), merged, heads


def _task_to_learn(
    config: FinetuneConfig, task: TaskConfig, sections: Mapping[str, JsonObject], origin: str | None
) -> tuple[TaskData, LoadedHead | None]:
    data = load_task(task, config.seed, config.cache_dir, config.offline)
    if isinstance(task, WindowedConfig) and task.domain is not None:
        target_texts = target_rows(task, config.cache_dir, config.offline)
        data = replace(data, unlabeled=target_texts, metadata={**data.metadata, "target_rows": len(target_texts)})
    task, head = data.config, None
    # The section of a run is named after its task; the section of a published classifier is named after its head.
    section = next((sections[name] for name in (task.name, *HEADS) if name in sections), None)
    if section is not None:
        head = load_head(section, task)
    if head is not None and not task.takes_head(head.settings, config.model):
        head = None
    if head is not None:
        task = task.with_head(head.settings)
    metadata = data.metadata
    if head is None and origin is not None and isinstance(task, SequenceConfig) and task.pooling == "auto":
        task, metadata = _with_published_pooling(task, metadata, origin, config.offline)
    return replace(data, config=task, metadata=metadata), head


def _with_published_pooling(
    task: TaskConfig, metadata: JsonObject, origin: str, offline: bool
) -> tuple[TaskConfig, JsonObject]:
    published = hf_folder(origin, offline)
    encoder = None if published is None else sentence_encoder(published, offline)
    if encoder is None:
        return task, metadata
    fields = encoder.task_fields(origin)
    without = f", without {' and '.join(encoder.extra_steps)}" if encoder.extra_steps else ""
    pooling = f"{fields['pooling']} (the checkpoint's {encoder.file}{without})"
    return task.model_copy(update=fields), {**metadata, "pooling": pooling}


def data_to_score(
    config: EvaluateConfig, trained: Trained, training_config: FinetuneConfig
) -> tuple[LabeledData, dict[str, LoadedHead]]:
    """Reads the data that a checkpoint is scored on; without task=, everything that it was trained for.

    Returns the data together with their tasks, and for each task the checkpoint's head, with its classes in the order
    of the data's labels. Raises UserError if the checkpoint was not trained for the data's task.
    """
    task, trained_task = config.task or training_config.task, training_config.task
    sections = sections_of(trained.saved)
    if isinstance(task, MixtureTaskConfig) and isinstance(trained_task, MixtureTaskConfig):
        parts = {member.name: member for member in trained_task.member_configs()}
        pairs = [(member, parts.get(member.name)) for member in task.member_configs()]
    else:
        members_trained = trained_task.member_configs()
        matching = [part for part in members_trained if part.name == task.name or task.differs_only_in_data(part)]
        only_task = trained_task if len(members_trained) == 1 else None
        pairs = [(task, matching[0] if matching else only_task)]
    members, heads = dict[str, TaskData](), dict[str, LoadedHead]()
    for member, trained_member in pairs:
        if trained_member is None:
            names = ", ".join(member.name for member in trained_task.member_configs())
            raise UserError(
                f"checkpoint={config.checkpoint} was trained for {names}, not for task={member.name}",
                "omit task=, or name one of these tasks",
            )
        data, heads[member.name] = _task_to_score(
            config, trained, training_config, member, trained_member, sections[trained_member.name]
        )
        members[member.name] = data
    merged = with_members(task, members)
    if isinstance(merged, MixedData) and isinstance(trained_task, MixtureTaskConfig):
        # Members are weighted by their counts of training rows, as in training.
        merged = replace(merged, config=merged.config.model_copy(update={"rows": trained_task.rows}))
    return merged, heads


def _task_to_score(
    config: EvaluateConfig,
    trained: Trained,
    training_config: FinetuneConfig,
    task: TaskConfig,
    trained_task: TaskConfig,
    section: JsonMapping,
) -> tuple[TaskData, LoadedHead]:
    checkpoint = config.checkpoint
    if trained.is_published:
        task = _labels_of_data(task, trained_task, checkpoint)
    elif not task.differs_only_in_data(trained_task):
        raise UserError(
            f"checkpoint={checkpoint} was trained for task={trained_task.name}, which reads "
            f"{', '.join(trained_task.text)}; task={task.name} reads {', '.join(task.text)}",
            "omit task=, and set task.path= to score other data",
        )
    other_data = task.path is not None and task.path != trained_task.path
    data = load_task(task, training_config.seed, config.cache_dir, config.offline, scoring=other_data)
    # Classes that were read from the data may be a subset of the head's.
    head = load_head(section, data.config, partial=task.class_names is None)
    if head is None:
        raise UserError(
            f"checkpoint={checkpoint} predicts {_target_text(trained_task)}, but task={task.name} has "
            f"{_target_text(data.config)}",
            "name the task's classes as the checkpoint does, in the order of their numbers in the files: "
            "task=custom task.kind=classification task.labels=[...]",
        )
    task_config = data.config.with_head(head.settings)
    if head.labels is not None:
        if task_config.needs_two_classes and len(head.labels) != 2:
            raise UserError(
                f"task.metrics names f1, which needs two classes; checkpoint={checkpoint} predicts "
                f"{_target_text(trained_task)}",
                "use macro_f1, accuracy or matthews",
            )
        task_config = task_config.model_copy(update={"labels": head.labels})
    return replace(data, config=task_config), head


def _labels_of_data(task: TaskConfig, known: TaskConfig, checkpoint: str) -> TaskConfig:
    """Labels in a file may be numbers, whose meaning the file defines: the checkpoint's classes cannot be used."""
    if not task.has_data:
        raise UserError(
            f"checkpoint={checkpoint} is a published classifier, whose configuration names no data to score it on",
            "set task=NAME task.path=FOLDER, or task=custom task.kind=classification task.path=FOLDER",
        )
    is_same_task = task.name == known.name and task.class_names == known.class_names
    return task.model_copy(update={"labels": None}) if is_same_task and task.has_classes else task


def _target_text(task: TaskConfig) -> str:
    labels = task.class_names
    return f"the classes {', '.join(labels)}" if labels else "a number"


def relabel(config: FinetuneConfig, path: str, data: SplitData) -> tuple[SplitData, JsonObject]:
    """Replaces the labels of training rows by the predictions in a file that `lmtool predict output=` wrote, or the
    predictions.jsonl of a run. Also returns metadata for the first screen. Raises UserError if the file has no
    prediction for some training rows, or several."""
    task = config.task
    rows, predictions = data.rows[task.name], predictions_of(task, path)
    by_key, by_text = _indices(predictions)
    indices = [by_key.get(key, by_text.get(key[1], -1)) for key in _keys(rows)]
    missing = [number for number, index in enumerate(indices) if index < 0]
    if missing:
        file, line = rows.origin[missing[0]]
        raise UserError(
            f"distill.predictions={path} has predictions for only {len(rows) - len(missing):,} of {len(rows):,} "
            f"training rows: the file has no prediction, or several, for the texts of {file}:{line}",
            f"lmtool predict checkpoint=TEACHER input={file} output={Path(path).stem}_train.jsonl",
        )
    labeled = replace(rows, labels=predictions.labels_at(np.array(indices)))
    metadata = {"predictions": f"{len(rows):,} of {path}"}
    unused = len(predictions) - len(set(indices))
    if unused:
        metadata["predictions of other rows"] = f"{unused:,}, not used"
    return replace(data, rows={**data.rows, task.name: labeled}), metadata


def predictions_of(task: TaskConfig, path: str) -> Rows:
    """Reads a file of predictions as rows of a task, with the predictions as labels. Raises UserError, with file and
    line, if a prediction is not a label of the task."""
    table = read_table(user_path(path))
    columns = with_joined_columns(task, task.with_aliases(table.columns), table.origin)
    missing = [name for name in ("prediction", *task.reads) if name not in columns]
    if missing:
        raise UserError(
            f"distill.predictions={path} has no column {missing[0]}; it has {', '.join(columns)}",
            "use the file that lmtool predict output= writes for the task's rows",
        )
    kind: TaskKind = build(task)
    labels = kind.labels_of_predictions(columns)
    inputs = {name: values for name, values in columns.items() if name not in ("gold", "prediction", "score", "split")}
    return kind.rows({**inputs, task.label: labels}, table.origin, True)


def _keys(rows: Rows) -> list[tuple[str, str]]:
    texts = zip(*rows.columns.values(), strict=True)
    return [(str(number), json.dumps(values)) for number, values in zip(rows.ids, texts, strict=True)]


def _indices(predictions: Rows) -> tuple[Mapping[tuple[str, str], int], Mapping[str, int]]:
    """By id and texts, and by texts alone: there -1 for texts with different predictions."""
    keys = _keys(predictions)
    assert predictions.labels is not None
    labels = [repr(label) for label in predictions.labels]
    by_text: dict[str, int] = {}
    for index, (_, text) in enumerate(keys):
        first = by_text.setdefault(text, index)
        if first >= 0 and labels[first] != labels[index]:
            by_text[text] = -1
    return {key: index for index, key in enumerate(keys)}, by_text
