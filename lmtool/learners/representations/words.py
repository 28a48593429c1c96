"""The vectors of one word in several sentences, layer by layer (Ethayarajh, "How Contextual are Contextualized Word
Representations?", EMNLP 2019: self-similarity, beside that of different words).

Shape letters: W layers, S sentences, O other words, H hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmtool.data.formats import text_format
from lmtool.errors import UserError
from lmtool.learners.representations.vectors import HiddenStates
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Packed

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class WordSimilarity:
    """layers: their numbers, 0 behind the embedding. similarity_WSS: cosines of the word's vectors. others_W: the mean
    cosine of two different words of the sentences."""

    layers: tuple[int, ...]
    similarity_WSS: np.ndarray
    others_W: np.ndarray

    @property
    def same_W(self) -> np.ndarray:
        """The mean cosine of the word with itself in another sentence."""
        count = self.similarity_WSS.shape[-1]
        return (self.similarity_WSS.sum((1, 2)) - count) / (count * (count - 1))


def word_vectors(
    states: HiddenStates, tokenizer: Tokenizer, layout: str, sentences: Sequence[str], word: str
) -> WordSimilarity:
    """Of sentences that each have the word; where one has it more than once, the first counts. UserError naming a
    sentence that lacks it."""
    own, others = [], []
    for sentence in sentences:
        vectors = _of_sentence(states, tokenizer, layout, sentence)
        place = next((at for at, (found, _) in enumerate(vectors) if found.lower() == word.lower()), None)
        if place is None:
            raise UserError(f"text: no {word!r} in {sentence!r}", "give sentences that have the word, with | between")
        own.append(vectors[place][1])
        others += [vector for found, vector in vectors if found.lower() != word.lower()]
    own_WSH, others_WOH = (_units(np.stack(part, 1)) for part in (own, [*others, own[0]]))
    similarity_WSS = own_WSH @ own_WSH.transpose(0, 2, 1)
    between_WOO = others_WOH @ others_WOH.transpose(0, 2, 1)
    count = between_WOO.shape[-1]
    pairs = max(count * (count - 1), 1)
    return WordSimilarity(states.layers, similarity_WSS, (between_WOO.sum((1, 2)) - count) / pairs)


def _of_sentence(
    states: HiddenStates, tokenizer: Tokenizer, layout: str, sentence: str
) -> list[tuple[str, np.ndarray]]:
    """The words of a sentence, each with (W, H): the mean over its tokens."""
    own_ids, spans = tokenizer.encode_aligned(sentence)
    ids, columns = text_format(layout, tokenizer).single(own_ids)
    places = range(len(ids) - len(own_ids) + 1)
    before = next(at for at in places if np.array_equal(ids[at : at + len(own_ids)], own_ids))
    tensors = {name: torch.from_numpy(np.asarray(column)) for name, column in columns.items()}
    inputs = Packed(torch.from_numpy(np.asarray(ids, dtype=np.int64)), (len(ids),), tensors)
    states_WTH = states.read(inputs.to(states.precision.device)).cpu().numpy()
    words = []
    for match in _WORD.finditer(sentence):
        inside = np.flatnonzero((spans[:, 0] < match.end()) & (spans[:, 1] > match.start()))
        if len(inside):
            words.append((match[0], states_WTH[:, before + inside].mean(1)))
    return words


def _units(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30)
