"""Several objectives in one run, by weights: each step has examples of all of them, each is logged apart.

As T5 mixes its tasks (Raffel et al. 2020, section 3.5.2), examples are drawn in proportion to the weights; each
objective's losses are means over its own targets, and the weights add them up.

Shape letters: N examples of a batch, E of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np
import torch
from torch import nn

from lmtool import streams
from lmtool.data.plan import Examples, Plan
from lmtool.data.split import Rows, SplitData
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, Warn, silent
from lmtool.learners.baseline import Predictor
from lmtool.learners.configs import MixtureConfig
from lmtool.learners.evaluation import Evaluation, Scorer
from lmtool.learners.writing import Writer
from lmtool.models.base import Backbone
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.types import Batch, Packed, Scores, StepOutput

# One example: which member it is of, and its number in that member's plan.
MIXED = np.dtype([("member", "i4"), ("row", "i8")])


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


class MixedExamples:
    """An epoch is as long as no member has to repeat an example in it; which of its examples a member gives is drawn
    anew each epoch. whole: all examples of every member, whatever its share: to evaluate on."""

    def __init__(self, members: dict[str, Examples], shares: Sequence[float], seed: int, whole: bool = False):
        self.members, self.shares, self.seed, self.whole = members, tuple(shares), seed, whole
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            plans = [member.plan(epoch) for member in self.members.values()]
            size = min(len(plan) / share for plan, share in zip(plans, self.shares, strict=True))
            rows, lengths = [], []
            for number, (plan, share) in enumerate(zip(plans, self.shares, strict=True)):
                count = len(plan) if self.whole else min(max(1, round(size * share)), len(plan))
                order = streams.Permutation(len(plan), self.seed, "order", epoch * len(plans) + number)
                taken = order(np.arange(count))
                records = np.empty(count, dtype=MIXED)
                records["member"], records["row"] = number, taken
                rows.append(records)
                lengths.append(plan.lengths[taken])
            kept = dict([*self._plans.items()][-1:])
            self._plans = kept | {epoch: Plan(np.concatenate(rows), np.concatenate(lengths))}
        return self._plans[epoch]

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> MixedBatch:
        parts = []
        for number, (name, member) in enumerate(self.members.items()):
            taken = rows["row"][rows["member"] == number]
            if len(taken):
                # Numbers of their own, so that no two members share a draw.
                own = taken * len(self.members) + number
                parts.append((name, member.batch(member.plan(epoch).rows[taken], own, epoch)))
        batches = [batch for _, batch in parts]
        inputs = Packed(
            torch.cat([batch.inputs.tokens for batch in batches]), sum((batch.inputs.lengths for batch in batches), ())
        )
        targets = {term_of(name, term): target for name, batch in parts for term, target in batch.targets.items()}
        examples_N, parts_N = (torch.cat([getattr(batch, key) for batch in batches]) for key in ("examples", "parts"))
        return MixedBatch(inputs, targets, examples_N, parts_N, members=tuple(parts))

    def facts(self) -> dict[str, Any]:
        """Size of the first epoch, and of each member's own."""
        plan, own = self.plan(0), {name: member.facts() for name, member in self.members.items()}
        parts = zip(self.shares, own.values(), strict=True)
        return {
            "examples": len(plan),
            "tokens": int(plan.lengths.sum()),
            "mean_length": float(plan.lengths.mean()),
            "longest": int(plan.lengths.max()),
            "predicted_fraction": sum(share * facts.get("predicted_fraction", 0.0) for share, facts in parts),
            **{f"{name}_examples": int(facts["examples"]) for name, facts in own.items()},
        }


# What a member's parameters are called in front of their own names, until the map to checkpoint names takes it away.
_MEMBERS = "members."


class Mixture(BaseLearner):
    """Terms of all members, named by `term_of`. Members share the backbone, and heads of the same name.

    In a checkpoint the tensors of a member have the names that they have in the member alone; what members share is
    there once.
    """

    def __init__(self, config: MixtureConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        parts = config.parts()
        learners = {part.title: part.learner(backbone, tokenizer, seed) for part in parts}
        self.shares = dict(zip(learners, config.shares(), strict=True))
        self.weights = {
            term_of(name, term): self.shares[name] * weight
            for name, member in learners.items()
            for term, weight in member.weights.items()
        }
        for name, member in learners.items():
            self._share_heads(name, member, learners)
            own = getattr(member, "objective", None)
            if isinstance(own, nn.Module):
                if hasattr(self, "objective"):
                    raise UserError(
                        f"objective.members: {name} has networks of its own, and so has another member",
                        "train them in two runs, one after the other",
                    )
                self.objective = own
        self.makes_inputs = any(member.makes_inputs for member in learners.values())
        # Behind the parts that they share: a tensor goes by the first name it is met with.
        self.members = nn.ModuleDict(learners)
        self.register_state_dict_post_hook(_without_members)
        self.register_load_state_dict_pre_hook(_with_members)

    def _share_heads(self, name: str, member: BaseLearner, learners: Mapping[str, BaseLearner]) -> None:
        """Enter the heads of a member, or give it those of their names that are there. UserError where a task would
        take another member's head."""
        for head in list(member.heads):
            if head in self.heads and head in learners:
                raise UserError(
                    f"objective.members: the task {head} has the name of another member's head",
                    "give it another task.name",
                )
            if head in self.heads:
                member.heads[head] = self.heads[head]
            else:
                self.heads[head] = member.heads[head]

    def _named(self) -> Iterator[tuple[str, BaseLearner]]:
        yield from ((name, cast(BaseLearner, member)) for name, member in self.members.items())

    def on_step(self, step: int) -> None:
        super().on_step(step)
        for _, member in self._named():
            member.on_step(step)

    def examples(self, data: SplitData, max_length: int) -> MixedExamples:
        """What all members learn of a split; where it is not trained on, all examples of each."""
        examples = {name: member.examples(data, max_length) for name, member in self._named()}
        return MixedExamples(examples, list(self.shares.values()), self.seed, whole=data.split != "train")

    def predictors(self, train: SplitData, examples: MixedExamples) -> dict[str, Predictor]:
        """Those of all members."""
        return {
            term_of(name, term): predictor
            for name, member in self._named()
            for term, predictor in member.predictors(train, examples.members[name]).items()
        }

    def of_members(self, batch: Batch) -> Iterator[tuple[str, BaseLearner, Batch]]:
        """Name, learner and batch of each member in a batch."""
        if not isinstance(batch, MixedBatch):
            raise TypeError("a mixture reads the batches of its own examples")
        yield from ((name, cast(BaseLearner, self.members[name]), member) for name, member in batch.members)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {
            term_of(name, term): count
            for name, member, own in self.of_members(batch)
            for term, count in member.counts(own).items()
        }

    def forward(self, batch: Batch, step: int) -> StepOutput:
        sums = {
            term_of(name, term): total
            for name, member, own in self.of_members(batch)
            for term, total in member(own, step).sums.items()
        }
        return StepOutput(sums, self.weights)

    def score(self, batch: Batch) -> dict[str, Scores]:
        scores, before = {}, 0
        for name, member, own in self.of_members(batch):
            for term, own_scores in member.score(own).items():
                scores[term_of(name, term)] = replace(own_scores, documents=own_scores.documents + before)
            before += len(own.inputs.lengths)
        return scores

    def scorer(self, data: SplitData, examples: MixedExamples, predictors: Mapping[str, Predictor]) -> Scorer:
        """The scorers of all members, each with its own predictors."""
        scorers = {}
        for name, member in self._named():
            names = {term: term_of(name, term) for term in member.weights}
            own = {term: predictors[mixed] for term, mixed in names.items() if mixed in predictors}
            scorers[name] = member.scorer(data, examples.members[name], own)
        return MixedScorer(scorers, self.weights)

    def samples(self, batch: Batch, n: int) -> list[dict[str, Any]]:
        """Some examples of each member."""
        parts = list(self.of_members(batch))
        each = -(-n // max(len(parts), 1))
        return [sample for _, member, own in parts for sample in member.samples(own, each)][:n]

    def respond(
        self, rows: Rows, max_length: int, batch_tokens: int, precision: Precision, warn: Warn = silent
    ) -> Iterator[dict[str, Any]]:
        """What the first member answers."""
        return self._first.respond(rows, max_length, batch_tokens, precision, warn)

    def writer(self) -> Writer:
        """The first member's."""
        return self._first.writer()

    def line(self, record: dict[str, Any]) -> str:
        return self._first.line(record)

    @property
    def _first(self) -> BaseLearner:
        return next(member for _, member in self._named())


class MixedScorer(Scorer):
    """Hands each member its part of a batch, and joins their scores under the names of the mixture's terms."""

    def __init__(self, members: Mapping[str, Scorer], weights: Mapping[str, float]):
        self.members, self.weights = members, weights

    def add(self, batch: Batch) -> None:
        if not isinstance(batch, MixedBatch):
            raise TypeError("a mixture scores the batches of its own examples")
        for name, own in batch.members:
            self.members[name].add(own)

    def result(self) -> Evaluation:
        for scorer in self.members.values():
            scorer.calibrates = self.calibrates
        evaluations = {name: scorer.result() for name, scorer in self.members.items()}
        terms = {
            term_of(name, term): value
            for name, evaluation in evaluations.items()
            for term, value in evaluation.terms.items()
        }
        scores = {
            f"{name}_{score}": value
            for name, evaluation in evaluations.items()
            for score, value in evaluation.scores.items()
        }
        warnings = tuple(f"{name}: {text}" for name, evaluation in evaluations.items() for text in evaluation.warnings)
        return Evaluation(terms, {term: float(self.weights[term]) for term in terms}, scores, warnings)


def _without_members(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """The map to checkpoint names: what a member shares stands under the mixture's name already. What is a member's
    alone keeps its full name."""
    for name in [name for name in state if name.startswith(prefix + _MEMBERS)]:
        own = name.removeprefix(prefix + _MEMBERS).partition(".")[2]
        if prefix + own in state:
            del state[name]


def _with_members(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The other way: a member's tensor is the one that has its own name in the checkpoint."""
    for name, member in cast(Mixture, module).members.items():
        for own in member.state_dict():
            if prefix + own in state:
                state[f"{prefix}{_MEMBERS}{name}.{own}"] = state[prefix + own]
