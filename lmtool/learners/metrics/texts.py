"""Written texts against right ones: BLEU and chrF by sacrebleu, ROUGE by rouge-score, which are imported when they are
asked for.

Papineni et al. 2002; Popović 2015; Lin 2004; Post 2018.

Shape letters: N texts, R of them, K numbers that a text adds to a corpus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmtool.errors import UserError
from lmtool.learners.metrics.scores import Metric

# By metric, the package that scores it.
_SCORED_BY = {
    **dict.fromkeys(("bleu", "chrf"), "sacrebleu"),
    **dict.fromkeys(("rouge1", "rouge2", "rougeL"), "rouge-score"),
}
TEXT_METRICS = {name: Metric(name) for name in (*_SCORED_BY, "exact_match")}


def require_scorers(names: Sequence[str]) -> None:
    """UserError where a metric's package is not installed."""
    for name in names:
        if name in _SCORED_BY:
            _module(name)


class TextScores:
    """The named scores of N texts, and of any of them. references: of each text at least one.

    bleu: of the corpus, 0 to 100, sacrebleu's tokenisation 13a and exponential smoothing. chrf: chrF2 of the corpus, 0
    to 100. rouge1, rouge2, rougeL: mean F of the best reference, 0 to 1, without stemming. exact_match: share of the
    texts that are one of their references, spaces at the ends aside.
    """

    def __init__(self, names: Sequence[str], texts: Sequence[str], references: Sequence[Sequence[str]]):
        self.names = tuple(names)
        # By metric: what scores a corpus, and what each text adds to it; the score of each text.
        self._corpus: dict[str, tuple[Any, np.ndarray]] = {}
        self._each: dict[str, np.ndarray] = {}
        pairs = list(zip(texts, references, strict=True))
        most = max(map(len, references))
        # The n-th references of all texts; texts have fewer than others.
        streams = [[others[place] if place < len(others) else None for others in references] for place in range(most)]
        for name in set(names) & {"bleu", "chrf"}:
            sacrebleu = _module(name)
            scorer = sacrebleu.BLEU(force=True) if name == "bleu" else sacrebleu.CHRF()
            self._corpus[name] = scorer, np.array(scorer._extract_corpus_statistics(list(texts), streams))
        rouge = [name for name in names if name.startswith("rouge")]
        if rouge:
            scorer = _module(rouge[0]).RougeScorer(rouge, use_stemmer=False)
            rows = [scorer.score_multi(list(others), text) for text, others in pairs]
            self._each |= {name: np.array([row[name].fmeasure for row in rows]) for name in rouge}
        if "exact_match" in names:
            right = [text.strip() in {other.strip() for other in others} for text, others in pairs]
            self._each["exact_match"] = np.array(right, dtype=np.float64)

    def scores(self, rows_R: np.ndarray | None = None) -> dict[str, float]:
        """Of all texts, or of those at these places."""
        values = {}
        for name in self.names:
            if name in self._corpus:
                scorer, statistics_NK = self._corpus[name]
                chosen_RK = statistics_NK if rows_R is None else statistics_NK[rows_R]
                values[name] = float(scorer._compute_score_from_stats(chosen_RK.sum(0).tolist()).score)
            else:
                values[name] = float((self._each[name] if rows_R is None else self._each[name][rows_R]).mean())
        return values


def _module(name: str) -> Any:
    """What scores a metric."""
    package = _SCORED_BY[name]
    try:
        if package == "sacrebleu":
            import sacrebleu

            return sacrebleu
        from rouge_score import rouge_scorer

        return rouge_scorer
    except ModuleNotFoundError as problem:
        raise UserError(
            f"the metric {name} is scored by the package {package}, which is not installed",
            "pip install 'lmtool[scores]', or name others with task.metrics= and task.metric=: exact_match needs none",
        ) from problem


# How well a language model predicts text: perplexity by token and by word, bits by byte.
#
# The perplexity of a model depends on its vocabulary: those of two tokenizers do not compare. By word and by byte
# they do: both are of the text itself, whatever it is cut into (Radford et al. 2019, section 3.1).


LANGUAGE_METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("perplexity", smaller_is_better=True), Metric("word_perplexity", smaller_is_better=True),
        Metric("bits_per_byte", smaller_is_better=True), Metric("forward_perplexity", smaller_is_better=True),
        Metric("backward_perplexity", smaller_is_better=True),
    )
}  # fmt: skip


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that is no number any more."""
    return math.exp(loss) if loss < 700 else math.inf


def of_text(loss: float, tokens: int, words: int, size: int) -> dict[str, float]:
    """word_perplexity and bits_per_byte of a text.

    loss: mean loss of its tokens, in nats. tokens, words, size: how many tokens, words (separated by white space) and
    bytes it has.
    """
    return {"word_perplexity": perplexity(loss * tokens / words), "bits_per_byte": loss * tokens / size / math.log(2)}
