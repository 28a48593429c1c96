"""What an objective does to text, measured against its definition over batches as the model is fed them.

Shape letters: N examples of a batch, T their tokens, M places that predict, S spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from lmtool.data.assembly import Template, ragged_ranges
from lmtool.data.plan import Examples
from lmtool.learners.mixture import MixedExamples, Mixture
from lmtool.learners.tally import Tally
from lmtool.learners.targets import labels_of, places_of
from lmtool.objectives.checks.denoising import noisy
from lmtool.objectives.checks.masking import masked, replaced
from lmtool.objectives.configs import MaskingConfig
from lmtool.objectives.corruption.sentinels import Corrupted, noise_counts, restore
from lmtool.objectives.denoising import NoisyWindows
from lmtool.objectives.examples.masked import CausalWindows, MaskedPairs, MaskedWindows
from lmtool.objectives.prefix_lm import EncodedPrefixes, MaskedPrefixes
from lmtool.objectives.rtd import ReplacedTokenDetection
from lmtool.objectives.span_corruption import CorruptedSpans
from lmtool.types import Batch, Packed

# Examples measured at a time.
_EXAMPLES = 256


def batches_of(examples: Examples, tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray, int, Batch]]:
    """Rows, numbers, epoch and batch, in the plan's order, of as many epochs as `tokens` tokens take; of static masks
    once each, since draws that come again tell nothing new."""
    seen = epoch = 0
    config = getattr(examples, "config", None)
    while seen < tokens and (not isinstance(config, MaskingConfig) or config.drawn_epoch(epoch) == epoch):
        plan = examples.plan(epoch)
        for start in range(0, len(plan), _EXAMPLES):
            numbers = np.arange(start, min(start + _EXAMPLES, len(plan)))
            batch = examples.batch(plan.rows[numbers], numbers, epoch)
            yield plan.rows[numbers], numbers, epoch, batch
            seen += batch.tokens
            if seen >= tokens:
                return
        epoch += 1


def measure(examples: Examples, tokens: int, max_length: int, pad: int | None = None, learner: Any = None) -> Tally:
    """The statistics of a learner's examples over `tokens` tokens or a few more.

    pad: the id of padding, where the vocabulary has one. learner: with weights, where it makes a part of what the model
    reads; else it is not asked.
    """
    tally = Tally()
    if isinstance(examples, MixedExamples):
        _members(tally, examples, tokens, max_length, pad, learner)
    else:
        _text(tally, examples, max_length)
    own = next((checks for kind, checks in _MEASURES if isinstance(examples, kind)), None)
    for rows, numbers, epoch, batch in batches_of(examples, tokens):
        sides = [batch.inputs, *([batch.outputs] if batch.outputs is not None else [])]
        longest = max(max(side.lengths) for side in sides)
        tally.note("tokens an example", batch.tokens, len(numbers))
        tally.none("padding fraction", _padding(batch, pad), batch.tokens)
        tally.none("sequences longer than max_length", longest > max_length)
        planned = examples.plan(epoch).lengths[numbers]
        lengths = np.sum([side.lengths for side in sides], axis=0)
        tally.none("examples longer than planned", (lengths > planned).sum())
        if own is not None:
            own(tally, examples, rows, numbers, epoch, batch)
        if isinstance(learner, ReplacedTokenDetection) and has_weights(learner):
            replaced(tally, learner, batch, epoch)
    return tally


def has_weights(learner: nn.Module) -> bool:
    """Whether its parameters are more than shapes."""
    return not any(parameter.is_meta for parameter in learner.parameters())


def _members(
    tally: Tally, examples: MixedExamples, tokens: int, max_length: int, pad: int | None, learner: Any
) -> None:
    """Each member's own statistics, and its share of the mixture."""
    drawn = np.bincount(examples.plan(0).rows["member"], minlength=len(examples.members))
    learners = dict(learner.members.items()) if isinstance(learner, Mixture) else {}
    for (name, member), count, share in zip(examples.members.items(), drawn, examples.shares, strict=True):
        own = measure(member, max(tokens // len(drawn), 1), max_length, pad, learners.get(name))
        for statistic in own.statistics.values():
            tally.statistics[f"{name}: {statistic.name}"] = replace(statistic, name=f"{name}: {statistic.name}")
        tally.remarks |= own.remarks
        tally.note(f"share of {name}", count, drawn.sum())
        # Each share is rounded to whole examples, by half of one at most, and so is their sum.
        tally.none("members off their share", abs(count - share * drawn.sum()) > 0.5 + len(drawn) / 2)


def _padding(batch: Batch, pad: int | None) -> int:
    """Places of the batch that hold no token: behind its sequences, or padding; outputs may begin with its id."""
    places = 0
    for side, first in ((batch.inputs, 0), (batch.outputs, 1)):
        if side is not None:
            ids = side.tokens.numpy()
            within = side.positions.numpy()[: sum(side.lengths)] >= first
            places += len(ids) - len(within) + int((ids[: len(within)][within] == pad).sum())
    return places


def _text(tally: Tally, examples: Any, max_length: int) -> None:
    """What of the text is in no example. Windows hold every token, but for a last one of a text that would be alone
    where two are needed. Rows that are too long are cut, and fill an example then."""
    plan = examples.plan(0)
    if hasattr(examples, "stream"):
        start, borders = plan.rows["start"], examples.stream.borders
        ends = np.maximum.accumulate(start + plan.rows["length"])
        gaps = np.maximum(np.append(start, borders[-1]) - np.append(0, ends), 0)
        left = ragged_ranges(np.append(0, ends), gaps)
        predicts = isinstance(examples, MaskedPrefixes | EncodedPrefixes | CorruptedSpans)
        lone = np.isin(left + 1, borders).sum() if predicts else 0
        tally.exact("left out share of text", len(left), lone, borders[-1])
    facts = examples.facts()
    if "truncated" in facts:
        sides = 1 if examples.batch(plan.rows[:1], np.arange(1), 0).outputs is None else 2
        tally.note("truncated fraction", facts["truncated"], facts["examples"])
        full = (plan.lengths >= sides * max_length).sum()
        tally.none("rows cut that are shorter than max_length", max(0, facts["truncated"] - full))


def _causal(
    tally: Tally, examples: CausalWindows, rows: np.ndarray, numbers: np.ndarray, epoch: int, batch: Batch
) -> None:
    at, labels = places_of(batch, "clm").numpy(), labels_of(batch, "clm").numpy()
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
    at, labels = places_of(batch, "prefix_lm").numpy(), labels_of(batch, "prefix_lm").numpy()
    if isinstance(examples, EncodedPrefixes):
        template, outputs = examples.sides.template, cast(Packed, batch.outputs)
        before = _within(template, batch.inputs, batch.inputs.tokens)
        behind = _within(template, outputs, labels_of(batch, "prefix_lm"))
        wanted = [
            examples.stream.read(start, length)
            for start, length in ((rows["start"], prefixes), (rows["start"] + prefixes, lengths - prefixes))
        ]
        both = np.array_equal(before, wanted[0]) and np.array_equal(behind, wanted[1])
        tally.none("batches whose sides do not give back the text", not both)
    else:
        tokens = batch.inputs.tokens.numpy()
        positions, documents = batch.inputs.positions.numpy()[at], batch.inputs.documents.numpy()[at]
        tally.none("labels that are not the next token", (tokens[at + 1] != labels).sum())
        tally.none("labels within the prefix", (positions + 1 < prefixes[documents]).sum())
        tally.none("tokens behind the split without a prediction", (lengths - prefixes).sum() - len(at))


def _within(template: Template, packed: Packed, ids: Tensor) -> np.ndarray:
    """The ids of one side without the special tokens that its format puts before and behind the text."""
    before, behind = (len(piece) for piece in template.pieces)
    positions = packed.positions.numpy()
    lengths = np.repeat(packed.lengths, packed.lengths)
    return ids.numpy()[(positions >= before) & (positions < lengths - behind)]


def _restores(corrupted: Corrupted, sentinels: np.ndarray, text: np.ndarray) -> bool:
    """Whether both sides give back the text; sides whose spans do not match give nothing."""
    try:
        return np.array_equal(restore(corrupted, sentinels), text)
    except ValueError:
        return False


def _corrupted(
    tally: Tally, examples: CorruptedSpans, rows: np.ndarray, numbers: np.ndarray, epoch: int, batch: Batch
) -> None:
    lengths = rows["length"].astype(np.int64)
    corrupted = examples.corrupted(rows, numbers, epoch)
    # Both sides as they are fed, without what the format puts around them.
    template, outputs = examples.sides.template, cast(Packed, batch.outputs)
    corrupted = replace(
        corrupted,
        inputs=_within(template, batch.inputs, batch.inputs.tokens),
        targets=_within(template, outputs, labels_of(batch, examples.config.name)),
    )
    noise, spans = noise_counts(lengths, examples.config)
    tally.exact("corrupted share of text", corrupted.noise.sum(), noise.sum(), lengths.sum())
    tally.note("tokens of a span", noise.sum(), spans.sum())
    documents = np.repeat(np.arange(len(rows)), lengths)
    tally.none(
        "examples off their number of corrupted tokens", (np.bincount(documents, corrupted.noise) != noise).sum()
    )
    text = examples.stream.read(rows["start"], lengths)
    for name, side, sizes in (
        ("inputs", corrupted.inputs, corrupted.input_lengths),
        ("targets", corrupted.targets, corrupted.target_lengths),
    ):
        marks = np.isin(side, examples.sentinels)
        counts = np.bincount(np.repeat(np.arange(len(rows)), sizes), marks, len(rows)).astype(np.int64)
        tally.none(f"examples off their number of sentinels in the {name}", (counts != spans).sum())
        number = ragged_ranges(np.zeros_like(counts), counts) % len(examples.sentinels)
        tally.none(f"sentinels out of order in the {name}", (side[marks] != examples.sentinels[number]).sum())
    tally.none("batches whose sides do not give back the text", not _restores(corrupted, examples.sentinels, text))
    # Of all ways to cut n tokens into k pieces, (k-1)/(n-1) begin with a piece of one token.
    starts = np.cumsum(lengths) - lengths
    several = spans > 1
    chances = ((spans - 1) / np.maximum(lengths - noise - 1, 1))[several]
    tally.share("first spans behind one token", corrupted.noise[starts + 1][several].sum(), several.sum(), chances)


_MEASURES: tuple[tuple[Any, Callable[..., None]], ...] = (
    (MaskedWindows, masked),
    (MaskedPairs, masked),
    (CausalWindows, _causal),
    (MaskedPrefixes, _prefixes),
    (EncodedPrefixes, _prefixes),
    (CorruptedSpans, _corrupted),
    (NoisyWindows, noisy),
)
