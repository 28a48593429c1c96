"""Written texts against right ones: BLEU and chrF by sacrebleu, ROUGE by rouge-score, which are imported when they are
asked for.

Papineni et al. 2002; Popović 2015; Lin 2004; Post 2018. Shape letters: N texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmtool.errors import UserError
from lmtool.metrics.metric import Metric

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


def text_scores(names: Sequence[str], texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """The named scores of N texts. references: of each text at least one.

    bleu: of the corpus, 0 to 100, sacrebleu's tokenisation 13a and exponential smoothing. chrf: chrF2 of the corpus, 0
    to 100. rouge1, rouge2, rougeL: mean F of the best reference, 0 to 1, without stemming. exact_match: share of the
    texts that are one of their references, spaces at the ends aside.
    """
    scores = {}
    for name in names:
        if name == "exact_match":
            pairs = zip(texts, references, strict=True)
            right = sum(text.strip() in {other.strip() for other in others} for text, others in pairs)
            scores[name] = right / len(texts)
        elif name in ("bleu", "chrf"):
            scores[name] = _of_corpus(name, texts, references)
    rouge = [name for name in names if name.startswith("rouge")]
    if rouge:
        scorer = _module(rouge[0]).RougeScorer(rouge, use_stemmer=False)
        rows = [scorer.score_multi(list(others), text) for text, others in zip(texts, references, strict=True)]
        scores |= {name: sum(row[name].fmeasure for row in rows) / len(rows) for name in rouge}
    return {name: float(scores[name]) for name in names}


def _of_corpus(name: str, texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    most = max(map(len, references))
    # The n-th references of all texts; texts have fewer than others.
    streams = [[others[place] if place < len(others) else None for others in references] for place in range(most)]
    sacrebleu = _module(name)
    scorer = sacrebleu.BLEU(force=True) if name == "bleu" else sacrebleu.CHRF()
    return scorer.corpus_score(list(texts), streams).score


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
