"""Heads of a model that reads a generator's text (Clark et al., "ELECTRA", 2020).

Shape letters: T tokens, M places that predict, H hidden width, V rows of the table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmtool.models.heads.base import PredictingHead
from lmtool.models.heads.lm import MaskedLMHead
from lmtool.nn.feedforward import ACTIVATIONS, Activation

# Rows of logits that are held at a time.
_ROWS = 256


class ReplacedTokenHead(PredictingHead):
    """dense, activation, one number a token: positive where the token is not the original one."""

    def __init__(self, hidden_size: int, activation: Activation = "gelu"):
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.activation = ACTIVATIONS[activation]
        self.output = nn.Linear(hidden_size, 1)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """(T,) logits."""
        return self.seen(self.output(self.activation(self.dense(hidden_TH)))[:, 0])


class CopyGate(nn.Module):
    """One number a token: how surely the token that is read is the original one."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.output = nn.Linear(hidden_size, 1)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """(T,) logits."""
        return self.output(hidden_TH)[:, 0]


def copy_losses(
    head: MaskedLMHead, gate_M: Tensor, hidden_MH: Tensor, table_VW: Tensor, read_M: Tensor, labels_M: Tensor
) -> Tensor:
    """(M,) fp32 losses of a head with a copy gate (section 3.4, All-Tokens MLM): the probability of a token is that of
    copying, where it is the one that is read, plus that of not copying times the head's.

    gate_M: logits of copying. read_M: the tokens that are read. Logits are made again on the way back, so that no
    more than a chunk of rows is held.
    """

    def part(gate: Tensor, hidden: Tensor, read: Tensor, labels: Tensor) -> Tensor:
        spelled = F.logsigmoid(-gate.float()) - F.cross_entropy(
            head(hidden, table_VW).float(), labels, reduction="none"
        )
        copied = F.logsigmoid(gate.float()).masked_fill(read != labels, -torch.inf)
        return -torch.logaddexp(copied, spelled)

    pieces = [
        checkpoint(part, *chunk, use_reentrant=False)
        for chunk in zip(*(tensor.split(_ROWS) for tensor in (gate_M, hidden_MH, read_M, labels_M)), strict=True)
    ]
    return torch.cat(pieces) if pieces else hidden_MH.new_zeros(0, dtype=torch.float32)


@torch.no_grad()
def copy_best(head: MaskedLMHead, gate_M: Tensor, hidden_MH: Tensor, table_VW: Tensor, read_M: Tensor) -> Tensor:
    """(M,) the most probable tokens of a head with a copy gate."""
    best = [read_M.new_zeros(0)]
    for gate, hidden, read in zip(*(tensor.split(_ROWS) for tensor in (gate_M, hidden_MH, read_M)), strict=True):
        copy = torch.sigmoid(gate.float())[:, None]
        fractions = head(hidden, table_VW).float().softmax(-1) * (1 - copy)
        best.append(fractions.scatter_add_(1, read[:, None], copy).argmax(-1))
    return torch.cat(best)
