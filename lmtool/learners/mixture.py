"""A weighted mixture of learners (objectives or tasks), which are trained together on one backbone.

The learners in a mixture are its *members*. Each step has examples of all members, sampled in proportion to their
weights, as in T5 (Raffel et al. 2020, section 3.5.2). The loss is the weighted sum of the members' mean losses, and
each member's loss is also logged separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import nn

from lmtool.config.base import Config
from lmtool.data.examples import SplitData
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, Responder
from lmtool.learners.baseline import Predictor
from lmtool.learners.configs import Mixed
from lmtool.learners.evaluation import Evaluation, Scorer
from lmtool.learners.mixed_examples import (
    MixedBatch,
    MixedExamples,
    MixedInspector,
    term_of,
)
from lmtool.learners.mixed_sources import MixedSources, examples_of, inspector_of, predictors_of, scorer_of
from lmtool.learners.writing import Writer
from lmtool.models.base import Backbone
from lmtool.nn.stack import Side
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput

# The prefix of the members' parameters in PyTorch; their names in checkpoints do not have it.
_MEMBERS = "members."


def has_data(member: BaseLearner, data: SplitData) -> bool:
    """Returns whether a split has data for a member: text, or the rows of its task."""
    return not member.config.reads_labeled_rows or member.config.name in data.rows


def _loss_weights(fractions: Mapping[str, float], members: Mapping[str, BaseLearner]) -> dict[str, float]:
    return {
        term_of(name, term): fractions[name] * weight
        for name, member in members.items()
        for term, weight in member.loss_weights.items()
    }


class Mixture(BaseLearner):
    """A learner that combines several learners, its members.

    Its loss has the terms of all members, named by `term_of`. Members share the backbone, and all heads that have the
    same name. In a checkpoint, the tensors of a member have the same names as without a mixture, and shared tensors
    occur once. members: the learner of each member, by name. fractions: the fraction of the examples that belong to
    each member, by name.
    """

    @property
    def scorer_class(self) -> type[MixedScorer]:
        """The class of the scorer that combines the members' scorers."""
        return MixedScorer

    def __init__(self, config: Mixed, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(cast(Config, config), backbone, tokenizer, seed)
        learners = {member.title: member.learner(backbone, tokenizer, seed) for member in config.member_configs()}
        self.fractions = dict(zip(learners, config.fractions(), strict=True))
        self.loss_weights = _loss_weights(self.fractions, learners)
        for name, member in learners.items():
            self._share_heads(member, learners)
            if member.objective is not None:
                if self.objective is not None:
                    raise UserError(
                        f"{config.members_key}: {name} and another member each have additional networks, but a mixture "
                        "allows only one such member",
                        "train these members in separate runs, one after the other",
                    )
                self.objective = member.objective
        # PyTorch names a shared tensor after its first occurrence, so `members` comes after the backbone and the heads.
        self.members = nn.ModuleDict(learners)
        self.register_state_dict_post_hook(_remove_member_tensors)
        self.register_load_state_dict_pre_hook(_add_member_tensors)

    def _share_heads(self, member: BaseLearner, learners: Mapping[str, BaseLearner]) -> None:
        for head in list(member.heads):
            if head in self.heads and head in learners:
                raise UserError(
                    f"{self.config.members_key}: the task {head} has the name of another member's head",
                    "choose another task.name for this task",
                )
            if head in self.heads:
                member.heads[head] = self.heads[head]
            else:
                self.heads[head] = member.heads[head]

    def add_head(self, name: str, head: nn.Module) -> None:
        """Adds a head to the mixture and to every member; tuning methods call this method."""
        super().add_head(name, head)
        for _, member in self.named_members():
            member.heads[name] = self.heads[name]

    @property
    def head_side(self) -> Side:
        """The side of a batch whose hidden states the heads read. It is the same for all members."""
        return next(member.head_side for _, member in self.named_members())

    def named_members(self) -> Iterator[tuple[str, BaseLearner]]:
        """Yields the name and the learner of each member."""
        yield from ((name, cast(BaseLearner, member)) for name, member in self.members.items())

    def on_step(self, step: int) -> None:
        super().on_step(step)
        for _, member in self.named_members():
            member.on_step(step)

    def predict_every_token(self) -> dict[str, str | None]:
        return {
            term_of(name, term): name for name, member in self.named_members() for term in member.predict_every_token()
        }

    def examples(self, data: SplitData, max_length: int) -> MixedExamples:
        """Returns the mixed examples of all members that have data in the split."""
        examples = {
            name: examples_of(member, data, max_length)
            for name, member in self.named_members()
            if has_data(member, data)
        }
        for number, member_examples in enumerate(examples.values()):
            if isinstance(member_examples, MixedSources):
                member_examples.nesting = len(examples), number
        config, places = cast(Mixed, self.config), [[*self.fractions].index(name) for name in examples]

        def annealed(epoch: int) -> list[float]:
            fractions = config.fractions(epoch)
            return [fractions[place] for place in places]

        return MixedExamples(
            examples,
            annealed(0),
            self.seed,
            takes_all=data.split != "train",
            repeats=self.config.repeats,
            annealed=annealed if config.annealed and data.split == "train" else None,
        )

    def inspector(self, examples: MixedExamples, max_length: int) -> MixedInspector:
        """Returns an inspector that combines the inspectors of all members."""
        members = {
            name: inspector_of(member, examples.members[name], max_length) for name, member in self.named_members()
        }
        return MixedInspector(self, examples, max_length, members)

    def predictors(self, train: SplitData, examples: MixedExamples) -> dict[str, Predictor]:
        """Returns the constant predictor of each term of all members."""
        return {
            term_of(name, term): predictor
            for name, member in self.named_members()
            for term, predictor in predictors_of(member, train, examples.members[name]).items()
        }

    def members_in(self, batch: Batch) -> Iterator[tuple[str, BaseLearner, Batch]]:
        """Yields the name, the learner and the batch of each member that has examples in a mixed batch."""
        if not isinstance(batch, MixedBatch):
            raise TypeError("a mixture needs a MixedBatch, which its own examples return")
        yield from ((name, cast(BaseLearner, self.members[name]), member_batch) for name, member_batch in batch.members)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {
            term_of(name, term): count
            for name, member, member_batch in self.members_in(batch)
            for term, count in member.counts(member_batch).items()
        }

    def forward(self, batch: Batch, step: int) -> StepOutput:
        sums = {
            term_of(name, term): total
            for name, member, member_batch in self.members_in(batch)
            for term, total in member(member_batch, step).sums.items()
        }
        fractions = batch.fractions if isinstance(batch, MixedBatch) else {}
        return StepOutput(
            sums, _loss_weights(fractions, dict(self.named_members())) if fractions else self.loss_weights
        )

    def score(self, batch: Batch) -> dict[str, Scores]:
        # Documents are counted over the batches of all members.
        scores, first_document = {}, 0
        for name, member, member_batch in self.members_in(batch):
            for term, term_scores in member.score(member_batch).items():
                scores[term_of(name, term)] = replace(term_scores, documents=term_scores.documents + first_document)
            first_document += len(member_batch.inputs.lengths)
        return scores

    def scorer(self, data: SplitData, examples: MixedExamples, predictors: Mapping[str, Predictor]) -> Scorer:
        """Returns a scorer that combines the scorers of all members."""
        scorers = {}
        for name, member in self.named_members():
            if name not in examples.members:
                continue
            mixed_terms = {term: term_of(name, term) for term in member.loss_weights}
            member_predictors = {term: predictors[mixed] for term, mixed in mixed_terms.items() if mixed in predictors}
            scorers[name] = scorer_of(member, data, examples.members[name], member_predictors)
        return self.scorer_class(scorers, self.loss_weights)

    def samples(self, batch: Batch, n: int) -> list[dict[str, object]]:
        """Returns n examples as plain data, about equally many of each member, see `BaseLearner.samples`."""
        members = list(self.members_in(batch))
        per_member = -(-n // max(len(members), 1))
        samples = [sample for _, member, member_batch in members for sample in member.samples(member_batch, per_member)]
        return samples[:n]

    def responder(self) -> Responder:
        """Returns the responder of the first member."""
        return self._first_member.responder()

    def writer(self) -> Writer:
        """Returns the writer of the first member."""
        return self._first_member.writer()

    @property
    def _first_member(self) -> BaseLearner:
        return next(member for _, member in self.named_members())


class MixedScorer(Scorer):
    """Scores the batch of each member in a mixed batch, and combines the evaluations of the members. members: the
    scorer of each member, by name. loss_weights: the weight of each term of the mixture, by the name that `term_of`
    returns."""

    def __init__(self, members: Mapping[str, Scorer], loss_weights: Mapping[str, float]):
        self.members, self.loss_weights = members, loss_weights

    def outputs(self, batch: Batch) -> list[object]:
        return [scorer.outputs(member_batch) for scorer, member_batch in self._member_batches(batch)]

    def take(self, batch: Batch, outputs: Sequence[object]) -> None:
        for (scorer, member_batch), member_outputs in zip(self._member_batches(batch), outputs, strict=True):
            scorer.take(member_batch, member_outputs)

    def _member_batches(self, batch: Batch) -> Iterator[tuple[Scorer, Batch]]:
        if not isinstance(batch, MixedBatch):
            raise TypeError("a mixture needs a MixedBatch, which its own examples return")
        for name, member_batch in batch.members:
            self.members[name].selects = self.selects
            yield self.members[name], member_batch

    def result(self) -> Evaluation:
        for scorer in self.members.values():
            scorer.calibrates, scorer.selects = self.calibrates, self.selects
        return self.combine({name: scorer.result() for name, scorer in self.members.items()})

    def combine(self, evaluations: Mapping[str, Evaluation]) -> Evaluation:
        """Combines the evaluations of the members. Terms have the names that `term_of` returns, scores the name
        MEMBER_SCORE."""
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
        return Evaluation(terms, {term: float(self.loss_weights[term]) for term in terms}, scores, warnings)


def _remove_member_tensors(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
    for name in [name for name in state if name.startswith(prefix + _MEMBERS)]:
        member_name = name.removeprefix(prefix + _MEMBERS).partition(".")[2]
        if prefix + member_name in state:
            del state[name]


def _add_member_tensors(module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    for name, member in cast(Mixture, module).members.items():
        for member_name in member.state_dict():
            if prefix + member_name in state:
                state[f"{prefix}{_MEMBERS}{name}.{member_name}"] = state[prefix + member_name]
