"""The checkpoints of one run: saved, restored, pruned.

`last` and `best` are small text files that are moved only once the checkpoint they name is complete. Which checkpoint
a run resumes from: see runs/checkpoints.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lmtool.config.checkpoint import (
    CARRIED,
    OPTIMIZER,
    STATE,
    of_step,
    pointed,
    read_config,
    read_state,
    saved_steps,
    verify,
)
from lmtool.errors import UserError, cannot_write
from lmtool.nn.cache import carried_tensors, load_carried
from lmtool.runs import checkpoints as disk
from lmtool.runs.checkpoints import DELETED, TEMPORARY, gathered
from lmtool.runs.files import remove_folder, replace_text
from lmtool.runs.identity import budgets
from lmtool.runs.run_folder import RunFolder
from lmtool.system.files import remove
from lmtool.training.budgets import retained_checkpoints
from lmtool.training.group import ALONE, ProcessGroup
from lmtool.training.optimizers import load_state_tensors, state_tensors
from lmtool.training.progress import CheckpointExtension, Progress, TrainingSettings

FAILURES = 3
"""Saves that may fail in a row before the run stops: until then training continues and the next one tries again."""


class Keeper:
    """Saves and restores everything a run needs to resume. Where the run's folder belongs to another process, it
    restores, and leaves the rest to that one. extensions: add files to each checkpoint, or leave tensors out of it.
    settings: how many checkpoints stay."""

    def __init__(
        self,
        run: RunFolder,
        learner: nn.Module,
        optimizer: Optimizer,
        named: Mapping[str, nn.Parameter],
        scaler: GradScaler | None,
        extensions: Sequence[CheckpointExtension],
        settings: TrainingSettings,
    ):
        self.settings = settings
        self.run, self.learner, self.optimizer, self.named = run, learner, optimizer, named
        self.scaler, self.extensions = scaler, extensions
        self.excluded = frozenset[str]().union(*(extension.excluded for extension in extensions))
        self.folder = run.checkpoints
        self.saved_step: int | None = None
        self._failures = 0

    def _write_extensions(self, folder: Path) -> None:
        for extension in self.extensions:
            extension.write(folder)

    # --- at the start ---------------------------------------------------------------------------------------------

    def restore(self, group: ProcessGroup = ALONE) -> Progress:
        """Resume from the run's newest intact checkpoint, which rank 0 finds, or begin. Rows after it are dropped.

        UserError where the checkpoint is of another model; CheckFailed where there are checkpoints and none is intact.
        """
        if self.run.writes:
            self._clear()
        folder = group.first(self.run.resume_point() if group.rank == 0 else None)
        progress = Progress()
        if folder is not None:
            disk.load_weights(self.learner, disk.read_weights(folder), folder, self.excluded)
            load_state_tensors(self.optimizer, self.named, disk.read_tensors(folder, OPTIMIZER))
            if (folder / CARRIED).exists():
                device = next(self.learner.parameters()).device
                load_carried(self.learner, disk.read_tensors(folder, CARRIED), device)
            progress = _progress(folder)
            if budgets(read_config(folder)) != budgets(self.run.config):
                progress.forget_horizon()
            if self.scaler is not None and progress.scaler:
                self.scaler.load_state_dict(progress.scaler)
            self.saved_step = progress.step
            if of_step(self.folder, progress.best_step) is None:
                progress.forget_best()  # its checkpoint is lost, or was damaged and is set aside
            self.run.log(f"resumes after step {progress.step}, from {folder.name}")
        self.run.drop_rows_after(progress.step)
        return progress

    def _clear(self) -> None:
        """Take away what a kill left; the lock is ours, so nobody writes there."""
        for pattern in (f"{TEMPORARY}*", f"{DELETED}*"):
            for left in self.folder.glob(pattern):
                remove(left)

    def require_space(self, steps: float) -> None:
        """UserError where the disk cannot hold the checkpoints of this run: its own weights, and two moments of what
        learns, for each that stays, and for one being written. steps: of the whole run; infinite where unknown."""
        if not self.run.writes:
            return
        weights = sum(tensor.nbytes for tensor in self._copy_of_weights().values())
        moments = 2 * sum(parameter.nbytes for parameter in self.named.values())
        stay = retained_checkpoints(self.settings, steps)
        needed = (weights + moments) * (stay + 1) + (1 << 20)
        held = sum(
            file.stat().st_size for step in saved_steps(self.folder) for file in step.iterdir() if file.is_file()
        )
        free = shutil.disk_usage(self.run.path).free
        if free + held < needed:
            raise UserError(
                f"{self.run.path} has {free / 1e6:,.1f} MB free; the checkpoints of this run need "
                f"{needed / 1e6:,.1f} MB ({stay:,} that stay, one being written)",
                f"free some space, or set run_dir= on another disk{', or a smaller keep=' if stay > 2 else ''}",
            )

    def _copy_of_weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the learner: the parameters themselves, of which tied ones are the same."""
        tensors = self.learner.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in tensors.items() if name not in self.excluded}

    # --- on the way -----------------------------------------------------------------------------------------------

    def save(self, progress: Progress, must: bool = False) -> bool:
        """Write a checkpoint of this step, move `last` and `best`, prune. False where the disk refused: reported, and
        the checkpoints before it stand. UserError after FAILURES in a row, or at once where it `must`."""
        if self.saved_step == progress.step:
            return True
        weights = gathered(self._copy_of_weights(), self.run.writes)
        optimizer = gathered(state_tensors(self.optimizer, self.named), self.run.writes)
        if not self.run.writes:
            return True
        progress.scaler = self.scaler.state_dict() if self.scaler is not None else None
        progress.threads = torch.get_num_threads()
        progress.rows = dict(self.run.row_counts)
        try:
            self.run.sync()  # the rows of these steps are never written again
            disk.write_checkpoint(
                self.folder, progress.step, weights, optimizer, progress.to_plain(), self.run.config,
                self._write_extensions, carried_tensors(self.learner),
            )  # fmt: skip
        except OSError as error:
            self._failures += 1
            self.run.log(f"the checkpoint of step {progress.step} could not be saved ({self._failures}.): {error}")
            if must or self._failures >= FAILURES:
                raise cannot_write(Path(error.filename or self.folder), error) from error
            return False
        self._failures = 0
        self.saved_step = progress.step
        self.point(progress)
        try:
            self._prune(progress)
        except OSError as error:  # the checkpoint itself is complete
            self.run.log(f"older checkpoints could not be removed: {error}")
        return True

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def point(self, progress: Progress) -> None:
        """Let `last` name this step's checkpoint, and `best` the best one's; no `best` where it is lost. They are for
        people: where they cannot be written, the run goes by the steps in state.json."""
        if not self.run.writes:
            return
        best = of_step(self.folder, progress.best_step)
        try:
            if best is None:
                (self.folder / "best").unlink(missing_ok=True)
            for name, target in (("last", self.path_of(progress.step)), ("best", best)):
                if target is not None and pointed(self.folder, name) != target:
                    verify(target, hashes=False)
                    replace_text(self.folder / name, target.name + "\n")
        except OSError as error:
            self.run.log(f"last and best could not be written: {error}")

    def _prune(self, progress: Progress) -> None:
        """Take away what neither `keep` nor `keep_every` keeps, never the best, nor what `last` or `best` names."""
        if self.settings.keep == "all":
            return
        named = {pointed(self.folder, "last"), pointed(self.folder, "best")}
        every = self.settings.keep_every
        for folder in saved_steps(self.folder)[self.settings.keep :]:
            stays = every is not None and int(folder.name[5:]) % every == 0
            if not stays and folder not in named and folder.name != f"step_{progress.best_step or 0:08d}":
                remove_folder(folder)


def _progress(folder: Path) -> Progress:
    """The counters of a checkpoint. UserError where one is of another type: its files verify, and lmtool did not write
    them."""
    try:
        return Progress.from_plain(read_state(folder))
    except ValueError as error:
        raise UserError(f"{folder / STATE}: {error}", "copy the checkpoint again from where it came") from error
