"""Spans that are cut out: how many tokens and spans, their sentinels, and that both sides give back the text."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from lmtool.data.assembly import ragged_ranges
from lmtool.learners.inspection import Drawn
from lmtool.learners.tally import Tally
from lmtool.learners.targets import labels_of
from lmtool.objectives.checks.sides import within
from lmtool.objectives.checks.streams import StreamInspector
from lmtool.objectives.corruption.sentinels import Corrupted, noise_counts, restore
from lmtool.types import Packed


class CorruptedSpansInspector(StreamInspector):
    """Of `CorruptedSpans`."""

    drops_lone_tokens = True

    def fact(self, tally: Tally) -> str:
        share, length = tally.measured("corrupted share of text"), tally.measured("tokens of a span")
        if share is None or length is None:
            return ""
        return (
            f"{share:.1%} of the tokens are cut out, in spans of {length:.1f} tokens; "
            "a sentinel stands for each, and the output is what was cut"
        )

    def check(self, tally: Tally, drawn: Drawn) -> None:
        examples, batch = self.examples, drawn.batch
        lengths = drawn.rows["length"].astype(np.int64)
        corrupted = examples.corrupted(drawn.rows, drawn.numbers, drawn.epoch)
        # Both sides as they are fed, without what the format puts around them.
        template, outputs = examples.sides.template, cast(Packed, batch.outputs)
        corrupted = replace(
            corrupted,
            inputs=within(template, batch.inputs, batch.inputs.tokens),
            targets=within(template, outputs, labels_of(batch, examples.config.name)),
        )
        noise, spans = noise_counts(lengths, examples.config)
        tally.exact("corrupted share of text", corrupted.noise.sum(), noise.sum(), lengths.sum())
        tally.note("tokens of a span", noise.sum(), spans.sum())
        documents = np.repeat(np.arange(len(lengths)), lengths)
        tally.none(
            "examples off their number of corrupted tokens", (np.bincount(documents, corrupted.noise) != noise).sum()
        )
        text = examples.stream.read(drawn.rows["start"], lengths)
        for name, side, sizes in (
            ("inputs", corrupted.inputs, corrupted.input_lengths),
            ("targets", corrupted.targets, corrupted.target_lengths),
        ):
            marks = np.isin(side, examples.sentinels)
            counts = np.bincount(np.repeat(np.arange(len(lengths)), sizes), marks, len(lengths)).astype(np.int64)
            tally.none(f"examples off their number of sentinels in the {name}", (counts != spans).sum())
            number = ragged_ranges(np.zeros_like(counts), counts) % len(examples.sentinels)
            tally.none(f"sentinels out of order in the {name}", (side[marks] != examples.sentinels[number]).sum())
        tally.none("batches whose sides do not give back the text", not _restores(corrupted, examples.sentinels, text))
        # Of all ways to cut n tokens into k pieces, (k-1)/(n-1) begin with a piece of one token.
        starts = np.cumsum(lengths) - lengths
        several = spans > 1
        chances = ((spans - 1) / np.maximum(lengths - noise - 1, 1))[several]
        tally.share("first spans behind one token", corrupted.noise[starts + 1][several].sum(), several.sum(), chances)


def _restores(corrupted: Corrupted, sentinels: np.ndarray, text: np.ndarray) -> bool:
    """Whether both sides give back the text; sides whose spans do not match give nothing."""
    try:
        return np.array_equal(restore(corrupted, sentinels), text)
    except ValueError:
        return False
