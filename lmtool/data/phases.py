"""Several loaders in sequence, one for each phase of a run.

The length of a phase is a fraction of the budget that ends the run: of its steps, tokens (max_tokens), FLOPs
(max_flops) or time (max_minutes; the time of a step is assumed to be proportional to its FLOPs). Fractions are
converted to steps once the length of the run is known, so that the boundaries stay the same when the run resumes; until
then the first phase continues.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.types import Step

_START = {"phase": 0, "step": 0, "epoch": 0, "batch": 0, "began": 0, "skipped": 0}


@dataclass(frozen=True)
class PhaseFractions:
    """The lengths of the phases of a run, with a number for each phase.

    fractions: fraction of the budget; the sum is 1. tokens, flops: mean per step. rates: multiple of the schedule's
    learning rate.
    """

    fractions: tuple[float, ...]
    tokens: tuple[float, ...]
    flops: tuple[float, ...]
    rates: tuple[float, ...]

    def of_steps(self, budget: str) -> tuple[float, ...]:
        """Returns the fraction of the steps in each phase of a run that ends with this budget; the sum is 1."""
        units = {"max_tokens": self.tokens, "max_flops": self.flops, "max_minutes": self.flops}.get(budget)
        steps: Sequence[float] = self.fractions
        if units is not None:
            steps = [fraction / unit for fraction, unit in zip(self.fractions, units, strict=True)]
        return tuple(step / math.fsum(steps) for step in steps)

    def mean(self, values: Sequence[float], budget: str) -> float:
        """Returns the mean over the steps of a run of a value that each phase has per step, such as `tokens`."""
        return math.fsum(fraction * value for fraction, value in zip(self.of_steps(budget), values, strict=True))

    def last_steps(self, steps: int, budget: str) -> list[int]:
        """Returns the last step of each phase in a run of `steps` steps."""
        ends = np.cumsum(self.of_steps(budget)) * steps
        return [*(math.floor(end + 0.5 + 1e-9) for end in ends[:-1].tolist()), steps]


class PhasedLoader:
    """A `types.Phased` loader. same_text: for each phase, whether it reads the same text as the phase before. A phase
    with the same text and the same examples as the phase before continues in its order; any other phase starts at epoch
    0. A cursor consists of that of the phase's loader, the phase, the completed steps of the run, and the epoch and the
    number of skipped examples at the start of the phase."""

    def __init__(self, loaders: Sequence[PackedLoader], fractions: PhaseFractions, same_text: Sequence[bool]):
        self.loaders, self.fractions = list(loaders), fractions
        self._continues = [False] + [
            has_same_text and loader.reads_like(before)
            for before, loader, has_same_text in zip(self.loaders, self.loaders[1:], same_text[1:], strict=False)
        ]
        self._horizon: tuple[int, str] | None = None
        self._ends: list[float] | None = None

    def steps(self, cursor: dict[str, int] | None = None, rank: int = 0, ranks: int = 1) -> Iterator[Step]:
        """Yields endless steps from the cursor on, since the last phase has no end; see `PackedLoader.steps`. Also
        raises UserError if the phase of the cursor would start later in a run of this length."""
        position = cursor or _START
        if self._ends is not None and position["phase"] and position["step"] < self._ends[position["phase"] - 1]:
            raise UserError(
                f"the checkpoint was saved in phase {position['phase'] + 1} after step {position['step']}, but with "
                f"this run's budget the phase starts after step {self._ends[position['phase'] - 1]:.0f}",
                "use the checkpoint's budget, or a checkpoint from the first phase",
            )
        return self._steps(position, self._loader(position).steps(_within(position), rank, ranks), rank, ranks)

    def steps_in_epoch(self, epoch: int) -> int:
        """Raises UserError if an epoch differs in length between phases."""
        steps = [loader.steps_in_epoch(epoch) for loader in self.loaders]
        if len(set(steps)) > 1:
            lengths = ", ".join(f"{number:,}" for number in steps)
            raise UserError(
                f"max_epochs does not determine the length of the run: in its phases an epoch has {lengths} steps",
                "set max_epochs=null, and max_steps=, max_tokens= or max_minutes=",
            )
        return steps[0]

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata of each phase's loader."""
        by_phase = {f"phase {number}": loader.metadata() for number, loader in enumerate(self.loaders, 1)}
        return {"padding_fraction": 0.0, **by_phase}

    def mean_tokens(self, budget: str) -> float:
        return self.fractions.mean(self.fractions.tokens, budget)

    def stretch(self, budget: str) -> float:
        return self.fractions.fractions[0] / self.fractions.of_steps(budget)[0]

    def fix(self, steps: int, budget: str) -> None:
        if self._horizon != (steps, budget):
            self._horizon, self._ends = (steps, budget), [*self.fractions.last_steps(steps, budget)[:-1], math.inf]

    def boundaries(self, steps: int) -> list[tuple[int, int]]:
        """Returns the first and the last step of each phase after `steps` steps of the run; the last is before the
        first in a phase without steps."""
        ends = [int(min(end, steps)) for end in self._ends or [steps] * len(self.loaders)]
        return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]

    def rows_read(self, steps: int) -> Iterator[np.ndarray]:
        """Yields the rows of the plans that the first `steps` steps read, in any order."""
        position = _START
        while position["step"] < steps:
            loader, number = self._loader(position), int(min(self._end(position), steps)) - position["step"]
            yield from loader.rows_read(number)
            position = {**position, **loader.after(number), "step": position["step"] + number}
            if position["step"] < steps:
                position = self._enter_phase(position)

    def _steps(self, position: dict[str, int], iterator: Iterator[Step], rank: int, ranks: int) -> Iterator[Step]:
        while True:
            while position["step"] < self._end(position):
                step = next(iterator)
                position = {**position, **step.cursor, "step": position["step"] + 1}
                rate = self.fractions.rates[position["phase"]]
                yield replace(step, cursor=position, phase=position["phase"] + 1, rate_scale=rate)
            position = self._enter_phase(position)
            iterator = self._loader(position).steps(_within(position), rank, ranks)

    def _end(self, position: dict[str, int]) -> float:
        return math.inf if self._ends is None else self._ends[position["phase"]]

    def _enter_phase(self, position: dict[str, int]) -> dict[str, int]:
        """The cursor at the start of the next phase that has steps."""
        assert self._ends is not None
        while position["step"] >= self._ends[position["phase"]]:
            before, phase = self._loader(position), position["phase"] + 1
            epoch, skipped = (
                (position["epoch"], before.examples_before(_within(position))) if self._continues[phase] else (0, 0)
            )
            position = {**position, "phase": phase, "epoch": epoch, "batch": 0, "began": epoch, "skipped": skipped}
        return position

    def _loader(self, position: dict[str, int]) -> PackedLoader:
        return self.loaders[position["phase"]].starting_at(position["began"], position["skipped"])


def _within(position: dict[str, int]) -> dict[str, int]:
    return {"epoch": position["epoch"], "batch": position["batch"]}
