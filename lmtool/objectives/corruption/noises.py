"""Corruption of texts, as pure, vectorized functions: BART's noises, T5's span corruption, and random prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np

from lmtool import random_streams
from lmtool.data.formats import ragged_ranges
from lmtool.errors import UserError
from lmtool.objectives.configs import SpanCorruptionConfig
from lmtool.objectives.corruption.masking import PackedTexts, Vocabulary, budget

# BART's five noises (Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language Generation,
# Translation, and Comprehension", ACL 2020, section 2.2).
#
# Text infilling masks exactly ceil(fraction x words) words of a text. Span lengths are sampled until their sum is large
# enough, the last length is truncated, and the spans are placed among the other words without overlap, where all
# arrangements are equally likely. (fairseq samples the starts one by one and lets spans overlap, so it masks fewer
# words.) A length of 0 inserts a mask between two words or at an end of the text.
#
# Shape letters: N texts, T original tokens, W words, S sentences or spans, D sampled lengths, U units (a span or an
# unmasked word).


# The offset of each use of random numbers, so that no two uses share random numbers.
_SENTENCE, _LENGTH, _PLACE, _INSERT, _MASK, _DELETE, _ROTATE, _RANDOM, _CHOOSE = (number << 40 for number in range(9))


@dataclass(frozen=True)
class InfilledTexts:
    """Texts after text infilling. sampled_lengths: (D,) the sampled span lengths in words, before truncation. masked:
    (N,) the number of masked words of each text."""

    texts: PackedTexts
    sampled_lengths: np.ndarray
    masked: np.ndarray


def _index_in_group(counts_N: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ... within each group, concatenated."""
    return ragged_ranges(np.zeros_like(counts_N), counts_N)


def _ranks(owners: np.ndarray, uniform: np.ndarray, counts_N: np.ndarray) -> np.ndarray:
    """Returns the rank of each random number within its text, from 0. owners: ascending."""
    order = np.lexsort((uniform, owners))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = _index_in_group(counts_N)
    return ranks


def permute_sentences(texts: PackedTexts, sentences_T: np.ndarray, fraction: float) -> PackedTexts:
    """Permutes ceil(fraction x sentences) randomly chosen sentences of each text among themselves. The other sentences
    stay in place. sentences_T: the index of the sentence that each token belongs to, ascending within a text."""
    owners = texts.owners
    starts_sentence = (np.diff(sentences_T, prepend=-1) != 0) | (texts.positions == 0)
    first_S = np.flatnonzero(starts_sentence)
    size_S = np.diff(np.append(first_S, len(sentences_T)))
    owner_S = owners[first_S]
    counts_N = np.bincount(owner_S, minlength=len(texts.lengths))
    number_S = _index_in_group(counts_N)
    budget_N = np.ceil(counts_N * fraction - 1e-9).astype(np.int64)
    is_selected = _ranks(owner_S, texts.uniform(owner_S, _CHOOSE + number_S), counts_N) < budget_N[owner_S]
    selected = np.flatnonzero(is_selected)
    source_S = np.arange(len(first_S))
    uniform = texts.uniform(owner_S[selected], _SENTENCE + number_S[selected])
    source_S[selected] = selected[np.lexsort((uniform, owner_S[selected]))]
    return texts.with_tokens(texts.tokens[ragged_ranges(first_S[source_S], size_S[source_S])], texts.lengths)


def infill(
    texts: PackedTexts, vocabulary: Vocabulary, fraction: float, mean: float, random: float, longest: int
) -> InfilledTexts:
    """Replaces spans of words by a single mask each (text infilling). fraction: of the words to mask. mean: of the span
    lengths, which have a Poisson distribution. random: fraction of the masks that are replaced by random tokens.
    longest: maximum tokens of an infilled text. Infilling also adds at most ceil(fraction x tokens) tokens to a text.
    Inserted masks that exceed one of these two limits are dropped."""
    owners = texts.owners
    starts_word = vocabulary.starts_word[texts.tokens] | (texts.positions == 0)
    first_W = np.flatnonzero(starts_word)
    size_W = np.diff(np.append(first_W, len(texts.tokens)))
    owner_W = owners[first_W]
    words_N = np.bincount(owner_W, minlength=len(texts.lengths))
    masked_N = np.ceil(words_N * fraction - 1e-9).astype(np.int64)
    owner_D, sampled_D = _sample_lengths(texts, masked_N, mean)
    # The last length of a text is truncated to the number of words that remain to be masked.
    ends_D = np.cumsum(sampled_D)
    sums_N = np.bincount(owner_D, sampled_D, len(words_N))
    before_N = np.cumsum(sums_N) - sums_N
    length_D = np.minimum(sampled_D, masked_N[owner_D] - (ends_D - sampled_D - before_N[owner_D])).astype(np.int64)
    inserts_N = np.bincount(owner_D[length_D == 0], minlength=len(words_N))
    size_S, owner_S = length_D[length_D > 0], owner_D[length_D > 0]
    # A text is a sequence of units, which are spans and unmasked words. The units that are spans are chosen at random.
    spans_N = np.bincount(owner_S, minlength=len(words_N))
    units_N = words_N - masked_N + spans_N
    owner_U = np.repeat(np.arange(len(units_N)), units_N)
    is_span = _ranks(owner_U, texts.uniform(owner_U, _PLACE + _index_in_group(units_N)), units_N) < spans_N[owner_U]
    words_U = np.ones(len(owner_U), dtype=np.int64)
    words_U[is_span] = size_S
    masked_W = np.repeat(is_span, words_U)
    retained_T = np.repeat(~masked_W, size_W)
    starts_span_W = np.zeros(len(first_W), dtype=bool)
    starts_span_W[(np.cumsum(words_U) - words_U)[is_span]] = True
    # The first token of each span becomes the mask.
    is_mask_T = np.zeros(len(texts.tokens), dtype=bool)
    is_mask_T[first_W[starts_span_W]] = True
    tokens = np.where(is_mask_T, vocabulary.mask, texts.tokens)[retained_T | is_mask_T]
    noised = texts.with_tokens(tokens, np.bincount(owners[retained_T | is_mask_T], minlength=len(words_N)))
    limits_N = np.minimum(longest, texts.lengths + np.ceil(texts.lengths * fraction).astype(np.int64))
    noised = _insert(noised, vocabulary.mask, np.minimum(inserts_N, np.maximum(limits_N - noised.lengths, 0)))
    return InfilledTexts(_randomize(noised, vocabulary, random), sampled_D, masked_N)


def poisson_probabilities(mean: float) -> np.ndarray:
    """Returns the Poisson probabilities of 0, 1, 2, ..., until they are negligible in double precision."""
    probabilities = [exp(-mean)]
    while len(probabilities) < mean or probabilities[-1] > 1e-17:
        probabilities.append(probabilities[-1] * mean / len(probabilities))
    return np.array(probabilities)


def _sample_lengths(texts: PackedTexts, targets_N: np.ndarray, mean: float) -> tuple[np.ndarray, np.ndarray]:
    """Samples span lengths until their sum reaches each text's target. Returns the text of each length, and the
    lengths."""
    cumulative = np.cumsum(poisson_probabilities(mean))[:-1]
    # Sample more lengths than are probably needed, and twice as many if these are not enough.
    samples_N = np.where(targets_N > 0, 8 + np.ceil(2 * targets_N / mean).astype(np.int64), 0)
    while True:
        owner = np.repeat(np.arange(len(samples_N)), samples_N)
        lengths = np.searchsorted(cumulative, texts.uniform(owner, _LENGTH + _index_in_group(samples_N)), side="right")
        sums_N = np.bincount(owner, lengths, len(samples_N)).astype(np.int64)
        if (sums_N >= targets_N).all():
            break
        samples_N = np.where(sums_N < targets_N, 2 * samples_N, samples_N)
    before = np.cumsum(lengths) - lengths - (np.cumsum(sums_N) - sums_N)[owner]
    within_budget = before < targets_N[owner]
    return owner[within_budget], lengths[within_budget]


def _insert(texts: PackedTexts, mask: int, inserts_N: np.ndarray) -> PackedTexts:
    if not inserts_N.any():
        return texts
    lengths = texts.lengths + inserts_N
    owners = np.repeat(np.arange(len(lengths)), lengths)
    is_mask = _ranks(owners, texts.uniform(owners, _INSERT + _index_in_group(lengths)), lengths) < inserts_N[owners]
    tokens = np.full(len(owners), mask, dtype=np.int64)
    tokens[~is_mask] = texts.tokens
    return texts.with_tokens(tokens, lengths)


def mask_each(texts: PackedTexts, vocabulary: Vocabulary, fraction: float, random: float) -> PackedTexts:
    """Replaces round(fraction x tokens) tokens of each text by masks (token masking). Tokens that are masks already are
    not chosen. random: the fraction of the new masks that are replaced by random tokens."""
    is_selected = _random_subset(texts, fraction, _MASK, texts.tokens != vocabulary.mask)
    tokens = np.where(is_selected, vocabulary.mask, texts.tokens)
    return _randomize(texts.with_tokens(tokens, texts.lengths), vocabulary, random, is_selected)


def delete(texts: PackedTexts, fraction: float) -> PackedTexts:
    """Deletes round(fraction x tokens) tokens of each text (token deletion). If these are all tokens of a text, the
    first one is retained."""
    retained = ~_random_subset(texts, fraction, _DELETE, np.ones(len(texts.tokens), dtype=bool))
    retained[texts.starts[np.bincount(texts.owners, retained, len(texts.lengths)) == 0]] = True
    return texts.with_tokens(texts.tokens[retained], np.bincount(texts.owners[retained], minlength=len(texts.lengths)))


def rotate(texts: PackedTexts, probability: float) -> PackedTexts:
    """Rotates some texts, so that they begin with a random token (document rotation). probability: the probability that
    a text is rotated."""
    owners_N = np.arange(len(texts.lengths))
    rotate_uniform, offset_uniform = (
        texts.uniform(owners_N, np.full(len(owners_N), _ROTATE + draw)) for draw in (0, 1)
    )
    is_rotated = rotate_uniform < probability
    offset_N = (offset_uniform * texts.lengths).astype(np.int64) * is_rotated
    owners = texts.owners
    source = texts.starts[owners] + (texts.positions + offset_N[owners]) % texts.lengths[owners]
    return texts.with_tokens(texts.tokens[source], texts.lengths)


def _random_subset(texts: PackedTexts, fraction: float, base: int, eligible_T: np.ndarray) -> np.ndarray:
    """Chooses round(fraction x eligible tokens) tokens of each text, but at least one."""
    indices = np.flatnonzero(eligible_T)
    owners = texts.owners[indices]
    counts_N = np.bincount(owners, minlength=len(texts.lengths))
    ranks = _ranks(owners, texts.uniform(owners, base + texts.positions[indices]), counts_N)
    is_selected = np.zeros(len(texts.tokens), dtype=bool)
    is_selected[indices[ranks < budget(counts_N, fraction)[owners]]] = True
    return is_selected


def _randomize(
    texts: PackedTexts, vocabulary: Vocabulary, fraction: float, eligible_T: np.ndarray | None = None
) -> PackedTexts:
    """eligible_T: the masks that may be replaced by a random token; None means all masks."""
    if fraction == 0:
        return texts
    indices = np.flatnonzero(texts.tokens == vocabulary.mask if eligible_T is None else eligible_T)
    owners, positions = texts.owners[indices], texts.positions[indices]
    # Token masking may follow text infilling, and needs other random numbers.
    base = _RANDOM if eligible_T is None else _RANDOM + (1 << 38)
    sampled = vocabulary.sample(texts.uniform(owners, base + 2 * positions + 1))
    tokens = texts.tokens.copy()
    tokens[indices] = np.where(texts.uniform(owners, base + 2 * positions) < fraction, sampled, tokens[indices])
    return texts.with_tokens(tokens, texts.lengths)


# T5's span corruption (Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
# Transformer", JMLR 2020, section 3.1.4; random_spans_helper and random_spans_noise_mask in the published code,
# google-research/text-to-text-transfer-transformer).
#
# Of n tokens, m = round(density x n) are noise, in round(m / mean_length) spans. The noise and the other tokens are
# both split into as many pieces as there are spans, where all splits are equally likely. The pieces alternate,
# beginning with a piece that is not noise. The lengths of inputs and targets depend on n only.
#
# Shape letters: N texts, T tokens of all texts, S spans of all texts.


# Each gap between two tokens has two random numbers: one for splitting the tokens that are not noise, one for splitting
# the noise.
_GAP_DRAWS = 2
_REST, _NOISE = 0, 1


@dataclass(frozen=True)
class CorruptedTexts:
    """Texts after span corruption. inputs, targets: those of all texts, concatenated, without the special tokens of the
    text format. input_lengths, target_lengths: (N,) their numbers of tokens in each text. noise: (T,) whether each
    token of the original texts is noise, which a sentinel replaces in the inputs."""

    inputs: np.ndarray
    input_lengths: np.ndarray
    targets: np.ndarray
    target_lengths: np.ndarray
    noise: np.ndarray


def noise_counts(lengths_N: np.ndarray, config: SpanCorruptionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of noise tokens (N,) and the number of spans (N,), for texts of at least two tokens. Halves
    are rounded to even."""
    lengths_N = np.asarray(lengths_N, dtype=np.int64)
    noise_N = np.clip(np.rint(lengths_N * config.density).astype(np.int64), 1, lengths_N - 1)
    spans_N = np.rint(noise_N / config.mean_length).astype(np.int64)
    return noise_N, np.clip(spans_N, 1, np.minimum(noise_N, lengths_N - noise_N))


def text_length(max_length: int, special_count: int, config: SpanCorruptionConfig) -> int:
    """Returns the length of the longest text whose inputs and targets both have at most max_length tokens: by default
    568 tokens for max_length=512, with 114 tokens in the targets. special_count: the special tokens that the text
    format adds to the inputs, and to the targets. Raises UserError if not even a text of two tokens fits."""
    lengths = np.arange(2, 2 + int(np.ceil((max_length + 2) / min(config.density, 1 - config.density))))
    noise, spans = noise_counts(lengths, config)
    fits = (np.maximum(lengths - noise, noise) + spans + special_count) <= max_length
    if not fits[0]:
        raise UserError(
            f"max_length={max_length} is too short for a text with a corrupted span",
            f"set max_length={special_count + 2} or more",  # two tokens become one token and one sentinel
        )
    return int(lengths[np.flatnonzero(fits)[-1]])


def corrupt_spans(config: SpanCorruptionConfig, sentinels: np.ndarray, texts: PackedTexts) -> CorruptedTexts:
    """Applies span corruption to texts of at least two tokens. sentinels: the ids of the sentinels, in the order in
    which they replace the spans of a text."""
    tokens_T, lengths_N = texts.tokens, texts.lengths
    noise_N, spans_N = noise_counts(lengths_N, config)
    rest_S = _split_randomly(texts, lengths_N - noise_N, spans_N, _REST)
    noise_S = _split_randomly(texts, noise_N, spans_N, _NOISE)
    sizes = np.stack([rest_S, noise_S], axis=1).ravel()
    is_noise_T = np.repeat(np.tile([False, True], len(rest_S)), sizes)
    sentinels_S = np.asarray(sentinels, dtype=np.int64)[_index_in_group(spans_N)]
    input_lengths, target_lengths = lengths_N - noise_N + spans_N, noise_N + spans_N
    # In the inputs, a sentinel follows the piece before its span; in the targets, it precedes the tokens of its span.
    input_at_S, target_at_S = np.cumsum(rest_S + 1) - 1, np.cumsum(noise_S + 1) - noise_S - 1
    inputs = _with_sentinels(tokens_T[~is_noise_T], input_at_S, sentinels_S)
    targets = _with_sentinels(tokens_T[is_noise_T], target_at_S, sentinels_S)
    return CorruptedTexts(inputs, input_lengths, targets, target_lengths, is_noise_T)


def restore(corrupted: CorruptedTexts, sentinels: np.ndarray) -> np.ndarray:
    """Returns the original texts (T,), restored from the inputs and targets, as a check that no token is lost."""
    spans = np.split(corrupted.targets, np.flatnonzero(np.isin(corrupted.targets, sentinels)))[1:]
    pieces = np.split(corrupted.inputs, np.flatnonzero(np.isin(corrupted.inputs, sentinels)))
    texts = [pieces[0], *(np.concatenate([span[1:], piece[1:]]) for span, piece in zip(spans, pieces[1:], strict=True))]
    return np.concatenate(texts)


def _with_sentinels(tokens: np.ndarray, at_S: np.ndarray, sentinels_S: np.ndarray) -> np.ndarray:
    result = np.empty(len(tokens) + len(at_S), dtype=np.int64)
    is_sentinel = np.zeros(len(result), dtype=bool)
    is_sentinel[at_S] = True
    result[is_sentinel], result[~is_sentinel] = sentinels_S, tokens
    return result


def _split_randomly(texts: PackedTexts, items_N: np.ndarray, pieces_N: np.ndarray, draw: int) -> np.ndarray:
    """A text of n pieces is split at the n - 1 gaps between items that have the smallest random numbers."""
    gaps_N = items_N - 1
    owner, gap = np.repeat(np.arange(len(items_N)), gaps_N), _index_in_group(gaps_N)
    rank = _ranks(owner, texts.uniform(owner, gap * _GAP_DRAWS + draw), gaps_N)
    first_N = np.cumsum(items_N) - items_N
    starts_piece = np.zeros(int(items_N.sum()), dtype=bool)
    starts_piece[first_N] = True
    starts_piece[first_N[owner] + gap + 1] = rank < pieces_N[owner] - 1
    return np.diff(np.append(np.flatnonzero(starts_piece), len(starts_piece)))


def prefix_lengths(lengths_N: np.ndarray, examples_N: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Samples the number of tokens (N,) in the prefix of each text, uniformly from 1 to length - 1."""
    uniform = random_streams.uniform(seed, "corrupt", epoch, np.asarray(examples_N), 1)[:, 0]
    return 1 + (uniform * (np.asarray(lengths_N, dtype=np.int64) - 1)).astype(np.int64)
