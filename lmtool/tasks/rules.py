"""The rules of tasks: their data, and the length of their texts. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lmtool.config.groups import conf_dir, purpose, yaml_file
from lmtool.config.messages import one_of
from lmtool.data.configs import DataConfig, missing_hub_data
from lmtool.errors import Problem
from lmtool.learners.configs import ObjectiveConfig
from lmtool.models.configs import ModelConfig
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.mixture import TaskObjectiveConfig, TaskTextConfig, tasks_of


def require_task_data(task: TaskConfig) -> Iterator[Problem]:
    """Every task has labeled data."""
    members = task.member_configs()
    for member in (member for member in members if len(members) > 1 and not member.has_data):
        message = f"the member {member.name} of task.members has no data by default"
        yield Problem(f"task.with.{member.name}.path", message, f"set task.with.{member.name}.path=FOLDER")
    if len(members) == 1 and not task.has_data:
        message = f"missing required value: task.path; task {task.name} has no data by default"
        yield Problem("task.path", message, _data_hint(task.name))


def _data_hint(task: str) -> str:
    file, named = yaml_file("task", task), _data_sets(task)
    described = None if file is None else re.fullmatch(r"Your own [\w -]+: (.+)\.", purpose(file))
    form = f" ({described[1]})" if described is not None else ""
    names = f"; or take a data set by its name: {one_of([f'task={name}' for name in named])}" if named else ""
    return f"set task.path=FOLDER, or a file to train on{form}{names}"


def _data_sets(task: str) -> tuple[str, ...]:
    files = {path.stem: path.read_text(encoding="utf-8") for path in sorted((conf_dir() / "task").glob("*.yaml"))}
    builds = re.compile(rf"^defaults: \[{re.escape(task)}[,\]]", re.M)
    has_data = re.compile(r"^(hub|embedded): (?!null)", re.M)
    return tuple(name for name, text in files.items() if builds.search(text) and has_data.search(text))


def require_available_task_data(task: TaskConfig, cache_dir: str, offline: bool) -> Iterator[Problem]:
    """A data set of the hub is in the cache or can be downloaded."""
    for member in task.member_configs():
        if member.path is not None or member.embedded is not None or member.hub is None:
            continue
        reason = missing_hub_data(member.hub, cache_dir, offline)
        if reason is not None:
            key = "task.path" if member is task else f"task.with.{member.name}.path"
            yield Problem(
                key,
                f"task={member.name}: the data set {member.hub} is not in cache_dir={cache_dir}, and {reason}",
                f"set {key}=FOLDER (train and dev files, .tsv .csv or .jsonl); task=pydocs needs no download; "
                f"with a network, `lmtool fetch finetune task={task.name}` downloads all that a run needs",
            )


def require_objective_task_data(objective: ObjectiveConfig) -> Iterator[Problem]:
    """Every task among the objectives has labeled data."""
    for task in (task for task in tasks_of(objective) if not task.has_data):
        message = f"the task {task.name} among the objectives has no data by default"
        single = isinstance(objective, TaskObjectiveConfig)
        key = "objective.task.path" if single else f"objective.with.{task.name}.path"
        yield Problem("objective", message, f"set {key}=FOLDER, or a file to train on")


def require_task_texts(data: DataConfig) -> Iterator[Problem]:
    """A task that is used as a text source must have data."""
    parts = data.task.member_configs() if isinstance(data, TaskTextConfig) else ()
    for task in (task for task in parts if not task.has_data):
        message = f"data.task={task.name} has no data by default"
        yield Problem("data.task.path", message, "set data.task.path=FOLDER, or a file")


def require_length_for_source(task: TaskConfig, model: ModelConfig, max_length: int) -> Iterator[Problem]:
    """A decoder reads the source before the target: both fit into max_length."""
    for member in task.member_configs():
        target = member.longest_target
        if model.architecture == "decoder" and target >= max_length:
            key = "task.target_tokens" if member is task else f"task.with.{member.name}.target_tokens"
            longer = f"max_length={2 * target} or " if 2 * target <= model.max_positions else ""
            yield Problem(
                "max_length",
                f"max_length={max_length} and {key}={target}: model={model.name} reads the source before the "
                "target, which leaves no tokens for the source",
                f"set {longer}{key}={max(2, max_length // 2)}",
            )
