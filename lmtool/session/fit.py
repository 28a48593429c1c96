"""Trains and scores a session and writes the results of its run: the common part of `lmtool pretrain` and `lmtool
finetune`."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from torch import nn

from lmtool.config.base import JsonObject
from lmtool.config.registry import command_line
from lmtool.costs.memory_of_run import TrainingConfig, require_memory
from lmtool.data.loader import PackedLoader
from lmtool.data.phases import PhasedLoader
from lmtool.errors import UserError
from lmtool.learners.baseline import headline_errors, headline_terms
from lmtool.learners.rules import reads_lanes
from lmtool.reporting.run_files import Baseline
from lmtool.reporting.screens import ProgressDisplay
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig
from lmtool.runs.checkpoints import read_weights
from lmtool.runs.finding import read_state, removable_optimizers, remove_optimizer
from lmtool.session import screens
from lmtool.session.companions import Companion, companions_of
from lmtool.session.open_run import OpenRun, open_run
from lmtool.session.preparation import FinetunePreparation, PretrainPreparation
from lmtool.session.provenance import begin_branch
from lmtool.session.session import Session
from lmtool.system.signals import ignore_first_signal
from lmtool.system.terminal import counted
from lmtool.training.configs import amounts_of
from lmtool.training.engine import outside_layers
from lmtool.training.group import require_same
from lmtool.training.loop import StopTraining, train
from lmtool.training.progress import TrainingResult
from lmtool.training.sharding import load_weights
from lmtool.types import Loader
from lmtool.weights.reading import ignored_warnings

_PLAN_TOLERANCE = 1.01  # of the planned tokens, which the mean of a step estimates
Preparation = PretrainPreparation | FinetunePreparation
_NEVER = 2**31
"""An interval in steps that no short training reaches, so that nothing is evaluated or saved."""


def preparation_of(config: TrainingConfig) -> Preparation:
    """Returns the preparation of a session. The labeled data of its tasks are read at once, the text later."""
    return PretrainPreparation(config) if isinstance(config, PretrainConfig) else FinetunePreparation(config)


def run(preparation: Preparation) -> JsonObject:
    """Trains, evaluates and saves a run; prints the result if it is already finished. Returns result.json."""
    with open_run(preparation.verb, preparation.config, preparation.stem, preparation.started) as opened:
        finished = opened.folder.result()
        if finished is not None:
            return screens.report_finished(opened, finished)
        begin_branch(opened)
        require_memory(preparation.config, opened.precision)
        session = preparation.prepare(opened)
        return fit(session, companions_of(session))


def fit(session: Session, companions: Sequence[Companion]) -> JsonObject:
    """Trains a session on its "train" split and scores it on the held-out splits, the first of which is the headline.
    Returns the content of result.json. Raises UserError if the data or the teachers of a resumed run have changed, or
    the training loop fails."""
    opened, learner = session.run, session.learner
    opened.group.wait()  # all ranks wait here for the rank that builds the data, which may take hours
    require_same(opened.group, {key: value for companion in companions for key, value in companion.identity().items()})
    warn_of_idle_ranks(opened, session.loader)
    warn_of_unused_state(opened)
    for scheme in learner.schemes:
        scheme.set_steps_in_epoch(session.loader.steps_in_epoch)
    held_out = session.held_out
    evaluation_tokens, final_tokens = held_out.tokens
    plan = replace(session.plan, evaluation_tokens=evaluation_tokens, final_tokens=final_tokens)
    if session.evaluate_every is not None:
        plan = replace(plan, evaluations=math.ceil(plan.steps / session.evaluate_every))
    baseline = cast(Baseline, held_out.baseline(session.phases[-1].data["train"]))
    settings = session.settings(held_out.baseline_loss(baseline))
    settings = replace(settings, evaluate_every=session.evaluate_every)
    metadata: dict[str, JsonObject] = {"data": dict(session.metadata), "model": {}, "run": {}}
    if session.loaded is not None and session.loaded.ignored:
        unread = ignored_warnings(str(session.config.checkpoint), session.loaded.ignored)
        metadata["data"]["warnings"] = [*session.metadata.get("warnings", ()), *unread]
    for companion in companions:
        for section, entries in companion.before(session).items():
            metadata[section] |= entries
    metadata["data"] |= {**train_metadata(session.loader), **held_out.metadata()}
    screens.show_start(session, metadata, plan, baseline)
    require_amounts_in_budget(session)

    def evaluate(step: int) -> JsonObject:
        metrics = dict(held_out.score(opened.precision, calibrates=True, group=opened.group).metrics())
        for companion in companions:
            metrics |= companion.scores()
        return metrics

    with (
        screens.LiveReport(opened) as live_report,
        ProgressDisplay(opened.output, learner.metric.name, opened.config.log_every, baseline) as listener,
    ):
        training = train(
            session.trained_module,
            session.loader,
            evaluate,
            opened.folder,
            settings,
            listeners=[listener, opened.trackers, live_report],
            extensions=companions,
            group=opened.group,
        )
    folder = opened.folder
    warn_of_missing_amounts(session, training)
    ignore_first_signal(command_line("resume", str(folder.path)), folder.log, folder.writes)
    started = time.perf_counter()
    excluded = {name for companion in companions for name in companion.excluded}
    load_best_weights(opened, training, session.trained_module, excluded)
    if held_out.sampled or learner.config.reads_labeled_rows:
        metrics = held_out.final_score(opened.precision, opened.group).metrics()
        training = replace(training, metrics=metrics, best_value=metrics[learner.metric.name])
    baseline = screens.updated_baseline(
        opened, baseline, headline_terms(learner.metric, learner.loss_weights), training.metrics
    )
    rows = result_rows(session, training, baseline)
    with outside_layers(session.trained_module):
        for companion in companions:
            rows |= companion.after(session, training)
    evaluation_seconds = training.evaluation_seconds + time.perf_counter() - started
    training = replace(training, evaluation_seconds=evaluation_seconds)
    result = screens.result_of(opened, training, session.subject, learner.metric.name, rows)
    result = screens.finish(opened, result, baseline, session.next_commands)
    if folder.writes:
        config = session.config
        for checkpoint in removable_optimizers(
            folder.checkpoints, config.keep_optimizer, config.keep, config.keep_every
        ):
            remove_optimizer(checkpoint)
    return result


def result_rows(session: Session, training: TrainingResult, baseline: Baseline) -> JsonObject:
    """Returns the rows of result.json that every run has in addition to its scores."""
    learner, loader = session.learner, session.loader
    rows: JsonObject = {"baseline": baseline["value"], "compiled": session.compilation.on}
    rows |= {name: loader.metadata()[name] for name in screens.WASTE if name in loader.metadata()}
    rows |= headline_errors(learner.metric, learner.loss_weights, training.metrics)
    rows["flops"] = session.plan.flops_per_token * training.tokens
    words = loader.metadata().get("words_per_epoch")
    rows |= {} if words is None else {"words": round(training.epochs * words)}
    return rows | {name: session.metadata[name] for name in ("few_shot",) if name in session.metadata}


def require_amounts_in_budget(session: Session) -> None:
    """Prints the passes over the text of a run that counts its words. Raises UserError if the run will end before an
    amount of `checkpoint_at`."""
    config, plan = session.config, session.plan
    amounts, words = amounts_of(config.checkpoint_at), session.loader.metadata().get("words_per_epoch")
    if words is not None and plan.epochs is not None and (config.max_words or any(amount.words for amount in amounts)):
        session.run.output.line(
            f"text: {words:,} words (wc -w) in each pass; {plan.epochs:,.2f} passes, "
            f"{round(plan.epochs * words):,} words"
        )
    if not amounts or plan.ends_by == "max_minutes":
        return
    in_words = amounts[-1].words
    total = round((plan.epochs or 0) * words) if in_words and words else round(plan.steps * plan.tokens_per_step)
    if amounts[-1].number > total * _PLAN_TOLERANCE:
        raise UserError(
            f"checkpoint_at={amounts[-1].name} is beyond the budget: the run reads about {total:,} "
            f"{'words' if in_words else 'tokens'} ({plan.ends_by})",
            f"omit the amount, or set a larger {plan.ends_by}=",
        )


def warn_of_missing_amounts(session: Session, training: TrainingResult) -> None:
    """Prints a warning if the run ended before an amount of `checkpoint_at`."""
    reached = {} if training.last is None else read_state(training.last).get("kept", {})
    if missing := [amount.name for amount in amounts_of(session.config.checkpoint_at) if amount.name not in reached]:
        session.run.output.warn(
            f"checkpoint_at: the run ended before {', '.join(missing)}, so these checkpoints do not exist"
        )


def train_metadata(loader: PackedLoader | PhasedLoader) -> JsonObject:
    """Returns the metadata of the training data, by phase; for a run without phases, under "train"."""
    metadata = loader.metadata()
    if not isinstance(loader, PhasedLoader):
        return {"train": metadata}
    return {name: section for name, section in metadata.items() if isinstance(section, dict)}


def warn_of_idle_ranks(opened: OpenRun, loader: PackedLoader | PhasedLoader) -> None:
    """Prints a warning if a step has fewer examples than there are processes, so that some have nothing to do."""
    size = opened.group.size
    for name, metadata in train_metadata(loader).items():
        examples = math.ceil(metadata["examples"] / metadata["steps_per_epoch"])
        if examples < size:
            opened.output.warn(
                f"{name}: a step has {counted(examples, 'example')} for {size} processes, so some processes "
                f"have nothing to do; set batch_examples={size} or more (or batch_tokens=), or devices={examples}"
            )


def warn_of_unused_state(opened: OpenRun) -> None:
    """Prints a warning if a model could carry state from batch to batch, but its batches do not continue each other."""
    config = opened.config
    if not isinstance(config, PretrainConfig) or not config.model.carries_state or config.data.documents == "separate":
        return
    if not reads_lanes(config.model, config.objective, config.data):
        opened.output.warn(
            f"model={config.model.name} carries no state from batch to batch: "
            f"objective={config.objective.name} with data={config.data.name} does not read contiguous streams of text"
        )


def load_best_weights(
    opened: OpenRun, training: TrainingResult, learner: nn.Module, excluded: Collection[str] = ()
) -> None:
    """Loads the weights of the best checkpoint into the trained module, for the final evaluation and the samples.
    excluded: the names of tensors that checkpoints leave out. Raises UserError if the checkpoint is damaged."""
    if training.best is None or training.best == training.last:
        return
    try:
        weights = read_weights(training.best)
    except UserError as error:
        resume = command_line("resume", str(opened.folder.path))
        raise UserError(
            error.message, f"run {resume}, which ignores this checkpoint and uses the best of the others"
        ) from error
    load_weights(learner, weights, training.best, excluded)


@contextmanager
def temporary_session(config: TrainingConfig, parent: Path | None = None) -> Iterator[Session]:
    """Yields the session of a configuration in a temporary run folder, which is removed afterwards. parent: the folder
    in which it is created; None means the system's."""
    with TemporaryDirectory(prefix=".run-", dir=parent) as folder:
        changes: JsonObject = {"run_dir": str(Path(folder) / "run"), "name": None, "logger": {}}
        if isinstance(config, FinetuneConfig):
            changes["forgetting"] = None
        preparation = preparation_of(config.model_copy(update=changes))
        with open_run(preparation.verb, preparation.config, preparation.stem, preparation.started) as opened:
            require_memory(preparation.config, opened.precision)
            yield preparation.prepare(opened)


def train_few_steps(session: Session, loader: Loader, steps: int, **changes: Any) -> None:
    """Trains a session without evaluating or saving, until the loader raises StopTraining. steps: an upper limit of
    their number. changes: fields of `TrainingSettings` to change."""
    for scheme in session.learner.schemes:
        scheme.set_steps_in_epoch(session.loader.steps_in_epoch)
    if session.distilled is not None:
        session.distilled.prepare(session.student_data)
    settings = replace(
        session.settings(), max_steps=max(session.plan.steps, steps + 1), max_epochs=None, max_tokens=None,
        max_words=None, max_minutes=None, max_flops=None, evaluate_every=_NEVER, checkpoint_every=_NEVER,
        keep_every=None, checkpoint_at=None, **changes,
    )  # fmt: skip
    with suppress(StopTraining):
        train(session.trained_module, loader, lambda step: {}, session.run.folder, settings)
