"""What attention keeps for its backward, counted on its parts: see activations.py.

Shape letters: W width of all heads together, A heads, K keys that a query sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lmtool.costs.formats import VALUE_BYTES, Formats
from lmtool.models.disentangled import DisentangledAttention
from lmtool.models.two_streams import TwoStreamAttention
from lmtool.nn.attention import MultiHead
from lmtool.nn.relative import RelativeAttention


@dataclass(frozen=True)
class Sees:
    """What the tokens of a stack see, and who asks. keys: tokens that a query sees at most. cross_keys: those of the
    encoder. scored: positions of all layers add to the scores. copies: of each key and value, where those that a block
    sees are gathered (`nn.block_sparse`). memory: states in front of a text, for each of its tokens. asked: share of
    the tokens that a query stream stands at besides."""

    keys: float
    cross_keys: float = 0.0
    scored: bool = False
    copies: float = 0.0
    memory: float = 0.0
    asked: float = 0.0


def attentions_of(layer: nn.Module) -> Iterator[tuple[str, MultiHead]]:
    """Those in a layer, by the last part of their names."""
    for name, part in layer.named_modules():
        if isinstance(part, MultiHead):
            yield name.rpartition(".")[2], part


def attention_bytes(attention: MultiHead, formats: Formats, cross: bool, sees: Sees, last: bool) -> float:
    """Its input where a projection learns, the states of the heads, and what the last map reads. last: of the layers,
    in which a query stream alone asks."""
    joined, width = attention.q_proj.weight.shape[0], attention.q_proj.in_features
    learns = any(keeps_input(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    low = sum(map(update_values, attention.modules()))
    content, queries = _streams(sees, last)
    asking, rows = _beside_keys(attention, _keyed(attention, formats, cross, sees))
    # Each stream has its copies of keys, values and rows of places.
    states = asking * queries + (2.0 + rows) * (1 + sees.memory) * (content + (sees.asked > 0))
    if sees.copies:
        states += 2 * (sees.copies - 1)
    read = 1 + sees.asked + (1 + sees.memory if sees.memory else 0.0)  # behind a memory one copy more, with it
    kept = learns * width * read * formats.product + states * joined * formats.attention + low * formats.product
    if keeps_input(attention.out_proj):
        kept += queries * joined * formats.product
    # What a cross-attention reads is kept once more, as the encoder's last state.
    return kept + VALUE_BYTES * attention.num_heads + cross * learns * width * formats.product


def score_bytes(attention: MultiHead, formats: Formats, cross: bool, sees: Sees, last: bool) -> float:
    """Of a token's scores, where they are kept: on a CPU dropout needs the weights and its choices, in pieces also what
    comes out; positions that add to the scores need them on the way back."""
    if _keyed(attention, formats, cross, sees):
        element = VALUE_BYTES + 1
    elif not formats.cuda and attention.dropout.rate > 0:
        element = 2 * VALUE_BYTES + 1
    else:
        element = _scored(attention, cross, sees) * formats.attention * (1 + 2 * _terms(attention))
    return element * (sees.cross_keys if cross else sees.keys) * attention.num_heads * _streams(sees, last)[1]


def update_values(module: nn.Module) -> int:
    """Values of a token that a low-rank update of a map keeps: what A gives, and with DoRA what its lengths scale."""
    own = dict(module.named_parameters(recurse=False))
    return sum(len(own[name]) for name in ("lora_a", "lora_magnitude") if name in own)


def keeps_input(linear: nn.Module) -> bool:
    """Whether a map's input is read on the way back: where its matrix learns, or one of low rank beside it."""
    return any(parameter.requires_grad and parameter.ndim > 1 for parameter in linear.parameters())


def _streams(sees: Sees, last: bool) -> tuple[float, float]:
    """The share of the tokens that ask as content, and that of all queries."""
    content = 0.0 if last and sees.asked else 1.0
    return content, content + sees.asked


def _scored(attention: MultiHead, cross: bool, sees: Sees) -> bool:
    """Whether places add to the scores: those of all layers, or a table that an attention maps by itself."""
    return not cross and (sees.scored or bool(attention.table_maps))


def _keyed(attention: MultiHead, formats: Formats, cross: bool, sees: Sees) -> bool:
    """Whether it is one function with its dropout (`nn.keyed`), which keeps queries, keys, values and weights."""
    pieces = cross or _scored(attention, cross, sees) or sees.copies > 0
    return not (formats.cuda or pieces) and attention.dropout.rate > 0


def _beside_keys(attention: MultiHead, keyed: bool) -> tuple[float, float]:
    """What is kept as wide as the heads: of a query, its result or another form of it too; and of a key, rows of
    distances, which there are to one side or to both."""
    if isinstance(attention, TwoStreamAttention):
        return 3.0, 2.0
    if isinstance(attention, RelativeAttention):
        return 2.0, 1.0
    return (1.0 if keyed else 2.0 + 2 * _terms(attention)), 0.0


def _terms(attention: MultiHead) -> int:
    """Terms of its scores that are products with a table of places, of which a query sees one before each key and one
    behind it, so that each keeps twice what the scores do."""
    return len(attention.terms) if isinstance(attention, DisentangledAttention) else 0
