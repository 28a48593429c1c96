"""How well a language model predicts text: perplexity by token and by word, bits by byte.

The perplexity of a model depends on its vocabulary: those of two tokenizers do not compare. By word and by byte they
do: both are of the text itself, whatever it is cut into (Radford et al. 2019, section 3.1).
"""

from __future__ import annotations

import math

from lmtool.metrics.metric import Metric

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
