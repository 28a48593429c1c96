"""Heads that predict tokens with the embedding's table, which is passed at each call, or with one of their own.

Shape letters: M places that predict, H hidden width, V rows of the table, W its width: H, but for factorized
embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.models.base import Backbone, VocabularyHead
from lmtool.models.heads.base import PredictingHead, TokenLogits
from lmtool.models.heads.losses import linear_loss_sum, linear_scores, loss_sum
from lmtool.nn.dropout import Draws
from lmtool.nn.feedforward import ACTIVATIONS, Activation
from lmtool.nn.regions import region
from lmtool.types import Packed

# Rows of logits over a vocabulary that are held at a time in evaluation.
_ROWS = 256


class LMHead(PredictingHead):
    """logits = table hidden, without a bias (GPT-2). Call it on the rows that predict, no others.

    output: a table of its own, None where the token table is read.
    """

    bias: nn.Parameter | None
    output: nn.Linear | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)
        self.output = None

    def untie(self, rows: int, width: int) -> None:
        """Read a table of its own from now on, (rows, width), for a checkpoint that has one."""
        self.output = nn.Linear(width, rows, bias=False)

    def table(self, table_VH: Tensor) -> Tensor:
        """The table that is read: the head's own, or the token table given."""
        return table_VH if self.output is None else self.output.weight

    def transform(self, hidden_MH: Tensor) -> Tensor:
        """What comes before the table."""
        return hidden_MH

    def forward(self, hidden_MH: Tensor, table_VH: Tensor) -> Tensor:
        """Logits (M, V)."""
        return nn.functional.linear(self.transform(hidden_MH), self.table(table_VH), self.bias)

    def of_tokens(self, hidden_MH: Tensor, table_VH: Tensor, tokens_C: Tensor) -> Tensor:
        """(M, C) logits of some tokens alone."""
        bias_C = None if self.bias is None else self.bias[tokens_C]
        return self.seen(nn.functional.linear(self.transform(hidden_MH), self.table(table_VH)[tokens_C], bias_C))

    def loss_sum(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Sum of the cross entropies, without ever holding all logits."""
        table_VH, hidden_MH = self.table(table_VH), self.transform(hidden_MH)
        if self.tap is not None:
            self.tap(self, TokenLogits(hidden_MH, table_VH, self.bias))
            if self.tap.only:
                return hidden_MH.new_zeros(())
        return linear_loss_sum(hidden_MH, table_VH, self.bias, labels_M, label_smoothing)

    def scores(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        """(M,) losses and (M,) best tokens, without gradient."""
        return linear_scores(self.transform(hidden_MH), self.table(table_VH), self.bias, labels_M)


class FamilyLMHead(LMHead):
    """A family's way from hidden states to tokens: scaled, by a table of its own, with constants or a bias
    (`VocabularyHead`).

    bias: (V,) constants that do not learn, a bias that does, or None.
    """

    def __init__(self, kind: VocabularyHead, hidden_size: int, vocab_size: int):
        super().__init__()
        self.scale = kind.scale
        if not kind.tied:
            self.untie(vocab_size, hidden_size)
        if kind.constants:
            del self.bias
            self.register_buffer("bias", torch.zeros(vocab_size))
        elif kind.bias:
            self.bias = nn.Parameter(torch.zeros(vocab_size))

    def transform(self, hidden_MH: Tensor) -> Tensor:
        return hidden_MH if self.scale == 1.0 else hidden_MH * self.scale


class AdaptiveLMHead(LMHead):
    """An adaptive softmax over the token table (Grave, Joulin, Cisse, Grangier, Jegou, "Efficient softmax approximation
    for GPUs", ICML 2017): frequent tokens and one entry a cluster of rare ones stand in a first softmax, the tokens of
    a cluster in one of their own. Tokens are ordered by frequency. torch's module of this name reads narrower tables of
    its own, whose entries have no bias; this one has one for each token (Dai et al. 2019, published code).

    bias: (V,). clusters: a row and a bias for each of the C clusters. cutoffs: their first tokens.
    """

    def __init__(self, cutoffs: tuple[int, ...], hidden_size: int, vocab_size: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.clusters = nn.Linear(hidden_size, len(cutoffs))
        self.sizes = [end - start for start, end in pairwise((0, *cutoffs, vocab_size))]

    @property
    def rows_read(self) -> float:
        """Rows of the table that a token is multiplied with, mean, where tokens are as frequent as Zipf's law has
        them: the first softmax's, and its own cluster's."""
        starts = list(accumulate(self.sizes))
        fractions = [math.log(end / start) / math.log(starts[-1]) for start, end in pairwise(starts)]
        return self.sizes[0] + sum(share * size for share, size in zip(fractions, self.sizes[1:], strict=True))

    def _parts(self, table_VH: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Table and biases of the first softmax, then of the clusters."""
        first, *tails = zip(self.table(table_VH).split(self.sizes), self.biases.split(self.sizes), strict=True)
        yield torch.cat([first[0], self.clusters.weight]), torch.cat([first[1], self.clusters.bias])
        yield from tails

    @property
    def biases(self) -> Tensor:
        """(V,)."""
        assert self.bias is not None
        return self.bias

    def forward(self, hidden_MH: Tensor, table_VH: Tensor) -> Tensor:
        """(M, V) logarithms of probabilities, fp32 or more."""
        logs = [_log_softmax(nn.functional.linear(hidden_MH, *part)) for part in self._parts(table_VH)]
        first = self.sizes[0]
        tails = [logs[0][:, first + number, None] + tail for number, tail in enumerate(logs[1:])]
        return torch.cat([logs[0][:, :first], *tails], -1)

    def of_tokens(self, hidden_MH: Tensor, table_VH: Tensor, tokens_C: Tensor) -> Tensor:
        return self.seen(self(hidden_MH, table_VH)[:, tokens_C])

    def loss_sum(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """As of every head; without smoothing, of each target the logits of its cluster alone beside the first
        softmax's."""
        if self.tap is not None:
            self.seen(self(hidden_MH, table_VH))
            if self.tap.only:
                return hidden_MH.new_zeros(())
        if label_smoothing:
            return loss_sum(self(hidden_MH, table_VH), labels_M, label_smoothing)
        first_labels, total, start = labels_M, hidden_MH.new_zeros(()), self.sizes[0]
        first, *tails = self._parts(table_VH)
        for number, (part, size) in enumerate(zip(tails, self.sizes[1:], strict=True)):
            inside_M = (labels_M >= start) & (labels_M < start + size)
            first_labels = first_labels.masked_fill(inside_M, self.sizes[0] + number)
            rows = inside_M.nonzero()[:, 0]
            total = total + linear_loss_sum(hidden_MH[rows], *part, labels_M[rows] - start)
            start += size
        return total + linear_loss_sum(hidden_MH, *first, first_labels)

    @torch.no_grad()
    def scores(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        each, best = [hidden_MH.new_zeros(0, dtype=torch.float32)], [labels_M.new_zeros(0)]
        for rows, labels in zip(hidden_MH.split(_ROWS), labels_M.split(_ROWS), strict=True):
            logs = self(rows, table_VH)
            each.append(-logs.gather(1, labels[:, None])[:, 0].float())
            best.append(logs.argmax(-1))
        return torch.cat(each), torch.cat(best)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def lm_head(backbone: Backbone) -> LMHead:
    """The language model's head of a backbone's family."""
    kind = backbone.vocabulary_head
    if kind.cutoffs:
        return AdaptiveLMHead(kind.cutoffs, backbone.hidden_size, backbone.config.vocab_size)
    if kind == VocabularyHead():
        return LMHead()
    return FamilyLMHead(kind, backbone.hidden_size, backbone.config.vocab_size)


class MaskedLMHead(LMHead):
    """dense, activation, norm, then the table and a bias (Devlin et al. 2019, in the published code).

    table_width: W; hidden_size where None (ALBERT and ELECTRA: the width of their embedding). biases: whether dense and
    norm have one.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        activation: Activation = "gelu",
        norm_epsilon: float = 1e-12,
        table_width: int | None = None,
        biases: bool = True,
    ):
        super().__init__()
        width = hidden_size if table_width is None else table_width
        self.dense = nn.Linear(hidden_size, width, biases)
        self.activation = ACTIVATIONS[activation]
        self.norm = nn.LayerNorm(width, norm_epsilon, bias=biases)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    @region(1)
    def transform(self, hidden_MH: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden_MH)))

    def states(
        self, backbone: Backbone, packed: Packed, draws: Draws | None = None, read_M: Tensor | None = None
    ) -> Tensor:
        """(T, H), or (M, H) of `read_M`: the states that it reads, of a backbone over a packed batch."""
        states: Tensor = backbone(packed, draws, read_M=read_M)
        return states


class EnhancedMaskedLMHead(MaskedLMHead):
    """The same behind an enhanced mask decoder (He et al. 2021, "DeBERTa", 3.2): absolute positions enter before the
    tokens are predicted. `absolute`: (P, H) their table. No other head reads these states."""

    absolute: nn.Embedding

    def states(
        self, backbone: Backbone, packed: Packed, draws: Draws | None = None, read_M: Tensor | None = None
    ) -> Tensor:
        states: Tensor = backbone(packed, draws, read_M=read_M, absolute=self.absolute)
        return states


def masked_lm_head(backbone: Backbone, enhanced: bool = False) -> MaskedLMHead:
    """The masked language model's head of a backbone's family. enhanced: behind the enhanced mask decoder; UserError
    where the family has none."""
    if enhanced and not backbone.decodes_masks:
        raise UserError(
            f"objective.enhanced_decoder=true: model={backbone.config.name} has no enhanced mask decoder",
            "give objective.enhanced_decoder=false, or model=deberta or deberta_v3",
        )
    head = (EnhancedMaskedLMHead if enhanced else MaskedLMHead)(
        backbone.hidden_size,
        backbone.config.vocab_size,
        backbone.head_activation,
        backbone.head_norm_epsilon,
        backbone.embed.token.weight.shape[1],
        backbone.head_biases,
    )
    if isinstance(head, EnhancedMaskedLMHead):
        head.absolute = nn.Embedding(backbone.config.max_positions, backbone.hidden_size)
    return head
