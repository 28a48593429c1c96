"""Several loaders one after the other, each for its share of a run.

Shares are of the budget that ends the run, in its own unit: of its steps, of its tokens (max_tokens), of its operations
(max_flops) or of its time (max_minutes, where the operations of a step stand for its time). All become steps once the
length of the run is known, so that the borders are the same when it resumes; until then the first phase lasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.types import Step

_START = {"phase": 0, "step": 0, "epoch": 0, "batch": 0, "began": 0, "skipped": 0}


@dataclass(frozen=True)
class PhaseFractions:
    """The phases of a run as numbers, one for each phase.

    fractions: of the budget, adding up to 1. tokens, flops: the mean of a step. rates: the learning rate as a multiple
    of the schedule's.
    """

    fractions: tuple[float, ...]
    tokens: tuple[float, ...]
    flops: tuple[float, ...]
    rates: tuple[float, ...]

    def of_steps(self, budget: str) -> tuple[float, ...]:
        """Each phase's share of the steps of a run that this budget ends, adding up to 1."""
        units = {"max_tokens": self.tokens, "max_flops": self.flops, "max_minutes": self.flops}.get(budget)
        steps = (
            self.fractions
            if units is None
            else [share / unit for share, unit in zip(self.fractions, units, strict=True)]
        )
        return tuple(step / math.fsum(steps) for step in steps)

    def mean(self, values: Sequence[float], budget: str) -> float:
        """The mean over all steps of a run of what a step of each phase has: `tokens`, `flops`."""
        return math.fsum(share * value for share, value in zip(self.of_steps(budget), values, strict=True))

    def last_steps(self, steps: int, budget: str) -> list[int]:
        """The last step of each phase in a run of so many."""
        ends = np.cumsum(self.of_steps(budget)) * steps
        return [*(math.floor(end + 0.5 + 1e-9) for end in ends[:-1].tolist()), steps]


class PhasedLoader:
    """Implements `types.Phased`.

    loaders: one a phase. same_text: whether it reads the text of the phase before it: one that cuts the same examples
    out of it continues in order where the other ended; any other begins a pass of its own, and `Step.epoch`
    counts anew. A cursor is that of the phase's loader, with the phase, the steps of the run before it, and the epoch
    in which the phase began, at which place of its order.
    """

    def __init__(self, loaders: Sequence[PackedLoader], fractions: PhaseFractions, same_text: Sequence[bool]):
        self.loaders, self.fractions = list(loaders), fractions
        self._continues = [False] + [
            same and loader.reads_like(before)
            for before, loader, same in zip(self.loaders, self.loaders[1:], same_text[1:], strict=False)
        ]
        self._horizon: tuple[int, str] | None = None
        self._ends: list[float] | None = None

    # What the loop asks of any loader.

    def steps(self, cursor: dict[str, int] | None = None, rank: int = 0, ranks: int = 1) -> Iterator[Step]:
        """Steps from the cursor on, without end: the last phase does not end. rank, ranks: as of `PackedLoader`;
        UserError too, and where the phase of the cursor has not started in a run of this length."""
        at = cursor or _START
        if self._ends is not None and at["phase"] and at["step"] < self._ends[at["phase"] - 1]:
            raise UserError(
                f"the checkpoint stands in phase {at['phase'] + 1} after step {at['step']}; with the budget of this "
                f"run that phase begins after step {self._ends[at['phase'] - 1]:.0f}",
                "use the budget that it had, or take a checkpoint of its first phase",
            )
        return self._steps(at, self._loader(at).steps(_within(at), rank, ranks), rank, ranks)

    def steps_in_epoch(self, epoch: int) -> int:
        """Of phases with passes of one length; UserError of others."""
        steps = [loader.steps_in_epoch(epoch) for loader in self.loaders]
        if len(set(steps)) > 1:
            lengths = ", ".join(f"{number:,}" for number in steps)
            raise UserError(
                f"max_epochs says not how long the run is: a pass has {lengths} steps in its phases, in their order",
                "set max_epochs=null, and max_steps=, max_tokens= or max_minutes=",
            )
        return steps[0]

    def metadata(self) -> dict[str, object]:
        """By phase, those of its loader."""
        by_phase = {f"phase {number}": loader.metadata() for number, loader in enumerate(self.loaders, 1)}
        return {"padding_fraction": 0.0, **by_phase}

    # What a budget asks of phases.

    def mean_tokens(self, budget: str) -> float:
        return self.fractions.mean(self.fractions.tokens, budget)

    def stretch(self, budget: str) -> float:
        """Of a run of limited time, whose later phases have longer or shorter steps than its first."""
        return self.fractions.fractions[0] / self.fractions.of_steps(budget)[0]

    def fix(self, steps: int, budget: str) -> None:
        if self._horizon == (steps, budget):
            return
        self._horizon, self._ends = (steps, budget), [*self.fractions.last_steps(steps, budget)[:-1], math.inf]

    # What is read when.

    def boundaries(self, steps: int) -> list[tuple[int, int]]:
        """The first and the last step of each phase, after so many steps of the run; of one without steps the last is
        before the first."""
        ends = [int(min(end, steps)) for end in self._ends or [steps] * len(self.loaders)]
        return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]

    def read(self, steps: int) -> Iterator[np.ndarray]:
        """The rows of the plans that so many steps from the beginning read, in no order."""
        at = _START
        while at["step"] < steps:
            loader, number = self._loader(at), int(min(self._end(at), steps)) - at["step"]
            yield from loader.read(number)
            at = {**at, **loader.after(number), "step": at["step"] + number}
            if at["step"] < steps:
                at = self._enter_phase(at)

    def _steps(self, at: dict[str, int], iterator: Iterator[Step], rank: int, ranks: int) -> Iterator[Step]:
        while True:
            while at["step"] < self._end(at):
                step = next(iterator)
                at = {**at, **step.cursor, "step": at["step"] + 1}
                rate = self.fractions.rates[at["phase"]]
                yield replace(step, cursor=at, phase=at["phase"] + 1, rate_scale=rate)
            at = self._enter_phase(at)
            iterator = self._loader(at).steps(_within(at), rank, ranks)

    def _end(self, at: dict[str, int]) -> float:
        """The last step of the current phase."""
        return math.inf if self._ends is None else self._ends[at["phase"]]

    def _enter_phase(self, at: dict[str, int]) -> dict[str, int]:
        """The beginning of the phase whose turn it is at the end of another; one that is too short for a step has
        none."""
        assert self._ends is not None
        while at["step"] >= self._ends[at["phase"]]:
            before, phase = self._loader(at), at["phase"] + 1
            epoch, skipped = (at["epoch"], before.read_before(_within(at))) if self._continues[phase] else (0, 0)
            at = {**at, "phase": phase, "epoch": epoch, "batch": 0, "began": epoch, "skipped": skipped}
        return at

    def _loader(self, at: dict[str, int]) -> PackedLoader:
        return self.loaders[at["phase"]].beginning(at["began"], at["skipped"])


def _within(at: dict[str, int]) -> dict[str, int]:
    """The cursor of the phase's own loader."""
    return {"epoch": at["epoch"], "batch": at["batch"]}
