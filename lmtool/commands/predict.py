"""`lmtool predict`: labels texts with a finetuned checkpoint; fills masks or completes texts with a pretrained one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from lmtool.config.base import JsonObject
from lmtool.data.examples import Rows
from lmtool.data.tables import Table
from lmtool.learners.base import BaseLearner, Inference, Responder, no_progress, truncation_warnings
from lmtool.reporting.console import Output
from lmtool.reporting.text import number
from lmtool.resolver.commands import FinetuneConfig, PredictConfig
from lmtool.runs.files import to_json
from lmtool.session.requests import (
    DELIMITERS,
    PAIR,
    Input,
    check_output,
    columns_of,
    file_digest,
    input_portions,
    join_columns,
    requested_input,
    write_output,
)
from lmtool.session.trained import Trained, load_trained, predicting_learner
from lmtool.session.unfinished import UnfinishedOutput, unfinished_output
from lmtool.system.files import user_path
from lmtool.system.terminal import counted
from lmtool.tasks.analysis import with_early_exit
from lmtool.tasks.configs.base import TaskConfig
from lmtool.weights.base import digest

PORTION = 4096
"""Rows that are in memory at a time, if the input is read in portions."""


def run(config: PredictConfig) -> None:
    """Reads texts, predicts, and prints or writes the predictions."""
    check_output(config.output)
    trained, output = load_trained(config), Output()
    task = trained.task(config.task)
    task_config = trained.config.task if isinstance(trained.config, FinetuneConfig) else None
    reading_task = task or task_config
    in_portions = config.output is not None and config.input not in (None, "-")
    if in_portions:  # whether its rows have labels is known from the first portion
        requested = next(input_portions(str(config.input), reading_task, PORTION))
    else:
        requested = requested_input(config, reading_task)
    paired = config.pair is not None if requested.table is None else PAIR in requested.table.columns
    learner = trained.learner(task) if task is not None else predicting_learner(trained, paired)
    learner = with_early_exit(learner, config.checkpoint, config.exit, config.exit_entropy)
    responder = learner.responder()
    rows = _rows(config, requested, responder)

    unlabeled = in_portions and rows.labels is None and not responder.continues
    if unlabeled and (total := _unlabeled_rows(config, responder, reading_task)) is not None:
        _predict_in_portions(config, trained, responder, reading_task, total, output)
        return
    if in_portions:  # scores need all rows
        requested = requested_input(config, reading_task)
        rows = _rows(config, requested, responder)
    table = requested.table
    with output.bar("predicting") if config.output is not None else nullcontext(no_progress) as progress:
        inference = Inference(trained.longest, config.batch_tokens, trained.precision, progress=progress)
        answers = responder.answers(rows, inference)
    for text in truncation_warnings(inference.truncated, len(rows)):
        output.warn(text)
    scores = ", ".join(f"{name} {number(value)}" for name, value in answers.scores.items())
    scores_suffix = f"; {scores} on {counted(answers.labeled_count, 'labeled row')}" if scores else ""
    if scores and task_config is not None and _trained_on(task_config, str(config.input)):
        output.warn(f"the model was trained on rows of {config.input}; lmtool evaluate scores the held-out rows")
    if config.output is None:
        for record in answers.records:
            output.line(responder.line(record))
        if scores_suffix:
            output.line(scores_suffix.removeprefix("; "))
        return
    rows_written = write_output(config.output, _joined(config, table, rows, answers.records, learner, output))
    output.line(f"{counted(rows_written, 'row')}: {config.output}{scores_suffix}")


def _joined(
    config: PredictConfig,
    table: Table | None,
    rows: Rows,
    records: Iterable[JsonObject],
    learner: BaseLearner,
    output: Output,
) -> Iterator[JsonObject]:
    flat = Path(str(config.output)).suffix.lower() in DELIMITERS
    task = learner.config if isinstance(learner.config, TaskConfig) else None
    aliases, further = ({}, ()) if task is None else (task.aliases, task.further_columns)
    records = iter(records)
    if config.probabilities:
        first_record = list(islice(records, 1))
        if first_record and "probabilities" not in first_record[0]:
            output.warn(f"probabilities=true: {learner.config.name} has no class probabilities; none are written")
        records = chain(first_record, records)
    return join_columns(table, records, aliases, {*rows.columns, *further}, config.probabilities, flat)


def _unlabeled_rows(config: PredictConfig, responder: Responder, task: TaskConfig | None) -> int | None:
    """Reads all rows, so that an error in one of them comes before the first prediction. Returns their number, or None
    if a portion has labels."""
    total = 0
    for portion in input_portions(str(config.input), task, PORTION):
        rows = _rows(config, portion, responder)
        if rows.labels is not None:
            return None
        total += len(rows)
    return total


def _predict_in_portions(
    config: PredictConfig, trained: Trained, responder: Responder, task: TaskConfig | None, total: int, output: Output
) -> None:
    file = str(config.input)
    learned = responder.learner.config.model_dump(mode="json")
    determining = [digest(trained.weights.tensors), trained.saved, trained.tokenizer.fingerprint, learned]
    settings = {name: getattr(config, name) for name in ("exit", "exit_entropy", "probabilities", "pair", "output")}
    determining += [file_digest(file), settings, config.batch_tokens, trained.precision.name, PORTION]
    truncated: Counter[str] = Counter()
    with unfinished_output(str(config.output), determining) as unfinished:
        finished = unfinished.lines(PORTION)
        if finished:
            output.line(f"continues after {finished:,} of {counted(total, 'row')}, which were predicted before")
        with output.bar("predicting") as progress:
            first = 0
            for portion in input_portions(file, task, PORTION):
                if first >= finished:
                    bar = partial(_portion_progress, progress, first, len(portion), total)
                    inference = Inference(trained.longest, config.batch_tokens, trained.precision, truncated, bar)
                    rows = _rows(config, portion, responder, first)
                    records = responder.answers(rows, inference).records
                    joined = _joined(config, portion.table, rows, records, responder.learner, output)
                    unfinished.file.write(b"".join(f"{to_json(row, indent=None)}\n".encode() for row in joined))
                    unfinished.file.flush()
                first += len(portion)
        for text in truncation_warnings(truncated, total - finished):
            output.warn(text)
        rows_written = write_output(str(config.output), _saved_rows(unfinished))
    output.line(f"{counted(rows_written, 'row')}: {config.output}")


def _saved_rows(unfinished: UnfinishedOutput) -> Iterator[JsonObject]:
    unfinished.file.seek(0)
    for line in unfinished.file:
        try:
            yield json.loads(line)
        except ValueError as error:
            raise unfinished.damaged() from error


def _portion_progress(
    progress: Callable[[int, int], None], before: int, rows: int, total: int, done: int, examples: int
) -> None:
    progress(before + rows * done // max(examples, 1), total)


def _trained_on(task: TaskConfig, input_path: str) -> bool:
    if task.path is None:
        return False
    rows, file = user_path(task.path).resolve(), user_path(input_path).resolve()
    return file == rows or (file.parent == rows and file.name.split(".")[0] == "train")


def _rows(config: PredictConfig, requested: Input, responder: Responder, first: int = 0) -> Rows:
    if requested.table is not None:
        return responder.read_rows(dict(requested.table.columns), requested.origin)
    columns = columns_of(responder, requested.texts, None if config.pair is None else [config.pair])
    rows = responder.read_rows(columns, requested.origin)
    return replace(rows, ids=[first + number for number in range(len(rows))])
