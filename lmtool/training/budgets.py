"""The budgets that end a run, and the horizon of its schedule: the number of steps until the end.

Budgets in steps and epochs are exact. A budget in words is one in epochs: the words of the text (`wc -w`) count as
divided equally among the steps of a pass. A budget in tokens or FLOPs is converted to steps by the mean of a few early
steps, measured once and saved in state.json, so that the horizon does not change when the run resumes. With a budget in
minutes the horizon is updated before every step from the largest spent fraction of any budget. Phases start at fixed
steps, so with phases a budget in minutes is measured once too. Before the measurement ends the horizon is the budget in
steps or epochs, otherwise infinite. A branch with other budgets, and a run with extended ones, measure the horizon over
all earlier training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from lmtool.errors import UserError
from lmtool.training.configs import amounts_of
from lmtool.training.progress import Progress, TrainingSettings
from lmtool.types import Loader, Phased

# Minimum length of a measurement, which omits the first step (allocations, compilation). With a budget in minutes it
# also takes MEASURED_SECONDS, or MEASURED_SHARE of the budget if that is shorter.
MEASURED_STEPS = 5
MEASURED_SECONDS = 10.0
MEASURED_SHARE = 0.03
# Counting the steps of an epoch takes 0.4 ms for a hundred examples and a second for a million, so they are counted
# only in the first epochs.
COUNTED_EPOCHS = 1000
COUNTED_STEPS = 1_000_000
MOST_STEPS = 2**62
LEAST_ROWS = 50  # train rows of a run
_ROUNDING = 1e-9  # subtracted before rounding up, so that a rounding error does not add a step


@dataclass
class _Mark:
    step: int
    tokens: int
    seconds: float


class Budget:
    """The budgets of one run. Raises UserError if there are none."""

    def __init__(self, settings: TrainingSettings, loader: Loader):
        self.settings = settings
        self.exact: dict[str, int] = {}
        if settings.max_steps is not None:
            self.exact["max_steps"] = settings.max_steps
        if settings.max_epochs is not None:
            max_steps = self.exact.get("max_steps", math.inf)
            self.exact["max_epochs"] = steps_of_epochs(loader, settings.max_epochs, max_steps)
        self.amounts = amounts_of(settings.checkpoint_at)
        self._words_per_epoch: int | None = loader.metadata().get("words_per_epoch")
        if self._words_per_epoch is None and (settings.max_words or any(amount.words for amount in self.amounts)):
            raise UserError(
                f"{'max_words' if settings.max_words else 'checkpoint_at'}: the words of this data are not known",
                "use max_tokens= and amounts of tokens",
            )
        if settings.max_words is not None and self._words_per_epoch is not None:
            self.exact["max_words"] = steps_of_epochs(loader, settings.max_words / self._words_per_epoch)
        limits = {
            "max_tokens": settings.max_tokens,
            "max_flops": settings.max_flops,
            "max_minutes": settings.max_minutes,
        }
        self.measured = {name: limit for name, limit in limits.items() if limit is not None}
        if not self.exact and not self.measured:
            raise UserError(
                "no budget: nothing says when the run ends",
                "set max_steps=1000, for example, or max_epochs= or max_minutes=",
            )
        if settings.max_flops is not None and settings.flops_per_token is None:
            raise ValueError("max_flops needs flops_per_token")
        self.loader, self._phased = loader, loader if isinstance(loader, Phased) else None
        # If the loader has counted the tokens of an epoch, a token budget needs no measurement.
        self._epoch_tokens = loader.metadata().get("tokens_per_epoch") if math.isfinite(self.tokens) else None
        self._uses_clock = "max_minutes" in self.measured and self._phased is None
        self._completed_tenths: int | None = None
        self._first_step: int | None = None
        self._mark: _Mark | None = None

    @property
    def tokens(self) -> float:
        """The token budget, or the FLOP budget converted to tokens if that is smaller; infinite if neither is set."""
        limits = [self.measured.get("max_tokens", math.inf)]
        if "max_flops" in self.measured:
            assert self.settings.flops_per_token is not None
            limits.append(self.measured["max_flops"] / self.settings.flops_per_token)
        return min(limits)

    @property
    def seconds(self) -> float:
        """The time budget in seconds of loading and stepping; infinite if there is none."""
        return 60 * self.measured.get("max_minutes", math.inf)

    def spent(self, progress: Progress) -> str | None:
        """Returns the name of a budget that is spent, or None."""
        for name, steps in self.exact.items():
            if progress.step >= steps:
                return name
        if progress.seconds >= self.seconds:
            return "max_minutes"
        if progress.tokens >= self.tokens:
            return self._token_budget()
        if progress.horizon == "max_minutes" and progress.total_steps and progress.step >= progress.total_steps:
            return "max_minutes"
        return None

    def count_words(self, progress: Progress) -> None:
        """Updates the words in `progress`: those of the text times the passes over it. Exact at the end of a pass;
        within a pass, its words are divided equally among its steps."""
        if self._words_per_epoch is not None:
            progress.words = round(progress.epoch * self._words_per_epoch)

    def reached(self, progress: Progress) -> list[str]:
        """Returns the names of the amounts of `checkpoint_at` that were reached without a checkpoint so far."""
        return [
            amount.name
            for amount in self.amounts
            if amount.name not in progress.kept
            and ((progress.words or 0) if amount.words else progress.tokens) >= amount.number
        ]

    def _token_budget(self) -> str:
        return "max_tokens" if self.measured.get("max_tokens") == self.tokens else "max_flops"

    def outlook(self, progress: Progress) -> tuple[int | None, float | None]:
        """Returns the maximum number of steps of the run and the maximum remaining seconds; each is None if unknown."""
        steps = min(self.exact.values(), default=math.inf) if self._uses_clock else self.horizon(progress)
        remaining = max(self.seconds - progress.seconds, 0.0) if math.isfinite(self.seconds) else None
        return int(steps) if math.isfinite(steps) else None, remaining

    def horizon(self, progress: Progress) -> float:
        """Returns the number of steps of the run for the schedule; before it is measured, the budget in steps or
        epochs, because a warm-up of unknown length would have a learning rate of zero; without such a budget, infinity.
        """
        self.measure(progress)
        return min(self.exact.values(), default=math.inf) if progress.total_steps is None else progress.total_steps

    def measure(self, progress: Progress) -> None:
        """Sets the horizon in `progress` once enough steps are measured, and passes it to a loader with phases; with a
        budget in minutes, updates it. Call this before each step is loaded."""
        if self._uses_clock:
            self._update_horizon(progress)
        elif progress.total_steps is None:
            self._fix_horizon(progress)
        if self._phased is not None and progress.total_steps is not None and progress.horizon is not None:
            self._phased.fix(progress.total_steps, progress.horizon)

    def fractions(self, progress: Progress) -> dict[str, float]:
        """Returns the spent fraction of each budget."""
        fractions = {name: progress.step / steps for name, steps in self.exact.items()}
        if math.isfinite(self.tokens):
            fractions[self._token_budget()] = progress.tokens / self.tokens
        if math.isfinite(self.seconds):
            fractions["max_minutes"] = progress.seconds / self.seconds
        return fractions

    def completes_tenth(self, progress: Progress, total: float) -> bool:
        """Whether the last step completed a tenth of the run. total: the horizon before that step."""
        if not self._uses_clock:
            return math.isfinite(total) and progress.step % max(1, math.ceil(total / 10)) == 0
        tenths, self._completed_tenths = self._completed_tenths, int(10 * max(self.fractions(progress).values()))
        return tenths is not None and self._completed_tenths > tenths

    def _update_horizon(self, progress: Progress) -> None:
        fractions = self.fractions(progress)
        name = max(fractions, key=lambda budget: fractions[budget])
        if self._completed_tenths is None:
            self._completed_tenths = int(10 * fractions[name])
        if fractions[name] > 0:
            progress.total_steps, progress.horizon = (
                max(1, math.ceil(progress.step / fractions[name] - _ROUNDING)),
                name,
            )

    def _fix_horizon(self, progress: Progress) -> None:
        totals: dict[str, float] = dict(self.exact)
        phased, budget = self._phased, self._token_budget()
        if math.isfinite(self.tokens) and phased is not None:
            totals[budget] = self.tokens / phased.mean_tokens(budget)
        elif math.isfinite(self.tokens) and self._epoch_tokens:
            totals[budget] = self.tokens / self._epoch_tokens * self.loader.steps_in_epoch(0)
        needs_tokens = math.isfinite(self.tokens) and budget not in totals
        if needs_tokens or math.isfinite(self.seconds):
            if not self._has_measured(progress):
                return
            assert self._mark is not None
            steps = progress.step - self._mark.step
            if needs_tokens:
                remaining = (self.tokens - progress.tokens) * steps / (progress.tokens - self._mark.tokens)
                totals[budget] = progress.step + remaining
            if math.isfinite(self.seconds):
                # Only the first phase is measured; steps of other phases take more or less time.
                extra = 0.0 if phased is None else (phased.stretch("max_minutes") - 1) * self.seconds
                remaining = (self.seconds - progress.seconds + extra) * steps / (progress.seconds - self._mark.seconds)
                totals["max_minutes"] = progress.step + remaining
        name = min(totals, key=lambda budget: totals[budget])
        progress.total_steps, progress.horizon = max(1, math.ceil(totals[name] - _ROUNDING)), name

    def _has_measured(self, progress: Progress) -> bool:
        """Without a time budget, only the number of steps decides, so that a token budget has the same horizon on every
        machine."""
        if self._first_step is None:
            self._first_step = progress.step
            if progress.step >= MEASURED_STEPS and progress.seconds >= self._min_seconds:
                self._mark = _Mark(0, 0, 0.0)  # a branch or an extended run: measure all earlier training
                return True
        if progress.step == self._first_step:
            return False
        if self._mark is None:
            self._mark = _Mark(progress.step, progress.tokens, progress.seconds)
        steps, seconds = progress.step - self._mark.step, progress.seconds - self._mark.seconds
        return steps >= MEASURED_STEPS and seconds >= self._min_seconds

    @property
    def _min_seconds(self) -> float:
        """Minimum duration of a measurement in seconds; 0 without a time budget."""
        return min(MEASURED_SECONDS, MEASURED_SHARE * self.seconds) if math.isfinite(self.seconds) else 0.0


def steps_of_epochs(loader: Loader, epochs: float, max_steps: float = math.inf) -> int:
    """Returns the number of optimizer steps in `epochs` epochs. The steps of a fraction of an epoch are rounded up.

    Epochs may differ in length if batches are sized in tokens, so the steps of each epoch are counted, up to
    COUNTED_EPOCHS epochs or COUNTED_STEPS steps; later epochs are assumed to be as long as the mean of the counted
    ones. max_steps: the number of steps after which the run ends anyway; the result may be any number above it.
    """
    complete_epochs, steps = int(epochs), 0
    for epoch in range(complete_epochs):
        if steps > max_steps:
            return steps
        if epoch == COUNTED_EPOCHS or steps > COUNTED_STEPS:
            return math.ceil(min(steps / epoch * epochs, MOST_STEPS) - _ROUNDING)
        steps += loader.steps_in_epoch(epoch)
    if epochs > complete_epochs:
        steps += math.ceil((epochs - complete_epochs) * loader.steps_in_epoch(complete_epochs) - _ROUNDING)
    return max(steps, 1)


def rows_an_interval(log_every: int, steps: float) -> int:
    """Returns the number of train rows per `log_every` steps in a run of `steps` steps: one, or more if the run would
    have fewer than LEAST_ROWS rows, too few for a curve."""
    return min(log_every, max(1, math.ceil(log_every * LEAST_ROWS / steps)))


def is_logged(step: int, log_every: int, steps: float) -> bool:
    """Whether a step has a train row: the first step, every `log_every`-th, and in a short run some between them.
    steps: the number of steps of the run; infinite if unknown."""
    rows = rows_an_interval(log_every, steps)
    return step == 1 or step * rows // log_every > (step - 1) * rows // log_every


class CheckpointSchedule(Protocol):
    """The settings that determine which checkpoints a run saves and retains, see `TrainingSettings`."""

    @property
    def evaluate_every(self) -> int | None: ...

    @property
    def checkpoint_every(self) -> int | None: ...

    @property
    def keep(self) -> int | str: ...

    @property
    def keep_every(self) -> int | None: ...

    @property
    def checkpoint_at(self) -> tuple[int | str, ...] | None: ...


def retained_checkpoints(settings: CheckpointSchedule, steps: float) -> int:
    """Returns the maximum number of checkpoints that a run of `steps` steps retains; if `steps` is infinite, that of a
    run with ten evaluations."""
    is_known = math.isfinite(steps)
    evaluation_interval = settings.evaluate_every or (math.ceil(steps / 10) if is_known else 1)
    save_interval = settings.checkpoint_every or evaluation_interval
    steps = steps if is_known else 10 * save_interval
    saved = math.ceil(steps / save_interval)
    # A checkpoint is also saved after each evaluation that is the best so far.
    saved += int(steps // evaluation_interval) - int(steps // math.lcm(evaluation_interval, save_interval))
    permanent = (int(steps // settings.keep_every) if settings.keep_every else 0) + len(settings.checkpoint_at or ())
    # The best checkpoint is retained in addition to the newest ones.
    return saved + permanent if isinstance(settings.keep, str) else min(settings.keep + 1, saved) + permanent
