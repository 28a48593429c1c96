"""Permutation language modeling: which tokens are predicted, and their random order, as a pure, vectorized function.

Yang, Dai, Yang, Carbonell, Salakhutdinov, Le, "XLNet", NeurIPS 2019, section 2.3 and data_utils.py of its published
code. One in K tokens is predicted, where K is the field `context`. A text is divided into windows of K n tokens; in
each window n consecutive tokens (an n-gram) are predicted, from the beginning of a word. The probability of n is
proportional to 1/n, for n <= `longest`. If the n-grams do not reach 1/K of the tokens, single tokens are added. As in
the published code, n counts tokens, even if a word has several tokens. In that code, however, a window is longer: K n
tokens plus the n-gram. N-grams then make up fewer of the predicted tokens, and a sixth of them are single tokens.

Predicted and special tokens are in a random order, after all other tokens. The ranks in this order determine the
attention masks (`models.two_streams`). The first `reuse` tokens of an example are ordered separately, before all
others.

Shape letters: T tokens, N examples, B blocks (an example has two: its first `reuse` tokens, and the rest), U runs (text
without a special token or a boundary of blocks in between), P tokens that are not special, M predicted tokens, D
sampled lengths, S n-grams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lmtool.objectives.configs import PlmConfig
from lmtool.objectives.corruption.masking import MaskedTexts, PackedTexts, Vocabulary, budget

# The random numbers of a run of text are keyed by the position of its first token and by the number of the n-gram.
# Those of a token are keyed by its position, plus an offset that the keys of runs do not reach.
_KEYS_PER_RUN = 1 << 20
_TOKEN_KEYS = 1 << 50
_LENGTH, _PLACE = 0, 1


@dataclass(frozen=True)
class PermutedTexts(MaskedTexts):
    """Permuted texts. The tokens are unchanged.

    Attributes:
        ranks: (T,) the position of each token in the random order of its example.
        single: (M,) whether a predicted token is a single token instead of part of an n-gram.
        sampled_lengths: (D,) the sampled n-gram lengths, before truncation.
        starts: (S,) the flat index of each n-gram's first token.
        blocks: (T,) the block of its example that each token belongs to: 0 for the first `reuse` tokens, otherwise 1;
            all 0 if `reuse` is 0.
    """

    ranks: np.ndarray
    single: np.ndarray
    sampled_lengths: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray


def ngram_probabilities(longest: int) -> np.ndarray:
    """Returns the probability (longest,) of each n from 1, proportional to 1/n."""
    weights = 1 / np.arange(1, longest + 1)
    return weights / weights.sum()


def permute(config: PlmConfig, vocabulary: Vocabulary, texts: PackedTexts) -> PermutedTexts:
    """Selects the predicted tokens of packed texts, and samples the order of each text."""
    tokens_T, owners_T, positions_T = texts.tokens, texts.owners, texts.positions
    blocks_T = (positions_T >= config.reuse).astype(np.int64) if config.reuse else np.zeros(len(tokens_T), np.int64)
    is_text_T = ~vocabulary.special[tokens_T]

    def uniform(indices: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return texts.uniform(owners_T[indices], numbers)

    indices_P = np.flatnonzero(is_text_T)
    block_ids_P = 2 * owners_T[indices_P] + blocks_T[indices_P]
    remaining_B = budget(np.bincount(block_ids_P, minlength=2 * len(texts.lengths)), 1 / config.context)
    runs = _Runs(indices_P, block_ids_P, vocabulary.starts_word[tokens_T[indices_P]], remaining_B)
    chosen_P, sampled_lengths, starts = _sample_ngrams(
        config, runs, lambda indices, number: uniform(indices, positions_T[indices] * _KEYS_PER_RUN + number)
    )
    # Add single tokens in random order until the budget of each block is used.
    remaining_B = remaining_B - np.bincount(block_ids_P[chosen_P], minlength=len(remaining_B))
    free = np.flatnonzero(~chosen_P & (remaining_B[block_ids_P] > 0))
    priorities = uniform(indices_P[free], _TOKEN_KEYS + positions_T[indices_P[free]])
    order = free[np.lexsort((priorities, block_ids_P[free]))]
    single_indices = order[_index_in_group(block_ids_P[order]) < remaining_B[block_ids_P[order]]]
    chosen_P[single_indices] = True
    indices = indices_P[chosen_P]

    permuted_T = ~is_text_T
    permuted_T[indices] = True
    order_T = uniform(np.arange(len(tokens_T)), 2 * _TOKEN_KEYS + positions_T)
    ranks_T = _ranks(permuted_T, owners_T, blocks_T, order_T)
    is_single = np.isin(indices, indices_P[single_indices])
    return PermutedTexts(
        tokens_T, indices, tokens_T[indices], ranks_T, is_single, sampled_lengths, indices_P[starts], blocks_T
    )


def _index_in_group(groups: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ... within each group. Equal groups are contiguous."""
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    sizes = np.diff(np.append(first, len(groups)))
    return np.arange(len(groups)) - np.repeat(first, sizes)


class _Runs:
    """The runs of text in a batch. next_start: for each token, the next token that begins a word, which may be the
    token itself."""

    def __init__(self, indices_P: np.ndarray, block_ids_P: np.ndarray, starts_word_P: np.ndarray, budget_B: np.ndarray):
        opens = (np.diff(indices_P, prepend=-2) != 1) | (np.diff(block_ids_P, prepend=-1) != 0)
        self.indices, self.first = indices_P, np.flatnonzero(opens)
        self.end = np.append(self.first[1:], len(indices_P))[: len(self.first)]
        # Each block has an exact budget, which its runs share in proportion to their lengths. Rounding the cumulative
        # budget at the end of each run preserves the sum.
        block_U = block_ids_P[self.first]
        sizes_B = np.bincount(block_ids_P, minlength=len(budget_B))
        before_B = np.cumsum(sizes_B) - sizes_B
        ends = self.end - before_B[block_U]
        cumulative = np.rint(budget_B[block_U] * ends / np.maximum(sizes_B[block_U], 1)).astype(np.int64)
        self.budget = np.diff(cumulative, prepend=0)
        opens_block = np.diff(block_U, prepend=-1) != 0
        self.budget[opens_block] = cumulative[opens_block]
        starts = np.where(starts_word_P | opens, np.arange(len(indices_P)), len(indices_P))
        self.next_start = np.append(np.minimum.accumulate(starts[::-1])[::-1], len(indices_P)).astype(np.int64)


def _sample_ngrams(
    config: PlmConfig, runs: _Runs, uniform: Callable[[np.ndarray, int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cumulative = np.cumsum(ngram_probabilities(config.longest))[:-1]
    chosen_P = np.zeros(len(runs.indices), dtype=bool)
    position, remaining = runs.first.copy(), runs.budget.copy()
    sampled_lengths, starts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    number = 0
    while len(active := np.flatnonzero((remaining > 0) & (position < runs.end))):
        opening = runs.indices[runs.first[active]]
        length_draw, place_draw = (uniform(opening, 2 * number + draw) for draw in (_LENGTH, _PLACE))
        number += 1
        length = 1 + np.searchsorted(cumulative, length_draw, side="right")
        sampled_lengths.append(length)
        length = np.minimum(length, remaining[active])
        window = config.context * length
        begin = position[active] + (place_draw * (window - length + 1)).astype(np.int64)
        begin = runs.next_start[np.minimum(begin, len(runs.indices))]
        end = begin + length
        fits = end <= runs.end[active]
        position[active] = np.where(fits, np.maximum(position[active] + window, end), runs.end[active])
        remaining[active[fits]] -= length[fits]
        starts.append(begin[fits])
        for step in range(int(length[fits].max(initial=0))):
            chosen_P[begin[fits & (step < length)] + step] = True
    return chosen_P, np.concatenate(sampled_lengths), np.concatenate(starts)


def _ranks(permuted_T: np.ndarray, owners_T: np.ndarray, blocks_T: np.ndarray, uniform_T: np.ndarray) -> np.ndarray:
    """In a block, the tokens that are not permuted share a rank before the permuted ones; the first block comes
    first."""
    permuted = np.flatnonzero(permuted_T)
    block = 2 * owners_T[permuted] + blocks_T[permuted]
    order = permuted[np.lexsort((uniform_T[permuted], block))]
    ranks_T = np.zeros(len(permuted_T), dtype=np.int64)
    ranks_T[order] = 1 + _index_in_group(2 * owners_T[order] + blocks_T[order])
    in_first = np.bincount(owners_T[permuted_T & (blocks_T == 0)], minlength=owners_T.max(initial=0) + 1)
    return ranks_T + blocks_T * (1 + in_first[owners_T])
