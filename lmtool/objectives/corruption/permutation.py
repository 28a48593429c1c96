"""Selection and order of the tokens predicted by permutation language modeling: a pure, vectorized function.

Yang, Dai, Yang, Carbonell, Salakhutdinov, Le, "XLNet", NeurIPS 2019, section 2.3 and data_utils.py of its published
code. One in K tokens is predicted: an n-gram of n tokens, with probability proportional to 1/n for n <= `longest`,
within a context of K n tokens, from the start of a word; contexts follow each other until 1/K of the tokens are
predicted. Single tokens anywhere compensate for the rest at the end of a text. As in that code, n counts tokens,
whether whole words or not; there the context is extra to its n-gram, so that single tokens are a sixth of all.

Predicted and special tokens are in a random order, after all other tokens. Ranks determine the attention masks
(`models.two_streams`). The first `reuse` tokens of an example are ordered separately, before all others.

Shape letters: T tokens, N examples, B blocks: an example, or its two parts; U runs of text without a special token or a
boundary in between; P tokens of text, M predicted ones, D sampled lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lmtool.objectives.corruption.masking import Masked, PackedTexts, Vocabulary, budget
from lmtool.objectives.permutation_configs import PlmConfig

# Random numbers of a run are keyed by its first position and their number in it; those of a token by its position, far
# beyond.
_ROUND = 1 << 20
_BY_POSITION = 1 << 50
_LENGTH, _OFFSET = 0, 1


@dataclass(frozen=True)
class Permuted(Masked):
    """tokens: unchanged. ranks: (T,). single: (M,) whether a token was added to compensate for the n-grams. drawn: (D,)
    sampled n-gram lengths, before truncation. starts: (S,) flat first positions of n-grams. blocks: (T,) part of the
    example that a token belongs to."""

    ranks: np.ndarray
    single: np.ndarray
    drawn: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray


def ngram_probabilities(longest: int) -> np.ndarray:
    """(longest,) probability of each n from 1, proportional to 1/n."""
    fractions = 1 / np.arange(1, longest + 1)
    return fractions / fractions.sum()


def permute(config: PlmConfig, vocabulary: Vocabulary, texts: PackedTexts) -> Permuted:
    """Targets and ranks of a packed batch."""
    tokens_T, owners_T, positions_T = texts.tokens, texts.owners, texts.positions
    blocks_T = (positions_T >= config.reuse).astype(np.int64) if config.reuse else np.zeros(len(tokens_T), np.int64)
    text_T = ~vocabulary.special[tokens_T]

    def draw(at: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return texts.uniform(owners_T[at], numbers)

    indices_P = np.flatnonzero(text_T)
    block_P = 2 * owners_T[indices_P] + blocks_T[indices_P]
    left_B = budget(np.bincount(block_P, minlength=2 * len(texts.lengths)), 1 / config.context)
    runs = _Runs(indices_P, block_P, vocabulary.starts_word[tokens_T[indices_P]], left_B)
    chosen_P, drawn, starts = _ngrams(config, runs, lambda at, number: draw(at, positions_T[at] * _ROUND + number))
    left_B = left_B - np.bincount(block_P[chosen_P], minlength=len(left_B))
    free = np.flatnonzero(~chosen_P & (left_B[block_P] > 0))
    order = free[np.lexsort((draw(indices_P[free], _BY_POSITION + positions_T[indices_P[free]]), block_P[free]))]
    single = order[_numbers(block_P[order]) < left_B[block_P[order]]]
    chosen_P[single] = True
    at = indices_P[chosen_P]

    ordered_T = ~text_T
    ordered_T[at] = True
    ranks_T = _ranks(ordered_T, owners_T, blocks_T, draw(np.arange(len(tokens_T)), 2 * _BY_POSITION + positions_T))
    is_single = np.isin(at, indices_P[single])
    return Permuted(tokens_T, at, tokens_T[at], ranks_T, is_single, drawn, indices_P[starts], blocks_T)


def _numbers(groups: np.ndarray) -> np.ndarray:
    """0, 1, ... within each group; groups are contiguous."""
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    sizes = np.diff(np.append(first, len(groups)))
    return np.arange(len(groups)) - np.repeat(first, sizes)


class _Runs:
    """Runs of text. first, last: (U,) boundaries among the P, the last one exclusive. left: remaining tokens to predict
    in each. next_start: (P+1,) the next token that begins a word, itself included; P if none. indices: (P,)."""

    def __init__(self, indices_P: np.ndarray, block_P: np.ndarray, starts_word_P: np.ndarray, left_B: np.ndarray):
        opens = (np.diff(indices_P, prepend=-2) != 1) | (np.diff(block_P, prepend=-1) != 0)
        self.indices, self.first = indices_P, np.flatnonzero(opens)
        self.last = np.append(self.first[1:], len(indices_P))[: len(self.first)]
        # An exact number per block, distributed over its runs by length.
        block_U = block_P[self.first]
        whole_B = np.bincount(block_P, minlength=len(left_B))
        before_B = np.cumsum(whole_B) - whole_B
        ends = self.last - before_B[block_U]
        reached = np.rint(left_B[block_U] * ends / np.maximum(whole_B[block_U], 1)).astype(np.int64)
        self.left = np.diff(reached, prepend=0)
        opens_block = np.diff(block_U, prepend=-1) != 0
        self.left[opens_block] = reached[opens_block]
        starts = np.where(starts_word_P | opens, np.arange(len(indices_P)), len(indices_P))
        self.next_start = np.append(np.minimum.accumulate(starts[::-1])[::-1], len(indices_P)).astype(np.int64)


def _ngrams(
    config: PlmConfig, runs: _Runs, draw: Callable[[np.ndarray, int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(P,) predicted tokens, (D,) sampled lengths, (S,) n-gram starts: each round samples one n-gram of each unfinished
    run."""
    cumulative = np.cumsum(ngram_probabilities(config.longest))[:-1]
    chosen_P = np.zeros(len(runs.indices), dtype=bool)
    at, left = runs.first.copy(), runs.left.copy()
    drawn, starts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    number = 0
    while len(active := np.flatnonzero((left > 0) & (at < runs.last))):
        opening = runs.indices[runs.first[active]]
        length, offset = (draw(opening, 2 * number + which) for which in (_LENGTH, _OFFSET))
        number += 1
        length = 1 + np.searchsorted(cumulative, length, side="right")
        drawn.append(length)
        length = np.minimum(length, left[active])
        capacity = config.context * length
        begin = at[active] + (offset * (capacity - length + 1)).astype(np.int64)
        begin = runs.next_start[np.minimum(begin, len(runs.indices))]
        end = begin + length
        fits = end <= runs.last[active]
        at[active] = np.where(fits, np.maximum(at[active] + capacity, end), runs.last[active])
        left[active[fits]] -= length[fits]
        starts.append(begin[fits])
        for step in range(int(length[fits].max(initial=0))):
            chosen_P[begin[fits & (step < length)] + step] = True
    return chosen_P, np.concatenate(drawn), np.concatenate(starts)


def _ranks(ordered_T: np.ndarray, owners_T: np.ndarray, blocks_T: np.ndarray, uniform_T: np.ndarray) -> np.ndarray:
    """(T,) ranks from 0: in each example, the tokens of its first block that are not `ordered`, then its ordered ones
    in random order, then the same for the second block."""
    ordered = np.flatnonzero(ordered_T)
    block = 2 * owners_T[ordered] + blocks_T[ordered]
    order = ordered[np.lexsort((uniform_T[ordered], block))]
    ranks_T = np.zeros(len(ordered_T), dtype=np.int64)
    ranks_T[order] = 1 + _numbers(2 * owners_T[order] + blocks_T[order])
    in_first = np.bincount(owners_T[ordered_T & (blocks_T == 0)], minlength=owners_T.max(initial=0) + 1)
    return ranks_T + blocks_T * (1 + in_first[owners_T])
