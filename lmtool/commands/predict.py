"""`lmtool predict`: labels texts with a finetuned checkpoint; fills masks or completes texts with a pretrained one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from lmtool.data.examples import Rows
from lmtool.data.tables import Table
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, Inference, Responder, no_progress
from lmtool.reporting.console import Output
from lmtool.reporting.text import number
from lmtool.resolver.commands import FinetuneConfig, PredictConfig
from lmtool.session.requests import (
    DELIMITERS,
    PAIR,
    TEXT,
    check_output,
    join_columns,
    requested_table,
    requested_texts,
    write_output,
)
from lmtool.session.trained import Trained, load_trained
from lmtool.system.files import user_path
from lmtool.system.terminal import counted
from lmtool.tasks.analysis import with_early_exit
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tasks.labels import LoadedHead
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.saved_model import PAIR_HEADS
from lmtool.weights.task_heads import CLASSIFIER


def run(config: PredictConfig) -> None:
    """Reads texts, predicts, and prints or writes the predictions."""
    check_output(config.output)
    trained, output = load_trained(config), Output()
    task = trained.task(config.task)
    task_config = trained.config.task if isinstance(trained.config, FinetuneConfig) else None
    table = requested_table(config, task or task_config)
    paired = config.pair is not None if table is None else PAIR in table.columns
    learner = trained.learner(task) if task is not None else predicting_learner(trained, paired)
    learner = with_early_exit(learner, config.checkpoint, config.exit, config.exit_entropy)
    responder = learner.responder()
    rows = _rows(config, table, responder)

    def warn(text: str) -> None:
        output.line(f"warning: {text}", "yellow")

    with output.bar("predicting") if config.output is not None else nullcontext(no_progress) as progress:
        inference = Inference(trained.longest, config.batch_tokens, trained.precision, warn, progress)
        answers = responder.answers(rows, inference)
    scores = ", ".join(f"{name} {number(value)}" for name, value in answers.scores.items())
    scores_suffix = f"; {scores} on {counted(answers.labeled_count, 'labeled row')}" if scores else ""
    if scores and task_config is not None and _trained_on(task_config, str(config.input)):
        warn(f"the model was trained on rows of {config.input}; lmtool evaluate scores the held-out rows")
    if config.output is None:
        for record in answers.records:
            output.line(responder.line(record))
        if scores_suffix:
            output.line(scores_suffix.removeprefix("; "))
        return
    flat = Path(config.output).suffix.lower() in DELIMITERS
    aliases = learner.config.aliases if isinstance(learner.config, TaskConfig) else {}
    records = answers.records
    if config.probabilities:
        first_record = list(islice(records, 1))
        if first_record and "probabilities" not in first_record[0]:
            warn(f"probabilities=true: {learner.config.name} has no class probabilities; none are written")
        records = chain(first_record, records)
    rows_written = write_output(config.output, join_columns(table, records, aliases, config.probabilities, flat))
    output.line(f"{counted(rows_written, 'row')}: {config.output}{scores_suffix}")


def _trained_on(task: TaskConfig, input_path: str) -> bool:
    if task.path is None:
        return False
    rows, file = user_path(task.path).resolve(), user_path(input_path).resolve()
    return file == rows or (file.parent == rows and file.name.split(".")[0] == "train")


def predicting_learner(trained: Trained, paired: bool) -> BaseLearner:
    """Returns the learner that predicts. A published classifier reads single texts or pairs; a pretrained model reads
    pairs with its head over pairs. Raises UserError if there is no such head. paired: whether the inputs are pairs."""
    if isinstance(trained.config, FinetuneConfig):
        # The folder of a published classifier does not say whether it reads single texts or pairs.
        if not trained.is_published or trained.saved["task"]["name"] != CLASSIFIER:
            return trained.learner()
        columns = (TEXT, PAIR) if paired else (TEXT,)
        return trained.learner(trained.config.task.model_copy(update={"text": columns}))
    if not paired:
        return trained.learner()
    name = next((name for name in PAIR_HEADS if f"heads.{name}.output.weight" in trained.weights.tensors), None)
    if name is None:
        raise UserError(
            f"checkpoint={trained.checkpoint} has no head over pairs of texts ({' or '.join(PAIR_HEADS)})",
            "omit the second text, or finetune the checkpoint on a task over pairs",
        )
    # Mask tokens typed in the texts are parsed as mask tokens, as when masks are filled.
    tokenizer = Tokenizer.load(trained.weights.folder, parse_special_tokens=True)
    task = ClassificationConfig(name=name, text=(TEXT, PAIR), labels=PAIR_HEADS[name])
    return replace(trained, tokenizer=tokenizer).learner(task, {name: LoadedHead(name, {})})


def _rows(config: PredictConfig, table: Table | None, responder: Responder) -> Rows:
    if table is not None:
        return responder.read_rows(dict(table.columns), table.origin)
    texts, origin = requested_texts(config)
    columns = columns_of(responder, texts, None if config.pair is None else [config.pair])
    return responder.read_rows(columns, origin)


def columns_of(responder: Responder, texts: list[str], pairs: list[str] | None) -> dict[str, list[str]]:
    """Returns texts, and optionally second texts, by the names of the responder's columns. Raises UserError if they do
    not fit."""
    names = ", ".join(responder.columns)
    if len(responder.columns) == 1 and pairs is not None:
        raise UserError(
            f"task={responder.learner.config.name} reads one text, {names}, but pair= is a second one", "omit pair="
        )
    if len(responder.columns) == 2 and pairs is None:
        raise UserError(
            f"task={responder.learner.config.name} reads pairs: {names}",
            'set text="..." pair="...", or input=FILE with both columns',
        )
    return dict(zip(responder.columns, (texts, pairs or []), strict=False))
