"""T5's span corruption: which tokens are cut out, and both sides of what is left. Pure functions, vectorised.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", JMLR 2020, 3.1.4,
and random_spans_helper, random_spans_noise_mask of google-research/text-to-text-transfer-transformer: of n tokens
round(density n) are noise, in round(noise / mean_length) spans; both the noise and the rest are cut into that many
pieces, every cut being equally likely, and laid alternately, the rest first. Lengths of both sides depend on n alone.

Every draw is keyed by (seed, epoch, example, number), so spans do not depend on the batch.
Shape letters: N examples, T their tokens, S spans of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtool import streams
from lmtool.data.assembly import ragged_ranges
from lmtool.errors import UserError
from lmtool.objectives.configs import SpanCorruptionConfig

_DRAWS = 2
_REST, _NOISE = 0, 1


@dataclass(frozen=True)
class Corrupted:
    """inputs, targets: ids of both sides laid end to end, without what a format puts around them; *_lengths: (N,).
    noise: (T,) which tokens of the text were cut out."""

    inputs: np.ndarray
    input_lengths: np.ndarray
    targets: np.ndarray
    target_lengths: np.ndarray
    noise: np.ndarray


def noise_counts(lengths_N: np.ndarray, config: SpanCorruptionConfig) -> tuple[np.ndarray, np.ndarray]:
    """(N,) tokens that are cut out and (N,) spans, of texts of two tokens or more. Half is rounded to even."""
    lengths_N = np.asarray(lengths_N, dtype=np.int64)
    noise_N = np.clip(np.rint(lengths_N * config.density).astype(np.int64), 1, lengths_N - 1)
    spans_N = np.rint(noise_N / config.mean_length).astype(np.int64)
    return noise_N, np.clip(spans_N, 1, np.minimum(noise_N, lengths_N - noise_N))


def text_length(max_length: int, overhead: int, config: SpanCorruptionConfig) -> int:
    """The longest text of which neither side is longer than max_length: 568 tokens for 512, whose outputs are 114.

    overhead: special tokens the format puts around a side. UserError where not even two tokens fit.
    """
    lengths = np.arange(2, 2 + int(np.ceil((max_length + 2) / min(config.density, 1 - config.density))))
    noise, spans = noise_counts(lengths, config)
    fits = (np.maximum(lengths - noise, noise) + spans + overhead) <= max_length
    if not fits[0]:
        raise UserError(f"max_length={max_length} leaves no room for a span", f"max_length={overhead + 2} or more")
    return int(lengths[np.flatnonzero(fits)[-1]])


def corrupt_spans(
    config: SpanCorruptionConfig,
    sentinels: np.ndarray,
    tokens_T: np.ndarray,
    lengths_N: np.ndarray,
    examples_N: np.ndarray,
    seed: int,
    epoch: int,
) -> Corrupted:
    """Cut spans out of texts of two tokens or more. sentinels: ids, the one of the first span first."""
    lengths_N, examples_N = np.asarray(lengths_N, dtype=np.int64), np.asarray(examples_N)
    noise_N, spans_N = noise_counts(lengths_N, config)
    rest_S = _cut(lengths_N - noise_N, spans_N, examples_N, seed, epoch, _REST)
    noise_S = _cut(noise_N, spans_N, examples_N, seed, epoch, _NOISE)
    runs = np.stack([rest_S, noise_S], axis=1).ravel()
    noise_T = np.repeat(np.tile([False, True], len(rest_S)), runs)
    number_S = np.arange(len(rest_S)) - np.repeat(np.cumsum(spans_N) - spans_N, spans_N)
    marks_S = np.asarray(sentinels, dtype=np.int64)[number_S]
    input_lengths, target_lengths = lengths_N - noise_N + spans_N, noise_N + spans_N
    # A span's sentinel stands behind its piece of the rest among the inputs, before its noise among the targets.
    at_S = np.cumsum(rest_S + 1) - 1
    inputs = _with_marks(tokens_T[~noise_T], at_S, marks_S)
    targets = _with_marks(tokens_T[noise_T], np.cumsum(noise_S + 1) - noise_S - 1, marks_S)
    return Corrupted(inputs, input_lengths, targets, target_lengths, noise_T)


def restore(corrupted: Corrupted, sentinels: np.ndarray) -> np.ndarray:
    """(T,) the text that both sides were made of: what proves that nothing is lost."""
    known = np.asarray(sentinels, dtype=np.int64)
    is_mark, opens = np.isin(corrupted.inputs, known), np.isin(corrupted.targets, known)
    spans = np.split(corrupted.targets, np.flatnonzero(opens))[1:]
    pieces = np.split(corrupted.inputs, np.flatnonzero(is_mark))
    joined = [pieces[0], *(np.concatenate([span[1:], rest[1:]]) for span, rest in zip(spans, pieces[1:], strict=True))]
    return np.concatenate(joined)


def _with_marks(tokens: np.ndarray, at_S: np.ndarray, marks_S: np.ndarray) -> np.ndarray:
    marked = np.empty(len(tokens) + len(at_S), dtype=np.int64)
    is_mark = np.zeros(len(marked), dtype=bool)
    is_mark[at_S] = True
    marked[is_mark], marked[~is_mark] = marks_S, tokens
    return marked


def _cut(
    items_N: np.ndarray, pieces_N: np.ndarray, examples_N: np.ndarray, seed: int, epoch: int, which: int
) -> np.ndarray:
    """(S,) lengths of the pieces, each of one item or more: of the gaps between items, those with the smallest draws
    are cut."""
    gaps_N = items_N - 1
    owner = np.repeat(np.arange(len(items_N)), gaps_N)
    gap = ragged_ranges(np.zeros_like(gaps_N), gaps_N)
    uniform = streams.uniform_at(seed, "corrupt", epoch, examples_N[owner], gap * _DRAWS + which)
    order = np.lexsort((uniform, owner))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - (np.cumsum(gaps_N) - gaps_N)[owner]
    first_N = np.cumsum(items_N) - items_N
    opens = np.zeros(int(items_N.sum()), dtype=bool)
    opens[first_N] = True
    opens[first_N[owner] + gap + 1] = rank < pieces_N[owner] - 1
    return np.diff(np.append(np.flatnonzero(opens), len(opens)))
