"""The head of a language model as its family has it: tied or with a table of its own, scaled, with constants.

Shape letters: M places that predict, H hidden width, V rows of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmtool.heads.lm import LMHead
from lmtool.models.base import Backbone, VocabularyHead


class FamilyHead(LMHead):
    """logits = table (scale hidden) + constants, with the token table that is passed at each call. bias: (V,), the
    constants; they are kept in checkpoints and do not learn."""

    def __init__(self, kind: VocabularyHead, vocab_size: int):
        super().__init__()
        self.scale = kind.scale
        if kind.constants:
            del self.bias
            self.register_buffer("bias", torch.zeros(vocab_size))

    def transform(self, hidden_MH: Tensor) -> Tensor:
        return hidden_MH if self.scale == 1.0 else hidden_MH * self.scale


class OwnTableHead(FamilyHead):
    """The same with a table of its own: the one passed is not read. `output.weight`: (V, H)."""

    def __init__(self, kind: VocabularyHead, vocab_size: int, hidden_size: int):
        super().__init__(kind, vocab_size)
        self.output = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, hidden_MH: Tensor, table_VH: Tensor) -> Tensor:
        return super().forward(hidden_MH, self.output.weight)

    def loss_sum(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor) -> Tensor:
        return super().loss_sum(hidden_MH, self.output.weight, labels_M)

    def scores(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        return super().scores(hidden_MH, self.output.weight, labels_M)


def language_head(backbone: Backbone) -> LMHead:
    """The language-model head of a backbone's family, to stand at `heads.lm`."""
    kind, (rows, width) = backbone.vocabulary_head, backbone.embed.token.weight.shape
    if not kind.tied:
        return OwnTableHead(kind, rows, width)
    return FamilyHead(kind, rows) if kind != VocabularyHead() else LMHead()
