"""The attention weights of a model for one text, and the pattern of each attention head (Clark, Khandelwal, Levy,
Manning, "What Does BERT Look At?", BlackboxNLP 2019, section 3).

Shape letters: L tokens of the text, A heads, W layers, R texts, Q queries, K keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmtool.errors import UserError
from lmtool.models.base import Backbone
from lmtool.nn.context import AttentionKind, AttentionObserver
from lmtool.nn.positions import Position
from lmtool.nn.stack import Tap, TapPoint
from lmtool.nn.tiled import AttentionInputs
from lmtool.training.precision import Precision
from lmtool.types import Packed


class _AttentionRecorder(Tap):
    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}
        self.terms: dict[int, dict[str, Tensor]] = {}

    def wants(self, place: TapPoint) -> bool:
        return False

    def attention(self, place: TapPoint, kind: AttentionKind) -> AttentionObserver | None:
        if place.side != "inputs" or kind != "self_attn":
            return None

        def record(attended: AttentionInputs) -> None:
            (weights_ALK,) = attended.weights()
            self.layers[place.layer] = weights_ALK
            _, queries, keys = weights_ALK.shape
            terms = next(attended.terms(), None)  # one text is one tile
            if terms is not None:
                masked_ALK = weights_ALK == 0
                self.terms[place.layer] = {
                    name: term_RALK[0, :, :queries, :keys].masked_fill(masked_ALK, torch.nan)
                    for name, term_RALK in terms.items()
                }

        return record


@dataclass(frozen=True, eq=False)
class TextAttention:
    """The self-attention of every layer over one text. For an encoder-decoder, the layers of the encoder. weights: the
    attention weights (W, A, L, L), float32. terms: the summands of the scores before the softmax, by name, with the
    same shape; NaN where attention is masked. Empty if positions add nothing to the scores."""

    weights: np.ndarray
    terms: dict[str, np.ndarray]


@torch.no_grad()
def attention_of(backbone: Backbone, inputs: Packed, precision: Precision) -> TextAttention:
    """Returns the attention of a model over one text. The model must be in evaluation mode.

    Raises UserError if the model has no self-attention.
    """
    tap = _AttentionRecorder()
    with precision.autocast():
        backbone.read_inputs(inputs, tap=tap)
    if not tap.layers:
        raise UserError(f"model={backbone.config.name} has no self-attention", "use a checkpoint of another model")
    names = next(iter(tap.terms.values()), {})
    return TextAttention(
        _stack(tap.layers),
        {name: _stack({layer: terms[name] for layer, terms in tap.terms.items()}) for name in names},
    )


def _stack(layers: dict[int, Tensor]) -> np.ndarray:
    return torch.stack([layers[layer].float().cpu() for layer in sorted(layers)]).numpy()


# A head has a pattern if its mean weight on the pattern's tokens is at least this.
_MINIMUM_WEIGHT = 0.5


@dataclass(frozen=True, eq=False)
class HeadPattern:
    """The pattern of an attention head; layers and heads are numbered from 1. fractions: the mean attention weight by
    pattern: on the previous token, the next token, the first token, the token itself, and the separators. pattern: the
    one with at least half of the weight; "" if there is none. entropy: the mean entropy of the tokens' attention
    weights, as a fraction of the maximum entropy."""

    layer: int
    number: int
    fractions: dict[str, float]
    pattern: str
    entropy: float


def heads_of(weights_WALL: np.ndarray, special_L: np.ndarray) -> list[HeadPattern]:
    """Returns the pattern of each attention head, from means over the tokens that are not special. weights_WALL: the
    attention weights. special_L: whether a token is special."""
    length = weights_WALL.shape[-1]
    queries = np.flatnonzero(~special_L)
    separators = np.flatnonzero(special_L & (np.arange(length) > 0))
    heads = []
    for layer, weights_ALL in enumerate(weights_WALL, 1):
        for number, weights_LL in enumerate(weights_ALL, 1):
            query_QL = weights_LL[queries]
            fractions = {
                "previous": _mean_weight(query_QL, queries - 1),
                "next": _mean_weight(query_QL, queries + 1),
                "first": float(query_QL[:, 0].mean()),
                "itself": _mean_weight(query_QL, queries),
                "separators": float(query_QL[:, separators].sum(1).mean()),
            }
            best = max(fractions, key=lambda name: fractions[name])
            entropy = -(query_QL * np.log(np.maximum(query_QL, 1e-30))).sum(1).mean() / np.log(max(length, 2))
            pattern = best if fractions[best] >= _MINIMUM_WEIGHT else ""
            heads.append(HeadPattern(layer, number, fractions, pattern, float(entropy)))
    return heads


def _mean_weight(weights_QL: np.ndarray, keys_Q: np.ndarray) -> float:
    inside_Q = (keys_Q >= 0) & (keys_Q < weights_QL.shape[1])
    if not inside_Q.any():
        return 0.0
    return float(weights_QL[np.flatnonzero(inside_Q), keys_Q[inside_Q]].mean())


# --- the effect of positions alone --------------------------------------------------------------------------------
#
# Shape letters: L positions, H width of the token vectors, A heads, D width of a head.


@torch.no_grad()
def position_scores(position: Position, length: int, hidden_size: int, num_heads: int) -> np.ndarray | None:
    """Returns the attention scores (1, L, L) that positions alone cause, as if all words were equal; (A, L, L) if heads
    differ; None for a model without positions.

    The score of a query at position i for a key at position j is in row i, column j. It is the cosine of the two
    position vectors if positions are added to the token vectors, the mean cosine of the rotations for rotary positions,
    and, if positions are added to the scores, the score of a query and a key that are all ones. Positions in a tree are
    bound to a text of L = `length` tokens (`Position.of_batch`).
    """
    positions_L, head_size = torch.arange(length), hidden_size // num_heads
    if position.scores:  # first, since positions in a tree may also add to the token vectors
        positions_1L = positions_L[None]
        ones_RALD = torch.ones(1, num_heads, length, head_size) / head_size**0.5
        bound = position.of_tokens(positions_1L, positions_1L, positions_1L)
        scores = bound.score(ones_RALD, ones_RALD, positions_1L, positions_1L)
        scores_ALL = scores.expand(1, num_heads, length, length)[0].float().numpy()
        return scores_ALL[:1] if (scores_ALL == scores_ALL[:1]).all() else scores_ALL
    vectors_LH = position.embed(torch.zeros(length, hidden_size), positions_L)
    if bool(vectors_LH.any()):
        units_LH = torch.nn.functional.normalize(vectors_LH, dim=-1)
        return (units_LH @ units_LH.T)[None].numpy()
    turns = position.turns(positions_L, torch.float32)
    if turns is not None:
        ones_LAD = torch.ones(length, 1, head_size) / head_size**0.5
        q_LAD, k_LAD = position.rotate(ones_LAD, ones_LAD, turns)
        return torch.einsum("iad,jad->aij", q_LAD, k_LAD).numpy()
    return None
