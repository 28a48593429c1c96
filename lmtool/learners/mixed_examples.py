"""Epochs that mix the examples of several learners in given fractions.

As T5 mixes its tasks (Raffel et al. 2020, section 3.5.2).

Shape letters: N examples of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch

from lmtool import random_streams
from lmtool.data.examples import Examples, Plan, SplitData, planned
from lmtool.data.store import TokenStore
from lmtool.learners.base import BaseLearner
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.evaluation import Evaluation, Scorer, TermScorer
from lmtool.learners.inspection import Inspector, RunningStatistics
from lmtool.types import Batch, Packed, Scores, Target

# An example: its member, its row in that member's plan, and the number of its earlier occurrences in the epoch.
MIXED = np.dtype([("member", "i4"), ("row", "i8"), ("again", "i4")])


@dataclass(frozen=True)
class MixedBatch(Batch):
    """A batch of several members. members: the batch of each member by name. The other fields are their concatenation,
    for counting tokens and joining examples; no model reads them."""

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


def combine(parts: Sequence[tuple[str, Batch]]) -> MixedBatch:
    """Combine the batches of members, given by name."""
    batches = [batch for _, batch in parts]
    inputs = Packed(
        torch.cat([batch.inputs.tokens for batch in batches]), sum((batch.inputs.lengths for batch in batches), ())
    )
    targets = {term_of(name, term): target for name, batch in parts for term, target in batch.targets.items()}
    examples_N, parts_N = (torch.cat([getattr(batch, key) for batch in batches]) for key in ("examples", "parts"))
    return MixedBatch(inputs, targets, examples_N, parts_N, members=tuple(parts))


def mixed_plan(text: Plan, plans: Sequence[Plan], counts: Sequence[int], seed: int, epoch: int) -> Plan:
    """Examples of all plans, `counts` of each, resampled every epoch. text: the plan whose cache is used."""
    rows, lengths = [], []
    for number, (plan, count) in enumerate(zip(plans, counts, strict=True)):
        order = random_streams.Permutation(len(plan), seed, "order", epoch * len(plans) + number)
        taken = order(np.arange(count) % len(plan))
        records = np.empty(count, dtype=MIXED)
        records["member"], records["row"], records["again"] = number, taken, np.arange(count) // len(plan)
        rows.append(records)
        lengths.append(plan.lengths[taken])
    return Plan(np.concatenate(rows), np.concatenate(lengths))


class MixedExamples:
    """Examples of several members. Each epoch samples other examples of each member.

    An epoch ends before any member would repeat an example. repeats: an epoch has as many examples as all members
    together, so that a member may repeat examples. whole: all examples of every member, for evaluation.
    """

    redraws: ClassVar[bool] = False
    """Whether repeated examples of an epoch get different numbers."""
    apart: tuple[int, int] = (1, 0)
    """The number of nested mixtures, and the index of this one, so that their examples have different numbers."""

    def __init__(
        self,
        members: dict[str, Examples],
        fractions: Sequence[float],
        seed: int,
        whole: bool = False,
        repeats: bool = False,
    ):
        self.members, self.fractions, self.seed, self.whole, self.repeats = (
            members,
            tuple(fractions),
            seed,
            whole,
            repeats,
        )
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            plans = [member.plan(epoch) for member in self.members.values()]
            # Processes share the file of the text; tasks have few rows, which every process holds.
            text = max(plans, key=lambda plan: plan.cache.processes)
            previous = dict([*self._plans.items()][-1:])
            self._plans = previous | {epoch: planned(mixed_plan, text, plans, self._counts(plans), self.seed, epoch)}
        return self._plans[epoch]

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        parts = []
        for number, (name, member) in enumerate(self.members.items()):
            member_rows = rows[rows["member"] == number]
            selected = member_rows["row"]
            if len(selected):
                plan = member.plan(epoch)
                # Unique numbers, so that no two members share random choices.
                numbers = (selected + member_rows["again"] * len(plan) * self.redraws) * len(self.members) + number
                numbers = numbers * self.apart[0] + self.apart[1]
                parts.append((name, member.batch(plan.rows[selected], numbers, epoch)))
        return self.combine(parts)

    def combine(self, parts: Sequence[tuple[str, Batch]]) -> Batch:
        """Batches of members, by their names, as one."""
        return combine(parts)

    def complete(self) -> MixedExamples:
        """All examples of every member."""
        return MixedExamples(self.members, self.fractions, self.seed, whole=True)

    def _counts(self, plans: Sequence[Plan]) -> list[int]:
        """How many examples of each member are in an epoch."""
        sizes = [len(plan) for plan in plans]
        if self.whole:
            return sizes
        if self.repeats:
            return [max(1, round(sum(sizes) * share)) for share in self.fractions]
        size = min(size / share for size, share in zip(sizes, self.fractions, strict=True))
        return [
            min(max(1, round(size * share)), available) for available, share in zip(sizes, self.fractions, strict=True)
        ]

    def drawn(self, rows: np.ndarray) -> dict[str, int]:
        """The number of rows of each member among rows of a plan."""
        return dict(zip(self.members, np.bincount(rows["member"], minlength=len(self.members)).tolist(), strict=True))

    def metadata(self) -> dict[str, object]:
        """Sizes of the first epoch and of each member."""
        plan, by_member = self.plan(0), {name: member.metadata() for name, member in self.members.items()}
        drawn = self.drawn(plan.rows)
        metadata = {
            **plan.metadata(),
            **{
                key: sum(count / len(plan) * by_member[name].get(key, 0.0) for name, count in drawn.items())
                for key in ("predicted_fraction", "truncated_fraction")
            },
            **{f"{name}_examples": int(metadata["examples"]) for name, metadata in by_member.items()},
        }
        return (
            metadata if self.whole else {**metadata, **{f"{name}_in_an_epoch": count for name, count in drawn.items()}}
        )


# What `lmtool inspect` reports of a mixture.


class MixedInspector(Inspector):
    """The inspectors of all members, and the fraction of each in the mixture."""

    def __init__(
        self, learner: BaseLearner, examples: MixedExamples, max_length: int, members: Mapping[str, Inspector]
    ):
        super().__init__(learner, examples, max_length)
        self.members = members

    def fact(self, stats: RunningStatistics) -> str:
        return " · ".join(f"{stats.measured(f'share of {name}') or 0:.0%} {name}" for name in self.members)

    def described(self, n: int) -> Iterator[dict[str, object]]:
        """The first n examples of each member, with the name of the `member`."""
        for name, member in self.members.items():
            for entry in member.described(n):
                yield {"member": name, **entry}

    def measured(self, tokens: int) -> RunningStatistics:
        stats, examples = RunningStatistics(), self.examples
        drawn = np.bincount(examples.plan(0).rows["member"], minlength=len(self.members))
        for (name, member), count, share in zip(self.members.items(), drawn, examples.fractions, strict=True):
            measured = member.measured(max(tokens // len(drawn), 1))
            for statistic in measured.statistics.values():
                title = f"{name}: {statistic.name}"
                stats.statistics[title] = replace(statistic, name=title)
            stats.remarks |= measured.remarks
            stats.note(f"share of {name}", count, drawn.sum())
            # Each share is rounded to whole examples, by half of one at most, and so is their sum.
            stats.none("members off their share", abs(count - share * drawn.sum()) > 0.5 + len(drawn) / 2)
        self.check_batches(stats, tokens)
        return stats


# Examples of several texts in one epoch, for any learner that reads text: what it makes of each, drawn by shares.
#
# Everything else sees a learner's own batches. A held-out split is scored in one pass, text by text and together.
#
# Shape letters: N examples of a batch, M targets, C classes.


class MixedSources(MixedExamples):
    """The examples that one learner makes of several texts. Without shares every example comes once an epoch; with
    them an epoch has as many examples, and those that come several times in it are corrupted anew each time."""

    redraws = True

    def __init__(self, members: dict[str, Examples], fractions: Sequence[float] | None, seed: int, held_out: bool):
        sizes = [len(member.plan(0)) for member in members.values()]
        fractions = fractions or [size / sum(sizes) for size in sizes]
        super().__init__(members, fractions, seed, whole=held_out, repeats=True)

    def complete(self) -> MixedSources:
        return MixedSources(self.members, self.fractions, self.seed, held_out=True)

    def combine(self, parts: Sequence[tuple[str, Batch]]) -> Batch:
        return concatenated([batch for _, batch in parts])

    def members_of(self, batch: Batch) -> np.ndarray:
        """(N,) the number of the text that each example of a batch is of."""
        return batch.examples.cpu().numpy() // self.apart[0] % len(self.members)


def concatenated(batches: Sequence[Batch]) -> Batch:
    """Batches of one learner, on the host, as one."""
    first = batches[0]
    if len(batches) == 1:
        return first
    sides: dict[str, list[Packed]] = {"inputs": [batch.inputs for batch in batches]}
    if first.outputs is not None:
        sides["outputs"] = [batch.outputs for batch in batches if batch.outputs is not None]
    starts = {side: np.cumsum([0, *(len(packed.tokens) for packed in parts)]) for side, parts in sides.items()}
    targets = {}
    for term, target in first.targets.items():
        term_targets = [batch.targets[term] for batch in batches]
        offsets = starts[target.side]
        targets[term] = Target(
            _cat([part.labels for part in term_targets]),
            _cat(
                [
                    None if part.at is None else part.at + int(by)
                    for part, by in zip(term_targets, offsets, strict=False)
                ]
            ),
            _cat(
                [
                    None if part.span is None else part.span + int(by)
                    for part, by in zip(term_targets, offsets, strict=False)
                ]
            ),
            target.side,
        )
    return Batch(
        _packed(sides["inputs"]),
        targets,
        torch.cat([batch.examples for batch in batches]),
        torch.cat([batch.parts for batch in batches]),
        _packed(sides["outputs"]) if "outputs" in sides else None,
    )


def _cat(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def _packed(parts: Sequence[Packed]) -> Packed:
    return Packed(
        torch.cat([part.tokens for part in parts]),
        sum((part.lengths for part in parts), ()),
        {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns},
        sum((part.prefixes for part in parts), ()),
    )


# Functions for learners that read one text or several.


def examples_of(learner: BaseLearner, data: SplitData, max_length: int) -> Examples:
    """What a learner makes of a split."""
    if not data.members or not learner.reads_text:
        return learner.examples(data, max_length)
    members = {title: learner.examples(part, max_length) for title, part in data.members.items()}
    return MixedSources(members, data.fractions, learner.seed, data.split != "train")


def predictors_of(learner: BaseLearner, train: SplitData, examples: object) -> Mapping[str, Predictor]:
    """The constant predictors of a learner; for several texts, the weighted mean of their distributions."""
    if not isinstance(examples, MixedSources):
        return learner.predictors(train, examples)
    by_source = [learner.predictors(train.members[title], part) for title, part in examples.members.items()]
    return {term: _mean([part[term] for part in by_source], examples.fractions) for term in by_source[0]}


def _mean(predictors: Sequence[Predictor], fractions: Sequence[float]) -> Predictor:
    constant = [predictor for predictor in predictors if isinstance(predictor, ConstantPredictor)]
    if len(constant) < len(predictors):
        return predictors[0]  # of the configuration, not of the text
    with np.errstate(divide="ignore"):
        probabilities_C = sum(share * np.exp(-part.losses_C) for share, part in zip(fractions, constant, strict=True))
        return ConstantPredictor(constant[0].name, -np.log(probabilities_C))


def scorer_of(learner: BaseLearner, data: SplitData, examples: object, predictors: Mapping[str, Predictor]) -> Scorer:
    """The scorer of a split; with several texts, it also scores each of them."""
    if not isinstance(examples, MixedSources):
        return learner.scorer(data, examples, predictors)
    whole = learner.scorer(replace(data, store=_merged_store(data)), examples, predictors)
    parts = {title: learner.scorer(data.members[title], part, predictors) for title, part in examples.members.items()}
    if not isinstance(whole, TermScorer):
        return whole
    return SourcesScorer(
        whole, {title: part for title, part in parts.items() if isinstance(part, TermScorer)}, examples
    )


def _merged_store(data: SplitData) -> TokenStore:
    """A store without tokens whose metadata are those of all members together."""
    metadata = [part.text.metadata for part in data.members.values()]
    sums: dict[str, object] = {
        name: sum(own[name] for own in metadata) for name in ("tokens", "words", "bytes", "documents", "characters")
    }
    sums["unknown_fraction"] = sum(own["unknown_fraction"] * own["tokens"] for own in metadata) / sums["tokens"]
    first = next(iter(data.members.values())).text
    empty = np.empty(0, dtype=np.int64)
    return TokenStore(first.tokens[:0], empty, empty, empty, sums, first.folder)


class SourcesScorer(Scorer):
    """Scores a batch once, and enters what it finds for all texts together and for the one that it is of."""

    def __init__(self, whole: TermScorer, members: Mapping[str, TermScorer], examples: MixedSources):
        self.whole, self.members, self.examples = whole, members, examples

    def outputs(self, batch: Batch) -> dict[str, Scores]:
        return self.whole.outputs(batch)

    def take(self, batch: Batch, outputs: Mapping[str, Scores]) -> None:
        member_N = self.examples.members_of(batch)
        parts = {
            title: (batch_of, member_N == number)
            for number, title in enumerate(self.members)
            if (batch_of := _documents(batch, member_N == number)) is not None
        }
        for term, scores in outputs.items():
            self.whole.add_term(term, batch, scores)
            for title, (own, of_it_N) in parts.items():
                self.members[title].add_term(term, own, _of_documents(scores, of_it_N))

    def result(self) -> Evaluation:
        """That of all texts, with the loss and the further scores of each as TITLE_NAME."""
        whole = self.whole.result()
        own = {title: scorer.result() for title, scorer in self.members.items() if scorer.sums}
        scores = {
            f"{title}_{name}": value
            for title, evaluation in own.items()
            for name, value in {"loss": evaluation.loss, **evaluation.scores}.items()
        }
        return replace(whole, scores={**whole.scores, **scores})


def _documents(batch: Batch, kept_N: np.ndarray) -> Batch | None:
    """Some documents of a batch as what is counted by document wants them: without their tokens. None of none."""
    if not kept_N.any():
        return None
    kept = torch.from_numpy(kept_N).to(batch.examples.device)
    lengths = tuple(np.asarray(batch.inputs.lengths)[kept_N].tolist())
    return Batch(Packed(batch.inputs.tokens[:0], lengths), {}, batch.examples[kept], batch.parts[kept])


def _of_documents(scores: Scores, kept_N: np.ndarray) -> Scores:
    """The scores of some documents, which are numbered anew."""
    kept = torch.from_numpy(kept_N).to(scores.documents.device)
    number_N = kept.cumsum(0) - 1
    of_them_M = kept[scores.documents]
    return Scores(
        scores.losses[of_them_M],
        scores.labels[of_them_M],
        scores.predictions[of_them_M],
        number_N[scores.documents[of_them_M]],
    )


def inspector_of(learner: BaseLearner, examples: object, max_length: int) -> Inspector:
    """What `inspect` reports of examples."""
    if not isinstance(examples, MixedSources):
        return learner.inspector(examples, max_length)
    members = {title: learner.inspector(part, max_length) for title, part in examples.members.items()}
    return MixedInspector(learner, examples, max_length, members)
