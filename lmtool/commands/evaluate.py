"""`lmtool evaluate`: score a checkpoint on the data it was trained for, or on other data of the same kind; beside
another one, with the difference on the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.commands.configs import EvaluateConfig, FinetuneConfig, PretrainConfig
from lmtool.commands.held_out import HeldOutSplits
from lmtool.commands.labelled import data_to_score
from lmtool.commands.predictions import check_output, write_output
from lmtool.commands.trained import Trained, load_trained, read_trained
from lmtool.config.tables import build
from lmtool.data.split import SplitData
from lmtool.data.store import open_store
from lmtool.errors import UserError
from lmtool.learners.evaluation import SplitEvaluations
from lmtool.reporting.console import Output
from lmtool.reporting.evaluation import print_difference, print_evaluation, write_evaluation
from lmtool.reporting.table import print_table
from lmtool.tasks.analysis import analysis, difference
from lmtool.tasks.kinds.learner import TaskEvaluation
from lmtool.tasks.members import read_tasks, rows_of
from lmtool.tokenizers.tokenizer import Tokenizer


def run(config: EvaluateConfig, overrides: list[str]) -> dict[str, Any]:
    """Score, print, and write predictions and a report where these are named. Returns the metrics."""
    check_output(config.output)
    trained, output = load_trained(config), Output()
    if isinstance(trained.config, PretrainConfig):
        return _on_text(config, trained, trained.config, output)
    scored = _on_task(config, trained, output)
    other = None if config.against is None else _on_task(config, _against(config, trained), output, config.against)
    if config.output is not None:
        write_output(config.output, scored.evaluations.records())
    details: dict[str, Any] = {"checkpoint": config.checkpoint, "task": scored.title, "splits": {}}
    for split, evaluation in scored.splits().items():
        of_split = details["splits"][split] = analysis(evaluation)
        print_evaluation(output, f"{config.checkpoint} · {scored.title}", split, of_split, scored.constant)
        if other is not None and split in other.splits():
            gap = difference(evaluation, other.splits()[split])
            of_split["difference"] = {"against": config.against, **gap}
            print_difference(output, config.checkpoint, str(config.against), evaluation.scores, gap)
    if config.report is not None:
        folder = Path(config.report).expanduser()
        write_output(str(folder / "predictions.jsonl"), scored.evaluations.records(), key="report")
        write_evaluation(folder, details)
        output.line(f"evaluation.json, predictions.jsonl and plots: {folder}")
    return scored.evaluations.metrics()


@dataclass(frozen=True)
class _Scored:
    """A checkpoint on a task's splits. constant: the baseline, as `BaseLearner.baseline` gives it."""

    title: str
    evaluations: SplitEvaluations
    constant: dict[str, Any]

    def splits(self) -> dict[str, TaskEvaluation]:
        return {
            split: evaluation
            for split, evaluation in self.evaluations.splits.items()
            if isinstance(evaluation, TaskEvaluation)
        }


def _on_task(config: EvaluateConfig, trained: Trained, output: Output, checkpoint: str | None = None) -> _Scored:
    """A finetuned checkpoint on its task. checkpoint: another one than the configuration's."""
    before = trained.config
    if not isinstance(before, FinetuneConfig):
        raise UserError(f"against={checkpoint} was trained for no task", "name a checkpoint of lmtool finetune")
    if checkpoint is not None:
        config = config.model_copy(update={"checkpoint": checkpoint})
    task, taken = data_to_score(config, trained, before)
    if taken.note:
        output.line(f"labels: {taken.note}")
    data, learner = task.splits(), trained.learner(task.config, taken)
    held_out = HeldOutSplits(learner, data, before.max_length, config.batch_tokens, before.seed)
    return _Scored(task.config.name, held_out.score(trained.precision), held_out.baseline(data["train"]))


def _against(config: EvaluateConfig, trained: Trained) -> Trained:
    return read_trained(str(config.against), config.offline, trained.precision)


def _on_text(config: EvaluateConfig, trained: Trained, before: PretrainConfig, output: Output) -> dict[str, Any]:
    """A pretrained checkpoint on text."""
    if config.against is not None or config.report is not None:
        key = "report" if config.against is None else "against"
        raise UserError(
            f"{key}= is for tasks; checkpoint={config.checkpoint} was trained on text", "evaluate each by itself"
        )
    data, title = _text(config, before, trained.tokenizer)
    held_out = HeldOutSplits(trained.learner(), data, before.max_length, config.batch_tokens, before.seed)
    evaluations = held_out.score(trained.precision)
    if config.output is not None:
        write_output(config.output, evaluations.records())
    metrics = evaluations.metrics()
    rows = [[name, f"{value:.4f}"] for name, value in metrics.items()]
    print_table(output, ["metric", "value"], rows, heading=f"{config.checkpoint} · {title}")
    for warning in evaluations.warnings:
        output.line(f"warning: {warning}", "yellow")
    return metrics


def _text(config: EvaluateConfig, before: PretrainConfig, tokenizer: Tokenizer) -> tuple[dict[str, SplitData], str]:
    """The validation text of what the checkpoint was trained on, or of other data; and what to call it."""
    data = config.data or before.data
    source = build(data, config.cache_dir)
    _, tasks = read_tasks(before.objective, before.seed, config.cache_dir, config.offline)
    store = open_store(source, "validation", tokenizer, config.cache_dir, Output().stage)
    split = SplitData("validation", store, data.documents, rows_of(tasks, "validation"))
    return {"validation": split}, f"validation text of data={data.name}"
