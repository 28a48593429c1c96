"""Perplexity of a language model on held-out text.

The end of each document is a token that is predicted like any other: it counts in the loss and in the perplexity of
tokens. Words and bytes are those of the text as it was read, so the ends of documents do not count in their scores, nor
do blank lines between documents. The first token of the stream (of each document, where these are separate) has nothing
before it: it is not predicted, and stands in the scores of words and bytes with the mean loss of the others.

Shape letters: M targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmtool.learners.baseline import Predictor
from lmtool.learners.evaluation import Evaluation, ScoresTargets, TermScorer
from lmtool.metrics.language import of_text, perplexity
from lmtool.types import Batch, Scores


class PerplexityScorer(TermScorer):
    """Adds the perplexity of tokens, of a learner with one term: exp of its loss."""

    def result(self) -> Evaluation:
        evaluation = super().result()
        return replace(evaluation, scores={"perplexity": perplexity(evaluation.loss), **evaluation.scores})


class TextScorer(PerplexityScorer):
    """Adds the scores of words and bytes, where the text's are known. text: facts of its store. end: the token that
    ends documents."""

    def __init__(
        self, learner: ScoresTargets, predictors: Mapping[str, Predictor] | None, text: Mapping[str, Any], end: int
    ):
        super().__init__(learner, predictors)
        self.text, self.end = text, end
        self.loss, self.count = 0.0, 0

    def enter(self, name: str, batch: Batch, scores: Scores) -> None:
        super().enter(name, batch, scores)
        of_text_M = scores.labels != self.end
        self.loss += float(scores.losses[of_text_M].double().sum())
        self.count += int(of_text_M.sum())

    def result(self) -> Evaluation:
        evaluation, text = super().result(), self.text
        if not (text.get("words") and text.get("bytes") and self.count):
            return evaluation
        scores = of_text(self.loss / self.count, text["tokens"], text["words"], text["bytes"])
        warnings = evaluation.warnings
        if text.get("unknown_fraction"):
            share = f"{text['unknown_fraction']:.2%}"
            warnings = (
                *warnings,
                f"{share} of the tokens are unknown: what was cut off is not predicted, and the scores of words and "
                "bytes are too good",
            )
        return replace(evaluation, scores={**evaluation.scores, **scores}, warnings=warnings)
