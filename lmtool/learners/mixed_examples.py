"""The examples of a mixture: each epoch has examples of several members in given proportions.

The members of a mixture are learners (`learners/mixture.py`) or texts (`learners/mixed_sources.py`). T5 mixes its tasks
in this way (Raffel et al. 2020, section 3.5.2).

Shape letters: N examples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np
import torch

from lmtool import random_streams
from lmtool.data.examples import Examples, Plan, cached_plan
from lmtool.learners.base import BaseLearner
from lmtool.learners.inspection import Inspector, RunningStatistics
from lmtool.types import Batch, Packed

# One example of a mixture: the index of its member, its row in the plan of this member, and how many times the epoch
# already had this row.
MIXED = np.dtype([("member", "i4"), ("row", "i8"), ("again", "i4")])


@dataclass(frozen=True)
class MixedBatch(Batch):
    """A batch with examples of several members, each of which has its own batch.

    The inherited fields are the concatenation of the members' batches, for counting tokens and for matching results to
    examples. No model reads these fields. members: the name and the batch of each member that has examples in this
    batch. fractions: the fractions of the epoch's examples by member; empty: those of the learner.
    """

    members: tuple[tuple[str, Batch], ...] = ()
    fractions: Mapping[str, float] = field(default_factory=dict)

    def to(self, device: torch.device) -> Self:
        moved = tuple((name, batch.to(device)) for name, batch in self.members)
        return replace(self, inputs=self.inputs.to(device), members=moved, source=self.host)

    @property
    def tokens(self) -> int:
        """The number of tokens of all members, inputs and outputs."""
        return sum(batch.tokens for _, batch in self.members)


def term_of(member: str, term: str) -> str:
    """Returns the name of a member's term in the mixture, MEMBER_TERM, such as `span_sbo`. A term that is named after
    its member keeps its name: `mlm` remains `mlm`."""
    return term if term == member else f"{member}_{term}"


def combine(member_batches: Sequence[tuple[str, Batch]]) -> MixedBatch:
    """Combines the batches of members, given with the members' names, into one batch."""
    batches = [batch for _, batch in member_batches]
    inputs = Packed(
        torch.cat([batch.inputs.tokens for batch in batches]), sum((batch.inputs.lengths for batch in batches), ())
    )
    targets = {term_of(name, term): target for name, batch in member_batches for term, target in batch.targets.items()}
    examples_N, parts_N = (torch.cat([getattr(batch, key) for batch in batches]) for key in ("examples", "parts"))
    return MixedBatch(inputs, targets, examples_N, parts_N, members=tuple(member_batches))


def mixed_plan(shared_plan: Plan, plans: Sequence[Plan], counts: Sequence[int], seed: int, epoch: int) -> Plan:
    """Builds the plan of an epoch from a random sample of each member's examples. shared_plan: the plan whose cache
    stores the result; `cached_plan` passes it, and this function ignores it. counts: the number of examples to sample
    from each plan. Examples repeat only if the count is larger than the plan."""
    rows, lengths = [], []
    for number, (plan, count) in enumerate(zip(plans, counts, strict=True)):
        order = random_streams.Permutation(len(plan), seed, "order", epoch * len(plans) + number)
        sampled = order(np.arange(count) % len(plan))
        records = np.empty(count, dtype=MIXED)
        records["member"], records["row"], records["again"] = number, sampled, np.arange(count) // len(plan)
        rows.append(records)
        lengths.append(plan.lengths[sampled])
    return Plan(np.concatenate(rows), np.concatenate(lengths))


class MixedExamples:
    """Examples of several members. Each epoch has a new random sample of each member's examples.

    fractions: the fraction of an epoch's examples that belong to each member. takes_all: whether an epoch has all
    examples of every member, as in evaluation, instead of the fractions. repeats: whether an epoch has as many examples
    as all members together, so that a member with a large fraction repeats examples. Otherwise, an epoch ends before a
    member would repeat an example. annealed: the fractions as a function of the epoch, whose first value is
    `fractions`; None if they are constant.
    """

    renumbers_repeats: ClassVar[bool] = False
    """Whether each repetition of an example in an epoch has its own number, and therefore its own random choices."""
    nesting: tuple[int, int] = (1, 0)
    """The number of members of the mixture that has these examples as a member, and the index of this member; (1, 0)
    without such a mixture. Both enter the numbers of the examples, so that no two members have equal numbers."""

    def __init__(
        self,
        members: dict[str, Examples],
        fractions: Sequence[float],
        seed: int,
        takes_all: bool = False,
        repeats: bool = False,
        annealed: Callable[[int], Sequence[float]] | None = None,
    ):
        self.members, self.fractions, self.seed = members, tuple(fractions), seed
        self.takes_all, self.repeats, self.annealed = takes_all, repeats, annealed
        self._plans: dict[int, Plan] = {}

    def fractions_in(self, epoch: int) -> tuple[float, ...]:
        """Returns the fraction of an epoch's examples that belong to each member."""
        return self.fractions if self.annealed is None else tuple(self.annealed(epoch))

    def plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            plans = [member.plan(epoch) for member in self.members.values()]
            # Plans of text are stored in a file that all processes share; plans of tasks are small, and every process
            # has a copy. The mixed plan is stored with the plan that most processes share.
            shared_plan = max(plans, key=lambda plan: plan.cache.processes)
            # The previous plan stays in memory, because a prefetching loader reads from two epochs at their boundary.
            previous = dict([*self._plans.items()][-1:])
            self._plans = previous | {
                epoch: cached_plan(mixed_plan, shared_plan, plans, self._counts(plans, epoch), self.seed, epoch)
            }
        return self._plans[epoch]

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        member_batches = []
        for number, (name, member) in enumerate(self.members.items()):
            member_rows = rows[rows["member"] == number]
            selected = member_rows["row"]
            if len(selected):
                plan = member.plan(epoch)
                # Random choices are keyed by the number of an example, so members must not have equal numbers.
                repetition = member_rows["again"] * len(plan) * self.renumbers_repeats
                numbers = (selected + repetition) * len(self.members) + number
                mixture_size, index_in_mixture = self.nesting
                numbers = numbers * mixture_size + index_in_mixture
                member_batches.append((name, member.batch(plan.rows[selected], numbers, epoch)))
        combined = self.combine(member_batches)
        if self.annealed is None or not isinstance(combined, MixedBatch):
            return combined
        return replace(combined, fractions=dict(zip(self.members, self.fractions_in(epoch), strict=True)))

    def combine(self, member_batches: Sequence[tuple[str, Batch]]) -> Batch:
        """Combines the batches of members, given with the members' names, into one batch."""
        return combine(member_batches)

    def complete(self) -> MixedExamples:
        """Returns the same mixture with all examples of every member."""
        return MixedExamples(self.members, self.fractions, self.seed, takes_all=True)

    def _counts(self, plans: Sequence[Plan], epoch: int) -> list[int]:
        fractions = self.fractions_in(epoch)
        sizes = [len(plan) for plan in plans]
        if self.takes_all:
            return sizes
        if self.repeats:
            return [max(1, round(sum(sizes) * fraction)) for fraction in fractions]
        # The epoch ends when the first member has no more examples.
        epoch_size = min(size / fraction for size, fraction in zip(sizes, fractions, strict=True))
        return [
            min(max(1, round(epoch_size * fraction)), size) for size, fraction in zip(sizes, fractions, strict=True)
        ]

    def member_counts(self, rows: np.ndarray) -> dict[str, int]:
        """Returns how many of some rows of a plan belong to each member, by name."""
        return dict(zip(self.members, np.bincount(rows["member"], minlength=len(self.members)).tolist(), strict=True))

    def metadata(self) -> dict[str, object]:
        """Returns the size of the first epoch, and the number of examples of each member."""
        plan, by_member = self.plan(0), {name: member.metadata() for name, member in self.members.items()}
        counts = self.member_counts(plan.rows)
        metadata = {
            **plan.metadata(),
            **{
                key: sum(count / len(plan) * by_member[name].get(key, 0.0) for name, count in counts.items())
                for key in ("predicted_fraction", "truncated_fraction")
            },
            **{f"{name}_examples": int(metadata["examples"]) for name, metadata in by_member.items()},
        }
        if self.takes_all:
            return metadata
        return {**metadata, **{f"{name}_in_an_epoch": count for name, count in counts.items()}}


class MixedInspector(Inspector):
    """Inspects a mixture, for `lmtool inspect`: the examples of each member, by its inspector, and the members'
    fractions."""

    def __init__(
        self, learner: BaseLearner, examples: MixedExamples, max_length: int, members: Mapping[str, Inspector]
    ):
        super().__init__(learner, examples, max_length)
        self.members = members

    def main_finding(self, stats: RunningStatistics) -> str:
        return " · ".join(f"{stats.measured(f'fraction of {name}') or 0:.0%} {name}" for name in self.members)

    def describe(self, n: int) -> Iterator[dict[str, object]]:
        """Yields the first n examples of each member, with the name of the `member`."""
        for name, member in self.members.items():
            for entry in member.describe(n):
                yield {"member": name, **entry}

    def measure(self, tokens: int) -> RunningStatistics:
        stats, examples = RunningStatistics(), self.examples
        counts = np.bincount(examples.plan(0).rows["member"], minlength=len(self.members))
        for (name, member), count, fraction in zip(self.members.items(), counts, examples.fractions, strict=True):
            measured = member.measure(max(tokens // len(counts), 1))
            for statistic in measured.statistics.values():
                title = f"{name}: {statistic.name}"
                stats.statistics[title] = replace(statistic, name=title)
            stats.remarks |= measured.remarks
            stats.report(f"fraction of {name}", count, counts.sum())
            # Rounding changes the count of a member by at most one half, and the sum of the counts by at most one half
            # per member.
            error = abs(count - fraction * counts.sum())
            stats.never("members without their fraction of the examples", error > 0.5 + len(counts) / 2)
        self.check_batches(stats, tokens)
        return stats
