"""Pooling of documents and spans, and heads that read the pooled states.

Shape letters: T tokens, N documents or examples, M spans or target tokens, S spans of an example, H hidden width, D =
3SH, C outputs, F input width of the pooler, B width of a position vector, V rows of the table, W width of the table.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lmtool.models.base import Backbone
from lmtool.models.heads.base import PredictingHead
from lmtool.models.heads.lm import LMHead
from lmtool.nn.dropout import Dropout, DropoutRng
from lmtool.nn.feedforward import ACTIVATIONS, Activation
from lmtool.nn.linear import apply_linear
from lmtool.types import Packed, on_host, send


def summary_index(packed: Packed, how: Literal["first", "last"]) -> Tensor:
    """Returns (N,): the flat index of the first or last token of each document."""
    starts = torch.tensor(packed.starts, dtype=torch.int64)
    if how == "last":
        starts = starts + torch.tensor(packed.lengths, dtype=torch.int64) - 1
    return send(starts, packed.tokens.device)


def summary(hidden_TH: Tensor, packed: Packed, how: Literal["first", "last", "mean", "max"]) -> Tensor:
    """Returns (N, H): the pooled hidden states of each document. how: the state of the first or last token, or the mean
    or maximum over the document including special tokens (Reimers and Gurevych 2019, section 3). Mean and maximum of an
    empty document are 0."""
    if how == "first" or how == "last":
        return hidden_TH[summary_index(packed, how)]
    if how == "max":
        lowest_NH = hidden_TH.new_full((len(packed.lengths), hidden_TH.shape[1]), float("-inf"))
        highest_NH = lowest_NH.scatter_reduce(0, packed.documents[:, None].expand_as(hidden_TH), hidden_TH, "amax")
        return highest_NH.masked_fill(packed.segments.cu_lengths.diff()[:, None] == 0, 0.0)
    lengths = packed.segments.cu_lengths.diff().clamp(min=1).to(hidden_TH.dtype)
    sums_NH = hidden_TH.new_zeros(len(packed.lengths), hidden_TH.shape[1]).index_add_(0, packed.documents, hidden_TH)
    return sums_NH / lengths[:, None]


class Pooler(nn.Module):
    """A dense layer and an activation over the state of the first token, followed by a norm in ModernBERT. activation:
    tanh (BERT, RoBERTa, ALBERT), relu (DistilBERT), gelu (ELECTRA) or its tanh approximation (BigBird). input_size: F;
    None for hidden_size. bias: whether the dense layer has a bias."""

    def __init__(
        self,
        hidden_size: int,
        activation: Literal["tanh", "relu", "gelu", "gelu_tanh"] = "tanh",
        input_size: int | None = None,
        bias: bool = True,
        norm: nn.Module | None = None,
    ):
        super().__init__()
        self.activation = torch.tanh if activation == "tanh" else ACTIVATIONS[activation]
        self.dense = nn.Linear(hidden_size if input_size is None else input_size, hidden_size, bias)
        self.norm = norm

    def forward(self, first_NH: Tensor) -> Tensor:
        """Maps (N, F) to (N, H)."""
        pooled_NH = self.activation(self.dense(first_NH))
        return pooled_NH if self.norm is None else self.norm(pooled_NH)


def pooler(backbone: Backbone) -> Pooler:
    """Returns the pooler of a backbone's family."""
    width, bias = backbone.hidden_size, backbone.head_biases
    norm = nn.LayerNorm(width, backbone.head_norm_epsilon, bias=bias) if backbone.pooler_norm else None
    return Pooler(width, backbone.pooler_activation, backbone.feature_size, bias, norm)


class SequenceHead(PredictingHead):
    """Predicts classes or values of a document by dropout and a linear layer.

    Args:
        dropout: Dropout rate before the output layer.
        bias: Whether the output layer has a bias.
        dense: Whether a dense layer with tanh precedes them.
        tokens: Number of special tokens with learned embeddings that the head adds to texts.
        token_size: Width of these embeddings; None for hidden_size.
    """

    def __init__(
        self,
        hidden_size: int,
        outputs: int,
        dropout: float = 0.0,
        bias: bool = True,
        dense: bool = False,
        tokens: int = 0,
        token_size: int | None = None,
    ):
        super().__init__()
        self.tokens = nn.Embedding(tokens, token_size or hidden_size) if tokens else None
        self.dense = nn.Linear(hidden_size, hidden_size) if dense else None
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden_size, outputs, bias)

    def forward(self, summary_NH: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Maps (N, H) to (N, C). rng: the dropout generator of the pooled tokens, `rng.rows(summary_index(...))`."""
        if self.dense is not None:
            summary_NH = torch.tanh(self.dense(summary_NH))
        return self.observe(apply_linear(self.output, self.dropout(summary_NH, rng)))


def span_vectors(hidden_TH: Tensor, span_M2: Tensor) -> Tensor:
    """Returns (M, 3H): the hidden states of the first and the last token of each span and their mean over the span.
    span_M2: the flat indices of the first and the last token."""
    starts_M, ends_M = span_M2.unbind(1)
    lengths_M = ends_M - starts_M + 1
    first_M, last_M = on_host(span_M2).unbind(1)
    tokens = int((last_M - first_M + 1).sum())  # output_size avoids a device sync
    numbers_M = torch.arange(len(span_M2), device=span_M2.device)
    span_number = numbers_M.repeat_interleave(lengths_M, output_size=tokens)
    before_M = lengths_M.cumsum(0) - lengths_M
    index = torch.arange(len(span_number), device=span_M2.device) - before_M[span_number] + starts_M[span_number]
    sums_MH = hidden_TH.new_zeros(len(span_M2), hidden_TH.shape[1]).index_add_(0, span_number, hidden_TH[index])
    return torch.cat([hidden_TH[starts_M], hidden_TH[ends_M], sums_MH / lengths_M[:, None].to(sums_MH.dtype)], dim=1)


class SpanHead(PredictingHead):
    """Predicts classes of S spans by a dense layer with tanh over their concatenated vectors, dropout, and a linear
    layer (two-layer classifier of Tenney et al. 2019, section 3; spans as in Lee et al. 2017, section 4)."""

    def __init__(self, hidden_size: int, spans: int, outputs: int, dropout: float = 0.0):
        super().__init__()
        self.dense = nn.Linear(3 * spans * hidden_size, hidden_size)
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden_size, outputs)

    def forward(self, spans_ND: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Maps (N, 3SH) to (N, C). rng: the dropout generator of the first token of each example."""
        return self.observe(self.output(self.dropout(torch.tanh(self.dense(spans_ND)), rng)))


class SpanBoundaryHead(LMHead):
    """Predicts the tokens of a span from its two neighbors (Joshi et al. 2020, "SpanBERT", section 3.2): y =
    norm(gelu(W2 norm(gelu(W1 [left; right; position])))), then the tied output layer with a bias.

    targets: maximum number of predicted tokens in a span. position_size: B.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        targets: int,
        position_size: int,
        activation: Activation = "gelu",
        norm_epsilon: float = 1e-12,
        table_width: int | None = None,
    ):
        super().__init__()
        width = hidden_size if table_width is None else table_width
        self.position = nn.Embedding(targets, position_size)
        self.dense1 = nn.Linear(2 * hidden_size + position_size, hidden_size)
        self.norm1 = nn.LayerNorm(hidden_size, norm_epsilon)
        self.dense2 = nn.Linear(hidden_size, width)
        self.norm2 = nn.LayerNorm(width, norm_epsilon)
        self.activation = ACTIVATIONS[activation]
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def features(self, edges_M2H: Tensor, offsets_M: Tensor) -> Tensor:
        """Returns (M, 2H+B): the input of `loss_sum` and `scores`. edges_M2H: the hidden states of the tokens before
        and after the span of each target. offsets_M: the index of each target in its span."""
        return torch.cat([edges_M2H.flatten(1), self.position(offsets_M).to(edges_M2H.dtype)], dim=-1)

    def transform(self, hidden_MH: Tensor) -> Tensor:
        inner_MH = self.norm1(self.activation(self.dense1(hidden_MH)))
        return self.norm2(self.activation(self.dense2(inner_MH)))
