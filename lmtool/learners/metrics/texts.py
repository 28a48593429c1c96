"""Metrics of generated texts against references, and of language models.

sacrebleu computes BLEU and chrF, and rouge-score computes ROUGE; each package is imported when it is first needed
(Papineni et al. 2002; Popović 2015; Lin 2004; Post 2018).

Shape letters: N texts, R selected texts, K statistics of a text, which are summed over the corpus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmtool.errors import UserError
from lmtool.learners.metrics.scores import Metric

# The package that computes each metric.
_PACKAGES = {
    **dict.fromkeys(("bleu", "chrf"), "sacrebleu"),
    **dict.fromkeys(("rouge1", "rouge2", "rougeL"), "rouge-score"),
}
TEXT_METRICS = {name: Metric(name) for name in (*_PACKAGES, "exact_match")}


def require_scorers(names: Sequence[str]) -> None:
    """Raises UserError if the package that computes one of the metrics is not installed. names: names of metrics."""
    for name in names:
        if name in _PACKAGES:
            _import_package(name)


class TextScores:
    """Scores of N generated texts, each with at least one reference, for the whole corpus or for a selection of its
    texts.

    The metrics are:
        bleu: corpus BLEU, 0 to 100, with sacrebleu's tokenization 13a and exponential smoothing.
        chrf: corpus chrF2, 0 to 100.
        rouge1, rouge2, rougeL: mean over texts of the F score against the best reference, 0 to 1, without stemming.
        exact_match: fraction of the texts that equal one of their references, ignoring white space at the ends.
    """

    def __init__(self, names: Sequence[str], texts: Sequence[str], references: Sequence[Sequence[str]]):
        self.names = tuple(names)
        # Corpus metrics: the scorer, and the (N, K) statistics of the texts.
        self._corpus: dict[str, tuple[Any, np.ndarray]] = {}
        # Other metrics: the (N,) scores of the texts.
        self._text_scores: dict[str, np.ndarray] = {}
        pairs = list(zip(texts, references, strict=True))
        max_references = max(map(len, references))
        # sacrebleu expects the first reference of every text, then the second of every text, ...; None if a text has
        # fewer references.
        streams = [
            [of_text[index] if index < len(of_text) else None for of_text in references]
            for index in range(max_references)
        ]
        for name in set(names) & {"bleu", "chrf"}:
            sacrebleu = _import_package(name)
            scorer = sacrebleu.BLEU(force=True) if name == "bleu" else sacrebleu.CHRF()
            self._corpus[name] = scorer, np.array(scorer._extract_corpus_statistics(list(texts), streams))
        rouge = [name for name in names if name.startswith("rouge")]
        if rouge:
            scorer = _import_package(rouge[0]).RougeScorer(rouge, use_stemmer=False)
            rows = [scorer.score_multi(list(of_text), text) for text, of_text in pairs]
            self._text_scores |= {name: np.array([row[name].fmeasure for row in rows]) for name in rouge}
        if "exact_match" in names:
            matches = [text.strip() in {reference.strip() for reference in of_text} for text, of_text in pairs]
            self._text_scores["exact_match"] = np.array(matches, dtype=np.float64)

    def scores(self, rows_R: np.ndarray | None = None) -> dict[str, float]:
        """Returns the scores by name. rows_R: indices of the texts to score; None means all texts."""
        values = {}
        for name in self.names:
            if name in self._corpus:
                scorer, statistics_NK = self._corpus[name]
                selected_RK = statistics_NK if rows_R is None else statistics_NK[rows_R]
                values[name] = float(scorer._compute_score_from_stats(selected_RK.sum(0).tolist()).score)
            else:
                scores_N = self._text_scores[name]
                values[name] = float((scores_N if rows_R is None else scores_N[rows_R]).mean())
        return values


def _import_package(name: str) -> Any:
    package = _PACKAGES[name]
    try:
        if package == "sacrebleu":
            import sacrebleu

            return sacrebleu
        from rouge_score import rouge_scorer

        return rouge_scorer
    except ModuleNotFoundError as problem:
        raise UserError(
            f"the metric {name} needs the package {package}, which is not installed",
            "pip install 'lmtool[scores]', or set task.metrics=[exact_match] and task.metric=exact_match",
        ) from problem


# Metrics of language models: perplexity per token, perplexity per word, and bits per byte.
#
# Perplexity per token depends on the tokenizer, so it is not comparable between models with different vocabularies.
# Perplexity per word and bits per byte are comparable, because words and bytes are properties of the text itself
# (Radford et al. 2019, section 3.1).


LANGUAGE_METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("perplexity", smaller_is_better=True),
        Metric("word_perplexity", smaller_is_better=True),
        Metric("bits_per_byte", smaller_is_better=True),
        Metric("forward_perplexity", smaller_is_better=True),
        Metric("backward_perplexity", smaller_is_better=True),
    )
}


def perplexity(loss: float) -> float:
    """Returns exp(loss) of a mean loss in nats, or infinity if the result is too large for a float."""
    # math.exp overflows above about 709.
    return math.exp(loss) if loss < 700 else math.inf


def word_and_byte_rates(loss: float, tokens: int, words: int, size: int) -> dict[str, float]:
    """Returns the word_perplexity and bits_per_byte of a text. loss: the mean loss of its tokens, in nats. words: the
    number of words, separated by white space. size: the number of bytes."""
    return {"word_perplexity": perplexity(loss * tokens / words), "bits_per_byte": loss * tokens / size / math.log(2)}
