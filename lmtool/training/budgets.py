"""The budgets that end a run, and the horizon of its schedule.

Budgets in steps and epochs are exact. A budget in tokens or FLOPs is converted to steps: the mean step is measured once
over a few early steps, kept in state.json and read when the run resumes: the schedule never bends. With a budget in
minutes the schedule follows the largest spent share of any budget: it is smooth at any speed, and ends when the time
does. Phases begin at steps, so a run of them that is limited in time measures its steps once, too. Until a horizon is
known the schedule sees the budget in steps or epochs, and where there is none an infinite run. A branch with changed
budgets, or a run whose budgets were extended, measures its horizon over all earlier training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from lmtool.errors import UserError
from lmtool.training.progress import Progress, TrainingSettings
from lmtool.types import Loader, Phased

# The first step warms up (allocations, compilation) and is left out. A measured time must be long enough to mean
# something and short beside the budget.
MEASURED_STEPS = 5
MEASURED_SECONDS = 10.0
MEASURED_SHARE = 0.03
# The passes of a run are counted one by one up to here: 0.4 ms each for a hundred examples, a second for a million.
COUNTED_EPOCHS = 1000
COUNTED_STEPS = 1_000_000
MOST_STEPS = 2**62
LEAST_ROWS = 50


@dataclass
class _Mark:
    step: int
    tokens: int
    seconds: float


class Budget:
    """The budgets of one run. UserError where none is given."""

    def __init__(self, settings: TrainingSettings, loader: Loader):
        self.settings = settings
        self.exact: dict[str, int] = {}
        if settings.max_steps is not None:
            self.exact["max_steps"] = settings.max_steps
        if settings.max_epochs is not None:
            enough = self.exact.get("max_steps", math.inf)
            self.exact["max_epochs"] = steps_of_epochs(loader, settings.max_epochs, enough)
        self.measured = {
            name: limit
            for name, limit in (
                ("max_tokens", settings.max_tokens),
                ("max_flops", settings.max_flops),
                ("max_minutes", settings.max_minutes),
            )
            if limit is not None
        }
        if not self.exact and not self.measured:
            raise UserError("no budget: nothing says when the run ends", "max_steps=1000 (or max_epochs, max_minutes)")
        if settings.max_flops is not None and settings.flops_per_token is None:
            raise ValueError("max_flops needs flops_per_token")
        self.loader, self._phased = loader, loader if isinstance(loader, Phased) else None
        # Tokens of a whole pass, where the loader counted them: then a token budget needs no measuring.
        self._epoch_tokens = loader.metadata().get("tokens_per_epoch") if math.isfinite(self.tokens) else None
        self._by_clock = "max_minutes" in self.measured and self._phased is None
        self._tenths: int | None = None
        self._started: int | None = None
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
        """The budget in seconds of loading and stepping; infinite where there is none."""
        return 60 * self.measured.get("max_minutes", math.inf)

    def spent(self, progress: Progress) -> str | None:
        """The budget that is spent, or None."""
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

    def _token_budget(self) -> str:
        return "max_tokens" if self.measured.get("max_tokens") == self.tokens else "max_flops"

    def outlook(self, progress: Progress) -> tuple[int | None, float | None]:
        """Steps of the whole run and seconds that are left, at most, where they are known."""
        steps = min(self.exact.values(), default=math.inf) if self._by_clock else self.horizon(progress)
        left = max(self.seconds - progress.seconds, 0.0) if math.isfinite(self.seconds) else None
        return int(steps) if math.isfinite(steps) else None, left

    def horizon(self, progress: Progress) -> float:
        """Steps of the whole run as the schedule sees them. Until they are known, those of an exact budget: a warm-up
        without an end would take no step at all."""
        self.measure(progress)
        return min(self.exact.values(), default=math.inf) if progress.total_steps is None else progress.total_steps

    def measure(self, progress: Progress) -> None:
        """Fix the horizon in `progress` as soon as enough is known, and let a loader with phases know; with a budget in
        minutes, bring it up to date. To be called before each step is loaded."""
        if self._by_clock:
            self._follow(progress)
        elif progress.total_steps is None:
            self._fix(progress)
        if self._phased is not None and progress.total_steps is not None and progress.horizon is not None:
            self._phased.fix(progress.total_steps, progress.horizon)

    def fractions(self, progress: Progress) -> dict[str, float]:
        """The share of each budget that is spent."""
        fractions = {name: progress.step / steps for name, steps in self.exact.items()}
        if math.isfinite(self.tokens):
            fractions[self._token_budget()] = progress.tokens / self.tokens
        if math.isfinite(self.seconds):
            fractions["max_minutes"] = progress.seconds / self.seconds
        return fractions

    def is_evaluated(self, progress: Progress, total: float) -> bool:
        """Whether a tenth of the run ends with the step that was just taken. total: the horizon before it."""
        if not self._by_clock:
            return math.isfinite(total) and progress.step % max(1, math.ceil(total / 10)) == 0
        tenths, self._tenths = self._tenths, int(10 * max(self.fractions(progress).values()))
        return tenths is not None and self._tenths > tenths

    def _follow(self, progress: Progress) -> None:
        """The horizon as if the rest of the run took its budgets as fast as all before."""
        fractions = self.fractions(progress)
        name = max(fractions, key=lambda budget: fractions[budget])
        if self._tenths is None:
            self._tenths = int(10 * fractions[name])
        if fractions[name] > 0:
            progress.total_steps, progress.horizon = max(1, math.ceil(progress.step / fractions[name] - 1e-9)), name

    def _fix(self, progress: Progress) -> None:
        totals: dict[str, float] = dict(self.exact)
        phased, budget = self._phased, self._token_budget()
        if math.isfinite(self.tokens) and phased is not None:
            totals[budget] = self.tokens / phased.mean_tokens(budget)
        elif math.isfinite(self.tokens) and self._epoch_tokens:
            totals[budget] = self.tokens / self._epoch_tokens * self.loader.steps_in_epoch(0)
        needs_tokens = math.isfinite(self.tokens) and budget not in totals
        if needs_tokens or math.isfinite(self.seconds):
            if not self._advance(progress):
                return
            assert self._mark is not None
            steps = progress.step - self._mark.step
            if needs_tokens:
                left = (self.tokens - progress.tokens) * steps / (progress.tokens - self._mark.tokens)
                totals[budget] = progress.step + left
            if math.isfinite(self.seconds):
                # The first phase is measured; the steps of others are longer or shorter.
                more = 0.0 if phased is None else (phased.stretch("max_minutes") - 1) * self.seconds
                left = (self.seconds - progress.seconds + more) * steps / (progress.seconds - self._mark.seconds)
                totals["max_minutes"] = progress.step + left
        name = min(totals, key=lambda budget: totals[budget])
        progress.total_steps, progress.horizon = max(1, math.ceil(totals[name] - 1e-9)), name

    def _advance(self, progress: Progress) -> bool:
        """Whether enough early steps are measured. Without a time budget only their number counts, so that
        a horizon in tokens is the same on every machine."""
        if self._started is None:
            self._started = progress.step
            if progress.step >= MEASURED_STEPS and progress.seconds >= self._enough:
                self._mark = _Mark(0, 0, 0.0)  # a branch, or an extended run: what was trained before says it
                return True
        if progress.step == self._started:
            return False
        if self._mark is None:
            self._mark = _Mark(progress.step, progress.tokens, progress.seconds)
        steps, seconds = progress.step - self._mark.step, progress.seconds - self._mark.seconds
        return steps >= MEASURED_STEPS and seconds >= self._enough

    @property
    def _enough(self) -> float:
        """Seconds that have to be measured; none where no time is asked for."""
        return min(MEASURED_SECONDS, MEASURED_SHARE * self.seconds) if math.isfinite(self.seconds) else 0.0


def steps_of_epochs(loader: Loader, epochs: float, enough: float = math.inf) -> int:
    """Optimizer steps of so many passes; of a broken pass, its share rounded up. Each pass is planned, since they
    differ where a batch is sized in tokens.

    enough: steps that end the run anyway; where there are more, the count is any number beyond. After COUNTED_EPOCHS
    passes or COUNTED_STEPS steps the rest is taken to be like those that were counted.
    """
    whole, steps = int(epochs), 0
    for epoch in range(whole):
        if steps > enough:
            return steps
        if epoch == COUNTED_EPOCHS or steps > COUNTED_STEPS:
            return math.ceil(min(steps / epoch * epochs, MOST_STEPS) - 1e-9)
        steps += loader.steps_in_epoch(epoch)
    if epochs > whole:
        steps += math.ceil((epochs - whole) * loader.steps_in_epoch(whole) - 1e-9)
    return max(steps, 1)


def rows_an_interval(log_every: int, steps: float) -> int:
    """Train rows in `log_every` steps of a run of so many: one, and more where the whole run would have fewer than
    LEAST_ROWS, of which no curve can be drawn."""
    return min(log_every, max(1, math.ceil(log_every * LEAST_ROWS / steps)))


def has_row(step: int, log_every: int, steps: float) -> bool:
    """Whether a step has a train row: the first has, each `log_every`-th, and others evenly between these. steps: of
    the whole run, infinite where they are not known."""
    rows = rows_an_interval(log_every, steps)
    return step == 1 or step * rows // log_every > (step - 1) * rows // log_every


class Keeping(Protocol):
    """What says which checkpoints a run saves, and which of them stay: see `TrainingSettings`."""

    @property
    def evaluate_every(self) -> int | None: ...

    @property
    def checkpoint_every(self) -> int | None: ...

    @property
    def keep(self) -> int | str: ...

    @property
    def keep_every(self) -> int | None: ...


def retained_checkpoints(keeping: Keeping, steps: float) -> int:
    """The maximum number of checkpoints that a run of `steps` steps keeps; if `steps` is infinite, that of a run with
    ten evaluations."""
    known = math.isfinite(steps)
    evaluate = keeping.evaluate_every or (math.ceil(steps / 10) if known else 1)
    save = keeping.checkpoint_every or evaluate
    steps = steps if known else 10 * save
    saved = math.ceil(steps / save)
    saved += int(steps // evaluate) - int(steps // math.lcm(evaluate, save))  # where they are the best so far
    stay = int(steps // keeping.keep_every) if keeping.keep_every else 0
    return saved + stay if isinstance(keeping.keep, str) else min(keeping.keep + 1, saved) + stay
