"""Several texts for one learner (`data=mixture`): its examples of each text, mixed in given proportions.

The learner gets ordinary batches, and does not know that there are several texts. A held-out split is scored in one
pass, for all texts together and for each text separately. The functions `examples_of`, `predictors_of`, `scorer_of` and
`inspector_of` work for one text and for several.

Shape letters: N examples of a batch, M targets, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from lmtool.data.examples import Examples, SplitData
from lmtool.data.store import TokenStore
from lmtool.learners.base import BaseLearner
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.evaluation import Evaluation, Scorer, TermScorer
from lmtool.learners.inspection import Inspector
from lmtool.learners.mixed_examples import MixedExamples, MixedInspector
from lmtool.types import Batch, Packed, Scores, Target


class MixedSources(MixedExamples):
    """The examples that one learner makes from several texts, by title.

    An epoch has as many examples as all texts together. With fractions, examples of some texts are repeated in an
    epoch, and each repetition is corrupted differently; without, an epoch has every example once. held_out: whether an
    epoch always has all examples.
    """

    renumbers_repeats = True

    def __init__(self, members: dict[str, Examples], fractions: Sequence[float] | None, seed: int, held_out: bool):
        sizes = [len(member.plan(0)) for member in members.values()]
        fractions = fractions or [size / sum(sizes) for size in sizes]
        super().__init__(members, fractions, seed, takes_all=held_out, repeats=True)

    def complete(self) -> MixedSources:
        return MixedSources(self.members, self.fractions, self.seed, held_out=True)

    def combine(self, member_batches: Sequence[tuple[str, Batch]]) -> Batch:
        """Concatenates the batches of texts into an ordinary batch of the learner."""
        return concatenate([batch for _, batch in member_batches])

    def members_of(self, batch: Batch) -> np.ndarray:
        """Returns the index (N,) of the text from which each example of a batch was made."""
        return batch.examples.cpu().numpy() // self.nesting[0] % len(self.members)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Concatenates batches of the same learner, which must be on the host."""
    first = batches[0]
    if len(batches) == 1:
        return first
    sides: dict[str, list[Packed]] = {"inputs": [batch.inputs for batch in batches]}
    if first.outputs is not None:
        sides["outputs"] = [batch.outputs for batch in batches if batch.outputs is not None]
    starts = {side: np.cumsum([0, *(len(packed.tokens) for packed in texts)]) for side, texts in sides.items()}
    targets = {
        term: _concatenate_targets([batch.targets[term] for batch in batches], starts[target.side])
        for term, target in first.targets.items()
    }
    return Batch(
        _concatenate_packed(sides["inputs"]),
        targets,
        torch.cat([batch.examples for batch in batches]),
        torch.cat([batch.parts for batch in batches]),
        _concatenate_packed(sides["outputs"]) if "outputs" in sides else None,
    )


def _concatenate_targets(targets: Sequence[Target], starts: np.ndarray) -> Target:
    indices, spans = [], []
    for target, start in zip(targets, starts.tolist(), strict=False):
        indices.append(None if target.at is None else target.at + start)
        spans.append(None if target.span is None else target.span + start)
    return Target(_cat([target.labels for target in targets]), _cat(indices), _cat(spans), targets[0].side)


def _cat(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def _concatenate_packed(texts: Sequence[Packed]) -> Packed:
    return Packed(
        torch.cat([packed.tokens for packed in texts]),
        sum((packed.lengths for packed in texts), ()),
        {name: torch.cat([packed.columns[name] for packed in texts]) for name in texts[0].columns},
        sum((packed.prefixes for packed in texts), ()),
    )


# Functions for a learner that reads one text or several texts.


def examples_of(learner: BaseLearner, data: SplitData, max_length: int) -> Examples:
    """Returns the examples that a learner makes from a split: of one text, several texts, or rows. max_length: maximum
    tokens of an example."""
    if not data.members or not learner.config.reads_text:
        return learner.examples(data, max_length)
    members = {title: learner.examples(member, max_length) for title, member in data.members.items()}
    return MixedSources(members, data.fractions, learner.seed, data.split != "train")


def predictors_of(learner: BaseLearner, train: SplitData, examples: object) -> Mapping[str, Predictor]:
    """Returns the constant predictor of each term; for several texts, the weighted mean of the texts' distributions.
    examples: those of the training data, as `examples_of` returned them."""
    if not isinstance(examples, MixedSources):
        return learner.predictors(train, examples)
    by_source = [learner.predictors(train.members[title], member) for title, member in examples.members.items()]
    return {term: _mean([predictors[term] for predictors in by_source], examples.fractions) for term in by_source[0]}


def _mean(predictors: Sequence[Predictor], fractions: Sequence[float]) -> Predictor:
    constant = [predictor for predictor in predictors if isinstance(predictor, ConstantPredictor)]
    if len(constant) < len(predictors):
        return predictors[0]  # depends on the configuration only, so the predictors of all texts are equal
    with np.errstate(divide="ignore"):
        probabilities_C = sum(
            fraction * np.exp(-predictor.losses_C) for fraction, predictor in zip(fractions, constant, strict=True)
        )
        return ConstantPredictor(constant[0].name, -np.log(probabilities_C))


def scorer_of(learner: BaseLearner, data: SplitData, examples: object, predictors: Mapping[str, Predictor]) -> Scorer:
    """Returns the scorer of a split; for several texts, one that also scores each text separately. examples,
    predictors: the results of `examples_of` and `predictors_of`."""
    if not isinstance(examples, MixedSources):
        return learner.scorer(data, examples, predictors)
    scorer_of_all = learner.scorer(replace(data, store=_merged_store(data)), examples, predictors)
    by_source = {
        title: learner.scorer(data.members[title], member, predictors) for title, member in examples.members.items()
    }
    if not isinstance(scorer_of_all, TermScorer):
        return scorer_of_all
    term_scorers = {title: scorer for title, scorer in by_source.items() if isinstance(scorer, TermScorer)}
    return SourcesScorer(scorer_of_all, term_scorers, examples)


def _merged_store(data: SplitData) -> TokenStore:
    """The store has no tokens: scorers read only the metadata."""
    metadata = [member.text.metadata for member in data.members.values()]
    sums: dict[str, object] = {
        name: sum(text[name] for text in metadata) for name in ("tokens", "words", "bytes", "documents", "characters")
    }
    sums["unknown_fraction"] = sum(text["unknown_fraction"] * text["tokens"] for text in metadata) / sums["tokens"]
    first = next(iter(data.members.values())).text
    empty = np.empty(0, dtype=np.int64)
    return TokenStore(first.tokens[:0], empty, empty, empty, sums, first.folder)


class SourcesScorer(Scorer):
    """Runs the learner once per batch, and adds the losses to the scores of all texts and to the scores of each
    text."""

    def __init__(self, scorer_of_all: TermScorer, members: Mapping[str, TermScorer], examples: MixedSources):
        self.scorer_of_all, self.members, self.examples = scorer_of_all, members, examples

    def outputs(self, batch: Batch) -> dict[str, Scores]:
        return self.scorer_of_all.outputs(batch)

    def take(self, batch: Batch, outputs: Mapping[str, Scores]) -> None:
        member_N = self.examples.members_of(batch)
        batches_by_title = {
            title: (selected_batch, member_N == number)
            for number, title in enumerate(self.members)
            if (selected_batch := _select_documents(batch, member_N == number)) is not None
        }
        for term, scores in outputs.items():
            self.scorer_of_all.add_term(term, batch, scores)
            for title, (selected_batch, selected_N) in batches_by_title.items():
                self.members[title].add_term(term, selected_batch, _select_scores(scores, selected_N))

    def result(self) -> Evaluation:
        """Returns the evaluation of all texts, with the loss and the scores of each text added as TITLE_NAME."""
        evaluation_of_all = self.scorer_of_all.result()
        by_title = {title: scorer.result() for title, scorer in self.members.items() if scorer.sums}
        scores = {
            f"{title}_{name}": value
            for title, evaluation in by_title.items()
            for name, value in {"loss": evaluation.loss, **evaluation.scores}.items()
        }
        return replace(evaluation_of_all, scores={**evaluation_of_all.scores, **scores})


def _select_documents(batch: Batch, selected_N: np.ndarray) -> Batch | None:
    if not selected_N.any():
        return None
    selected = torch.from_numpy(selected_N).to(batch.examples.device)
    lengths = tuple(np.asarray(batch.inputs.lengths)[selected_N].tolist())
    # Scores are counted by document, without tokens.
    return Batch(Packed(batch.inputs.tokens[:0], lengths), {}, batch.examples[selected], batch.parts[selected])


def _select_scores(scores: Scores, selected_N: np.ndarray) -> Scores:
    selected = torch.from_numpy(selected_N).to(scores.documents.device)
    new_index_N = selected.cumsum(0) - 1
    selected_M = selected[scores.documents]
    return Scores(
        scores.losses[selected_M],
        scores.labels[selected_M],
        scores.predictions[selected_M],
        new_index_N[scores.documents[selected_M]],
    )


def inspector_of(learner: BaseLearner, examples: object, max_length: int) -> Inspector:
    """Returns the inspector of a learner's examples, the result of `examples_of`, for `lmtool inspect`."""
    if not isinstance(examples, MixedSources):
        return learner.inspector(examples, max_length)
    members = {title: learner.inspector(member, max_length) for title, member in examples.members.items()}
    return MixedInspector(learner, examples, max_length, members)
