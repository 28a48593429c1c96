"""`lmtool finetune task=glue`: finetunes a model for each task of a suite, if the task has data, prints one table of
scores, and writes the files to submit to the suite's leaderboard.

The runs are subfolders of one folder, named after their tasks. Repeating the command skips finished runs.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from lmtool.config import compose
from lmtool.config.base import JsonObject
from lmtool.config.registry import Choice
from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.learners.base import Inference
from lmtool.reporting.console import Output, print_table
from lmtool.resolver.commands import FinetuneConfig
from lmtool.runs.files import to_json
from lmtool.session.trained import read_trained
from lmtool.system.files import RUNS, replace_bytes, require_no_link, user_path
from lmtool.system.ranks import rank_info
from lmtool.system.signals import Interrupted, pop_late_signals
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.mixture import GlueConfig
from lmtool.tasks.loading import load_task
from lmtool.tasks.mixture import DIAGNOSTIC, FILES, NOT_AVERAGED, folder_of, glue_average, score_of, submission
from lmtool.training.precision import select_device, select_precision

Run = Callable[[FinetuneConfig], JsonObject]
"""A function that trains one run and returns the content of its result.json."""
_TOKENS_PER_PASS = 8192  # maximum number of tokens in a forward pass


def run(config: FinetuneConfig, suite: GlueConfig, finetune: Run) -> JsonObject:
    """Finetunes every task that has data, prints the table of scores, and writes NAME.json and NAME.zip of the suite.
    config: the configuration that all runs have in common. finetune: trains one run. Returns the content of
    NAME.json."""
    output, configs = Output(), dict(_members(suite))
    with_data = {name: task for name, task in configs.items() if task is not None and name != DIAGNOSTIC}
    missing_tasks = [name for name in suite.names if name not in with_data]
    if not with_data:
        raise UserError(
            f"task.path={suite.path} has no folder that is named after a task of {suite.name}",
            f"name the folders after the tasks: {', '.join(suite.names)}",
        )
    root = user_path(config.run_dir) if config.run_dir else RUNS / (config.name or f"{suite.name}-{config.model.name}")
    output.line(
        f"{suite.name}: {', '.join(with_data)} in {root}; without data: {', '.join(missing_tasks) or 'none'}", "bold"
    )
    results = {}
    for name, task in with_data.items():
        if late := pop_late_signals():  # the interrupt came when the previous task was already finishing
            raise Interrupted(late[0])
        require_no_link(root / name)
        results[name] = finetune(_config_of(config, task, root / name))
    scores = {name: score_of(name, result["metrics"]) for name, result in results.items()}
    average = glue_average(scores)
    rows = [
        [name, f"{scores[name]:.4f}", result["metric"], result.get("validation_examples", ""), str(root / name)]
        for name, result in results.items()
    ]
    print_table(output, ["task", "score", "selected by", "rows", "run"], rows, heading=f"{suite.name} · development")
    averaged_names = [name for name in scores if name != NOT_AVERAGED]
    if average is not None:
        excluded = f"; {NOT_AVERAGED} is not included" if NOT_AVERAGED in scores else ""
        missing_note = f"; without data: {', '.join(missing_tasks)}" if missing_tasks else ""
        output.line(f"average {average:.4f} of {', '.join(averaged_names)}{excluded}{missing_note}")
    files = dict(_submissions(config, root, list(with_data), configs.get(DIAGNOSTIC)))
    is_first_rank = rank_info(os.environ).rank == 0
    if is_first_rank:
        _write_zip(root / f"{suite.name}.zip", files)
    missing_files = [file for file in FILES.values() if file not in files]
    output.line(f"{root / suite.name}.zip: {', '.join(files) or 'empty, since no task has a test split'}")
    if missing_files:
        output.line(f"the leaderboard also asks for: {', '.join(missing_files)}")
        if FILES[DIAGNOSTIC, "test"] in missing_files and "mnli" in with_data:
            output.line(f"the diagnostic set would be read from {suite.path}/diagnostic/diagnostic.tsv")
    summary = {
        "average": average,
        "members": averaged_names,
        "scores": scores,
        "without_data": missing_tasks,
        "files": list(files),
    }
    if is_first_rank:
        replace_bytes(root / f"{suite.name}.json", to_json(summary).encode())
    return {"metric": "average", "value": average, **summary}


def _config_of(config: FinetuneConfig, task: TaskConfig, folder: Path) -> FinetuneConfig:
    copied = config.model_copy(update={"task": task, "name": None, "run_dir": str(folder)})
    data = FinetuneConfig.filled(json.loads(copied.model_dump_json()))
    return FinetuneConfig.model_validate_json(json.dumps(data))


def tasks_of_suite(suite: GlueConfig) -> Iterator[TaskConfig]:
    """Yields the tasks of a suite that have data, including its diagnostic set."""
    yield from (task for _, task in _members(suite) if task is not None)


def _members(suite: GlueConfig) -> Iterator[tuple[str, TaskConfig | None]]:
    """None in place of a task's configuration if there is no data."""
    path = None if suite.path is None else user_path(suite.path)
    if path is not None and not path.is_dir():
        raise UserError(
            f"task.path={suite.path} is not a folder",
            f"set task.path= to a folder with subfolders named {', '.join(suite.names)}",
        )
    for name, member in zip((*suite.names, DIAGNOSTIC), (*suite.members, DIAGNOSTIC), strict=True):
        data = member if isinstance(member, dict) else compose.option("task", member)
        folder = None if path is None or data["path"] is not None else folder_of(name, path)
        if path is not None and folder is None and data["path"] is None:
            yield name, None
            continue
        suite_values: JsonObject = {
            "path": None if folder is None else str(folder),
            "train_examples": suite.train_examples,
        }
        suite_values |= {"dropout": suite.dropout} if suite.dropout else {}
        # What the task's own configuration sets takes precedence.
        defaults = {key: value for key, value in suite_values.items() if data[key] is None}
        yield name, cast(TaskConfig, Choice("task", key="kind").validate(data | defaults))


def _submissions(
    config: FinetuneConfig, root: Path, task_names: list[str], diagnostic: TaskConfig | None
) -> Iterator[tuple[str, str]]:
    """The model of MNLI also predicts the diagnostic set."""
    precision = select_precision(config.precision, select_device(config.device))
    for name in task_names:
        trained = read_trained(str(root / name), config.offline, precision)
        assert isinstance(trained.config, FinetuneConfig)
        task = trained.config.task
        test_splits: list[tuple[str, Mapping[str, Rows]]] = [
            (name, load_task(task, config.seed, config.cache_dir, config.offline).test)
        ]
        if name == "mnli" and diagnostic is not None:
            diagnostic_data = load_task(diagnostic, config.seed, config.cache_dir, config.offline, scoring=True)
            test_splits.append((DIAGNOSTIC, diagnostic_data.test))
        responder, inference = trained.learner().responder(), Inference(trained.longest, _TOKENS_PER_PASS, precision)
        for task_name, splits in test_splits:
            for split, rows in splits.items():
                if (task_name, split) in FILES:
                    records = responder.answers(replace(rows, labels=None), inference).records
                    predictions = (record["prediction"] for record in records)
                    yield FILES[task_name, split], submission(task_name, task.class_names, predictions)


def _write_zip(path: Path, files: Mapping[str, str]) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)  # without a time, so that equal content gives equal bytes
    replace_bytes(path, content.getvalue())
