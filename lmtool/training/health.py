"""Divergence: a loss that is not finite or has exploded ends a run, and the offending batch is saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lmtool.errors import Diverged, NotFinite
from lmtool.runs.checkpoints import save_tensors
from lmtool.runs.files import to_json
from lmtool.system.files import draft_path, real_folder, replace_bytes
from lmtool.training.group import ALONE, ProcessGroup
from lmtool.training.precision import Precision
from lmtool.training.progress import Progress
from lmtool.types import Batch, Loader, Packed, Step

# A loss has exploded if it exceeds this multiple of the reference in this many consecutive steps or in one evaluation.
# The reference is the largest of 1, the baseline loss and the first step's loss. With tiny BERTs finetuned on two
# classes in batches of four, learning rates up to 1e-2 have losses below 1 nat, rates up to 1 recover from losses below
# 5, and rates of 5 and 50 have losses above 35.
EXPLODED_STEPS = 3
EXPLODED_TIMES = 30.0
LEAST_REFERENCE = 1.0


class Health:
    """Checks the loss and the gradient norm of every step on the device, and reads the result when the loop waits for
    the device anyway: at each step on a CPU; at rows, evaluations and checkpoints on CUDA.

    Args:
        baseline_loss: Loss of a model that ignores its input.
        progress: Keeps the state of the check for checkpoints.
        loader: Loads the batch of an earlier step again.
        folder: The run's folder, where offending batches are saved; None: do not save them.
        group: The ranks, which all reach the same result.
    """

    def __init__(
        self,
        precision: Precision,
        baseline_loss: float,
        progress: Progress,
        loader: Loader | None = None,
        folder: Path | None = None,
        group: ProcessGroup = ALONE,
    ):
        self._group, self._precision, device = group, precision, precision.device
        self._min_reference = max(baseline_loss, LEAST_REFERENCE)
        self._progress, self._loader, self._folder = progress, loader, folder
        self._first_non_finite = torch.zeros((), dtype=torch.int64, device=device)
        self._first_exploded = torch.zeros((), dtype=torch.int64, device=device)
        self._exploded_steps = torch.tensor(progress.exploded_steps, dtype=torch.int64, device=device)
        self._reference = torch.tensor(progress.reference_loss, dtype=torch.float64, device=device)
        self._cursors: dict[int, dict[str, int] | None] = {}

    def watch(self, step: int, cursor: dict[str, int] | None, loss: Tensor, norm: Tensor, scaled: bool) -> None:
        """Checks a step on the device. cursor: the loader's before the step. scaled: with an fp16 scaler, which handles
        infinite gradients itself."""
        bad = ~torch.isfinite(loss)
        if not scaled:
            bad = bad | ~torch.isfinite(norm)
        self._first_non_finite = torch.where((self._first_non_finite == 0) & bad, step, self._first_non_finite)
        self._reference = torch.where(
            self._reference > 0, self._reference, loss.double().clamp(min=self._min_reference)
        )
        high = loss > EXPLODED_TIMES * self._reference
        self._exploded_steps = torch.where(high, self._exploded_steps + 1, 0)
        exploded = (self._first_exploded == 0) & (self._exploded_steps >= EXPLODED_STEPS)
        self._first_exploded = torch.where(exploded, step, self._first_exploded)
        self._cursors[step] = cursor

    def check(self, data: Step, step: int, loss: Tensor, norm: Tensor) -> None:
        """Raises Diverged, with the offending batch saved, if a step since the last check was not finite or the loss
        exploded; otherwise updates the progress."""
        verdict = (self._first_non_finite, self._first_exploded, self._exploded_steps, self._reference)
        first_non_finite, first_exploded, exploded_steps, reference = torch.stack(
            [value.double() for value in verdict]
        ).tolist()
        self._progress.exploded_steps, self._progress.reference_loss = int(exploded_steps), reference
        first = int(min((number for number in (first_non_finite, first_exploded) if number), default=0))
        if first == 0:
            self._cursors.clear()
            return
        # On CUDA the result is read some steps later, so the loader loads the batch again.
        offending = data if first == step else self._batch_of(first)
        metadata: dict[str, object] = {"step": first, "cursor": self._cursors[first], "reference_loss": reference}
        if first == step:
            metadata |= {"loss": str(float(loss)), "grad_norm": str(float(norm))}
        if first == first_exploded:
            height = f" to {float(loss):.3g}" if first == step else ""
            excess = _multiple_of(reference)
            message = f"the loss exploded{height}: for {EXPLODED_STEPS} steps up to step {first} it was {excess}"
            raise self._error_on_all_ranks(first, offending, message, metadata)
        quantity = "loss" if not torch.isfinite(loss) else "gradient"
        quantity = quantity if first == step else "loss or gradient"
        raise self._error_on_all_ranks(first, offending, f"the {quantity} of step {first} is not finite", metadata)

    def _error_on_all_ranks(self, step: int, data: Step, message: str, metadata: Mapping[str, object]) -> Diverged:
        batches = [batch for part in self._group.all(data.batches) for batch in part]
        return self._error_with_batch(step, replace(data, batches=batches), message, metadata)

    def _error_with_batch(self, step: int, data: Step, message: str, metadata: Mapping[str, object]) -> Diverged:
        remedies = ["a lower optimizer.lr", "a longer warm-up", "precision=fp32"]
        *first, last = remedies[:-1] if self._precision.name == "fp32" else remedies
        hint = f"use {', '.join(first)} or {last}, and another name="
        if self._folder is None:
            return Diverged(message, hint)
        try:
            saved = save_batch(self._folder, step, data, metadata)
        except OSError as error:
            return Diverged(f"{message}; its batch could not be saved ({error})", hint)
        return Diverged(f"{message}; its batch is saved in {saved}", hint)

    def _batch_of(self, step: int) -> Step:
        assert self._loader is not None
        return next(iter(self._loader.steps(self._cursors[step], self._group.rank, self._group.size)))

    def check_evaluation(self, data: Step, loss: float | None) -> None:
        """Raises Diverged if the loss of an evaluation after this step has exploded. loss: None if the evaluation has
        no loss."""
        reference = self._progress.reference_loss
        if loss is not None and loss > EXPLODED_TIMES * reference:
            step = self._progress.step
            message = f"the loss exploded to {loss:.3g} in the evaluation after step {step}, {_multiple_of(reference)}"
            metadata = {"step": step, "loss": loss, "reference_loss": reference}
            raise self._error_on_all_ranks(step, data, message, metadata)

    def not_finite(self, data: Step, problem: NotFinite) -> Diverged:
        """Returns the error for an evaluation with outputs that are not finite; saves the held-out batch."""
        step = self._progress.step
        offending = data if problem.batch is None else replace(data, batches=[problem.batch.host])
        message = f"the model's {problem.quantity} are not finite in the evaluation after step {step}"
        return self._error_with_batch(step, offending, message, {"step": step})


def _multiple_of(reference: float) -> str:
    return f"more than {EXPLODED_TIMES:g} times {reference:.3g} (the loss of the first step or without input, or 1)"


def save_batch(folder: Path, step: int, data: Step, metadata: Mapping[str, object]) -> Path:
    """Writes `diverged/step_N.safetensors` with the tensors of all micro-batches, and `.json` with lengths and
    metadata."""
    tensors: dict[str, Tensor] = {}
    lengths: list[dict[str, object]] = []
    for number, batch in enumerate(data.batches):
        tensors |= {f"{number}.{name}": tensor for name, tensor in _tensors(batch).items()}
        outputs = None if batch.outputs is None else list(batch.outputs.lengths)
        lengths.append({"inputs": list(batch.inputs.lengths), "outputs": outputs})
    path = real_folder(folder / "diverged") / f"step_{step:08d}.safetensors"
    draft = draft_path(path)
    save_tensors(tensors, draft)
    os.replace(draft, path)
    metadata = {**metadata, "lengths": lengths, "next_cursor": data.cursor}
    replace_bytes(path.with_suffix(".json"), to_json(metadata).encode())
    return path


def _tensors(batch: Batch) -> dict[str, Tensor]:
    tensors = {"examples": batch.examples, "parts": batch.parts}
    tensors |= {} if batch.groups is None else {"groups": batch.groups}
    sides: dict[str, Packed | None] = {"inputs": batch.inputs, "outputs": batch.outputs}
    for side, packed in sides.items():
        if packed is not None:
            tensors[f"{side}.tokens"] = packed.tokens
            tensors |= {f"{side}.columns.{name}": column for name, column in packed.columns.items()}
    for name, target in batch.targets.items():
        parts = {"labels": target.labels, "at": target.at, "span": target.span}
        tensors |= {f"targets.{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    return tensors
