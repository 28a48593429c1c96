"""What an objective does to text, measured against its definition over batches as the model is fed them.

Shape letters: N examples of a batch, T their tokens, M places that predict, S spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np

from lmtool.data.plan import Examples
from lmtool.objectives.configs import SpanConfig, TokenMaskingConfig
from lmtool.objectives.corruption import noise_counts, restore
from lmtool.objectives.denoising import NoisyWindows
from lmtool.objectives.examples import CausalWindows, MaskedPairs, MaskedWindows, corrupt
from lmtool.objectives.masking import budget
from lmtool.objectives.mixture import MixedExamples
from lmtool.objectives.noises import poisson_shares
from lmtool.objectives.prefix_lm import EncodedPrefixes, MaskedPrefixes
from lmtool.objectives.span_corruption import CorruptedSpans
from lmtool.objectives.spans import MaskedSpans, length_shares
from lmtool.objectives.tally import Tally
from lmtool.types import Batch

# Examples measured at a time.
_EXAMPLES = 256


def batches_of(examples: Examples, tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray, int, Batch]]:
    """Rows, numbers, epoch and batch, in the plan's order, of as many epochs as `tokens` tokens take."""
    seen = epoch = 0
    while seen < tokens:
        plan = examples.plan(epoch)
        for start in range(0, len(plan), _EXAMPLES):
            numbers = np.arange(start, min(start + _EXAMPLES, len(plan)))
            batch = examples.batch(plan.rows[numbers], numbers, epoch)
            yield plan.rows[numbers], numbers, epoch, batch
            seen += batch.tokens
            if seen >= tokens:
                return
        epoch += 1


def measure(examples: Examples, tokens: int, max_length: int) -> Tally:
    """The statistics of an objective's examples over `tokens` tokens or a few more."""
    tally = Tally()
    if isinstance(examples, MixedExamples):
        for name, member in examples.members.items():
            for one in measure(member, max(tokens // len(examples.members), 1), max_length).statistics.values():
                tally.statistics[f"{name}: {one.name}"] = replace(one, name=f"{name}: {one.name}")
    own = next((one for kind, one in _MEASURES if isinstance(examples, kind)), None)
    for rows, numbers, epoch, batch in batches_of(examples, tokens):
        sides = [batch.inputs, *([batch.outputs] if batch.outputs is not None else [])]
        longest = max(max(one.lengths) for one in sides)
        tally.note("tokens an example", batch.tokens, len(numbers))
        tally.note("padding fraction", 0.0, batch.tokens)
        tally.none("sequences longer than max_length", longest > max_length)
        planned = examples.plan(epoch).lengths[numbers]
        made = np.sum([one.lengths for one in sides], axis=0)
        tally.none("examples longer than planned", (made > planned).sum())
        if own is not None:
            own(tally, examples, rows, numbers, epoch, batch)
    return tally


def _masked(
    tally: Tally, examples: MaskedWindows | MaskedPairs, rows: np.ndarray, numbers: np.ndarray, epoch: int, batch: Batch
) -> None:
    config, vocabulary = examples.config, examples.vocabulary
    whole = examples.assemble(rows)
    masked = corrupt(config, vocabulary, whole, numbers, examples.seed, epoch)
    shown, labels, at = batch.inputs.tokens.numpy(), masked.labels, masked.at
    documents = np.repeat(np.arange(len(whole.lengths)), whole.lengths)
    text = ~vocabulary.special[whole.tokens]
    eligible, selected = (np.bincount(documents[one], minlength=len(rows)) for one in (np.flatnonzero(text), at))
    tally.note("predicted share of text", len(at), text.sum())
    tally.none("special tokens predicted", (~text[at]).sum())
    tally.none("labels that are not the text", (labels != whole.tokens[at]).sum())
    changed = np.flatnonzero(shown != whole.tokens)
    tally.none("tokens changed but not predicted", (~np.isin(changed, at)).sum())
    if isinstance(config, SpanConfig):
        _spans(tally, config, examples, cast(MaskedSpans, masked), shown, whole.tokens)
        tally.none("examples off their budget", (selected != np.ceil(eligible * config.probability - 1e-9)).sum())
    elif isinstance(config, TokenMaskingConfig):
        _branches(tally, config.mask, config.random, shown[at], labels, (~vocabulary.special).sum(), vocabulary.mask)
        if config.select == "bernoulli" and not config.whole_word:
            tally.share("selected share", len(at), text.sum(), config.probability)
        elif not config.whole_word:
            tally.none("examples off their budget", (selected != budget(eligible, config.probability)).sum())
        if config.whole_word:
            opens = text & (vocabulary.starts_word[whole.tokens] | ~np.append(False, text[:-1]))
            word = np.cumsum(opens)[text]
            taken = np.isin(np.flatnonzero(text), at)
            share = np.bincount(word, taken) / np.maximum(np.bincount(word), 1)
            tally.none("words partly predicted", ((share > 0) & (share < 1)).sum())
    if isinstance(examples, MaskedPairs):
        _pairs(tally, examples, rows)


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


def _causal(
    tally: Tally, examples: CausalWindows, rows: np.ndarray, numbers: np.ndarray, epoch: int, batch: Batch
) -> None:
    at, labels = _at(batch, "clm")
    tokens = batch.inputs.tokens.numpy()
    tally.note("predicted share of tokens", len(at), len(tokens))
    tally.none("labels that are not the next token", (tokens[at + 1] != labels).sum())
    tally.none("tokens without a prediction", len(tokens) - len(rows) - len(np.unique(at)))


def _prefixes(
    tally: Tally, examples: MaskedPrefixes | EncodedPrefixes, rows: np.ndarray, numbers: np.ndarray, epoch: int,
    batch: Batch,
) -> None:  # fmt: skip
    lengths, prefixes = rows["length"].astype(np.int64), examples.prefixes(rows, numbers, epoch)
    tally.none("splits that leave a side empty", ((prefixes < 1) | (prefixes >= lengths)).sum())
    free = lengths > 2
    places = (prefixes[free] - 1) / (lengths[free] - 2)
    variance = float((lengths[free] / (12 * (lengths[free] - 2))).sum())
    tally.mean("place of the split, 0 to 1", places.sum(), free.sum(), free.sum() / 2, variance, 0.5)
    at, labels = _at(batch, "prefix_lm")
    if isinstance(examples, MaskedPrefixes):
        tokens = batch.inputs.tokens.numpy()
        positions, documents = batch.inputs.positions.numpy()[at], batch.inputs.documents.numpy()[at]
        tally.none("labels that are not the next token", (tokens[at + 1] != labels).sum())
        tally.none("labels within the prefix", (positions + 1 < prefixes[documents]).sum())
        tally.none("tokens behind the split without a prediction", (lengths - prefixes).sum() - len(at))


def _corrupted(
    tally: Tally, examples: CorruptedSpans, rows: np.ndarray, numbers: np.ndarray, epoch: int, batch: Batch
) -> None:
    lengths = rows["length"].astype(np.int64)
    made = examples.corrupted(rows, numbers, epoch)
    noise, spans = noise_counts(lengths, examples.config)
    tally.note("corrupted share of text", noise.sum(), lengths.sum())
    tally.note("tokens of a span", noise.sum(), spans.sum())
    documents = np.repeat(np.arange(len(rows)), lengths)
    tally.none("examples off their number of corrupted tokens", (np.bincount(documents, made.noise) != noise).sum())
    text = examples.stream.read(rows["start"], lengths)
    for name, side, sizes in (
        ("inputs", made.inputs, made.input_lengths),
        ("targets", made.targets, made.target_lengths),
    ):
        marks = np.isin(side, examples.sentinels)
        owner = np.repeat(np.arange(len(rows)), sizes)[marks]
        tally.none(f"examples off their number of sentinels in the {name}", (np.bincount(owner) != spans).sum())
        number = np.arange(len(owner)) - np.repeat(np.cumsum(spans) - spans, spans)
        tally.none(f"sentinels out of order in the {name}", (side[marks] != examples.sentinels[number]).sum())
    tally.none("texts that both sides do not give back", not np.array_equal(restore(made, examples.sentinels), text))
    # Of all ways to cut n tokens into k pieces, (k-1)/(n-1) begin with a piece of one token.
    starts = np.cumsum(lengths) - lengths
    several = spans > 1
    chances = ((spans - 1) / np.maximum(lengths - noise - 1, 1))[several]
    tally.share("first spans behind one token", made.noise[starts + 1][several].sum(), several.sum(), chances)


def _noisy(
    tally: Tally, examples: NoisyWindows, rows: np.ndarray, numbers: np.ndarray, epoch: int, batch: Batch
) -> None:
    config, vocabulary = examples.config, examples.vocabulary
    texts = examples.texts(rows, numbers, epoch)
    stages = examples.stages(texts, rows["start"])
    before = texts
    for name, after in stages.items():
        if name == "sentence_permutation":
            order = np.lexsort((before.tokens, before.owners)), np.lexsort((after.tokens, after.owners))
            lost = before.tokens[order[0]] != after.tokens[order[1]]
            tally.none("tokens lost by the permutation", lost.sum())
        if name == "text_infilling":
            found = examples.infilled(before)
            shares, drawn = poisson_shares(config.poisson_mean), found.drawn
            _lengths(tally, drawn, shares, config.poisson_mean)
            opens = vocabulary.starts_word[before.tokens] | (before.positions == 0)
            words = np.bincount(before.owners[opens], minlength=len(rows))
            tally.note("masked share of words", found.masked.sum(), words.sum())
            off = found.masked != np.ceil(words * config.text_infilling - 1e-9)
            tally.none("texts off their number of masked words", off.sum())
        if name == "token_masking" and not config.random:
            some = np.bincount(before.owners, before.tokens != vocabulary.mask, len(rows)).astype(np.int64)
            new = np.bincount(after.owners, (after.tokens != before.tokens), len(rows))
            tally.none("texts off their number of masks", (new != budget(some, config.token_masking)).sum())
        if name == "token_deletion":
            gone = before.lengths - after.lengths
            wanted = np.minimum(budget(before.lengths, config.token_deletion), before.lengths - 1)
            tally.none("texts off their number of deletions", (gone != wanted).sum())
        if name == "document_rotation":
            kept = np.bincount(before.owners, before.tokens != after.tokens, len(rows)) == 0
            distinct = np.array(
                [len(set(one.tolist())) == len(one) for one in np.split(before.tokens, before.starts[1:])]
            )
            chances = 1 - config.document_rotation * (1 - 1 / before.lengths[distinct])
            # Only where all tokens differ can it be seen whether a text was turned.
            if distinct.any():
                tally.share("texts left as they are, of distinct tokens", kept[distinct].sum(), distinct.sum(), chances)
        before = after
    _, labels = _at(batch, config.name)
    special = vocabulary.special[labels]
    tally.none(
        "outputs that are not the text",
        not np.array_equal(labels[~special], texts.tokens[~vocabulary.special[texts.tokens]]),
    )


def _lengths(tally: Tally, drawn: np.ndarray, shares: np.ndarray, mean: float) -> None:
    """Lengths are drawn until they are enough, so their number depends on them: each is held against the definition
    given those before it, of which the bound knows nothing but the variance."""
    tally.mean("words of a span as drawn", drawn.sum(), len(drawn), len(drawn) * mean, len(drawn) * mean, 1.0)
    for length in range(int(2 * mean) + 2):
        tally.share(f"spans of {length} as drawn", (drawn == length).sum(), len(drawn), float(shares[length]))


def _at(batch: Batch, term: str) -> tuple[np.ndarray, np.ndarray]:
    target = batch.targets[term]
    if target.at is None or target.labels is None:
        raise ValueError(f"the batch has no places for {term}")
    return target.at.numpy(), target.labels.numpy()


_MEASURES: tuple[tuple[Any, Callable[..., None]], ...] = (
    (MaskedWindows, _masked),
    (MaskedPairs, _masked),
    (CausalWindows, _causal),
    (MaskedPrefixes, _prefixes),
    (EncodedPrefixes, _prefixes),
    (CorruptedSpans, _corrupted),
    (NoisyWindows, _noisy),
)
