"""A weighted mixture of objectives: each step has examples of all of them, and each is logged separately.

As in T5 (Raffel et al. 2020, section 3.5.2), examples are sampled in proportion to the weights. The loss is the
weighted sum of each objective's mean loss over its own targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import nn

from lmtool.config.base import Config
from lmtool.data.examples import Rows, SplitData
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, Inference
from lmtool.learners.baseline import Predictor
from lmtool.learners.configs import Mixed
from lmtool.learners.evaluation import Evaluation, Scorer
from lmtool.learners.mixed_examples import (
    MixedBatch,
    MixedExamples,
    MixedInspector,
    MixedSources,
    examples_of,
    inspector_of,
    predictors_of,
    scorer_of,
    term_of,
)
from lmtool.learners.writing import Writer
from lmtool.models.base import Backbone
from lmtool.nn.stack import Side
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput

# Prefix of the members' parameters, removed in checkpoints.
_MEMBERS = "members."


class Mixture(BaseLearner):
    """A learner with the terms of all members, named by `term_of`. Members share the backbone and heads of the same
    name.

    In a checkpoint, the tensors of a member have the same names as without the mixture, and shared tensors occur once.
    """

    reads_text = False  # its members may

    @property
    def joins(self) -> type[MixedScorer]:
        """The scorer class that combines the members' scorers."""
        return MixedScorer

    def __init__(self, config: Mixed, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(cast(Config, config), backbone, tokenizer, seed)
        parts = config.parts()
        learners = {part.title: part.learner(backbone, tokenizer, seed) for part in parts}
        self.fractions = dict(zip(learners, config.fractions(), strict=True))
        self.weights = {
            term_of(name, term): self.fractions[name] * weight
            for name, member in learners.items()
            for term, weight in member.weights.items()
        }
        for name, member in learners.items():
            self._share_heads(name, member, learners)
            if member.objective is not None:
                if self.objective is not None:
                    raise UserError(
                        f"{config.members_key}: two members, {name} among them, have additional networks",
                        "train them in two runs, one after the other",
                    )
                self.objective = member.objective
        self.makes_inputs = any(member.makes_inputs for member in learners.values())
        self.pretrained = tuple(dict.fromkeys(name for member in learners.values() for name in member.pretrained))
        # After the shared parts, because a shared tensor is named after its first occurrence.
        self.members = nn.ModuleDict(learners)
        self.register_state_dict_post_hook(_without_members)
        self.register_load_state_dict_pre_hook(_with_members)

    def _share_heads(self, name: str, member: BaseLearner, learners: Mapping[str, BaseLearner]) -> None:
        """Add the heads of a member, or let it share existing heads of the same name. Raises UserError if a task has
        the name of another member's head."""
        for head in list(member.heads):
            if head in self.heads and head in learners:
                raise UserError(
                    f"{self.config.members_key}: the task {head} has the name of another member's head",
                    "give it another task.name",
                )
            if head in self.heads:
                member.heads[head] = self.heads[head]
            else:
                self.heads[head] = member.heads[head]

    def add_head(self, name: str, head: nn.Module) -> None:
        """Add a head to every member, for a tuning method."""
        super().add_head(name, head)
        for _, member in self.named():
            member.heads[name] = self.heads[name]

    @property
    def head_side(self) -> Side:
        """The side of the first member; compatible tasks have the same."""
        return next(member.head_side for _, member in self.named())

    def named(self) -> Iterator[tuple[str, BaseLearner]]:
        """The members by name."""
        yield from ((name, cast(BaseLearner, member)) for name, member in self.members.items())

    def on_step(self, step: int) -> None:
        super().on_step(step)
        for _, member in self.named():
            member.on_step(step)

    def examples(self, data: SplitData, max_length: int) -> MixedExamples:
        """The examples of all members; for a held-out split, all examples of each member that has some."""
        examples = {name: examples_of(member, data, max_length) for name, member in self.named() if member.is_in(data)}
        for number, part in enumerate(examples.values()):
            if isinstance(part, MixedSources):
                part.apart = len(examples), number
        fractions = [self.fractions[name] for name in examples]
        return MixedExamples(examples, fractions, self.seed, data.split != "train", self.config.repeats)

    def inspector(self, examples: MixedExamples, max_length: int) -> MixedInspector:
        """The inspectors of all members."""
        members = {name: inspector_of(member, examples.members[name], max_length) for name, member in self.named()}
        return MixedInspector(self, examples, max_length, members)

    def predictors(self, train: SplitData, examples: MixedExamples) -> dict[str, Predictor]:
        """The constant predictors of all members."""
        return {
            term_of(name, term): predictor
            for name, member in self.named()
            for term, predictor in predictors_of(member, train, examples.members[name]).items()
        }

    def of_members(self, batch: Batch) -> Iterator[tuple[str, BaseLearner, Batch]]:
        """Name, learner and batch of each member in a batch."""
        if not isinstance(batch, MixedBatch):
            raise TypeError("a mixture reads the batches of its own examples")
        yield from ((name, cast(BaseLearner, self.members[name]), member) for name, member in batch.members)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {
            term_of(name, term): count
            for name, member, part in self.of_members(batch)
            for term, count in member.counts(part).items()
        }

    def forward(self, batch: Batch, step: int) -> StepOutput:
        sums = {
            term_of(name, term): total
            for name, member, part in self.of_members(batch)
            for term, total in member(part, step).sums.items()
        }
        return StepOutput(sums, self.weights)

    def score(self, batch: Batch) -> dict[str, Scores]:
        scores, before = {}, 0
        for name, member, part in self.of_members(batch):
            for term, part_scores in member.score(part).items():
                scores[term_of(name, term)] = replace(part_scores, documents=part_scores.documents + before)
            before += len(part.inputs.lengths)
        return scores

    def scorer(self, data: SplitData, examples: MixedExamples, predictors: Mapping[str, Predictor]) -> Scorer:
        """The scorers of all members, each with its own predictors."""
        scorers = {}
        for name, member in self.named():
            if name not in examples.members:
                continue
            names = {term: term_of(name, term) for term in member.weights}
            of_member = {term: predictors[mixed] for term, mixed in names.items() if mixed in predictors}
            scorers[name] = scorer_of(member, data, examples.members[name], of_member)
        return self.joins(scorers, self.weights)

    def samples(self, batch: Batch, n: int) -> list[dict[str, object]]:
        """Some examples of each member."""
        parts = list(self.of_members(batch))
        each = -(-n // max(len(parts), 1))
        return [sample for _, member, part in parts for sample in member.samples(part, each)][:n]

    def respond(self, rows: Rows, inference: Inference) -> Iterator[dict[str, object]]:
        """The predictions of the first member."""
        return self._first.respond(rows, inference)

    def writer(self) -> Writer:
        """The first member's."""
        return self._first.writer()

    def line(self, record: dict[str, object]) -> str:
        return self._first.line(record)

    @property
    def _first(self) -> BaseLearner:
        return next(member for _, member in self.named())


class MixedScorer(Scorer):
    """Scores each member's part of a batch, and combines the results under the mixture's term names."""

    def __init__(self, members: Mapping[str, Scorer], weights: Mapping[str, float]):
        self.members, self.weights = members, weights

    def outputs(self, batch: Batch) -> list[object]:
        return [scorer.outputs(part) for scorer, part in self._parts(batch)]

    def take(self, batch: Batch, outputs: Sequence[object]) -> None:
        for (scorer, part), part_outputs in zip(self._parts(batch), outputs, strict=True):
            scorer.take(part, part_outputs)

    def _parts(self, batch: Batch) -> Iterator[tuple[Scorer, Batch]]:
        """The scorer and the part of the batch of each member."""
        if not isinstance(batch, MixedBatch):
            raise TypeError("a mixture scores the batches of its own examples")
        for name, part in batch.members:
            self.members[name].selects = self.selects
            yield self.members[name], part

    def result(self) -> Evaluation:
        for scorer in self.members.values():
            scorer.calibrates, scorer.selects = self.calibrates, self.selects
        return self.combine({name: scorer.result() for name, scorer in self.members.items()})

    def combine(self, evaluations: Mapping[str, Evaluation]) -> Evaluation:
        """The combined evaluation of the members, under the mixture's term names."""
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


def _without_members(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
    """Remove shared tensors of members from a state dict, which contains them under the mixture's names."""
    for name in [name for name in state if name.startswith(prefix + _MEMBERS)]:
        member_name = name.removeprefix(prefix + _MEMBERS).partition(".")[2]
        if prefix + member_name in state:
            del state[name]


def _with_members(module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    """The reverse: add the tensors of members under their names in the checkpoint."""
    for name, member in cast(Mixture, module).members.items():
        for member_name in member.state_dict():
            if prefix + member_name in state:
                state[f"{prefix}{_MEMBERS}{name}.{member_name}"] = state[prefix + member_name]
