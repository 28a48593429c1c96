"""What the heads of a model look at: attention weights of one text, and what they are mostly on (Clark, Khandelwal,
Levy, Manning, "What Does BERT Look At?", BlackboxNLP 2019, section 3).

Shape letters: L tokens of the text, A heads, W layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmtool.errors import UserError
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.nn.context import AttentionKind, AttentionObserver
from lmtool.nn.positions import Position
from lmtool.nn.stack import Tap, TapPoint
from lmtool.nn.tiled import AttentionInputs
from lmtool.training.precision import Precision
from lmtool.types import Packed


class _Weights(Tap):
    """Keeps the weights of every self-attention over the inputs, of one text, and the terms of its scores."""

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}
        self.terms: dict[int, dict[str, Tensor]] = {}

    def wants(self, place: TapPoint) -> bool:
        return False

    def attention(self, place: TapPoint, kind: AttentionKind) -> AttentionObserver | None:
        if place.side != "inputs" or kind != "self_attn":
            return None

        def take(attended: AttentionInputs) -> None:
            (weights_ALK,) = attended.weights()
            self.layers[place.layer] = weights_ALK
            _, queries, keys = weights_ALK.shape
            for terms in attended.terms():
                self.terms[place.layer] = {
                    name: term_RALK[0, :, :queries, :keys].masked_fill(weights_ALK == 0, torch.nan)
                    for name, term_RALK in terms.items()
                }

        return take


@dataclass(frozen=True, eq=False)
class HeadAttention:
    """The self-attentions over one text, of an encoder-decoder those of its encoder. weights: (W, A, L, L) float32.
    terms: by name as many of what a score is the sum of before the softmax, NaN where nothing is seen; empty where
    positions add nothing to it."""

    weights: np.ndarray
    terms: dict[str, np.ndarray]


@torch.no_grad()
def attention_of(backbone: Backbone, inputs: Packed, precision: Precision) -> HeadAttention:
    """In evaluation mode. UserError for a model that has none."""
    tap = _Weights()
    with precision.autocast():
        read = backbone.read_inputs if isinstance(backbone, EncoderDecoder) else backbone
        read(inputs, tap=tap)
    if not tap.layers:
        raise UserError(
            f"model={backbone.config.name} has no attention of a text to itself", "use a checkpoint of another model"
        )
    names = next(iter(tap.terms.values()), {})
    return HeadAttention(
        _stacked(tap.layers),
        {name: _stacked({layer: terms[name] for layer, terms in tap.terms.items()}) for name in names},
    )


def _stacked(layers: dict[int, Tensor]) -> np.ndarray:
    return torch.stack([layers[layer].float().cpu() for layer in sorted(layers)]).numpy()


PATTERNS = ("previous", "next", "first", "itself", "separators")
_MOSTLY = 0.5


@dataclass(frozen=True, eq=False)
class Head:
    """A head of a layer, both counted from 1.

    fractions: the mean weight on each of PATTERNS. mostly: the pattern with at least half of the weight, and more than
    uniform weights give it; "" if there is none. entropy: mean over the tokens, as a fraction of the maximum.
    """

    layer: int
    number: int
    fractions: dict[str, float]
    mostly: str
    entropy: float


def heads_of(weights_WALL: np.ndarray, special_L: np.ndarray) -> list[Head]:
    """What each head is on, mean over the tokens that are not special. special_L: which tokens are."""
    length = weights_WALL.shape[-1]
    asking = np.flatnonzero(~special_L)
    separators = np.flatnonzero(special_L & (np.arange(length) > 0))
    heads = []
    for layer, weights_ALL in enumerate(weights_WALL, 1):
        for number, weights_LL in enumerate(weights_ALL, 1):
            own_LL = weights_LL[asking]
            fractions = {
                "previous": _mean(own_LL, asking - 1),
                "next": _mean(own_LL, asking + 1),
                "first": float(own_LL[:, 0].mean()),
                "itself": _mean(own_LL, asking),
                "separators": float(own_LL[:, separators].sum(1).mean()),
            }
            best = max(fractions, key=lambda name: fractions[name])
            surprise = -(own_LL * np.log(np.maximum(own_LL, 1e-30))).sum(1).mean() / np.log(max(length, 2))
            heads.append(Head(layer, number, fractions, best if fractions[best] >= _MOSTLY else "", float(surprise)))
    return heads


def _mean(weights_QL: np.ndarray, at_Q: np.ndarray) -> float:
    """The mean weight on one key of each query, of those that have it."""
    inside_Q = (at_Q >= 0) & (at_Q < weights_QL.shape[1])
    if not inside_Q.any():
        return 0.0
    return float(weights_QL[np.flatnonzero(inside_Q), at_Q[inside_Q]].mean())


# What positions do to attention, by themselves: the score of every place for every other one, all words being equal.
#
# Shape letters: L places, H width of the token vectors, A heads, D width of a head.


@torch.no_grad()
def place_scores(position: Position, length: int, hidden_size: int, num_heads: int) -> np.ndarray | None:
    """(1, L, L), or (A, L, L) where heads differ: row i, what a query at place i gives a key at place j. Of positions
    that are added to the vectors, the cosine of both vectors; of turned queries and keys, the mean cosine of their
    turns; of numbers added to the scores, these, for queries of ones. None for no positions."""
    places_L = torch.arange(length)
    vectors_LH = position.embed(torch.zeros(length, hidden_size), places_L)
    if bool(vectors_LH.any()):
        units_LH = torch.nn.functional.normalize(vectors_LH, dim=-1)
        return (units_LH @ units_LH.T)[None].numpy()
    head = hidden_size // num_heads
    turns = position.turns(places_L, torch.float32)
    if turns is not None:
        ones_LAD = torch.ones(length, 1, head) / head**0.5
        q_LAD, k_LAD = position.rotate(ones_LAD, ones_LAD, turns)
        return torch.einsum("iad,jad->aij", q_LAD, k_LAD).numpy()
    if position.scores:
        ones_RALD = torch.ones(1, num_heads, length, head) / head**0.5
        scores = position.score(ones_RALD, ones_RALD, places_L[None], places_L[None])
        scores_ALL = scores.expand(1, num_heads, length, length)[0].float().numpy()
        return scores_ALL[:1] if (scores_ALL == scores_ALL[:1]).all() else scores_ALL
    return None
