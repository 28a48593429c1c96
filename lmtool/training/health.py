"""Whether a run still learns: non-finite and exploded losses end it, and the batch that did it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtool.errors import Diverged
from lmtool.manifest import write_bytes
from lmtool.runs.checkpoints import save_tensors
from lmtool.runs.files import to_json
from lmtool.training.progress import Progress
from lmtool.types import Batch, Loader, Packed, Step

# Exploded: this many logged losses in a row above so many times the highest of the first ones. A cross entropy over
# any vocabulary starts near its ceiling for a model that still learns, so a hundredfold is no noise.
REFERENCE_ROWS = 10
EXPLODED_ROWS = 3
EXPLODED_TIMES = 100.0


class Health:
    """Watches every step on the device and reads the verdict where the loop synchronises anyway: each step on a CPU,
    at rows, evaluations and checkpoints on CUDA."""

    def __init__(self, device: torch.device):
        self._first_bad = torch.zeros((), dtype=torch.int64, device=device)
        self._cursors: dict[int, dict[str, int] | None] = {}

    def watch(self, step: int, cursor: dict[str, int] | None, loss: Tensor, norm: Tensor, scaled: bool) -> None:
        """Note a step. `cursor` is the loader's before it. With an fp16 scaler (`scaled`) an infinite gradient is
        its business; an infinite loss is not."""
        bad = ~torch.isfinite(loss)
        if not scaled:
            bad = bad | ~torch.isfinite(norm)
        self._first_bad = torch.where((self._first_bad == 0) & bad, step, self._first_bad)
        self._cursors[step] = cursor

    def check(self, folder: Path, loader: Loader, data: Step, step: int, loss: Tensor, norm: Tensor) -> None:
        """Diverged, with the offending batch saved in `folder`, if a step since the last check was not finite."""
        first = int(self._first_bad)
        if first == 0:
            self._cursors.clear()
            return
        # On CUDA the verdict comes some steps late; the loader is a function of its cursor and gives the batch again.
        offending = data if first == step else next(iter(loader.steps(self._cursors[first])))
        facts: dict[str, Any] = {"step": first, "cursor": self._cursors[first]}
        if first == step:
            facts |= {"loss": str(float(loss)), "grad_norm": str(float(norm))}
            what = "loss" if not torch.isfinite(loss) else "gradient"
        else:
            what = "loss or gradient"
        raise _diverged(folder, first, offending, f"the {what} of step {first} is not finite", facts)

    def check_row(self, folder: Path, progress: Progress, data: Step, loss: float) -> None:
        """Diverged if the logged losses have exploded."""
        progress.logged_rows += 1
        if progress.logged_rows <= REFERENCE_ROWS:
            progress.reference_loss = max(progress.reference_loss, loss, 1.0)
        exploded = progress.logged_rows > 1 and loss > EXPLODED_TIMES * progress.reference_loss
        progress.exploded_rows = progress.exploded_rows + 1 if exploded else 0
        if progress.exploded_rows >= EXPLODED_ROWS:
            facts = {"step": progress.step, "loss": loss, "reference_loss": progress.reference_loss}
            start = f"{progress.reference_loss:.3g} at the start"
            message = f"the loss exploded: {loss:.3g} at step {progress.step}, {start}"
            raise _diverged(folder, progress.step, data, message, facts)


def _diverged(folder: Path, step: int, data: Step, message: str, facts: Mapping[str, Any]) -> Diverged:
    hint = "a lower optimizer.lr, a longer warm-up or precision=fp32, under another name="
    try:
        saved = save_batch(folder, step, data, facts)
    except OSError as error:
        return Diverged(f"{message}; its batch could not be saved ({error})", hint)
    return Diverged(f"{message}; its batch is saved in {saved}", hint)


def save_batch(folder: Path, step: int, data: Step, facts: Mapping[str, Any]) -> Path:
    """`diverged/step_N.safetensors` with the tensors of every micro-batch, and `.json` with lengths and facts."""
    place = folder / "diverged"
    place.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    lengths: list[dict[str, Any]] = []
    for number, batch in enumerate(data.batches):
        tensors |= {f"{number}.{name}": one for name, one in _tensors(batch).items()}
        outputs = None if batch.outputs is None else list(batch.outputs.lengths)
        lengths.append({"inputs": list(batch.inputs.lengths), "outputs": outputs})
    path = place / f"step_{step:08d}.safetensors"
    save_tensors(tensors, path)
    write_bytes(path.with_suffix(".json"), to_json({**facts, "lengths": lengths, "next_cursor": data.cursor}).encode())
    return path


def _tensors(batch: Batch) -> dict[str, Tensor]:
    found = {"examples": batch.examples, "parts": batch.parts}
    found |= {} if batch.groups is None else {"groups": batch.groups}
    sides: dict[str, Packed | None] = {"inputs": batch.inputs, "outputs": batch.outputs}
    for side, packed in sides.items():
        if packed is not None:
            found[f"{side}.tokens"] = packed.tokens
            found |= {f"{side}.columns.{name}": column for name, column in packed.columns.items()}
    for name, target in batch.targets.items():
        parts = {"labels": target.labels, "at": target.at, "span": target.span}
        found |= {f"targets.{name}.{part}": one for part, one in parts.items() if one is not None}
    return found
