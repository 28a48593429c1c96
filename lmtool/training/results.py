"""What came out of a training, gathered."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping

import torch
from torch import nn

from lmtool.config.checkpoint import of_step
from lmtool.runs.run_folder import RunFolder
from lmtool.training.precision import Precision
from lmtool.training.progress import Progress, TrainingResult


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
