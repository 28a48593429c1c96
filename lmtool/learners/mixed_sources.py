"""Examples of several texts in one epoch, for any learner that reads text: what it makes of each, drawn by shares.

Everything else sees a learner's own batches. A held-out split is scored in one pass, text by text and together.

Shape letters: N examples of a batch, M targets, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lmtool.data.plan import Examples
from lmtool.data.split import SplitData
from lmtool.data.store import TokenStore
from lmtool.learners.base import BaseLearner
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.evaluation import Evaluation, Scorer, TermScorer
from lmtool.learners.inspection import Inspector
from lmtool.learners.mixed_examples import MixedExamples
from lmtool.learners.mixed_inspector import MixedInspector
from lmtool.types import Batch, Packed, Scores, Target


class MixedSources(MixedExamples):
    """The examples that one learner makes of several texts. Without shares every example comes once an epoch; with
    them an epoch has as many examples, and those that come several times in it are corrupted anew each time."""

    redraws = True

    def __init__(self, members: dict[str, Examples], shares: Sequence[float] | None, seed: int, held_out: bool):
        sizes = [len(member.plan(0)) for member in members.values()]
        shares = shares or [size / sum(sizes) for size in sizes]
        super().__init__(members, shares, seed, whole=held_out, repeats=True)

    def complete(self) -> MixedSources:
        return MixedSources(self.members, self.shares, self.seed, held_out=True)

    def joined(self, parts: Sequence[tuple[str, Batch]]) -> Batch:
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
        own = [batch.targets[term] for batch in batches]
        offsets = starts[target.side]
        targets[term] = Target(
            _cat([part.labels for part in own]),
            _cat([None if part.at is None else part.at + int(by) for part, by in zip(own, offsets, strict=False)]),
            _cat([None if part.span is None else part.span + int(by) for part, by in zip(own, offsets, strict=False)]),
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
    there = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(there) if there else None


def _packed(parts: Sequence[Packed]) -> Packed:
    return Packed(
        torch.cat([part.tokens for part in parts]),
        sum((part.lengths for part in parts), ()),
        {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns},
        sum((part.prefixes for part in parts), ()),
    )


# What is asked of a learner, of one text or of several.


def examples_of(learner: BaseLearner, data: SplitData, max_length: int) -> Examples:
    """What a learner makes of a split."""
    if not data.members or not learner.reads_text:
        return learner.examples(data, max_length)
    members = {title: learner.examples(part, max_length) for title, part in data.members.items()}
    return MixedSources(members, data.shares, learner.seed, data.split != "train")


def predictors_of(learner: BaseLearner, train: SplitData, examples: Any) -> Mapping[str, Predictor]:
    """The best that reading nothing predicts: of several texts the mean of their distributions, by their shares."""
    if not isinstance(examples, MixedSources):
        return learner.predictors(train, examples)
    own = [learner.predictors(train.members[title], part) for title, part in examples.members.items()]
    return {term: _mean([part[term] for part in own], examples.shares) for term in own[0]}


def _mean(predictors: Sequence[Predictor], shares: Sequence[float]) -> Predictor:
    constant = [predictor for predictor in predictors if isinstance(predictor, ConstantPredictor)]
    if len(constant) < len(predictors):
        return predictors[0]  # of the configuration, not of the text
    with np.errstate(divide="ignore"):
        shares_C = sum(share * np.exp(-part.losses_C) for share, part in zip(shares, constant, strict=True))
        return ConstantPredictor(constant[0].name, -np.log(shares_C))


def scorer_of(learner: BaseLearner, data: SplitData, examples: Any, predictors: Mapping[str, Predictor]) -> Scorer:
    """Collects the scores of a split: of several texts those of each too."""
    if not isinstance(examples, MixedSources):
        return learner.scorer(data, examples, predictors)
    whole = learner.scorer(replace(data, store=_counted(data)), examples, predictors)
    parts = {title: learner.scorer(data.members[title], part, predictors) for title, part in examples.members.items()}
    if not isinstance(whole, TermScorer):
        return whole
    return SourcesScorer(
        whole, {title: part for title, part in parts.items() if isinstance(part, TermScorer)}, examples
    )


def _counted(data: SplitData) -> TokenStore:
    """A store without tokens whose facts are those of all members together."""
    facts = [part.text.facts for part in data.members.values()]
    sums: dict[str, Any] = {
        name: sum(own[name] for own in facts) for name in ("tokens", "words", "bytes", "documents", "characters")
    }
    sums["unknown_fraction"] = sum(own["unknown_fraction"] * own["tokens"] for own in facts) / sums["tokens"]
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
            self.whole.enter(term, batch, scores)
            for title, (own, of_it_N) in parts.items():
                self.members[title].enter(term, own, _of_documents(scores, of_it_N))

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


def inspector_of(learner: BaseLearner, examples: Any, max_length: int) -> Inspector:
    """What `inspect` reports of examples."""
    if not isinstance(examples, MixedSources):
        return learner.inspector(examples, max_length)
    members = {title: learner.inspector(part, max_length) for title, part in examples.members.items()}
    return MixedInspector(learner, examples, max_length, members)
