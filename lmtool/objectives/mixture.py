"""Several objectives in one run, by weights: each step has examples of all of them, each is logged apart.

As T5 mixes its tasks (Raffel et al. 2020, section 3.5.2), examples are drawn in proportion to the weights; each
objective's losses are means over its own targets, and the weights add them up.

Shape letters: N examples of a batch, E of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from lmtool import streams
from lmtool.config.tables import build
from lmtool.data.plan import Examples, Plan
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.heads.learner import BaseLearner
from lmtool.models.base import Backbone
from lmtool.objectives.baseline import Predictor
from lmtool.objectives.configs import MixtureConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput

# One example: which member it is of, and its number in that member's plan.
MIXED = np.dtype([("member", "i4"), ("row", "i8")])


@dataclass(frozen=True)
class MixedBatch(Batch):
    """members: by name, the batch of each objective that has examples in it. The other fields lay them end to end for
    whoever counts tokens or joins examples; no model reads them."""

    members: tuple[tuple[str, Batch], ...] = ()

    def to(self, device: torch.device) -> Self:
        moved = tuple((name, one.to(device)) for name, one in self.members)
        return replace(self, inputs=self.inputs.to(device), members=moved, source=self.host)

    @property
    def tokens(self) -> int:
        """Real tokens of all members, both sides."""
        return sum(one.tokens for _, one in self.members)


def term_of(member: str, term: str) -> str:
    """The name of a member's term in the mixture: `span_sbo`; `mlm` stays `mlm`."""
    return term if term == member else f"{member}_{term}"


class MixedExamples:
    """An epoch is as long as no member has to repeat an example in it; which of its examples a member gives is drawn
    anew each epoch. whole: all examples of every member, whatever its share: to evaluate on."""

    def __init__(self, members: dict[str, Examples], shares: Sequence[float], seed: int, whole: bool = False):
        self.members, self.shares, self.seed, self.whole = members, tuple(shares), seed, whole
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            plans = [one.plan(epoch) for one in self.members.values()]
            size = min(len(plan) / share for plan, share in zip(plans, self.shares, strict=True))
            rows, lengths = [], []
            for number, (plan, share) in enumerate(zip(plans, self.shares, strict=True)):
                count = len(plan) if self.whole else min(max(1, round(size * share)), len(plan))
                order = streams.Permutation(len(plan), self.seed, "order", epoch * len(plans) + number)
                taken = order(np.arange(count))
                made = np.empty(count, dtype=MIXED)
                made["member"], made["row"] = number, taken
                rows.append(made)
                lengths.append(plan.lengths[taken])
            kept = dict([*self._plans.items()][-1:])
            self._plans = kept | {epoch: Plan(np.concatenate(rows), np.concatenate(lengths))}
        return self._plans[epoch]

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> MixedBatch:
        made = []
        for number, (name, member) in enumerate(self.members.items()):
            taken = rows["row"][rows["member"] == number]
            if len(taken):
                # Numbers of their own, so that no two members share a draw.
                own = taken * len(self.members) + number
                made.append((name, member.batch(member.plan(epoch).rows[taken], own, epoch)))
        batches = [one for _, one in made]
        inputs = Packed(
            torch.cat([one.inputs.tokens for one in batches]), sum((one.inputs.lengths for one in batches), ())
        )
        targets = {term_of(name, term): target for name, one in made for term, target in one.targets.items()}
        examples_N, parts_N = (torch.cat([getattr(one, key) for one in batches]) for key in ("examples", "parts"))
        return MixedBatch(inputs, targets, examples_N, parts_N, members=tuple(made))

    def facts(self) -> dict[str, Any]:
        """Size of the first epoch, and of each member's own."""
        plan, own = self.plan(0), {name: one.facts() for name, one in self.members.items()}
        parts = zip(self.shares, own.values(), strict=True)
        return {
            "examples": len(plan),
            "tokens": int(plan.lengths.sum()),
            "mean_length": float(plan.lengths.mean()),
            "longest": int(plan.lengths.max()),
            "predicted_fraction": sum(share * facts.get("predicted_fraction", 0.0) for share, facts in parts),
            **{f"{name}_examples": int(facts["examples"]) for name, facts in own.items()},
        }


class Mixture(BaseLearner):
    """Terms of all members, named by `term_of`. Members share the backbone, and heads of the same name."""

    def __init__(self, config: MixtureConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(backbone, seed)
        self.config, self.tokenizer = config, tokenizer
        shares = config.shares()
        members = {one.title: build(one, backbone, tokenizer, seed) for one in config.parts()}
        self.shares = dict(zip(members, shares, strict=True))
        # In a tuple: their parameters are named as this learner's own, under `backbone`, `heads` and `objective`.
        self._members: tuple[tuple[str, Any], ...] = tuple(members.items())
        self.weights: dict[str, float] = {}
        self.measures: dict[str, Any] = {}
        for name, member in self._members:
            for head in list(member.heads):
                if head in self.heads and head in members:
                    raise UserError(
                        f"objective.members: the task {head} has the name of another member's head",
                        "give it another task.name",
                    )
                if head in self.heads:
                    member.heads[head] = self.heads[head]
                else:
                    self.heads[head] = member.heads[head]
            if isinstance(getattr(member, "objective", None), nn.Module):
                self.objective = member.objective
            self.weights |= {term_of(name, term): self.shares[name] * weight for term, weight in member.weights.items()}
            self.measures |= {term_of(name, term): measure for term, measure in member.measures.items()}

    @property
    def members(self) -> dict[str, Any]:
        """The members' learners by name."""
        return dict(self._members)

    def train(self, mode: bool = True) -> Self:
        """Members follow."""
        super().train(mode)
        for _, member in self._members:
            member.train(mode)
        return self

    def on_step(self, step: int) -> None:
        for _, member in self._members:
            member.on_step(step)

    def examples(self, store: TokenStore, max_length: int, documents: str, split: str) -> MixedExamples:
        """What all members learn of a store."""
        made = {name: one.examples(store, max_length, documents, split) for name, one in self._members}
        return MixedExamples(made, list(self.shares.values()), self.seed, whole=split == "validation")

    def baselines(self, store: TokenStore, examples: MixedExamples) -> dict[str, Predictor]:
        """Those of all members."""
        return {
            term_of(name, term): one
            for name, member in self._members
            for term, one in member.baselines(store, examples.members[name]).items()
        }

    def _parts(self, batch: Batch) -> Iterator[tuple[str, Any, Batch]]:
        """Name, learner and batch of each member in it."""
        if not isinstance(batch, MixedBatch):
            raise TypeError("a mixture reads the batches of its own examples")
        members = self.members
        yield from ((name, members[name], one) for name, one in batch.members)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {
            term_of(name, term): count
            for name, member, own in self._parts(batch)
            for term, count in member.counts(own).items()
        }

    def forward(self, batch: Batch, step: int) -> StepOutput:
        sums = {
            term_of(name, term): total
            for name, member, own in self._parts(batch)
            for term, total in member(own, step).sums.items()
        }
        return StepOutput(sums, self.weights)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Each target's loss and best guess, in evaluation."""
        found, before = {}, 0
        for name, member, own in self._parts(batch):
            for term, one in member.score(own).items():
                found[term_of(name, term)] = replace(one, documents=one.documents + before)
            before += len(own.inputs.lengths)
        return found

    @torch.no_grad()
    def samples(self, batch: Batch, tokenizer: Tokenizer, n: int) -> list[dict[str, Any]]:
        """Some examples of each member."""
        parts = list(self._parts(batch))
        each = -(-n // max(len(parts), 1))
        return [one for _, member, own in parts for one in member.samples(own, tokenizer, each)][:n]

    @torch.no_grad()
    def complete(
        self, texts: Sequence[str], autocast: Callable[[], AbstractContextManager]
    ) -> Iterator[dict[str, Any]]:
        """What the first member makes of texts."""
        yield from self._members[0][1].complete(texts, autocast)
