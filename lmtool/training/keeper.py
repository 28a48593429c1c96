"""Saves, restores and prunes the checkpoints of a run; runs/checkpoints.py selects the one that a run resumes from."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lmtool.errors import UserError, cannot_write
from lmtool.nn.cache import carried_tensors, load_carried
from lmtool.runs import checkpoints as disk
from lmtool.runs.checkpoints import DELETED, TEMPORARY
from lmtool.runs.files import remove_folder, replace_text
from lmtool.runs.finding import (
    AT,
    CARRIED,
    OPTIMIZER,
    STATE,
    checkpoint_of_pointer,
    of_step,
    read_config,
    read_state,
    require_optimizer,
    saved_steps,
    verify,
)
from lmtool.runs.identity import budgets
from lmtool.runs.run_folder import RunFolder
from lmtool.system.files import remove
from lmtool.training.budgets import retained_checkpoints
from lmtool.training.group import ALONE, ProcessGroup
from lmtool.training.optimizers import load_state_tensors, state_tensors
from lmtool.training.progress import CheckpointExtension, Progress, TrainingSettings
from lmtool.training.sharding import gather_tensors, load_weights

FAILURES = 3
"""Number of consecutive failed saves after which the run stops."""


class Keeper:
    """Saves and restores everything that a run needs to resume. A process that does not own the run's folder only
    restores. extensions: they add files to each checkpoint, or exclude tensors. settings: which checkpoints to
    retain."""

    def __init__(
        self,
        run: RunFolder,
        learner: nn.Module,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        scaler: GradScaler | None,
        extensions: Sequence[CheckpointExtension],
        settings: TrainingSettings,
    ):
        self.settings = settings
        self.run, self.learner, self.optimizer, self.named = run, learner, optimizer, parameters
        self.scaler, self.extensions = scaler, extensions
        self.excluded = frozenset[str]().union(*(extension.excluded for extension in extensions))
        self.folder = run.checkpoints
        self.saved_step: int | None = None
        self._failures = 0

    def _write_extensions(self, folder: Path) -> None:
        for extension in self.extensions:
            extension.write(folder)

    def restore(self, group: ProcessGroup = ALONE) -> Progress:
        """Loads the run's newest intact checkpoint, if there is one, and removes the metrics of later steps. Rank 0
        selects the checkpoint. Raises UserError if it belongs to another model; raises CheckFailed if there are
        checkpoints but none is intact."""
        if self.run.writes:  # the run holds the lock, so temporary files are those of a killed process
            for pattern in (f"{TEMPORARY}*", f"{DELETED}*"):
                for path in self.folder.glob(pattern):
                    remove(path)
        folder = group.first(self.run.resume_point() if group.rank == 0 else None)
        progress = Progress()
        if folder is not None:
            load_weights(self.learner, disk.read_weights(folder), folder, self.excluded)
            require_optimizer(folder)
            load_state_tensors(self.optimizer, self.named, disk.read_tensors(folder, OPTIMIZER))
            if (folder / CARRIED).exists():
                device = next(self.learner.parameters()).device
                load_carried(self.learner, disk.read_tensors(folder, CARRIED), device)
            progress = _read_progress(folder)
            if budgets(read_config(folder)) != budgets(self.run.config):
                progress.forget_horizon()  # the planned number of steps, which depends on the budgets
            if self.scaler is not None and progress.scaler:
                self.scaler.load_state_dict(progress.scaler)
            self.saved_step = progress.step
            if of_step(self.folder, progress.best_step) is None:
                progress.forget_best()  # its checkpoint is missing or was damaged
            self.run.log(f"resumes after step {progress.step}, from {folder.name}")
        self.run.drop_rows_after(progress.step)
        return progress

    def require_space(self, steps: float) -> None:
        """Raises UserError if the disk has no space for the retained checkpoints and one that is being written, each
        with the weights and two moments of trained parameters. steps: the number of steps of the run; infinite if
        unknown."""
        if not self.run.writes:
            return
        weights = sum(tensor.nbytes for tensor in self._weights_to_save().values())
        moments = 2 * sum(parameter.nbytes for parameter in self.named.values())
        retained = retained_checkpoints(self.settings, steps)
        required_bytes = (weights + moments) * (retained + 1) + (1 << 20)  # 1 MiB for other files
        used_bytes = sum(
            file.stat().st_size for step in saved_steps(self.folder) for file in step.iterdir() if file.is_file()
        )
        free = shutil.disk_usage(self.run.path).free
        if free + used_bytes < required_bytes:
            raise UserError(
                f"{self.run.path} has {free / 1e6:,.1f} MB free; the checkpoints of this run need "
                f"{required_bytes / 1e6:,.1f} MB ({retained:,} to keep, one being written)",
                f"free some space, or set run_dir= on another disk{', or a smaller keep=' if retained > 2 else ''}",
            )

    def _weights_to_save(self) -> dict[str, Tensor]:
        tensors = self.learner.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in tensors.items() if name not in self.excluded}

    def save(self, progress: Progress, must: bool = False) -> bool:
        """Writes a checkpoint of this step, updates `last` and `best`, and removes old checkpoints. Returns False if
        writing failed, which is logged. UserError after FAILURES consecutive failures, or after one if `must`."""
        if self.saved_step == progress.step:
            return True
        weights = gather_tensors(self._weights_to_save(), self.run.writes)
        optimizer = gather_tensors(state_tensors(self.optimizer, self.named), self.run.writes)
        if not self.run.writes:
            return True
        progress.scaler = self.scaler.state_dict() if self.scaler is not None else None
        progress.threads = torch.get_num_threads()
        progress.rows = dict(self.run.row_counts)
        try:
            self.run.sync()  # the rows up to this step must be on disk first: a resumed run does not write them again
            disk.write_checkpoint(
                self.folder, progress.step, weights, optimizer, progress.to_plain(), self.run.config,
                self._write_extensions, carried_tensors(self.learner),
            )  # fmt: skip
        except OSError as error:
            self._failures += 1
            failure = f"failure {self._failures} of {FAILURES}"
            self.run.log(f"the checkpoint of step {progress.step} could not be saved ({failure}): {error}")
            if must or self._failures >= FAILURES:
                raise cannot_write(Path(error.filename or self.folder), error) from error
            return False
        self._failures = 0
        self.saved_step = progress.step
        self.write_pointers(progress)
        try:
            self._prune(progress)
        except OSError as error:  # the checkpoint itself is complete
            self.run.log(f"older checkpoints could not be removed: {error}")
        return True

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def write_pointers(self, progress: Progress) -> None:
        """Writes the names of this step's checkpoint, of the best one and of those of `checkpoint_at` to the files
        `last`, `best` and `at_AMOUNT`; removes `best` if that checkpoint is lost.
        These files are for people: the run itself reads the steps in state.json."""
        if not self.run.writes:
            return
        best = of_step(self.folder, progress.best_step)
        try:
            if best is None:
                (self.folder / "best").unlink(missing_ok=True)
            kept = [(f"{AT}{name}", of_step(self.folder, step)) for name, step in progress.kept.items()]
            for name, target in (("last", self.path_of(progress.step)), ("best", best), *kept):
                if target is not None and checkpoint_of_pointer(self.folder, name) != target:
                    verify(target, hashes=False)
                    replace_text(self.folder / name, target.name + "\n")
        except OSError as error:
            self.run.log(f"last and best could not be written: {error}")

    def _prune(self, progress: Progress) -> None:
        if self.settings.keep == "all":
            return
        last_and_best = {checkpoint_of_pointer(self.folder, "last"), checkpoint_of_pointer(self.folder, "best")}
        interval = self.settings.keep_every
        for folder in saved_steps(self.folder)[self.settings.keep :]:
            step = int(folder.name.removeprefix("step_"))
            permanent = step in progress.kept.values() or (interval is not None and step % interval == 0)
            if not permanent and folder not in last_and_best and folder.name != f"step_{progress.best_step or 0:08d}":
                remove_folder(folder)


def _read_progress(folder: Path) -> Progress:
    """Raises UserError if a value has a wrong type: the file was changed after lmtool wrote it."""
    try:
        return Progress.from_plain(read_state(folder))
    except ValueError as error:
        raise UserError(
            f"{folder / STATE} is damaged: {error}", "use another checkpoint of the run, or copy this one again"
        ) from error
