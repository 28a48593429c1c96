"""Metrics of generated texts against references, and of language models.

sacrebleu computes BLEU and chrF, and is imported when it is first needed (Papineni et al. 2002; Popović 2015; Post
2018). ROUGE (Lin 2004) is computed here, with the values of the package rouge-score, whose import takes seconds.

Shape letters: N texts, R selected texts, K statistics of a text, which are summed over the corpus.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmtool.errors import UserError
from lmtool.learners.metrics.scores import Metric

_OF_SACREBLEU = ("bleu", "chrf")
_OF_ROUGE = ("rouge1", "rouge2", "rougeL")
TEXT_METRICS = {name: Metric(name) for name in (*_OF_SACREBLEU, *_OF_ROUGE, "exact_match")}


def require_scorers(names: Sequence[str]) -> None:
    """Raises UserError if the package that computes one of the metrics is not installed. names: names of metrics."""
    for name in names:
        if name in _OF_SACREBLEU:
            _import_sacrebleu(name)


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
        for name in set(names) & {*_OF_SACREBLEU}:
            sacrebleu = _import_sacrebleu(name)
            scorer = sacrebleu.BLEU(force=True) if name == "bleu" else sacrebleu.CHRF()
            self._corpus[name] = scorer, np.array(scorer._extract_corpus_statistics(list(texts), streams))
        if rouge := [name for name in names if name in _OF_ROUGE]:
            words = [(_words(text), [_words(reference) for reference in of_text]) for text, of_text in pairs]
            self._text_scores |= {
                name: np.array([max(_rouge(name, of_text, other) for other in others) for of_text, others in words])
                for name in rouge
            }
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


def _import_sacrebleu(name: str) -> Any:
    try:
        import sacrebleu
    except ModuleNotFoundError as problem:
        raise UserError(
            f"the metric {name} needs the package sacrebleu, which is not installed",
            "pip install 'lmtool[scores]', or set task.metrics=[exact_match] and task.metric=exact_match",
        ) from problem
    return sacrebleu


def _words(text: str) -> list[str]:
    """The words that ROUGE compares: letters without accents and digits, in lower case."""
    return re.findall("[a-z0-9]+", text.lower())


def _rouge(name: str, words: list[str], reference: list[str]) -> float:
    """The F score of the words that a text and its reference share: words, pairs, or the longest common subsequence."""
    if name == "rougeL":
        matches, of_text, of_reference = _common_length(words, reference), len(words), len(reference)
    else:
        first, second = (_ngrams(each, int(name[-1])) for each in (words, reference))
        matches, of_text, of_reference = (first & second).total(), first.total(), second.total()
    if not matches:
        return 0.0
    precision, recall = matches / of_text, matches / of_reference
    return 2 * precision * recall / (precision + recall)


def _ngrams(words: list[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(length)), strict=False))


def _common_length(first: list[str], second: list[str]) -> int:
    """The length of the longest common subsequence: a row of the table of lengths is the bits of an integer, which are
    0 where the length increases (Hyyrö 2004)."""
    places: dict[str, int] = defaultdict(int)
    for place, word in enumerate(first):
        places[word] |= 1 << place
    row = full = (1 << len(first)) - 1
    for word in second:
        matches = row & places[word]
        row = (row + matches | row - matches) & full
    return len(first) - row.bit_count()


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
