"""The loop, for every model and everything that can be learned.

Order of a step: load -> count what is predicted, over all micro-batches -> forward under autocast -> backward ->
(accumulate) -> clip -> step -> schedule -> log -> evaluate -> checkpoint. The loop knows a learner, a loader and a
function that evaluates, never what they are.

Of several processes each runs this loop over its share of every step. What they add up is the engine's; what they
decide by a clock or a signal is decided once a step for all.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lmtool.config.plugins import command_line
from lmtool.config.tables import build
from lmtool.errors import NotFinite, UserError
from lmtool.nn.regions import regions_by
from lmtool.nn.stack import recompute_layers
from lmtool.runs.run_folder import RunFolder
from lmtool.signals import Signals
from lmtool.terminal import counted
from lmtool.training.budgets import Budget, has_row
from lmtool.training.compiling import compiled
from lmtool.training.consistency import require_alike
from lmtool.training.group import ALONE, Group
from lmtool.training.health import Health
from lmtool.training.keeper import Keeper
from lmtool.training.optimizers import named_parameters, set_learning_rate, training_groups
from lmtool.training.precision import StepWaits, choose_device, choose_precision, deterministic, keep_freed_memory
from lmtool.training.progress import (
    Best,
    CheckpointExtension,
    Listener,
    Listeners,
    Progress,
    TrainingResult,
    TrainingSettings,
)
from lmtool.training.results import training_result
from lmtool.training.sharded import engine_for, outside_layers, shard
from lmtool.training.step import apply_gradients, gradients, row_gradients
from lmtool.types import Learner, Loader, Step

Evaluate = Callable[[int], Mapping[str, Any]]
_SECONDS = "seconds"


def train(
    learner: Learner,
    loader: Loader,
    evaluate: Evaluate,
    run: RunFolder,
    settings: TrainingSettings,
    listeners: Sequence[Listener] = (),
    extensions: Sequence[CheckpointExtension] = (),
    group: Group = ALONE,
) -> TrainingResult:
    """Train until a budget is spent, resuming from the run's newest whole checkpoint where it has one.

    evaluate: step -> scores by name, `settings.metric` among them; called with the learner in evaluation mode.
    extensions: add their files (the tokenizer) to each checkpoint. group: the processes that train together. The
    learner keeps the last weights; the best ones are in the result's `best`.

    Raises UserError (no budget, no space, a checkpoint of another model), Diverged, and Stopped after a signal, with a
    checkpoint saved.
    """
    assert isinstance(learner, nn.Module)
    precision = choose_precision(settings.precision, choose_device(settings.device))
    device, listener = precision.device, Listeners(listeners)
    move_to_device(learner, loader, settings, device, group)
    named = named_parameters(groups := training_groups(learner, settings.optimizer.layer_decay))
    optimizer, schedule, scaler = build(settings.optimizer, groups), build(settings.schedule), precision.scaler()
    budget = Budget(settings, loader)
    keeper = Keeper(run, learner, optimizer, named, scaler, extensions, settings)
    progress = resume(keeper, budget, settings, group)
    require_alike(group, learner, loader)
    engine = engine_for(learner, settings.parallel, group)
    health = Health(precision, settings.uninformed_loss, progress, loader, run.path if run.writes else None, group)
    run.announce()
    run.log(f"trains on {device} in {precision.name} ({precision.why}), {counted(torch.get_num_threads(), 'thread')}")
    by_rows = row_gradients(learner, optimizer, device.type == "cpu" and group.size == 1)
    interrupts = Signals(command_line("resume", str(run.path)))
    waits = StepWaits(run.writes and device.type == "cuda", run.log)
    with interrupts as signals, deterministic(device), by_rows, compiled(settings.compiles), waits.heard():
        listener.on_start(progress.step, *budget.outlook(progress))
        logged_tokens, logged_seconds = progress.tokens, progress.seconds
        steps = iter(loader.steps(progress.cursor, group.rank, group.size))
        while progress.ended is None:
            started = time.perf_counter()
            step, total = progress.step + 1, budget.horizon(progress)  # before the data: phases end at shares of it
            data = next(steps)
            learning_rate = settings.optimizer.lr * schedule(step, total) * data.rate_scale
            set_learning_rate(optimizer, learning_rate)
            with waits.watched():
                outcome = gradients(engine, data, step, settings.seed, device, precision, scaler)
                norm = apply_gradients(optimizer, scaler, list(named.values()), settings.optimizer.clip_norm)
                health.watch(step, progress.cursor, outcome.loss, norm, scaled=scaler is not None)
            logs = has_row(step, settings.log_every, total)
            if device.type == "cpu" or logs:  # CUDA waits for the steps here, inside the measured time
                health.check(data, step, outcome.loss, norm)
            progress.step, progress.cursor, progress.epoch = step, data.cursor, data.epoch
            progress.tokens += outcome.tokens
            progress.seconds, stops = agreed(group, progress.seconds + time.perf_counter() - started, signals)
            progress.ended = budget.spent(progress)

            if logs or progress.ended:
                rate = (progress.tokens - logged_tokens) / max(progress.seconds - logged_seconds, 1e-9)
                logged_tokens, logged_seconds = progress.tokens, progress.seconds
                row = outcome.row(progress, learning_rate, rate, norm) | phase_of(data)
                run.append(row)
                listener.on_step(row)
            evaluates, saves = due(settings, progress, budget.is_evaluated(progress, total))
            best = progress.best
            if evaluates:
                health.check(data, step, outcome.loss, norm)
                row = score(learner, evaluate, settings, progress, health, data, group)
                run.append(row)
                listener.on_evaluation(row)
                health.check_evaluation(data, row.get("loss"))
                _, stops = agreed(group, progress.seconds, signals)
            if saves or progress.best_step == step or progress.ended or stops:
                health.check(data, step, outcome.loss, norm)
                saved = save(keeper, progress, listener, best, group)
                if stops and progress.ended is None:
                    raise signals.stopped(step, saved)
    listener.on_end()
    return training_result(run, learner, named, progress, precision)


def move_to_device(
    learner: nn.Module, loader: Loader, settings: TrainingSettings, device: torch.device, group: Group
) -> None:
    """Put a learner where it trains, sharded over the group with parallel=fsdp, in training mode."""
    if device.type == "cpu":
        keep_freed_memory()
    if settings.parallel == "fsdp" and group.size > 1:
        require_alike(group, learner, loader)
        shard(learner, device, group)
    learner.to(device).train()
    if settings.gradient_checkpointing:
        recompute_layers(learner)


def agreed(group: Group, seconds: float, signals: Signals) -> tuple[float, bool]:
    """What a clock and the signals say, the same for all processes of a group: the seconds of rank 0, and whether any
    was asked to stop, as all are then."""
    received = {} if signals.received is None else {signals.received.name: 1.0}
    said = group.sum({_SECONDS: 0.0 if group.rank else seconds, **received})
    names = [name for name in said if name != _SECONDS]
    if names and signals.received is None:
        signals.received = signal.Signals[names[0]]
    return said[_SECONDS], bool(names)


def resume(keeper: Keeper, budget: Budget, settings: TrainingSettings, group: Group = ALONE) -> Progress:
    """Where the run stands: at its newest whole checkpoint, which is loaded, or at its beginning."""
    keeper.require_space(min(budget.exact.values(), default=math.inf))
    progress = keeper.restore(group)
    if progress.best_step is None and progress.evaluated_step == progress.step > 0:
        # The best checkpoint is lost; of those that are left, the one resumed from has a score.
        note_best(progress, settings)
    if keeper.saved_step is not None:
        keeper.point(progress)
    spent = budget.spent(progress)
    if progress.ended is None and spent is not None and progress.step:  # a branch, or an extended run
        message = (
            f"{spent} is spent after step {progress.step:,}, which {keeper.run.path} begins at: it would train nothing"
        )
        raise UserError(message, f"give a larger {spent}=")
    progress.ended = progress.ended or spent
    return progress


def due(settings: TrainingSettings, progress: Progress, tenth: bool) -> tuple[bool, bool]:
    """Whether to evaluate and whether to save after this step. tenth: whether a tenth of the run ends with it, when
    both are done where nothing is asked for."""

    def comes(every: int | None) -> bool:
        return tenth if every is None else progress.step % every == 0

    evaluates = progress.ended is not None or comes(settings.evaluate_every)
    saves = comes(settings.checkpoint_every or settings.evaluate_every)
    kept = settings.keep_every is not None and progress.step % settings.keep_every == 0
    return evaluates, progress.ended is not None or saves or kept


def score(
    learner: nn.Module, evaluate: Evaluate, settings: TrainingSettings, progress: Progress, health: Health, data: Step,
    group: Group = ALONE,
) -> dict[str, Any]:  # fmt: skip
    """Evaluate, note whether it is the best so far and whether patience ends the run. Returns the row. Diverged where
    the model gives something that is no number."""
    started = time.perf_counter()
    learner.eval()
    try:
        with regions_by(None), outside_layers(learner):
            metrics = group.first(dict(evaluate(progress.step)))
    except NotFinite as problem:
        raise health.not_finite(data, problem) from problem
    learner.train()
    progress.evaluation_seconds += time.perf_counter() - started
    progress.metrics, progress.evaluated_step = metrics, progress.step
    better = note_best(progress, settings)
    progress.stale_evaluations = 0 if better else progress.stale_evaluations + 1
    if settings.patience is not None and progress.stale_evaluations >= settings.patience and progress.ended is None:
        progress.ended = "patience"
    row = {"step": progress.step, "split": "validation", **metrics, "tokens": progress.tokens, "best": better}
    return row | phase_of(data)


def phase_of(data: Step) -> dict[str, int]:
    """What a row says of the phase of its step."""
    return {} if data.phase is None else {"phase": data.phase}


def save(keeper: Keeper, progress: Progress, listener: Listener, best: Best, group: Group = ALONE) -> bool:
    """Save a checkpoint of this step; whether the disk took it. best: the best evaluation before this step's."""
    started = time.perf_counter()
    saved = group.first(keeper.save(progress, must=progress.ended is not None))
    progress.evaluation_seconds += time.perf_counter() - started
    if saved:
        listener.on_checkpoint(progress.step, str(keeper.path_of(progress.step)))
    elif progress.best_step == progress.step:  # those weights are on no disk
        progress.best = best
    return saved


def note_best(progress: Progress, settings: TrainingSettings) -> bool:
    """Make the last evaluation the best one where it is: of equal scores the later one with the smaller loss. Whether
    it is."""
    number, best = progress.metrics[settings.metric], progress.best_value
    value = math.nan if number is None else float(number)  # state.json has null for what is no number
    better = math.isfinite(value) and (best is None or (value > best if settings.greater_is_better else value < best))
    if value == best:
        losses = [metrics.get("loss") for metrics in (progress.metrics, progress.best_metrics)]
        known = [loss for loss in losses if isinstance(loss, int | float) and math.isfinite(loss)]
        better = len(known) == 2 and known[0] < known[1]
    better = better or (math.isfinite(value) and not settings.chooses)
    if better:
        progress.best_step, progress.best_value, progress.best_metrics = progress.step, value, progress.metrics
    return better
