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

from lmtool.config.checkpoint import of_step
from lmtool.runs.run_folder import RunFolder
from lmtool.training.configs import OptimizerConfig, Parallel, ScheduleConfig
from lmtool.training.precision import Precision
from lmtool.types import Step


@dataclass(frozen=True)
class TrainingSettings:
    """How a training runs, but for its learner and data.

    seed: of dropout here; data and weights carry their own use of it. device: auto, cpu, cuda or cuda:N. precision:
    auto, fp32, bf16 or fp16. max_*: budgets, whichever comes first, at least one; max_minutes counts loading and
    stepping, not evaluating and saving; max_flops needs flops_per_token (forward and backward). log_every,
    evaluate_every, checkpoint_every: in steps; log_every: at most (`budgets.has_row`); evaluate_every None: a tenth of
    the run; checkpoint_every None: with each evaluation. keep: newest checkpoints that stay beside the best, or "all";
    keep_every: steps between those that are saved, and stay, whatever keep is. patience: evaluations without a better
    `metric` before the run ends, None: never. gradient_checkpointing: layers are recomputed in the backward. compiles:
    see compiling.py. parallel: how several processes train the model. metric: a key of what `evaluate` returns;
    greater_is_better: its direction; chooses: whether it says which checkpoint is the best, else the last one is.
    baseline_loss: what reading nothing loses; many times as much is an explosion (health.py).
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
    max_minutes: float | None = None
    max_flops: float | None = None
    flops_per_token: float | None = None
    log_every: int = 10
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    keep: int | Literal["all"] = 2
    keep_every: int | None = None
    patience: int | None = None
    gradient_checkpointing: bool = False
    compiles: bool = False
    parallel: Parallel = "ddp"
    baseline_loss: float = 0.0
    chooses: bool = True


Best = tuple[int | None, float | None, dict[str, object]]
"""The best evaluation so far: its step, its value, its scores."""


@dataclass
class Progress:
    """How far a run is: all that a checkpoint needs beside tensors. Randomness is derived from the step, so there is
    no generator state.

    step: optimizer steps done. epoch: passes over the data. cursor: the loader's, of the next step. tokens: real
    tokens trained on. seconds: of loading and stepping. evaluation_seconds: of evaluating and saving. total_steps:
    the schedule's horizon, None while it is being measured; horizon: the budget that set it. best_*: the best
    evaluation so far. stale_evaluations: since then. metrics: the last evaluation's, of step evaluated_step. ended: the
    budget, or "patience", that ended the run. reference_loss, exploded_steps: see health.py. scaler: the fp16 scaler's
    numbers. threads: of torch on a CPU, on which the order of its sums depends. rows: by split, of metrics.jsonl.
    """

    step: int = 0
    epoch: float = 0.0
    cursor: dict[str, int] | None = None
    tokens: int = 0
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
        """Count a step that was taken."""
        self.step, self.cursor, self.epoch = self.step + 1, data.cursor, data.epoch
        self.tokens += tokens

    @property
    def best(self) -> Best:
        return self.best_step, self.best_value, self.best_metrics

    @best.setter
    def best(self, best: Best) -> None:
        self.best_step, self.best_value, self.best_metrics = best

    def forget_best(self) -> None:
        """The best checkpoint is lost: another becomes the best one."""
        self.best = None, None, {}

    def forget_horizon(self) -> None:
        """The budget is another one: where the run ends is to be found anew. Patience has ended it for good."""
        self.total_steps, self.horizon = None, None
        self.ended = self.ended if self.ended == "patience" else None

    @classmethod
    def from_plain(cls, state: Mapping[str, object]) -> Progress:
        """From state.json; what an older version did not write keeps its default. ValueError, naming the key, for a
        value of another type."""
        known = {field.name for field in fields(cls)}
        known_fields = {name: value for name, value in state.items() if name in known}
        try:
            return TypeAdapter(cls).validate_json(json.dumps(known_fields), strict=True)
        except ValidationError as error:
            detail = error.errors()[0]
            key = str(detail["loc"][0])
            raise ValueError(f"{key}={known_fields[key]!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}") from error


@dataclass(frozen=True)
class TrainingResult:
    """What came out of a training.

    status: "done". ended: what ended it, max_steps|max_epochs|max_tokens|max_minutes|max_flops|patience. best_*: None
    where nothing was evaluated. metrics: of the best evaluation; last_metrics: of the last. best, last: checkpoint
    folders. seconds, evaluation_seconds: as of `Progress`. peak_memory_bytes: of the device (CUDA) or of the process
    (CPU).
    """

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
    """Follows the training and adds files to each checkpoint. excluded: names of tensors that no checkpoint of the run
    holds."""

    excluded: frozenset[str]

    def on_update(self, step: int) -> None:
        """Called after each update of the weights. step: the first is 1."""

    def write(self, folder: Path) -> None:
        """Add files to the folder of a checkpoint that is being written."""


class Listener(Protocol):
    """Hears how a training goes. The loop prints nothing."""

    def on_start(self, step: int, steps: int | None, max_seconds: float | None) -> None:
        """Training continues after `step`; `steps` in all, at most, where known; at most `max_seconds` more."""

    def on_step(self, row: Mapping[str, object]) -> None:
        """A train row of metrics.jsonl, as it was written."""

    def on_evaluation(self, row: Mapping[str, object]) -> None:
        """A validation row of metrics.jsonl, as it was written."""

    def on_checkpoint(self, step: int, path: str) -> None: ...

    def on_end(self) -> None: ...


class Listeners:
    """Several listeners as one: a bar, trackers. Each hears everything, in order."""

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


# What came out of a training, gathered.


def training_result(
    run: RunFolder, learner: nn.Module, named: Mapping[str, nn.Parameter], progress: Progress, precision: Precision
) -> TrainingResult:
    """The result of a run that has ended."""
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
        trainable_parameters=sum(parameter.numel() for parameter in named.values()),
        precision=precision.name,
        device=str(precision.device),
    )


def peak_memory(device: torch.device) -> int:
    """Bytes at most: allocated on a CUDA device, else resident of this process since it started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes, Linux in KiB
