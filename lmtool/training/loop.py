"""The training loop for every model, through the interfaces of a learner, a loader and an evaluation function.

Order of a step: load -> count the targets of all micro-batches -> forward under autocast -> backward -> (accumulate) ->
clip -> step -> schedule -> log -> evaluate -> checkpoint. Each of several processes runs this loop on its part of every
step. The engine sums their gradients; decisions that depend on a clock or a signal are made for all of them (`agree`).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lmtool.config.registry import build, command_line
from lmtool.errors import NotFinite, UserError
from lmtool.nn.regions import regions_by
from lmtool.nn.stack import recompute_layers
from lmtool.runs.run_folder import RunFolder
from lmtool.system.signals import Signals
from lmtool.system.terminal import counted
from lmtool.training.budgets import Budget, is_logged
from lmtool.training.compiling import compiled
from lmtool.training.configs import Schedule
from lmtool.training.engine import engine_for, outside_layers, shard
from lmtool.training.group import ALONE, ProcessGroup, require_same_training
from lmtool.training.health import Health
from lmtool.training.keeper import Keeper
from lmtool.training.optimizers import (
    named_parameters,
    set_learning_rate,
    swap_average,
    training_groups,
    update_average,
)
from lmtool.training.precision import (
    Precision,
    StepWaits,
    deterministic,
    keep_freed_memory,
    select_device,
    select_precision,
)
from lmtool.training.progress import (
    Best,
    CheckpointExtension,
    Listener,
    Listeners,
    Progress,
    TrainingResult,
    TrainingSettings,
    training_result,
)
from lmtool.training.step import RowWriter, apply_gradients, gradients, phase_of, sparse_row_gradients
from lmtool.types import Learner, Loader, Step

Evaluate = Callable[[int], Mapping[str, object]]


class StopTraining(Exception):
    """Ends training early; a loader of a limited number of steps raises it."""


_SECONDS = "seconds"


def train(
    learner: Learner, loader: Loader, evaluate: Evaluate, run: RunFolder, settings: TrainingSettings,
    listeners: Sequence[Listener] = (), extensions: Sequence[CheckpointExtension] = (), group: ProcessGroup = ALONE,
) -> TrainingResult:  # fmt: skip
    """Trains until a budget is spent, resuming from the run's newest intact checkpoint if there is one.

    evaluate: returns scores by name, including `settings.metric`, after a step. extensions: called after each update;
    they add files (the tokenizer) to each checkpoint. group: the ranks. The learner keeps the last weights; the
    result's `best` is the checkpoint of the best ones. Raises UserError (no budget, no space, a checkpoint of another
    model), Diverged, and Stopped after a signal, with a checkpoint saved."""
    assert isinstance(learner, nn.Module)
    precision = move_to_device(learner, loader, settings, group)
    device, listener = precision.device, Listeners(listeners)
    optimizer, schedule, scaler, parameters = optimization(learner, settings, precision)
    budget = Budget(settings, loader)
    keeper = Keeper(run, learner, optimizer, parameters, scaler, extensions, settings)
    progress = resume(keeper, budget, settings, group)
    require_same_training(group, learner, loader)
    if progress.ended is None:
        swap_average(optimizer)  # a checkpoint has the average in place of the weights
    engine = engine_for(learner, settings.parallel, group)
    health = Health(precision, settings.baseline_loss, progress, loader, run.path if run.writes else None, group)
    announce(run, precision)
    sparse_gradients = sparse_row_gradients(learner, optimizer, sparse=device.type == "cpu" and group.size == 1)
    signals = Signals(command_line("resume", str(run.path)))
    waits = StepWaits(run.writes and device.type == "cuda", run.log)
    with signals, deterministic(device), sparse_gradients, compiled(settings.compiles), waits.receive_warnings():
        listener.on_start(progress.step, *budget.outlook(progress))
        rows = RowWriter(run, listener, progress)
        steps = iter(loader.steps(progress.cursor, group.rank, group.size))
        while progress.ended is None:
            started = time.perf_counter()
            step, total = progress.step + 1, budget.horizon(progress)  # before next(): phases end at fractions of total
            data = next(steps)
            rate = set_learning_rate(optimizer, settings.optimizer.lr * schedule(step, total) * data.rate_scale)
            with waits.watch_step():
                outcome = gradients(engine, data, step, settings.seed, precision, scaler)
                norm = apply_gradients(optimizer, scaler, list(parameters.values()), settings.optimizer.clip_norm)
                for extension in extensions:
                    extension.on_update(step)
                if settings.weight_average is not None:
                    update_average(optimizer, step, settings.weight_average)
                health.watch(step, progress.cursor, outcome.loss, norm, scaled=scaler is not None)
            logs = is_logged(step, settings.log_every, total)
            if device.type == "cpu" or logs:  # on CUDA this waits for the device, within the measured time
                health.check(data, step, outcome.loss, norm)
            progress.advance(data, outcome.tokens)
            budget.count_words(progress)
            reached = budget.reached(progress)
            progress.kept |= dict.fromkeys(reached, progress.step)
            progress.seconds, stops = agree(group, progress.seconds + time.perf_counter() - started, signals)
            progress.ended = budget.spent(progress)
            if logs or progress.ended:
                rows.write_step(outcome, data, rate, norm)
            evaluates, saves = due(settings, progress, budget.completes_tenth(progress, total))
            saves = saves or bool(reached)
            previous_best = progress.best
            if evaluates or saves or stops:
                swap_average(optimizer)
            if evaluates:
                health.check(data, step, outcome.loss, norm)
                score(learner, evaluate, settings, progress, rows, health, data, group)
                _, stops = agree(group, progress.seconds, signals)
            if saves or progress.best_step == step or progress.ended or stops:
                health.check(data, step, outcome.loss, norm)
                saved = save(keeper, progress, listener, previous_best, group)
                if stops and progress.ended is None:
                    raise signals.stop_error(step, saved)
            if (evaluates or saves) and progress.ended is None:
                swap_average(optimizer)
    listener.on_end()
    return training_result(run, learner, parameters, progress, precision)


def optimization(
    learner: Learner, settings: TrainingSettings, precision: Precision
) -> tuple[Optimizer, Schedule, GradScaler | None, dict[str, nn.Parameter]]:
    """Returns the optimizer, the learning-rate schedule, the gradient scaler of fp16, and the trained parameters by
    name."""
    groups = training_groups(learner, settings.optimizer.layer_decay)
    optimizer: Optimizer = build(settings.optimizer, groups)
    return optimizer, build(settings.schedule), precision.scaler(), named_parameters(groups)


def move_to_device(learner: nn.Module, loader: Loader, settings: TrainingSettings, group: ProcessGroup) -> Precision:
    """Moves a learner to its device in training mode; with parallel=fsdp, first shards it over the group. Returns the
    device and number format."""
    precision = select_precision(settings.precision, select_device(settings.device))
    device = precision.device
    if device.type == "cpu":
        keep_freed_memory()
    if settings.parallel == "fsdp" and group.size > 1:
        require_same_training(group, learner, loader)
        shard(learner, device, group)
    learner.to(device).train()
    if settings.gradient_checkpointing:
        recompute_layers(learner)
    return precision


def announce(run: RunFolder, precision: Precision) -> None:
    """Makes the run the latest one, and logs where it trains."""
    run.announce()
    threads = counted(torch.get_num_threads(), "thread")
    run.log(f"trains on {precision.device} in {precision.name} ({precision.why}), {threads}")


def agree(group: ProcessGroup, seconds: float, signals: Signals) -> tuple[float, bool]:
    """Returns the clock and the signals, the same for all processes of a group: the seconds of rank 0, and whether any
    process received a signal to stop, after which all of them stop."""
    received = {} if signals.received is None else {signals.received.name: 1.0}
    totals = group.sum({_SECONDS: 0.0 if group.rank else seconds, **received})
    names = [name for name in totals if name != _SECONDS]
    if names and signals.received is None:
        signals.received = signal.Signals[names[0]]
    return totals[_SECONDS], bool(names)


def resume(keeper: Keeper, budget: Budget, settings: TrainingSettings, group: ProcessGroup = ALONE) -> Progress:
    """Loads the newest intact checkpoint of the run, if it has one, and returns its progress. Raises UserError if the
    budget is already spent."""
    keeper.require_space(min(budget.exact.values(), default=math.inf))
    progress = keeper.restore(group)
    if progress.best_step is None and progress.evaluated_step == progress.step > 0:
        # The best checkpoint is lost; the one resumed from has a score.
        note_best(progress, settings)
    if keeper.saved_step is not None:
        keeper.write_pointers(progress)
    if missed := budget.reached(progress):
        raise UserError(
            f"checkpoint_at: {keeper.run.path} has passed {', '.join(missed)} without a checkpoint",
            "omit these amounts of checkpoint_at=",
        )
    budget_name = budget.spent(progress)
    # A run that starts from another run's checkpoint, or that was extended.
    if progress.ended is None and budget_name is not None and progress.step:
        message = (
            f"{budget_name} is spent after step {progress.step:,}, where {keeper.run.path} starts: no step is left"
        )
        raise UserError(message, f"use a larger {budget_name}=")
    progress.ended = progress.ended or budget_name
    return progress


def due(settings: TrainingSettings, progress: Progress, completes_tenth: bool) -> tuple[bool, bool]:
    """Returns whether to evaluate and whether to save after this step. completes_tenth: whether the step completes a
    tenth of the run, the default interval of both."""

    def is_due(interval: int | None) -> bool:
        return completes_tenth if interval is None else progress.step % interval == 0

    ended = progress.ended is not None
    evaluates = ended or is_due(settings.evaluate_every)
    saves = is_due(settings.checkpoint_every or settings.evaluate_every)
    permanent = settings.keep_every is not None and progress.step % settings.keep_every == 0
    return evaluates, ended or saves or permanent


def score(
    learner: nn.Module, evaluate: Evaluate, settings: TrainingSettings, progress: Progress, rows: RowWriter,
    health: Health, data: Step, group: ProcessGroup = ALONE,
) -> None:  # fmt: skip
    """Evaluates the model, writes the row of metrics.jsonl, and updates the best score and patience. Raises Diverged if
    outputs are not finite or the loss has exploded."""
    started = time.perf_counter()
    learner.eval()
    try:
        with regions_by(None), outside_layers(learner):
            metrics: dict[str, Any] = group.first(dict(evaluate(progress.step)))
    except NotFinite as error:
        raise health.not_finite(data, error) from error
    learner.train()
    progress.evaluation_seconds += time.perf_counter() - started
    progress.metrics, progress.evaluated_step = metrics, progress.step
    better = note_best(progress, settings)
    progress.stale_evaluations = 0 if better else progress.stale_evaluations + 1
    if settings.patience is not None and progress.stale_evaluations >= settings.patience and progress.ended is None:
        progress.ended = "patience"
    row = {"step": progress.step, "split": "validation", **metrics, "tokens": progress.tokens, "best": better}
    rows.write_evaluation(row | phase_of(data))
    health.check_evaluation(data, metrics.get("loss"))


def save(
    keeper: Keeper, progress: Progress, listener: Listener, previous_best: Best, group: ProcessGroup = ALONE
) -> bool:
    """Saves a checkpoint of this step, and returns whether it was written; its time counts as evaluation.
    previous_best: the best evaluation before this step's."""
    started = time.perf_counter()
    must = progress.ended is not None or progress.step in progress.kept.values()
    saved = group.first(keeper.save(progress, must))
    progress.evaluation_seconds += time.perf_counter() - started
    if saved:
        listener.on_checkpoint(progress.step, str(keeper.path_of(progress.step)))
    elif progress.best_step == progress.step:  # those weights were not saved
        progress.best = previous_best
    return saved


def note_best(progress: Progress, settings: TrainingSettings) -> bool:
    """Makes the last evaluation the best one if its score is better, equal with a smaller loss, or finite in a run that
    does not select the best checkpoint. Returns whether it is now the best."""
    metric, best = progress.metrics[settings.metric], progress.best_value
    value = math.nan if metric is None else float(metric)  # a number that is not finite is null in state.json
    better = math.isfinite(value) and (best is None or (value > best if settings.greater_is_better else value < best))
    if value == best:
        losses = [metrics.get("loss") for metrics in (progress.metrics, progress.best_metrics)]
        finite = [loss for loss in losses if isinstance(loss, int | float) and math.isfinite(loss)]
        better = len(finite) == 2 and finite[0] < finite[1]
    better = better or (math.isfinite(value) and not settings.selects_best)
    if better:
        progress.best_step, progress.best_value, progress.best_metrics = progress.step, value, progress.metrics
    return better
