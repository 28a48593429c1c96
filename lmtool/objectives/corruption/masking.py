"""Which tokens a masked language model predicts, and what stands in their place: a pure function, vectorised.

Every draw is keyed by (seed, epoch, example, position), so masks do not depend on how examples are batched.
Shape letters: T tokens of the packed batch, N examples in it, M predicted places, W words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtool import streams
from lmtool.objectives.configs import MaskingConfig, TokenMaskingConfig
from lmtool.tokenizers.tokenizer import Tokenizer

# Draws of one position, side by side: is it selected, which branch, which random token.
_DRAWS = 4
_SELECT, _BRANCH, _RANDOM = 0, 1, 2


@dataclass(frozen=True)
class Vocabulary:
    """What masking knows of a vocabulary.

    mask: the id of [MASK]. special: (V,) bool, the tokens never selected and never drawn. starts_word: (V,) bool.
    """

    mask: int
    special: np.ndarray
    starts_word: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        special: np.ndarray = np.zeros(tokenizer.vocab_size, dtype=bool)
        special[list(tokenizer.special_ids)] = True
        return cls(tokenizer.role("mask"), special, np.asarray(tokenizer.starts_word, dtype=bool))


@dataclass(frozen=True)
class Masked:
    """tokens: (T,) what the model reads. at: (M,) flat places, rising. labels: (M,) what stood there."""

    tokens: np.ndarray
    at: np.ndarray
    labels: np.ndarray


def budget(eligible_N: np.ndarray, probability: float) -> np.ndarray:
    """(N,) how many of an example's eligible tokens are predicted: round(probability x n), at least one of any.

    Half is rounded to even, as Python's round does in BERT's data script.
    """
    return np.minimum(np.maximum(np.rint(eligible_N * probability).astype(np.int64), 1), eligible_N)


def mask_tokens(
    config: TokenMaskingConfig,
    vocabulary: Vocabulary,
    tokens_T: np.ndarray,
    lengths_N: np.ndarray,
    examples_N: np.ndarray,
    seed: int,
    epoch: int,
) -> Masked:
    """Select and replace tokens of a packed batch.

    tokens_T: ids of N examples laid end to end, of lengths lengths_N; special ones are never selected.
    examples_N: the numbers of the examples, which key the draws. epoch: of the draws; under masking=static they
    repeat every `duplicates` epochs.
    """
    epoch = config.drawn_epoch(epoch)
    documents_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
    positions_T = np.arange(len(tokens_T)) - np.repeat(np.cumsum(lengths_N) - lengths_N, lengths_N)
    eligible_T = ~vocabulary.special[tokens_T]

    def draw(which: int, at: np.ndarray) -> np.ndarray:
        return streams.uniform_at(seed, "corrupt", epoch, examples_N[documents_T[at]], positions_T[at] * _DRAWS + which)

    places = np.flatnonzero(eligible_T)
    documents = documents_T[places]
    if config.whole_word:
        starts = vocabulary.starts_word[tokens_T[places]]
        starts |= np.diff(places, prepend=-2) != 1  # behind a special token or at the start of an example
        word_of = np.cumsum(starts) - 1
        first = np.flatnonzero(starts)
        chosen = _choose(
            config,
            draw(_SELECT, places[first]),
            documents[first],
            np.bincount(word_of, minlength=len(first)),
            len(lengths_N),
        )
        selected = chosen[word_of] if len(first) else np.zeros(0, dtype=bool)
    else:
        selected = _choose(config, draw(_SELECT, places), documents, None, len(lengths_N))

    at = places[selected]
    labels = tokens_T[at]
    tokens = replace_tokens(config, vocabulary, tokens_T, at, draw(_BRANCH, at), draw(_RANDOM, at))
    return Masked(tokens, at, labels)


def replace_tokens(
    config: MaskingConfig,
    vocabulary: Vocabulary,
    tokens_T: np.ndarray,
    at: np.ndarray,
    branch_M: np.ndarray,
    uniform_M: np.ndarray,
) -> np.ndarray:
    """(T,) the tokens with [MASK], a random token or themselves at the M places `at`.

    branch_M: the draw that decides which. uniform_M: the draw of the random token.
    """
    regular = np.flatnonzero(~vocabulary.special)
    drawn = regular[(uniform_M * len(regular)).astype(np.int64)]
    random = branch_M < config.mask + config.random
    tokens = tokens_T.copy()
    tokens[at] = np.where(branch_M < config.mask, vocabulary.mask, np.where(random, drawn, tokens_T[at]))
    return tokens


def _choose(
    config: TokenMaskingConfig, uniform: np.ndarray, documents: np.ndarray, sizes: np.ndarray | None, count: int
) -> np.ndarray:
    """Which units (tokens, or words of given sizes) are selected: bool, a unit each.

    exact: units in the order of their draws while they fit what is left of the example's budget (BERT's data
    script). A word larger than the whole budget is taken where nothing else was, so that no example goes without.
    """
    if config.select == "bernoulli":
        return uniform < config.probability
    tokens = np.bincount(documents, weights=sizes, minlength=count).astype(np.int64)
    left = budget(tokens, config.probability)
    order = np.lexsort((uniform, documents))
    units = np.bincount(documents, minlength=count)
    first = np.cumsum(units) - units
    chosen = np.zeros(len(uniform), dtype=bool)
    if sizes is None:
        rank = np.arange(len(order)) - first[documents[order]]
        chosen[order[rank < left[documents[order]]]] = True
        return chosen
    whole = left.copy()
    for rank in range(int(units.max(initial=0))):
        open_ = np.flatnonzero((left > 0) & (units > rank))
        if not len(open_):
            break
        unit = order[first[open_] + rank]
        fits = sizes[unit] <= left[open_]
        chosen[unit[fits]] = True
        left[open_[fits]] -= sizes[unit[fits]]
    untouched = np.flatnonzero((left == whole) & (units > 0))
    chosen[order[first[untouched]]] = True
    return chosen
