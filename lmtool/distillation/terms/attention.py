"""What self-attention is: its scores (TinyBERT), and the relations of tokens within a layer (MiniLM, MiniLMv2).

Shape letters: T tokens, A heads, D width of a head, R rows of a tile, L queries and K keys of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lmtool.distillation.configs import LayerMap, RelationsConfig
from lmtool.distillation.kept import Kept
from lmtool.distillation.seen import Teacher
from lmtool.distillation.terms.layers import LayerTerm, Pair
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.nn.attended import Attended
from lmtool.nn.stack import Stack
from lmtool.nn.tiled import TileScores
from lmtool.types import Batch

Tiles = tuple[TileScores, TileScores]


class AttentionTerm(LayerTerm):
    """The base of terms over self-attention. UserError where virtual tokens, or a prefix, stand among the student's
    keys: the teacher has none there."""

    of_attention = True

    def __init__(self, config: Any, student: BaseLearner, teacher: Teacher | None, layers: LayerMap | None = None):
        super().__init__(config, student, teacher, layers)
        stacks = [module for module in student.backbone.modules() if isinstance(module, Stack)]
        if student.virtual_tokens or any(stack.ahead for stack in stacks):
            raise UserError(
                f"distill.terms.{config.term}: the tuning method puts tokens into what the student attends to, and the "
                "teacher has none there",
                "give tuning=full, or take terms over states: distill.terms.hidden.weight=1",
            )

    def lost(self, student: Kept, teacher: Kept, pair: Pair, batch: Batch) -> tuple[Tensor, int]:
        total, tokens = torch.zeros((), device=batch.inputs.tokens.device), 0
        for own, its in zip(student.attended[pair[0]], teacher.attended[pair[1]], strict=True):
            for tiles in self.tiles(own, its):
                total = total + self.distance(*tiles)
            tokens += len(own.q_TAD)
        return total, tokens

    @abstractmethod
    def tiles(self, student: Attended, teacher: Attended) -> Iterator[Tiles]:
        """The scores that are compared."""

    @abstractmethod
    def distance(self, student: TileScores, teacher: TileScores) -> Tensor:
        """Of a tile, summed over queries."""


class Attention(AttentionTerm):
    """The squared error of the scores before the softmax, its mean over heads and over what a token sees, summed over
    tokens and layers: 1/h sum_i MSE(A_i student, A_i teacher) (Jiao et al. 2020, equation 8; "the attention matrix is
    used as the fitting target instead of its softmax output", section 3.1, and so in their code)."""

    def tiles(self, student: Attended, teacher: Attended) -> Iterator[Tiles]:
        return zip(student.scores(), teacher.scores(), strict=True)

    def distance(self, student: TileScores, teacher: TileScores) -> Tensor:
        squared_RALK = (student.scores_RALK - teacher.scores_RALK).square()
        if student.allow is None:
            means_RAL = squared_RALK.mean(-1)
        else:
            means_RAL = squared_RALK.masked_fill(~student.allow, 0.0).sum(-1) / student.allow.sum(-1).clamp(min=1)
        return _over_queries(means_RAL, student)


class Relations(AttentionTerm):
    """KL(teacher || student) of a layer's distributions, its mean over heads, summed over tokens, over the relations
    and over the layers: of attention (Wang et al. 2020, MiniLM, equation 5), and of softmax(V V^T / sqrt(d)) of its
    values (equation 7); or of its queries, keys and values cut into relation heads (Wang et al. 2021, MiniLMv2,
    equation 2, whose weights are 1). The papers have one layer, the last: distill.layers=last."""

    config: RelationsConfig

    def tiles(self, student: Attended, teacher: Attended) -> Iterator[Tiles]:
        for relation in self.config.relations:
            if relation == "attention":
                yield from zip(student.scores(), teacher.scores(), strict=True)
                continue
            pair = (attended.related(self._vectors(attended, relation)) for attended in (student, teacher))
            yield from zip(*pair, strict=True)

    def _vectors(self, attended: Attended, relation: str) -> Tensor:
        x_TAD = {"queries": attended.q_TAD, "keys": attended.k_SAD, "values": attended.v_SAD}[relation]
        parts = self.config.relation_heads
        return x_TAD if parts is None else x_TAD.flatten(-2).unflatten(-1, (parts, -1))

    def distance(self, student: TileScores, teacher: TileScores) -> Tensor:
        own_RALK, its_RALK = _logs(student), _logs(teacher)
        # What is not seen counts nothing: 0 times -inf is no number.
        gap_RALK = its_RALK - own_RALK
        if student.allow is not None:
            gap_RALK = gap_RALK.masked_fill(~student.allow, 0.0)
        return _over_queries((its_RALK.exp() * gap_RALK).sum(-1), student)


def _logs(tile: TileScores) -> Tensor:
    """The logarithm of the softmax over what is seen."""
    scores_RALK = tile.scores_RALK
    if tile.allow is not None:
        scores_RALK = scores_RALK.masked_fill(~tile.allow, -torch.inf)
    return scores_RALK.log_softmax(-1)


def _over_queries(each_RAL: Tensor, tile: TileScores) -> Tensor:
    """The mean over heads, summed over the queries that are tokens."""
    return each_RAL.mean(1).masked_fill(~tile.real_RL, 0.0).sum()
