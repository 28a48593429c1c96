"""The examples of several learners in one epoch, drawn in proportion to their shares.

As T5 mixes its tasks (Raffel et al. 2020, section 3.5.2).

Shape letters: N examples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from lmtool import streams
from lmtool.data.plan import Examples, Plan
from lmtool.types import Batch, Packed

# One example: which member it is of, its number in that member's plan, and how often it came before in the epoch.
MIXED = np.dtype([("member", "i4"), ("row", "i8"), ("again", "i4")])


@dataclass(frozen=True)
class MixedBatch(Batch):
    """members: by name, the batch of each objective that has examples in it. The other fields lay them end to end for
    whoever counts tokens or joins examples; no model reads them."""

    members: tuple[tuple[str, Batch], ...] = ()

    def to(self, device: torch.device) -> Self:
        moved = tuple((name, batch.to(device)) for name, batch in self.members)
        return replace(self, inputs=self.inputs.to(device), members=moved, source=self.host)

    @property
    def tokens(self) -> int:
        """Real tokens of all members, both sides."""
        return sum(batch.tokens for _, batch in self.members)


def term_of(member: str, term: str) -> str:
    """The name of a member's term in the mixture: `span_sbo`; `mlm` stays `mlm`."""
    return term if term == member else f"{member}_{term}"


def joined(parts: Sequence[tuple[str, Batch]]) -> MixedBatch:
    """Batches of members, by their names, as one."""
    batches = [batch for _, batch in parts]
    inputs = Packed(
        torch.cat([batch.inputs.tokens for batch in batches]), sum((batch.inputs.lengths for batch in batches), ())
    )
    targets = {term_of(name, term): target for name, batch in parts for term, target in batch.targets.items()}
    examples_N, parts_N = (torch.cat([getattr(batch, key) for batch in batches]) for key in ("examples", "parts"))
    return MixedBatch(inputs, targets, examples_N, parts_N, members=tuple(parts))


class MixedExamples:
    """Which of its examples a member gives is drawn anew each epoch.

    An epoch is as long as no member has to repeat an example in it. repeats: it has as many examples as all members
    together; one whose share is more than it has gives all of them several times, and some of them once more. whole:
    all examples of every member, whatever its share: to evaluate on.
    """

    redraws: ClassVar[bool] = False
    """Whether an example that comes again in an epoch has a number of its own each time."""
    apart: tuple[int, int] = (1, 0)
    """How many mixtures there are side by side, and which of them this is: their examples have numbers of their own."""

    def __init__(
        self,
        members: dict[str, Examples],
        shares: Sequence[float],
        seed: int,
        whole: bool = False,
        repeats: bool = False,
    ):
        self.members, self.shares, self.seed, self.whole, self.repeats = members, tuple(shares), seed, whole, repeats
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            plans = [member.plan(epoch) for member in self.members.values()]
            rows, lengths = [], []
            for number, (plan, count) in enumerate(zip(plans, self._counts(plans), strict=True)):
                order = streams.Permutation(len(plan), self.seed, "order", epoch * len(plans) + number)
                taken = order(np.arange(count) % len(plan))
                records = np.empty(count, dtype=MIXED)
                records["member"], records["row"], records["again"] = number, taken, np.arange(count) // len(plan)
                rows.append(records)
                lengths.append(plan.lengths[taken])
            kept = dict([*self._plans.items()][-1:])
            self._plans = kept | {epoch: Plan(np.concatenate(rows), np.concatenate(lengths))}
        return self._plans[epoch]

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        parts = []
        for number, (name, member) in enumerate(self.members.items()):
            of_it = rows[rows["member"] == number]
            taken = of_it["row"]
            if len(taken):
                plan = member.plan(epoch)
                # Numbers of their own, so that no two members share a draw.
                own = (taken + of_it["again"] * len(plan) * self.redraws) * len(self.members) + number
                own = own * self.apart[0] + self.apart[1]
                parts.append((name, member.batch(plan.rows[taken], own, epoch)))
        return self.joined(parts)

    def joined(self, parts: Sequence[tuple[str, Batch]]) -> Batch:
        """Batches of members, by their names, as one."""
        return joined(parts)

    def complete(self) -> MixedExamples:
        """All examples of every member, whatever its share."""
        return MixedExamples(self.members, self.shares, self.seed, whole=True)

    def _counts(self, plans: Sequence[Plan]) -> list[int]:
        """How many examples of each member are in an epoch."""
        sizes = [len(plan) for plan in plans]
        if self.whole:
            return sizes
        if self.repeats:
            return [max(1, round(sum(sizes) * share)) for share in self.shares]
        size = min(size / share for size, share in zip(sizes, self.shares, strict=True))
        return [min(max(1, round(size * share)), own) for own, share in zip(sizes, self.shares, strict=True)]

    def drawn(self, rows: np.ndarray) -> dict[str, int]:
        """How many of these rows of a plan are of each member."""
        return dict(zip(self.members, np.bincount(rows["member"], minlength=len(self.members)).tolist(), strict=True))

    def facts(self) -> dict[str, Any]:
        """Size of the first epoch, and of each member's own."""
        plan, own = self.plan(0), {name: member.facts() for name, member in self.members.items()}
        drawn = self.drawn(plan.rows)
        facts = {
            **plan.facts(),
            **{
                key: sum(count / len(plan) * own[name].get(key, 0.0) for name, count in drawn.items())
                for key in ("predicted_fraction", "truncated_fraction")
            },
            **{f"{name}_examples": int(facts["examples"]) for name, facts in own.items()},
        }
        return facts if self.whole else {**facts, **{f"{name}_in_an_epoch": count for name, count in drawn.items()}}
