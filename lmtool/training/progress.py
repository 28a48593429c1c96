"""The settings, the progress and the result of a training, as plain numbers."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from lmtool.runs.finding import of_step
from lmtool.runs.run_folder import RunFolder
from lmtool.training.configs import OptimizerConfig, Parallel, ScheduleConfig
from lmtool.training.precision import Precision
from lmtool.types import Step


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training, without its learner and data.

    Attributes:
        seed: The seed of dropout; data and weights have seeds of their own.
        metric, greater_is_better: The score of `evaluate` that selects the best checkpoint, and its direction.
        selects_best: Whether the metric selects the best checkpoint; otherwise it is the last one.
        device: auto, cpu, cuda or cuda:N.
        precision: auto, fp32, bf16 or fp16.
        max_*: Budgets, at least one; the first that is spent ends the run. max_minutes includes loading and stepping,
            not evaluation and saving; max_flops needs flops_per_token (forward and backward), max_words a loader that
            knows the words of its text.
        log_every: Maximum number of steps between train rows (`budgets.is_logged`).
        evaluate_every: Steps between evaluations; None: a tenth of the run.
        checkpoint_every: Steps between checkpoints; None: the same number as between evaluations.
        keep: Number of newest checkpoints to retain in addition to the best one, or "all".
        keep_every: Steps between checkpoints that are retained regardless of `keep`; None: no such checkpoints.
        checkpoint_at: Amounts of text at which a checkpoint is saved and retained; None: no such checkpoints.
        patience: Evaluations without a better `metric` before the run ends; None: no limit.
        weight_average: Decay of the moving average of the weights that is evaluated and saved; None: no average.
        gradient_checkpointing: Recompute layers in the backward pass.
        compiles: Compile the regions (compiling.py).
        baseline_loss: Loss of a model that ignores its input; many times this loss is an explosion (health.py).
    """

    seed: int
    metric: str
    greater_is_better: bool
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    device: str = "auto"
    precision: str = "auto"
    max_steps: int | None = None
    max_epochs: float | None = None
    max_tokens: int | None = None
    max_words: int | None = None
    max_minutes: float | None = None
    max_flops: float | None = None
    flops_per_token: float | None = None
    log_every: int = 10
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    keep: int | Literal["all"] = 2
    keep_every: int | None = None
    checkpoint_at: tuple[int | str, ...] | None = None
    patience: int | None = None
    weight_average: float | None = None
    gradient_checkpointing: bool = False
    compiles: bool = False
    parallel: Parallel = "ddp"
    baseline_loss: float = 0.0
    selects_best: bool = True


Best = tuple[int | None, float | None, dict[str, object]]
"""The best evaluation so far: its step, the value of its metric, and all its scores."""


@dataclass
class Progress:
    """The progress of a run: the contents of a checkpoint other than tensors. Randomness depends on the step only, so
    there is no generator state.

    Attributes:
        step: Completed optimizer steps.
        epoch: Completed epochs, including a fraction.
        cursor: The loader's cursor for the next step.
        tokens: Real tokens trained on.
        words: Words of the text that was trained on, as `wc -w` counts; None if its words are not known.
        kept: The step at which each amount of text of `checkpoint_at` was reached, by the name of the amount.
        seconds: Time of loading and stepping.
        evaluation_seconds: Time of evaluation and saving.
        total_steps: The schedule's horizon; None before it is measured.
        horizon: The budget that determines `total_steps`.
        best_*: The best evaluation so far.
        stale_evaluations: Evaluations since the best one.
        metrics, evaluated_step: Scores of the last evaluation, and its step.
        ended: The budget that ended the run, or "patience"; None before the end.
        reference_loss, exploded_steps: See health.py.
        scaler: State of the fp16 scaler.
        threads: torch's threads on a CPU, which determine the order of its sums.
        rows: Number of rows of metrics.jsonl by split.
    """

    step: int = 0
    epoch: float = 0.0
    cursor: dict[str, int] | None = None
    tokens: int = 0
    words: int | None = None
    kept: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    evaluation_seconds: float = 0.0
    total_steps: int | None = None
    horizon: str | None = None
    best_step: int | None = None
    best_value: float | None = None
    best_metrics: dict[str, object] = field(default_factory=dict)
    stale_evaluations: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluated_step: int | None = None
    ended: str | None = None
    reference_loss: float = 0.0
    exploded_steps: int = 0
    scaler: dict[str, object] | None = None
    threads: int | None = None
    rows: dict[str, int] = field(default_factory=dict)

    def to_plain(self) -> dict[str, object]:
        return asdict(self)

    def advance(self, data: Step, tokens: int) -> None:
        """Counts a completed step."""
        self.step, self.cursor, self.epoch = self.step + 1, data.cursor, data.epoch
        self.tokens += tokens

    @property
    def best(self) -> Best:
        return self.best_step, self.best_value, self.best_metrics

    @best.setter
    def best(self, best: Best) -> None:
        self.best_step, self.best_value, self.best_metrics = best

    def forget_best(self) -> None:
        """Discards the best evaluation because its checkpoint is lost."""
        self.best = None, None, {}

    def forget_horizon(self) -> None:
        """Discards the horizon because the budgets have changed. A run ended by patience stays ended."""
        self.total_steps, self.horizon = None, None
        self.ended = self.ended if self.ended == "patience" else None

    @classmethod
    def from_plain(cls, state: Mapping[str, object]) -> Progress:
        """Reads state.json; fields that an older version did not write have their defaults. Raises
        ValueError, which names the key, for a value of a wrong type."""
        names = {field.name for field in fields(cls)}
        values = {name: value for name, value in state.items() if name in names}
        try:
            return TypeAdapter(cls).validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            detail = error.errors()[0]
            key = str(detail["loc"][0])
            raise ValueError(f"{key}={values[key]!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}") from error


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training; see `Progress` for shared fields. best_step, best_value: None without an evaluation.
    metrics, last_metrics: scores of the best and of the last evaluation. best, last: checkpoint folders.
    peak_memory_bytes: see `peak_memory`."""

    status: str
    ended: str
    steps: int
    epochs: float
    tokens: int
    seconds: float
    evaluation_seconds: float
    tokens_per_second: float
    best_step: int | None
    best_value: float | None
    metrics: dict[str, Any]
    last_metrics: dict[str, object]
    best: Path | None
    last: Path | None
    peak_memory_bytes: int
    parameters: int
    trainable_parameters: int
    precision: str
    device: str


class CheckpointExtension(Protocol):
    """Follows the training and adds files to each checkpoint. excluded: names of tensors that checkpoints omit."""

    excluded: frozenset[str]

    def on_update(self, step: int) -> None:
        """Called after each update of the weights, with the number of the step from 1."""

    def write(self, folder: Path) -> None:
        """Adds files to the folder of a checkpoint that is being written."""


class Listener(Protocol):
    """Receives the events of a training. The loop itself prints nothing."""

    def on_start(self, step: int, steps: int | None, max_seconds: float | None) -> None:
        """Called before training, which starts after `step`. steps, max_seconds: the maximum number of steps of the run
        and of remaining seconds; None if unknown."""

    def on_step(self, row: Mapping[str, object]) -> None:
        """Called when a train row was written to metrics.jsonl."""

    def on_evaluation(self, row: Mapping[str, object]) -> None:
        """Called when a validation row was written to metrics.jsonl."""

    def on_checkpoint(self, step: int, path: str) -> None: ...

    def on_end(self) -> None: ...


class Listeners:
    """Several listeners as one, called in order."""

    def __init__(self, listeners: Sequence[Listener] = ()):
        self.listeners = tuple(listeners)

    def on_start(self, step: int, steps: int | None, max_seconds: float | None) -> None:
        for listener in self.listeners:
            listener.on_start(step, steps, max_seconds)

    def on_step(self, row: Mapping[str, object]) -> None:
        for listener in self.listeners:
            listener.on_step(row)

    def on_evaluation(self, row: Mapping[str, object]) -> None:
        for listener in self.listeners:
            listener.on_evaluation(row)

    def on_checkpoint(self, step: int, path: str) -> None:
        for listener in self.listeners:
            listener.on_checkpoint(step, path)

    def on_end(self) -> None:
        for listener in self.listeners:
            listener.on_end()


def training_result(
    run: RunFolder, learner: nn.Module, parameters: Mapping[str, nn.Parameter], progress: Progress, precision: Precision
) -> TrainingResult:
    assert progress.ended is not None
    return TrainingResult(
        status="done",
        ended=progress.ended,
        steps=progress.step,
        epochs=progress.epoch,
        tokens=progress.tokens,
        seconds=progress.seconds,
        evaluation_seconds=progress.evaluation_seconds,
        tokens_per_second=progress.tokens / max(progress.seconds, 1e-9),
        best_step=progress.best_step,
        best_value=progress.best_value,
        metrics=progress.best_metrics or progress.metrics,
        last_metrics=progress.metrics,
        best=of_step(run.checkpoints, progress.best_step),
        last=of_step(run.checkpoints, progress.step),
        peak_memory_bytes=peak_memory(precision.device),
        parameters=sum(parameter.numel() for parameter in learner.parameters()),
        trainable_parameters=sum(parameter.numel() for parameter in parameters.values()),
        precision=precision.name,
        device=str(precision.device),
    )


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory in bytes: on CUDA, of the tensors on the device; on a CPU, of this whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes, Linux in KiB
