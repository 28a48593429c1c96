"""Tokens to vectors, in two calls: `tokens` looks them up, `finish` adds what depends on the position.

Virtual tokens are inserted between the two. Shape letters: T tokens, H hidden width, E width of the token vectors, V
rows of the token table, U distinct tokens of a batch.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.nn.dropout import Dropout, DropoutRng
from lmtool.nn.positions import Position
from lmtool.nn.prefix import VirtualTokens
from lmtool.nn.regions import is_plain
from lmtool.types import Packed


class StackInput(nn.Module):
    """The vectors that a stack adds to its token vectors: positions, and for some families segments; then a norm
    in some families, and dropout.

    segment: table of segments, or None; the ids are the column "segment", 0 if a batch has none. norm: applied to the
    sum. virtual: learned vectors inserted among the tokens, set by prompt tuning, otherwise None.
    """

    virtual: VirtualTokens | None

    def __init__(
        self,
        position: Position,
        dropout: float,
        segment: nn.Embedding | None = None,
        norm: nn.Module | None = None,
    ):
        super().__init__()
        self.position = position
        self.segment = segment
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.virtual = None

    @property
    def virtual_count(self) -> int:
        """Virtual tokens per text."""
        return 0 if self.virtual is None else len(self.virtual)

    def finish(self, vectors_TH: Tensor, packed: Packed, positions_T: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Adds positions and segments, then norm and dropout. positions_T: positions within the documents."""
        x_TH = self.position.of_batch(packed).embed(vectors_TH, positions_T)
        if self.segment is not None:
            ids_T = packed.columns.get("segment")
            x_TH = x_TH + (self.segment.weight[0] if ids_T is None else self.segment(ids_T))
        if self.norm is not None:
            x_TH = self.norm(x_TH)
        return self.dropout(x_TH, rng)


def reserved_positions(embed: StackInput, ahead: int = 0) -> int:
    """Returns the positions that virtual tokens and a prefix of this length take from a text; 0 if positions are
    unbounded."""
    return embed.virtual_count + ahead if embed.position.has_limit else 0


class _LookUp(torch.autograd.Function):
    """table[ids], whose sparse gradient has each row once, with the same sum as the dense gradient, bit by bit."""

    @staticmethod
    def forward(ctx: Any, table_VE: Tensor, ids_T: Tensor) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.shape = table_VE.shape
        return F.embedding(ids_T, table_VE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (ids_T,), (gradient_TE,) = ctx.saved_tensors, gradients
        ids_U, index_T = ids_T.unique(return_inverse=True)
        sums_UE = torch.ops.aten.embedding_dense_backward(gradient_TE, index_T, len(ids_U), -1, False)
        gradient_VE = torch.sparse_coo_tensor(
            ids_U[None], sums_UE, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return gradient_VE, None


class Embeddings(StackInput):
    """Token vectors, and the vectors that a stack adds to them.

    token: (V, E). further_tables: tables of tokens after the vocabulary, which belong to heads. segments: rows of the
    segment table, 0 for none. scale: the factor of the token vectors, see `scaled`. project: maps to the stack's width
    if the tables are narrower (ALBERT, ELECTRA); otherwise E is H. sparse_leaf: a leaf that shares the memory of the
    token table and gets a sparse gradient. The lookup reads it instead of the table if the training loop sets it
    (`sparse_row_gradients`).
    """

    sparse_leaf: Tensor | None = None

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        position: Position,
        dropout: float,
        segments: int = 0,
        norm: nn.Module | None = None,
        project: nn.Module | None = None,
    ):
        segment = nn.Embedding(segments, hidden_size) if segments else None
        super().__init__(position, dropout, segment, norm)
        self.token = nn.Embedding(vocab_size, hidden_size)
        self.further_tables: tuple[nn.Embedding, ...] = ()  # a tuple, because the tables belong to the heads
        self.scale = 1.0
        self.project = project

    def scaled(self, scale: float) -> Self:
        """Returns these embeddings, with token vectors multiplied by `scale`."""
        self.scale = scale
        return self

    def extend(self, table: nn.Embedding) -> int:
        """Adds tokens with a separate table, after all existing ones. Returns the id of the first."""
        first = self.token.num_embeddings + sum(other.num_embeddings for other in self.further_tables)
        self.further_tables = (*self.further_tables, table)
        return first

    def _look_up(self, ids_T: Tensor) -> Tensor:
        """Returns (T, E). An edited table and a compiled forward get dense gradients."""
        leaf, weight = self.sparse_leaf, self.token.weight
        if leaf is None or torch.compiler.is_compiling() or not (torch.is_grad_enabled() and weight.requires_grad):
            return self.token(ids_T)
        if not is_plain(self.token, nn.Embedding) or leaf.data_ptr() != weight.data_ptr():
            return self.token(ids_T)
        return _LookUp.apply(leaf, ids_T)

    def tokens(self, ids_T: Tensor) -> Tensor:
        """Maps ids (T,) to token vectors (T, E)."""
        first = self.token.num_embeddings
        vectors_TE = self._look_up(ids_T if not self.further_tables else ids_T.clamp(max=first - 1))
        for table in self.further_tables:
            row_T = ids_T - first
            in_table_T = (row_T >= 0) & (row_T < table.num_embeddings)
            further_TE = table(row_T.clamp(0, table.num_embeddings - 1))
            vectors_TE = torch.where(in_table_T[:, None], further_TE, vectors_TE)
            first += table.num_embeddings
        return vectors_TE if self.scale == 1.0 else vectors_TE * self.scale

    def finish(self, vectors_TH: Tensor, packed: Packed, positions_T: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Maps token vectors (T, E) to the (T, H) input of a stack."""
        x_TH = super().finish(vectors_TH, packed, positions_T, rng)
        return x_TH if self.project is None else self.project(x_TH)
