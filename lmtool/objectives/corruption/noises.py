"""Corruption of texts for encoder-decoders: BART's noises, T5's sentinels, and prefixes. Pure, vectorized functions."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np

from lmtool import random_streams
from lmtool.data.formats import ragged_ranges
from lmtool.errors import UserError
from lmtool.objectives.configs import SpanCorruptionConfig
from lmtool.objectives.corruption.masking import PackedTexts, Vocabulary, budget

# BART's five noises.
# Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language Generation, Translation, and
# Comprehension", ACL 2020, section 2.2. Text infilling masks exactly ceil(share x words) words of a text: lengths are
# sampled until their sum suffices, the last one is truncated, and the spans are placed among the other words without
# overlap, every arrangement being equally likely. (fairseq samples the starts one by one and lets spans overlap, so
# it masks fewer words.) A length of 0 inserts a mask between two words or at an end.
# Shape letters: N examples, T original tokens, W words, S spans, D samples.


# Offset of each noise in the random stream, so that no two noises share random numbers.
_SENTENCE, _LENGTH, _PLACE, _INSERT, _MASK, _DELETE, _ROTATE, _RANDOM, _CHOOSE = (number << 40 for number in range(9))


@dataclass(frozen=True)
class Infilled:
    """texts: the infilled texts. drawn: (D,) sampled lengths, before truncation. masked: (N,) masked words."""

    texts: PackedTexts
    drawn: np.ndarray
    masked: np.ndarray


def _index_in_group(counts_N: np.ndarray) -> np.ndarray:
    """0, 1, ... within each of N groups of these sizes."""
    return ragged_ranges(np.zeros_like(counts_N), counts_N)


def _ranks(owners: np.ndarray, uniform: np.ndarray, counts_N: np.ndarray) -> np.ndarray:
    """The rank of each random number within its text; owners are ascending."""
    order = np.lexsort((uniform, owners))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = _index_in_group(counts_N)
    return ranks


def permute_sentences(texts: PackedTexts, sentences_T: np.ndarray, share: float) -> PackedTexts:
    """Permutes ceil(share x sentences) sentences of each text among themselves. sentences_T: each token's sentence
    number, ascending within a text."""
    owners = texts.owners
    opens = (np.diff(sentences_T, prepend=-1) != 0) | (texts.positions == 0)
    first = np.flatnonzero(opens)
    sizes = np.diff(np.append(first, len(sentences_T)))
    owner_S = owners[first]
    counts_N = np.bincount(owner_S, minlength=len(texts.lengths))
    number_S = _index_in_group(counts_N)
    chosen_N = np.ceil(counts_N * share - 1e-9).astype(np.int64)
    chosen = _ranks(owner_S, texts.uniform(owner_S, _CHOOSE + number_S), counts_N) < chosen_N[owner_S]
    places = np.flatnonzero(chosen)
    source = np.arange(len(first))
    source[places] = places[np.lexsort((texts.uniform(owner_S[places], _SENTENCE + number_S[places]), owner_S[places]))]
    return texts.of(texts.tokens[ragged_ranges(first[source], sizes[source])], texts.lengths)


def infill(
    texts: PackedTexts, vocabulary: Vocabulary, share: float, mean: float, random: float, longest: int
) -> Infilled:
    """Replaces each sampled span of words by a single mask.

    share: fraction of the words. mean: mean of the Poisson-distributed span lengths. random: fraction of the
    masks that are random tokens instead. longest: maximum length of a text, which may also grow by at most ceil(share x
    tokens); inserted masks that exceed either limit are dropped.
    """
    owners = texts.owners
    starts_word = vocabulary.starts_word[texts.tokens] | (texts.positions == 0)
    first = np.flatnonzero(starts_word)
    sizes = np.diff(np.append(first, len(texts.tokens)))
    owner_W = owners[first]
    words_N = np.bincount(owner_W, minlength=len(texts.lengths))
    masked_N = np.ceil(words_N * share - 1e-9).astype(np.int64)
    owner_D, drawn = _lengths(texts, masked_N, mean)
    # The last length of a text is truncated to the number of words that are still to be masked.
    ends = np.cumsum(drawn)
    before_N = np.cumsum(np.bincount(owner_D, drawn, len(words_N))) - np.bincount(owner_D, drawn, len(words_N))
    cut = np.minimum(drawn, masked_N[owner_D] - (ends - drawn - before_N[owner_D])).astype(np.int64)
    inserts_N = np.bincount(owner_D[cut == 0], minlength=len(words_N))
    size_S, owner_S = cut[cut > 0], owner_D[cut > 0]
    # Spans and unmasked words in random order, each span as one unit: span positions are sampled among all units.
    spans_N = np.bincount(owner_S, minlength=len(words_N))
    units_N = words_N - masked_N + spans_N
    owner_U = np.repeat(np.arange(len(units_N)), units_N)
    is_span = _ranks(owner_U, texts.uniform(owner_U, _PLACE + _index_in_group(units_N)), units_N) < spans_N[owner_U]
    taken_U = np.ones(len(owner_U), dtype=np.int64)
    taken_U[is_span] = size_S
    masked_W = np.repeat(is_span, taken_U)
    retained_T = np.repeat(~masked_W, sizes)
    opens_W = np.zeros(len(first), dtype=bool)
    opens_W[(np.cumsum(taken_U) - taken_U)[is_span]] = True
    marks_T = np.zeros(len(texts.tokens), dtype=bool)
    marks_T[first[opens_W]] = True
    tokens = np.where(marks_T, vocabulary.mask, texts.tokens)[retained_T | marks_T]
    noised = texts.of(tokens, np.bincount(owners[retained_T | marks_T], minlength=len(words_N)))
    limits_N = np.minimum(longest, texts.lengths + np.ceil(texts.lengths * share).astype(np.int64))
    noised = _insert(noised, vocabulary.mask, np.minimum(inserts_N, np.maximum(limits_N - noised.lengths, 0)))
    return Infilled(_randomized(noised, vocabulary, random), drawn, masked_N)


def poisson_probabilities(mean: float) -> np.ndarray:
    """Probabilities of 0, 1, 2, ... until they vanish in double precision."""
    fractions = [exp(-mean)]
    while len(fractions) < mean or fractions[-1] > 1e-17:
        fractions.append(fractions[-1] * mean / len(fractions))
    return np.array(fractions)


def _lengths(texts: PackedTexts, enough_N: np.ndarray, mean: float) -> tuple[np.ndarray, np.ndarray]:
    """(D,) text indices and (D,) sampled lengths: for each text, just enough that their sum is at least `enough_N`."""
    cumulative = np.cumsum(poisson_probabilities(mean))[:-1]
    draws_N = np.where(enough_N > 0, 8 + np.ceil(2 * enough_N / mean).astype(np.int64), 0)
    while True:
        owner = np.repeat(np.arange(len(draws_N)), draws_N)
        lengths = np.searchsorted(cumulative, texts.uniform(owner, _LENGTH + _index_in_group(draws_N)), side="right")
        sums_N = np.bincount(owner, lengths, len(draws_N)).astype(np.int64)
        if (sums_N >= enough_N).all():
            break
        draws_N = np.where(sums_N < enough_N, 2 * draws_N, draws_N)
    before = np.cumsum(lengths) - lengths - (np.cumsum(sums_N) - sums_N)[owner]
    needed = before < enough_N[owner]
    return owner[needed], lengths[needed]


def _insert(texts: PackedTexts, mask: int, inserts_N: np.ndarray) -> PackedTexts:
    """Inserts masks at random positions of each text."""
    if not inserts_N.any():
        return texts
    lengths = texts.lengths + inserts_N
    owners = np.repeat(np.arange(len(lengths)), lengths)
    new = _ranks(owners, texts.uniform(owners, _INSERT + _index_in_group(lengths)), lengths) < inserts_N[owners]
    tokens = np.full(len(owners), mask, dtype=np.int64)
    tokens[~new] = texts.tokens
    return texts.of(tokens, lengths)


def mask_each(texts: PackedTexts, vocabulary: Vocabulary, share: float, random: float) -> PackedTexts:
    """Replaces round(share x tokens) tokens of each text by masks; existing masks are not replaced."""
    chosen = _chosen(texts, share, _MASK, texts.tokens != vocabulary.mask)
    tokens = np.where(chosen, vocabulary.mask, texts.tokens)
    return _randomized(texts.of(tokens, texts.lengths), vocabulary, random, chosen)


def delete(texts: PackedTexts, share: float) -> PackedTexts:
    """Deletes round(share x tokens) tokens of each text, but never all of them."""
    retained = ~_chosen(texts, share, _DELETE, np.ones(len(texts.tokens), dtype=bool))
    retained[texts.starts[np.bincount(texts.owners, retained, len(texts.lengths)) == 0]] = True
    return texts.of(texts.tokens[retained], np.bincount(texts.owners[retained], minlength=len(texts.lengths)))


def rotate(texts: PackedTexts, share: float) -> PackedTexts:
    """Rotates each text, with probability `share`, to begin with a uniformly sampled token."""
    numbers = np.arange(len(texts.lengths))
    turned = texts.uniform(numbers, np.full(len(numbers), _ROTATE)) < share
    offset_N = (texts.uniform(numbers, np.full(len(numbers), _ROTATE + 1)) * texts.lengths).astype(np.int64) * turned
    owners = texts.owners
    source = texts.starts[owners] + (texts.positions + offset_N[owners]) % texts.lengths[owners]
    return texts.of(texts.tokens[source], texts.lengths)


def _chosen(texts: PackedTexts, share: float, base: int, eligible_T: np.ndarray) -> np.ndarray:
    """(T,) a random subset of exactly round(share x eligible tokens), at least one, of each text."""
    places = np.flatnonzero(eligible_T)
    owners = texts.owners[places]
    counts_N = np.bincount(owners, minlength=len(texts.lengths))
    ranks = _ranks(owners, texts.uniform(owners, base + texts.positions[places]), counts_N)
    chosen = np.zeros(len(texts.tokens), dtype=bool)
    chosen[places[ranks < budget(counts_N, share)[owners]]] = True
    return chosen


def _randomized(
    texts: PackedTexts, vocabulary: Vocabulary, share: float, among: np.ndarray | None = None
) -> PackedTexts:
    """Replaces a fraction of the masks by random tokens."""
    if share == 0:
        return texts
    masks = texts.tokens == vocabulary.mask if among is None else among
    at = np.flatnonzero(masks)
    owners, positions = texts.owners[at], texts.positions[at]
    base = _RANDOM if among is None else _RANDOM + (1 << 38)
    sampled = vocabulary.sample(texts.uniform(owners, base + 2 * positions + 1))
    tokens = texts.tokens.copy()
    tokens[at] = np.where(texts.uniform(owners, base + 2 * positions) < share, sampled, tokens[at])
    return texts.of(tokens, texts.lengths)


# T5's span corruption.
# Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", JMLR 2020, 3.1.4,
# and random_spans_helper, random_spans_noise_mask of google-research/text-to-text-transfer-transformer: round(density
# n) of n tokens are noise, in round(noise / mean_length) spans; both the noise and the rest are split into that many
# pieces, every split being equally likely, and interleaved, the rest first. Lengths of both sides depend on n only.
# Shape letters: N examples, T their tokens, S spans of all of them.


_DRAWS = 2
_REST, _NOISE = 0, 1


@dataclass(frozen=True)
class Corrupted:
    """inputs, targets: concatenated ids of both sides, without the format's special tokens; *_lengths: (N,). noise:
    (T,) the replaced tokens of the text."""

    inputs: np.ndarray
    input_lengths: np.ndarray
    targets: np.ndarray
    target_lengths: np.ndarray
    noise: np.ndarray


def noise_counts(lengths_N: np.ndarray, config: SpanCorruptionConfig) -> tuple[np.ndarray, np.ndarray]:
    """(N,) noise tokens and (N,) spans, for texts of two tokens or more. Halves round to even."""
    lengths_N = np.asarray(lengths_N, dtype=np.int64)
    noise_N = np.clip(np.rint(lengths_N * config.density).astype(np.int64), 1, lengths_N - 1)
    spans_N = np.rint(noise_N / config.mean_length).astype(np.int64)
    return noise_N, np.clip(spans_N, 1, np.minimum(noise_N, lengths_N - noise_N))


def text_length(max_length: int, special_count: int, config: SpanCorruptionConfig) -> int:
    """The longest text whose two sides are within max_length: 568 tokens for 512, with 114 outputs.

    special_count: special tokens of the format around a side. UserError if not even two tokens fit.
    """
    lengths = np.arange(2, 2 + int(np.ceil((max_length + 2) / min(config.density, 1 - config.density))))
    noise, spans = noise_counts(lengths, config)
    fits = (np.maximum(lengths - noise, noise) + spans + special_count) <= max_length
    if not fits[0]:
        raise UserError(
            f"max_length={max_length} is too short for a text with a corrupted span",
            f"set max_length={special_count + 2} or more",
        )
    return int(lengths[np.flatnonzero(fits)[-1]])


def corrupt_spans(config: SpanCorruptionConfig, sentinels: np.ndarray, texts: PackedTexts) -> Corrupted:
    """Corrupts spans of texts of two tokens or more. sentinels: ids in the order of the spans."""
    tokens_T, lengths_N = texts.tokens, texts.lengths
    noise_N, spans_N = noise_counts(lengths_N, config)
    rest_S = _split(texts, lengths_N - noise_N, spans_N, _REST)
    noise_S = _split(texts, noise_N, spans_N, _NOISE)
    runs = np.stack([rest_S, noise_S], axis=1).ravel()
    noise_T = np.repeat(np.tile([False, True], len(rest_S)), runs)
    marks_S = np.asarray(sentinels, dtype=np.int64)[_index_in_group(spans_N)]
    input_lengths, target_lengths = lengths_N - noise_N + spans_N, noise_N + spans_N
    # A span's sentinel follows its piece of the rest in the inputs, and precedes its noise in the targets.
    at_S = np.cumsum(rest_S + 1) - 1
    inputs = _with_marks(tokens_T[~noise_T], at_S, marks_S)
    targets = _with_marks(tokens_T[noise_T], np.cumsum(noise_S + 1) - noise_S - 1, marks_S)
    return Corrupted(inputs, input_lengths, targets, target_lengths, noise_T)


def restore(corrupted: Corrupted, sentinels: np.ndarray) -> np.ndarray:
    """(T,) the text restored from both sides; proves that nothing is lost."""
    is_mark, opens = np.isin(corrupted.inputs, sentinels), np.isin(corrupted.targets, sentinels)
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


def _split(texts: PackedTexts, items_N: np.ndarray, pieces_N: np.ndarray, which: int) -> np.ndarray:
    """(S,) lengths of the pieces, each of one item or more: splits at the gaps with the smallest random numbers."""
    gaps_N = items_N - 1
    owner, gap = np.repeat(np.arange(len(items_N)), gaps_N), _index_in_group(gaps_N)
    rank = _ranks(owner, texts.uniform(owner, gap * _DRAWS + which), gaps_N)
    first_N = np.cumsum(items_N) - items_N
    opens = np.zeros(int(items_N.sum()), dtype=bool)
    opens[first_N] = True
    opens[first_N[owner] + gap + 1] = rank < pieces_N[owner] - 1
    return np.diff(np.append(np.flatnonzero(opens), len(opens)))


def prefix_lengths(lengths_N: np.ndarray, examples_N: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """(N,) tokens before the split: 1 to length - 1, uniformly."""
    uniform = random_streams.uniform(seed, "corrupt", epoch, np.asarray(examples_N), 1)[:, 0]
    return 1 + (uniform * (np.asarray(lengths_N, dtype=np.int64) - 1)).astype(np.int64)
