"""Heads that predict tokens with the embedding's table, which is passed at each call and never owned.

Shape letters: M places that predict, H hidden width, V rows of the table, W its width: H, but for factorized
embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmtool.heads.losses import linear_loss_sum, linear_scores
from lmtool.models.base import Backbone, VocabularyHead
from lmtool.nn.feedforward import ACTIVATIONS, Activation


class LMHead(nn.Module):
    """logits = table hidden, without a bias (GPT-2). Call it on the rows that predict, no others."""

    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)

    def transform(self, hidden_MH: Tensor) -> Tensor:
        """What comes before the table."""
        return hidden_MH

    def forward(self, hidden_MH: Tensor, table_VH: Tensor) -> Tensor:
        """Logits (M, V)."""
        return nn.functional.linear(self.transform(hidden_MH), table_VH, self.bias)

    def loss_sum(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Sum of the cross entropies, without ever holding all logits."""
        return linear_loss_sum(self.transform(hidden_MH), table_VH, self.bias, labels_M, label_smoothing)

    def scores(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        """(M,) losses and (M,) best tokens, without gradient."""
        return linear_scores(self.transform(hidden_MH), table_VH, self.bias, labels_M)


class FamilyLMHead(LMHead):
    """A family's way from hidden states to tokens: scaled, by a table of its own, with constants (`VocabularyHead`).

    output: the table of its own, None where the token table is read. bias: (V,) constants that do not learn, or None.
    """

    def __init__(self, kind: VocabularyHead, hidden_size: int, vocab_size: int):
        super().__init__()
        self.scale = kind.scale
        self.output = None if kind.tied else nn.Linear(hidden_size, vocab_size, bias=False)
        if kind.constants:
            del self.bias
            self.register_buffer("bias", torch.zeros(vocab_size))

    def transform(self, hidden_MH: Tensor) -> Tensor:
        return hidden_MH if self.scale == 1.0 else hidden_MH * self.scale

    def table(self, table_VH: Tensor) -> Tensor:
        """The table that is read: the head's own, or the token table given."""
        return table_VH if self.output is None else self.output.weight

    def forward(self, hidden_MH: Tensor, table_VH: Tensor) -> Tensor:
        return super().forward(hidden_MH, self.table(table_VH))

    def loss_sum(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor, label_smoothing: float = 0.0) -> Tensor:
        return super().loss_sum(hidden_MH, self.table(table_VH), labels_M, label_smoothing)

    def scores(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        return super().scores(hidden_MH, self.table(table_VH), labels_M)


def lm_head(backbone: Backbone) -> LMHead:
    """The language model's head of a backbone's family."""
    kind = backbone.vocabulary_head
    if kind == VocabularyHead():
        return LMHead()
    return FamilyLMHead(kind, backbone.hidden_size, backbone.config.vocab_size)


class MaskedLMHead(LMHead):
    """dense, activation, norm, then the table and a bias (Devlin et al. 2019, in the published code).

    table_width: W; hidden_size where None (ALBERT and ELECTRA: the width of their embedding).
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        activation: Activation = "gelu",
        norm_epsilon: float = 1e-12,
        table_width: int | None = None,
    ):
        super().__init__()
        width = hidden_size if table_width is None else table_width
        self.dense = nn.Linear(hidden_size, width)
        self.activation = ACTIVATIONS[activation]
        self.norm = nn.LayerNorm(width, norm_epsilon)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def transform(self, hidden_MH: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden_MH)))
