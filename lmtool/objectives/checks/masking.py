"""What masks, spans, pairs and a generator do to text, measured against their definitions.

Shape letters: N examples of a batch, T their tokens, M places that predict.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from lmtool.learners.tally import Tally
from lmtool.learners.targets import places_of
from lmtool.objectives.configs import SpanConfig, TokenMaskingConfig
from lmtool.objectives.corruption.masking import budget
from lmtool.objectives.corruption.spans import MaskedSpans, length_shares
from lmtool.objectives.examples.masked import MaskedPairs, MaskedWindows, corrupt
from lmtool.objectives.rtd import ReplacedTokenDetection
from lmtool.types import Batch


def masked(
    tally: Tally, examples: MaskedWindows | MaskedPairs, rows: np.ndarray, numbers: np.ndarray, epoch: int, batch: Batch
) -> None:
    config, vocabulary = examples.config, examples.vocabulary
    whole = examples.assemble(rows)
    done = corrupt(config, vocabulary, whole, numbers, examples.seed, epoch)
    shown, labels, at = batch.inputs.tokens.numpy(), done.labels, done.at
    documents = np.repeat(np.arange(len(whole.lengths)), whole.lengths)
    text = ~vocabulary.special[whole.tokens]
    eligible, selected = (np.bincount(documents[places], minlength=len(rows)) for places in (np.flatnonzero(text), at))
    tally.none("special tokens predicted", (~text[at]).sum())
    tally.none("labels that are not the text", (labels != whole.tokens[at]).sum())
    changed = np.flatnonzero(shown != whole.tokens)
    tally.none("tokens changed but not predicted", (~np.isin(changed, at)).sum())
    if isinstance(config, SpanConfig):
        _spans(tally, config, examples, cast(MaskedSpans, done), shown, whole.tokens)
        _budget(tally, selected, np.ceil(eligible * config.probability - 1e-9), eligible)
    elif isinstance(config, TokenMaskingConfig):
        _branches(tally, config.mask, config.random, shown[at], labels, (~vocabulary.special).sum(), vocabulary.mask)
        if config.whole_word:
            tally.note("predicted share of text", len(at), text.sum())
            opens = text & (vocabulary.starts_word[whole.tokens] | ~np.append(False, text[:-1]))
            word = np.cumsum(opens)[text]
            taken = np.isin(np.flatnonzero(text), at)
            share = np.bincount(word, taken) / np.maximum(np.bincount(word), 1)
            tally.none("words partly predicted", ((share > 0) & (share < 1)).sum())
        elif config.select == "bernoulli":
            tally.share("predicted share of text", len(at), text.sum(), config.probability)
        else:
            _budget(tally, selected, budget(eligible, config.probability), eligible)
    if isinstance(examples, MaskedPairs):
        _pairs(tally, examples, rows)


def _budget(tally: Tally, selected_N: np.ndarray, budget_N: np.ndarray, eligible_N: np.ndarray) -> None:
    """How many of each example's tokens are predicted, where their number is exact."""
    tally.exact("predicted share of text", selected_N.sum(), budget_N.sum(), eligible_N.sum())
    tally.none("examples off their budget", (selected_N != budget_N).sum())


def _branches(
    tally: Tally, mask: float, random: float, shown_M: np.ndarray, labels_M: np.ndarray, regular: int, mask_id: int
) -> None:
    """What stands in the place of predicted tokens. A random token may be the same one: it looks unchanged then."""
    hidden, same = shown_M == mask_id, shown_M == labels_M
    tally.share("of these, [MASK]", hidden.sum(), len(labels_M), mask)
    tally.share("of these, another token", (~hidden & ~same).sum(), len(labels_M), random * (1 - 1 / regular))
    tally.share("of these, unchanged", (~hidden & same).sum(), len(labels_M), 1 - mask - random + random / regular)


def _spans(
    tally: Tally, config: SpanConfig, examples: Any, masked: MaskedSpans, shown: np.ndarray, text: np.ndarray
) -> None:
    shares = length_shares(config)
    lengths = np.arange(1, len(shares) + 1)
    mean = float(shares @ lengths)
    variance = float(shares @ lengths**2 - mean**2)
    drawn = masked.drawn
    tally.mean(
        "words of a span as drawn", drawn.sum(), len(drawn), len(drawn) * mean, len(drawn) * variance, len(shares)
    )
    for length, share in zip(lengths, shares, strict=True):
        tally.share(f"spans of {length} as drawn", (drawn == length).sum(), len(drawn), float(share))
    vocabulary = examples.vocabulary
    tokens, regular = shown[masked.at], int((~vocabulary.special).sum())
    if config.replace == "token":
        _branches(tally, config.mask, config.random, tokens, masked.labels, regular, vocabulary.mask)
    else:
        count = len(masked.spans)
        sizes = np.bincount(masked.span_of, minlength=count)
        hidden = np.bincount(masked.span_of, tokens == vocabulary.mask, count)
        same = np.bincount(masked.span_of, tokens == masked.labels, count)
        tally.none("spans partly [MASK]", ((hidden > 0) & (hidden < sizes)).sum())
        tally.share("spans that are [MASK]", (hidden > 0).sum(), count, config.mask)
        chances = 1 - config.mask - config.random + config.random * float(regular) ** -sizes.astype(float)
        tally.share("spans that are unchanged", ((hidden == 0) & (same == sizes)).sum(), count, chances)
    starts = vocabulary.starts_word[masked.labels[np.searchsorted(masked.at, masked.spans[:, 0])]]
    # A window may begin within a word, and so may a span that begins with the window.
    within = ~starts & ~vocabulary.special[text[masked.spans[:, 0] - 1]]
    tally.none("spans that begin within a word", within.sum())


def _pairs(tally: Tally, examples: MaskedPairs, rows: np.ndarray) -> None:
    label, choice = rows["label"] == 1, rows["choice"] == 1
    _cut(tally, examples, rows)
    offsets = examples.store.document_offsets
    a, b = (np.searchsorted(offsets, rows[f"{side}_start"], side="right") for side in "ab")
    if examples.config.pairs == "sop":
        tally.share("pairs that are swapped", label.sum(), len(rows), 0.5)
        tally.none("pairs of two documents", (a != b).sum())
        first, second = (
            np.where(label, rows["b_start"], rows["a_start"]),
            np.where(label, rows["a_start"], rows["b_start"]),
        )
        tally.none("pairs in another order than their class says", (first >= second).sum())
        return
    tally.share("random second segments where there is a choice", (label & choice).sum(), choice.sum(), 0.5)
    tally.note("random second segments in all", label.sum(), len(rows))
    tally.none("pairs without a choice that follow", (~choice & ~label).sum())
    tally.none("random segments of the same document", (label & (a == b)).sum())
    tally.none("following segments of another document", (~label & (a != b)).sum())


def _cut(tally: Tally, examples: MaskedPairs, rows: np.ndarray) -> None:
    """Pairs too long for an example lose tokens at the ends of their segments: a segment that does not begin and end
    with a sentence has lost some. Where order is learned a lone sentence is cut in two, and its halves meet."""
    starts, lengths = (
        np.stack([rows[f"{side}_{field}"].astype(np.int64) for side in "ab"]) for field in ("start", "length")
    )
    ends, offsets = starts + lengths, examples.store.sentence_offsets
    opens, closes = np.isin(starts, offsets), np.isin(ends, offsets)
    if examples.config.pairs == "sop":
        opens |= starts == ends[::-1]
        closes |= ends == starts[::-1]
    cut = ~(opens & closes).all(0)
    tally.note("truncated fraction", cut.sum(), len(rows))
    tally.none("pairs cut although they fit", (cut & (lengths.sum(0) != examples.limit)).sum())


def replaced(tally: Tally, learner: ReplacedTokenDetection, batch: Batch, step: int) -> None:
    """What the generator, as it is, writes in the masked places."""
    tally.remarks["replaced share of tokens"] = "masked share x the generator's probability of another token there"
    tally.remarks["surprise of a sample, nats"] = "entropy of the generator's probabilities"
    batch = batch.to(next(learner.parameters()).device)
    sampled = learner.sampled(batch, step)
    other = (sampled.filled.tokens != learner.original(batch)).cpu().numpy()
    at = places_of(batch, "mlm").cpu().numpy()
    chances = sampled.other_M.cpu().numpy()
    tally.mean("replaced share of tokens", other.sum(), len(other), chances.sum(), (chances * (1 - chances)).sum(), 1.0)
    tally.note("samples that are the original token", (~other[at]).sum(), len(at))
    tally.none("tokens replaced that were not masked", other.sum() - other[at].sum())
    surprise, entropy, variance = (
        float(values.sum()) for values in (sampled.surprise_M, sampled.entropy_M, sampled.variance_M)
    )
    tally.mean("surprise of a sample, nats", surprise, len(at), entropy, variance, sampled.bound)
