"""Token positions, as objects with hooks. A model calls every hook; each kind implements those it needs.

Every kind is a function of the positions passed to it and stores only learned tables, so a model can be built on the
meta device and read texts of any length (except with `Learned`).

Shape letters: T tokens, H width of the token vectors, A heads, D head width, R rows, L queries, K keys, C clipping
distance, P positions.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.nn.configs import (
    AlibiPositionsConfig,
    ConcatenatedPositionsConfig,
    Extension,
    LearnedPositionsConfig,
    NoPositionsConfig,
    RotaryPositionsConfig,
    ShawPositionsConfig,
    SinusoidalPositionsConfig,
    T5PositionsConfig,
    TreeDepthPositionsConfig,
    TreeDistancePositionsConfig,
)
from lmtool.nn.linear import apply_linear
from lmtool.types import Packed, send

Pairs = Literal["half_split", "interleaved"]
Turns = tuple[Tensor, Tensor]
"""Cosine and sine, (T, 1, D/2) each, fp32 or more."""


@dataclass(frozen=True)
class PositionSizes:
    """Sizes of a stack, for its positions.

    max_positions: the maximum length of a sequence in tokens. hidden_size: H. num_heads: A. head_size: D. causal:
    whether tokens attend only to earlier ones. offset: rows of a learned table before position 0 (RoBERTa and BART: 2).
    """

    max_positions: int
    hidden_size: int
    num_heads: int
    head_size: int
    causal: bool
    offset: int = 0


class Position(nn.Module):
    """No positions: the base of every kind. Positions count from 0 within the document."""

    scores: ClassVar[bool] = False
    """Whether `score` adds to the attention scores, which the variable-length kernels cannot do."""
    weighs: ClassVar[bool] = False
    """Whether `value` adds to the attention's result, which needs the weights; no fused kernel returns them."""
    has_limit: ClassVar[bool] = False
    """Whether there is a last position."""

    def check(self, longest: int, virtual: int = 0) -> None:
        """Raises UserError for documents longer than the kind supports. longest: the length of the longest document in
        tokens, `virtual` of which are virtual."""

    def of_batch(self, packed: Packed) -> Position:
        """Returns the same kind for a batch: for kinds that read its columns."""
        return self

    def embed(self, x_TH: Tensor, positions_T: Tensor) -> Tensor:
        """Adds to the token vectors (learned, sinusoidal)."""
        return x_TH

    def turns(self, positions_T: Tensor, dtype: torch.dtype) -> Turns | None:
        """Rotations of tokens at these positions (rotary), for states of this type; None for none."""
        return None

    def rotate(self, q_TAD: Tensor, k_TAD: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys (rotary), before the keys are cached."""
        return q_TAD, k_TAD

    def score(self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        """Returns a term added to the scores (T5 buckets, ALiBi, Shaw); broadcasts to (R, A, L, K). The queries are
        already scaled. Positions have R rows, or one for all."""
        return q_RALD.new_zeros(())

    def terms(
        self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor
    ) -> dict[str, Tensor]:
        """Returns the terms that `score` sums, by name."""
        return {"places": self.score(q_RALD, k_RAKD, query_positions_RL, key_positions_RK)}

    def value(self, weights_RALK: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        """Returns a term added to the result of the attention (Shaw); broadcasts to (R, A, L, D)."""
        return weights_RALK.new_zeros(())

    def of_tokens(self, query_RL: Tensor, key_RK: Tensor, key_positions_RK: Tensor) -> Position:
        """Returns the same kind for these queries and keys, given as flat indices: for kinds that depend on more than
        the position."""
        return self


class Learned(Position):
    """A table with one vector per position (Gehring et al. 2017; BERT, GPT-2). `weight`: (offset + max_positions,
    H)."""

    has_limit: ClassVar[bool] = True

    def __init__(self, max_positions: int, hidden_size: int, offset: int = 0):
        super().__init__()
        self.max_positions, self.offset = max_positions, offset
        table = nn.Embedding(offset + max_positions, hidden_size)
        self.weight = table.weight

    def check(self, longest: int, virtual: int = 0) -> None:
        if longest > self.max_positions:
            virtual_part = f", {virtual} of them virtual" if virtual else ""
            raise UserError(
                f"model.max_positions={self.max_positions}, but a sequence has {longest} tokens{virtual_part}",
                f"set max_length={self.max_positions - virtual} or less, or model.max_positions={longest} for a new "
                "model",
            )

    def embed(self, x_TH: Tensor, positions_T: Tensor) -> Tensor:
        index_T = positions_T + self.offset if self.offset else positions_T
        return x_TH + nn.functional.embedding(index_T, self.weight)


class Concatenated(Learned):
    """W [token; position], with a learned vector per position and a learned map W back to the width of the token
    vectors. `weight`: (offset + max_positions, P); `project.weight`: (H, H + P)."""

    def __init__(self, max_positions: int, hidden_size: int, size: int, offset: int = 0):
        super().__init__(max_positions, size, offset)
        self.project = nn.Linear(hidden_size + size, hidden_size, bias=False)

    def embed(self, x_TH: Tensor, positions_T: Tensor) -> Tensor:
        places_TP = nn.functional.embedding(positions_T + self.offset, self.weight)
        return apply_linear(self.project, torch.cat([x_TH, places_TP.to(x_TH.dtype)], -1))


class Sinusoidal(Position):
    """PE[p, 2i] = sin(p / base^(2i/H)), PE[p, 2i+1] = cos of the same (Vaswani et al. 2017, 3.5)."""

    def __init__(self, base: float = 10000.0):
        super().__init__()
        self.base = base

    def embed(self, x_TH: Tensor, positions_T: Tensor) -> Tensor:
        width = x_TH.shape[-1]
        angles = _angles(positions_T, width, self.base)
        return x_TH + torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[:, :width].to(x_TH.dtype)


class Shaw(Position):
    """A vector of the clipped distance added to each key, another added to each value (Shaw et al. 2018, 3.2):

        score_ij = scale q_i (k_j + keys[clip(j - i)])        z_i = sum_j weight_ij (v_j + values[clip(j - i)])

    `keys`, `values`: (2C+1, D), row c of distance c - C. Heads and layers share them.
    """

    scores: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    def __init__(self, clip: int, head_size: int):
        super().__init__()
        self.clip = clip
        self.keys = nn.Parameter(torch.randn(2 * clip + 1, head_size))
        self.values = nn.Parameter(torch.randn(2 * clip + 1, head_size))

    def _rows(self, query_positions_RL: Tensor, key_positions_RK: Tensor, shape_RALK: tuple[int, ...]) -> Tensor:
        rows_RLK = _distances(query_positions_RL, key_positions_RK).clamp(-self.clip, self.clip) + self.clip
        return rows_RLK[:, None].expand(shape_RALK)

    def score(self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        # One product per distance, gathered for the keys: (R, A, L, 2C+1) instead of (L, K, D) vectors.
        products = q_RALD @ self.keys.to(q_RALD.dtype).T
        return products.gather(
            -1, self._rows(query_positions_RL, key_positions_RK, (*q_RALD.shape[:-1], k_RAKD.shape[-2]))
        )

    def value(self, weights_RALK: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        sums = weights_RALK.new_zeros(*weights_RALK.shape[:-1], 2 * self.clip + 1)
        rows_RALK = self._rows(query_positions_RL, key_positions_RK, tuple(weights_RALK.shape))
        return sums.scatter_add(-1, rows_RALK, weights_RALK) @ self.values.to(weights_RALK.dtype)


class T5Buckets(Position):
    """A number for each head and bucket of distances, added to the scores (Raffel et al. 2020, 2.1). `weight`:
    (buckets, A). A causal stack uses all buckets for earlier tokens; others half of them for each direction."""

    scores: ClassVar[bool] = True

    def __init__(self, buckets: int, max_distance: int, num_heads: int, causal: bool):
        super().__init__()
        self.buckets, self.max_distance, self.causal = buckets, max_distance, causal
        self.weight = nn.Embedding(buckets, num_heads).weight

    def bucket(self, distances: Tensor) -> Tensor:
        """Returns the bucket of each distance, key minus query; as Mesh TensorFlow's `_relative_position_bucket`."""
        if self.causal:
            buckets, side, far = self.buckets, torch.zeros_like(distances), (-distances).clamp(min=0)
        else:
            buckets = self.buckets // 2
            side, far = (distances > 0).long() * buckets, distances.abs()
        exact = buckets // 2
        log_fraction = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        spaced = (exact + (log_fraction * (buckets - exact)).long()).clamp(max=buckets - 1)
        return side + torch.where(far < exact, far, spaced)

    def score(self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        buckets_RLK = self.bucket(_distances(query_positions_RL, key_positions_RK))
        return nn.functional.embedding(buckets_RLK, self.weight).permute(0, 3, 1, 2).to(q_RALD.dtype)


class Rotary(Position):
    """Each pair i of a head's dimensions is rotated by p / base^(2i/D) (Su et al. 2021, 3.2), so that a score depends
    only on the distance. layout: half_split pairs dimensions i and i + D/2, interleaved 2i and 2i + 1; the two
    differ only in the order of dimensions, which matters for published weights."""

    def __init__(self, head_size: int, base: float = 10000.0, layout: Pairs = "half_split"):
        super().__init__()
        if head_size % 2:
            raise ValueError(f"rotary positions turn pairs of dimensions; a head has {head_size}")
        self.head_size, self.base, self.layout = head_size, base, layout
        self._extension: Extension | None = None
        self._factor, self._trained_length = 1.0, 1
        self._cached_turns: tuple[Tensor, torch.dtype, Turns] | None = None

    def extend(self, extension: Extension | None, factor: float, trained_length: int) -> None:
        """Changes the angles for longer texts than in training.

        extension: linear divides positions by `factor` (Chen et al. 2023, "Extending Context Window of Large Language
        Models via Positional Interpolation"). ntk raises the base so that the slowest pair turns `factor` times less
        and the fastest as before (bloc97 2023, in Peng et al. 2023, 3.1). yarn treats pairs that turn less than once in
        `trained_length` tokens as linear, those of 32 turns or more as before, with a ramp between, and multiplies the
        scores by (1 + 0.1 ln(factor))^2 (Peng et al. 2023, "YaRN", 3.2 to 3.4). None restores the angles of training.
        factor: the length of the texts relative to training, at least 1. trained_length: in tokens.
        """
        self._extension, self._factor, self._trained_length = extension, factor, trained_length
        self._cached_turns = None

    def _rates(self, device: torch.device) -> Tensor:
        """Returns the angle per token of each pair, (D/2,) float64."""
        rates = _rates(self.head_size, self.base, device)
        if self._extension == "linear":
            return rates / self._factor
        if self._extension == "ntk":
            base = self.base * self._factor ** (self.head_size / max(self.head_size - 2, 1))
            return _rates(self.head_size, base, device)
        if self._extension == "yarn":
            turns = self._trained_length * rates / (2 * math.pi)
            kept = ((turns - 1) / (32 - 1)).clamp(0, 1)
            return kept * rates + (1 - kept) * rates / self._factor
        return rates

    def turns(self, positions_T: Tensor, dtype: torch.dtype) -> Turns:
        # All layers of a forward use the same positions.
        wide_dtype = torch.promote_types(dtype, torch.float32)
        if (
            self._cached_turns is None
            or self._cached_turns[0] is not positions_T
            or self._cached_turns[1] != wide_dtype
        ):
            angles = (positions_T.double()[:, None] * self._rates(positions_T.device))[:, None]
            cosine, sine = angles.cos(), angles.sin()
            if self._extension == "yarn":
                growth = 1 + 0.1 * math.log(self._factor)
                cosine, sine = cosine * growth, sine * growth
            self._cached_turns = positions_T, wide_dtype, (cosine.to(wide_dtype), sine.to(wide_dtype))
        return self._cached_turns[2]

    def rotate(self, q_TAD: Tensor, k_TAD: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        return self._rotate_pairs(q_TAD, *turns), self._rotate_pairs(k_TAD, *turns)

    def _rotate_pairs(self, x_TAD: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        if self.layout == "half_split":
            first, second = x_TAD.chunk(2, -1)
        else:
            first, second = x_TAD[..., ::2], x_TAD[..., 1::2]
        turned = first * cosine - second * sine, second * cosine + first * sine
        rotated = torch.cat(turned, -1) if self.layout == "half_split" else torch.stack(turned, -1).flatten(-2)
        return rotated.to(x_TAD.dtype)


class Alibi(Position):
    """-m |i - j| added to the scores, with m = 2^(-8h/A) for head h = 1..A (Press et al. 2022, 3; symmetric for
    encoders as in Portes et al. 2023, MosaicBERT). Nothing is learned."""

    scores: ClassVar[bool] = True

    def __init__(self, num_heads: int):
        super().__init__()
        self.slopes = tuple(2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1))

    def score(self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        slopes_A11 = send(torch.tensor(self.slopes, dtype=q_RALD.dtype), q_RALD.device)[:, None, None]
        return _distances(query_positions_RL, key_positions_RK).abs()[:, None] * -slopes_A11


# Positions in a dependency tree (Wang, Tu, Wang, Shi, "Self-Attention with Structural Position Representations", EMNLP
# 2019), added to positions in the sequence. All subwords have the place of their word; tokens of no word have no place.
# No path leads from them to other tokens, nor between the trees of a pair's two texts: such tokens have a distance of
# their own. Shape letters: T tokens, D levels of the deepest word, R rows of a tile, L queries and K keys of a row, A
# heads, C clipping distance.


class TreePosition(Position):
    """Positions in a tree and in the sequence. sequence: the positions in the sequence. _ancestors_TD: the path of each
    token of the batch from the root, -1 after its end; set by `of_batch`."""

    has_limit: ClassVar[bool] = True

    def __init__(self, sequence: Position):
        super().__init__()
        self.sequence = sequence
        self._ancestors_TD: Tensor | None = None

    def of_batch(self, packed: Packed) -> Self:
        """Returns the positions of a batch, with the same weights. Raises UserError if its texts have no trees."""
        ancestors_TD = packed.columns.get("ancestors")
        if ancestors_TD is None:
            raise UserError(
                "the model reads the dependency tree of each text, and these texts have none",
                "use rows of a task with task.heads, which names their column of heads",
            )
        bound = copy.copy(self)
        bound._ancestors_TD = ancestors_TD
        return bound

    @property
    def ancestors_TD(self) -> Tensor:
        """The path of each token of the batch."""
        assert self._ancestors_TD is not None
        return self._ancestors_TD

    def check(self, longest: int, virtual: int = 0) -> None:
        self.sequence.check(longest, virtual)

    def embed(self, x_TH: Tensor, positions_T: Tensor) -> Tensor:
        return self.sequence.embed(x_TH, positions_T)


class TreeDepth(TreePosition):
    """A vector of the depth, added to the token vectors. `weight`: (deepest + 2, H), row 0 for tokens of no word."""

    def __init__(self, sequence: Position, deepest: int, hidden_size: int):
        super().__init__(sequence)
        self.weight = nn.Embedding(deepest + 2, hidden_size).weight

    def embed(self, x_TH: Tensor, positions_T: Tensor) -> Tensor:
        row_T = (self.ancestors_TD >= 0).sum(-1).clamp(max=len(self.weight) - 1)
        return super().embed(x_TH, positions_T) + nn.functional.embedding(row_T, self.weight)


def tree_distances(query_RLD: Tensor, key_RKD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (R, L, K) int64: the edges between the words of a query and a key, and bool: whether both have words, of
    the same tree. query_RLD, key_RKD: their paths from the root. Two paths agree exactly down to the last common
    ancestor."""
    root_RL1, root_R1K = query_RLD[:, :, None, 0], key_RKD[:, None, :, 0]
    real_RLK = (root_RL1 >= 0) & (root_RL1 == root_R1K)
    depth_RL, depth_RK = (query_RLD >= 0).sum(-1), (key_RKD >= 0).sum(-1)
    common_RLK = torch.zeros_like(real_RLK, dtype=torch.int64)
    for level in range(query_RLD.shape[-1]):  # (R, L, K, D) at once would need much memory
        query_RL, key_RK = query_RLD[..., level], key_RKD[..., level]
        common_RLK += (query_RL[:, :, None] == key_RK[:, None, :]) & (query_RL >= 0)[:, :, None]
    return depth_RL[:, :, None] + depth_RK[:, None, :] - 2 * common_RLK, real_RLK


class TreeDistance(TreePosition):
    """A vector of the clipped distance in the tree added to each key, another to each value, as in `Shaw`. The distance
    is negative if the key is before the query. `keys`, `values`: (2C+2, D), the last row for tokens without a path."""

    scores: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    def __init__(self, sequence: Position, clip: int, head_size: int):
        super().__init__(sequence)
        self.clip = clip
        self.keys = nn.Parameter(torch.randn(2 * clip + 2, head_size))
        self.values = nn.Parameter(torch.randn(2 * clip + 2, head_size))
        # All layers read the same tiles: the rows (R, L, K) of a tile, by the id of its queries, which are kept.
        self._rows_by_tile: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows_RLK: Tensor | None = None

    def of_batch(self, packed: Packed) -> Self:
        bound = super().of_batch(packed)
        bound._rows_by_tile = {}
        return bound

    def of_tokens(self, query_RL: Tensor, key_RK: Tensor, key_positions_RK: Tensor) -> Self:
        if id(query_RL) not in self._rows_by_tile:
            distances_RLK, real_RLK = tree_distances(self.ancestors_TD[query_RL], self.ancestors_TD[key_RK])
            signs_RLK = torch.where(key_RK[:, None, :] < query_RL[:, :, None], -1, 1)
            rows_RLK = (distances_RLK * signs_RLK).clamp(-self.clip, self.clip) + self.clip
            rows_RLK = torch.where(real_RLK, rows_RLK, 2 * self.clip + 1)
            self._rows_by_tile[id(query_RL)] = query_RL, rows_RLK
        bound = copy.copy(self)
        bound._rows_RLK = self._rows_by_tile[id(query_RL)][1]
        return bound

    def _rows(self, heads: int) -> Tensor:
        assert self._rows_RLK is not None
        return self._rows_RLK[:, None].expand(-1, heads, -1, -1)

    def score(self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        products = q_RALD @ self.keys.to(q_RALD.dtype).T
        in_tree = products.gather(-1, self._rows(q_RALD.shape[1]))
        return in_tree + self.sequence.score(q_RALD, k_RAKD, query_positions_RL, key_positions_RK)

    def value(self, weights_RALK: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        sums = weights_RALK.new_zeros(*weights_RALK.shape[:-1], len(self.values))
        in_tree = sums.scatter_add(-1, self._rows(weights_RALK.shape[1]), weights_RALK) @ self.values.to(sums.dtype)
        return in_tree + self.sequence.value(weights_RALK, query_positions_RL, key_positions_RK)


def _angles(positions_T: Tensor, width: int, base: float) -> Tensor:
    """Returns (T, ceil(width / 2)) float64: at position 5e6 single precision is off by a third of a radian."""
    return positions_T.double()[:, None] * _rates(width, base, positions_T.device)


def _rates(width: int, base: float, device: torch.device) -> Tensor:
    steps = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    return base ** (-steps / width)


def sinusoids(positions_P: Tensor, width: int, base: float = 10000.0) -> Tensor:
    """Returns (P, width) float64: all sines before all cosines (Dai et al. 2019, "Transformer-XL", original code)."""
    angles = _angles(positions_P, width, base)
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :width]


def _distances(query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
    return key_positions_RK[:, None, :] - query_positions_RL[:, :, None]


def build_learned(config: LearnedPositionsConfig, sizes: PositionSizes) -> Learned:
    return Learned(sizes.max_positions, sizes.hidden_size, sizes.offset)


def build_concatenated(config: ConcatenatedPositionsConfig, sizes: PositionSizes) -> Concatenated:
    return Concatenated(sizes.max_positions, sizes.hidden_size, config.size, sizes.offset)


def build_sinusoidal(config: SinusoidalPositionsConfig, sizes: PositionSizes) -> Sinusoidal:
    return Sinusoidal(config.base)


def build_shaw(config: ShawPositionsConfig, sizes: PositionSizes) -> Shaw:
    return Shaw(config.clip, sizes.head_size)


def build_t5(config: T5PositionsConfig, sizes: PositionSizes) -> T5Buckets:
    return T5Buckets(config.buckets, config.max_distance, sizes.num_heads, sizes.causal)


def build_rotary(config: RotaryPositionsConfig, sizes: PositionSizes) -> Rotary:
    return Rotary(sizes.head_size, config.base, config.layout)


def build_alibi(config: AlibiPositionsConfig, sizes: PositionSizes) -> Alibi:
    return Alibi(sizes.num_heads)


def build_tree_depth(config: TreeDepthPositionsConfig, sizes: PositionSizes) -> TreeDepth:
    return TreeDepth(_in_sequence(config.sequence, sizes), config.deepest, sizes.hidden_size)


def build_tree_distance(config: TreeDistancePositionsConfig, sizes: PositionSizes) -> TreeDistance:
    return TreeDistance(_in_sequence(config.sequence, sizes), config.clip, sizes.head_size)


def _in_sequence(name: str, sizes: PositionSizes) -> Position:
    if name == "learned":
        return Learned(sizes.max_positions, sizes.hidden_size, sizes.offset)
    if name == "shaw":
        return Shaw(ShawPositionsConfig().clip, sizes.head_size)
    return Sinusoidal() if name == "sinusoidal" else Position()


def build_none(config: NoPositionsConfig, sizes: PositionSizes) -> Position:
    return Position()
