"""Heads that predict tokens, and ELECTRA's heads. Tied heads receive the token embedding as an argument.

Shape letters: T tokens, M predicting positions, H hidden width, V rows of the table, W width of the table, which is H
unless embeddings are factorized, C selected tokens or clusters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmtool.errors import UserError
from lmtool.models.base import Backbone, VocabularyHead
from lmtool.models.heads.base import PredictingHead, TokenLogits, linear_loss_sum, linear_scores, loss_sum
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.feedforward import ACTIVATIONS, Activation
from lmtool.nn.linear import apply_linear, linear
from lmtool.nn.regions import region
from lmtool.types import Packed, on_host, send

# Rows of logits over a vocabulary computed at once.
_ROWS = 256


class LMHead(PredictingHead):
    """A language model head without a bias (GPT-2): logits = table hidden. It should only get positions that predict.

    output: the output layer if it is untied from the token embedding, otherwise None.
    """

    bias: nn.Parameter | None
    output: nn.Linear | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)
        self.output = None

    def untie(self, rows: int, width: int) -> None:
        """Adds an untied output layer with a weight of shape (rows, width), if a checkpoint has one."""
        self.output = nn.Linear(width, rows, bias=False)

    def table(self, table_VH: Tensor) -> Tensor:
        """Returns the weight of the output layer: its own if it is untied, otherwise the token embedding."""
        return table_VH if self.output is None else self.output.weight

    def transform(self, hidden_MH: Tensor) -> Tensor:
        """Applies the layers before the output layer."""
        return hidden_MH

    def forward(self, hidden_MH: Tensor, table_VH: Tensor) -> Tensor:
        """Returns the logits, (M, V)."""
        return linear(self.transform(hidden_MH), self.table(table_VH), self.bias)

    def of_tokens(self, hidden_MH: Tensor, table_VH: Tensor, tokens_C: Tensor) -> Tensor:
        """Returns (M, C): the logits of the tokens `tokens_C`."""
        bias_C = None if self.bias is None else self.bias[tokens_C]
        return self.observe(nn.functional.linear(self.transform(hidden_MH), self.table(table_VH)[tokens_C], bias_C))

    def observe_words(self, hidden_MH: Tensor, table_VH: Tensor) -> None:
        """Reports the predictions for hidden states to the tap."""
        if self.tap is not None:
            self.tap(self, TokenLogits(self.transform(hidden_MH), self.table(table_VH), self.bias))

    def loss_sum(
        self,
        hidden_MH: Tensor,
        table_VH: Tensor,
        labels_M: Tensor,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Returns the sum of cross entropies, computed in chunks of rows, plus z_loss times that of the squared
        logarithms of the softmax's normalizers."""
        table_VH, hidden_MH = self.table(table_VH), self.transform(hidden_MH)
        if self.tap is not None:
            self.tap(self, TokenLogits(hidden_MH, table_VH, self.bias))
            if self.tap.predictions_only:
                return hidden_MH.new_zeros(())
        return linear_loss_sum(hidden_MH, table_VH, self.bias, labels_M, label_smoothing, z_loss)

    def scores(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the losses, (M,), and the most probable tokens, (M,), without gradient."""
        return linear_scores(self.transform(hidden_MH), self.table(table_VH), self.bias, labels_M)


class BackboneLMHead(LMHead):
    """The language model head that the `VocabularyHead` of a family describes: tied or untied, with or without a scale,
    constants or a bias.

    bias: (V,) fixed constants or a learned bias; None if there is neither.
    """

    def __init__(self, form: VocabularyHead, hidden_size: int, vocab_size: int):
        super().__init__()
        self.scale = form.scale
        if not form.tied:
            self.untie(vocab_size, hidden_size)
        if form.constants:
            del self.bias
            self.register_buffer("bias", torch.zeros(vocab_size))
        elif form.bias:
            self.bias = nn.Parameter(torch.zeros(vocab_size))

    def transform(self, hidden_MH: Tensor) -> Tensor:
        return hidden_MH if self.scale == 1.0 else hidden_MH * self.scale


class AdaptiveLMHead(LMHead):
    """An adaptive softmax over the token embedding (Grave, Joulin, Cisse, Grangier, Jegou, "Efficient softmax
    approximation for GPUs", ICML 2017): a first softmax over the frequent tokens and one entry per cluster of rare
    tokens, and a softmax within each cluster. Tokens are ordered by frequency. Unlike torch's module, this head is tied
    and has a bias for each token (Dai et al. 2019, original code).

    bias: (V,) the bias of each token. clusters: a row and a bias for each of the C clusters. cutoffs: the first token
    of each cluster. sizes: the number of frequent tokens, then that of each cluster.
    """

    def __init__(self, cutoffs: tuple[int, ...], hidden_size: int, vocab_size: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.clusters = nn.Linear(hidden_size, len(cutoffs))
        self.sizes = [end - start for start, end in pairwise((0, *cutoffs, vocab_size))]

    @property
    def rows_read(self) -> float:
        """The mean number of table rows that are multiplied by the state of a token, in the first softmax and in the
        token's cluster, if token frequencies follow Zipf's law."""
        starts = list(accumulate(self.sizes))
        probabilities = [math.log(end / start) / math.log(starts[-1]) for start, end in pairwise(starts)]
        return self.sizes[0] + sum(p * size for p, size in zip(probabilities, self.sizes[1:], strict=True))

    def _parts(self, table_VH: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the table rows and the biases of the first softmax, then those of each cluster."""
        first, *tails = zip(self.table(table_VH).split(self.sizes), self.biases.split(self.sizes), strict=True)
        yield torch.cat([first[0], self.clusters.weight]), torch.cat([first[1], self.clusters.bias])
        yield from tails

    @property
    def biases(self) -> Tensor:
        """(V,), the bias of each token."""
        assert self.bias is not None
        return self.bias

    def forward(self, hidden_MH: Tensor, table_VH: Tensor) -> Tensor:
        """Returns (M, V): the log probabilities of all tokens, in fp32 or a wider type."""
        logs = [_log_softmax(nn.functional.linear(hidden_MH, *part)) for part in self._parts(table_VH)]
        first = self.sizes[0]
        tails = [logs[0][:, first + number, None] + tail for number, tail in enumerate(logs[1:])]
        return torch.cat([logs[0][:, :first], *tails], -1)

    def of_tokens(self, hidden_MH: Tensor, table_VH: Tensor, tokens_C: Tensor) -> Tensor:
        return self.observe(self(hidden_MH, table_VH)[:, tokens_C])

    def loss_sum(
        self,
        hidden_MH: Tensor,
        table_VH: Tensor,
        labels_M: Tensor,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Returns the sum of cross entropies. Without smoothing, only the first softmax and the logits of each target's
        cluster are computed. Raises ValueError for a z_loss: there is a normalizer for each cluster."""
        if z_loss:
            raise ValueError("an adaptive softmax has several normalizers, and no z_loss")
        if self.tap is not None:
            self.observe(self(hidden_MH, table_VH))
            if self.tap.predictions_only:
                return hidden_MH.new_zeros(())
        if label_smoothing:
            return loss_sum(self(hidden_MH, table_VH), labels_M, label_smoothing)
        first_labels, total, start = labels_M, hidden_MH.new_zeros(()), self.sizes[0]
        host_M = on_host(labels_M)
        first, *tails = self._parts(table_VH)
        for number, (part, size) in enumerate(zip(tails, self.sizes[1:], strict=True)):
            in_cluster_M = (labels_M >= start) & (labels_M < start + size)
            first_labels = first_labels.masked_fill(in_cluster_M, self.sizes[0] + number)
            rows = send(((host_M >= start) & (host_M < start + size)).nonzero()[:, 0], labels_M.device)
            total = total + linear_loss_sum(hidden_MH[rows], *part, labels_M[rows] - start)
            start += size
        return total + linear_loss_sum(hidden_MH, *first, first_labels)

    @torch.no_grad()
    def scores(self, hidden_MH: Tensor, table_VH: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        losses, best = [hidden_MH.new_zeros(0, dtype=torch.float32)], [labels_M.new_zeros(0)]
        for rows, labels in zip(hidden_MH.split(_ROWS), labels_M.split(_ROWS), strict=True):
            logs = self(rows, table_VH)
            losses.append(-logs.gather(1, labels[:, None])[:, 0].float())
            best.append(logs.argmax(-1))
        return torch.cat(losses), torch.cat(best)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def lm_head(backbone: Backbone) -> LMHead:
    """Returns the language model head of a backbone."""
    form = backbone.vocabulary_head
    if form.cutoffs:
        return AdaptiveLMHead(form.cutoffs, backbone.hidden_size, backbone.config.vocab_size)
    if form == VocabularyHead():
        return LMHead()
    return BackboneLMHead(form, backbone.hidden_size, backbone.config.vocab_size)


class MaskedLMHead(LMHead):
    """A dense layer, an activation, a norm, and the tied output layer with a bias (Devlin et al. 2019, original code).
    table_width: W, in ALBERT and ELECTRA the width of the embedding; None for hidden_size. biases: whether dense layer
    and norm have biases."""

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
        return self.norm(self.activation(apply_linear(self.dense, hidden_MH)))

    def states(
        self, backbone: Backbone, packed: Packed, rng: DropoutRng | None = None, read_M: Tensor | None = None
    ) -> Tensor:
        """Returns the states of a backbone that this head reads, for packed texts: (T, H), or (M, H) of the tokens with
        the flat indices `read_M`."""
        states: Tensor = backbone(packed, rng, read_M=read_M)
        return states


class EnhancedMaskedLMHead(MaskedLMHead):
    """A `MaskedLMHead` that reads the states of an enhanced mask decoder (He et al. 2021, "DeBERTa", 3.2), to which it
    gives absolute positions. `absolute`: the table of positions, with rows of width H."""

    absolute: nn.Embedding

    def states(
        self, backbone: Backbone, packed: Packed, rng: DropoutRng | None = None, read_M: Tensor | None = None
    ) -> Tensor:
        states: Tensor = backbone(packed, rng, read_M=read_M, absolute=self.absolute)
        return states


def masked_lm_head(backbone: Backbone, enhanced: bool = False) -> MaskedLMHead:
    """Returns the masked language model head of a backbone. enhanced: whether the head follows the enhanced mask
    decoder. Raises UserError if the family has no such decoder."""
    if enhanced and not backbone.decodes_masks:
        raise UserError(
            f"objective.enhanced_decoder=true: model={backbone.config.name} has no enhanced mask decoder",
            "set objective.enhanced_decoder=false, or model=deberta or deberta_v3",
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


# Heads of ELECTRA's discriminator (Clark et al. 2020).


class ReplacedTokenHead(PredictingHead):
    """ELECTRA's discriminator head: a dense layer, an activation, and one logit per token, which is positive if the
    token was replaced."""

    def __init__(self, hidden_size: int, activation: Activation = "gelu"):
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.activation = ACTIVATIONS[activation]
        self.output = nn.Linear(hidden_size, 1)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Returns the logits (T,)."""
        dense_TH = self.activation(apply_linear(self.dense, hidden_TH))
        return self.observe(apply_linear(self.output, dense_TH)[:, 0])


class CopyGate(nn.Module):
    """One logit per token, which is positive if the input token is the original one."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.output = nn.Linear(hidden_size, 1)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Returns the logits (T,)."""
        return self.output(hidden_TH)[:, 0]


def copy_losses(
    head: MaskedLMHead, gate_M: Tensor, hidden_MH: Tensor, table_VW: Tensor, input_M: Tensor, labels_M: Tensor
) -> Tensor:
    """Returns (M,): the losses in fp32 of a head with a copy gate (section 3.4, All-Tokens MLM). The probability of a
    token is that of the head times the probability of not copying. The probability of copying is added to that of the
    input token. Logits are recomputed in the backward pass, in chunks of rows.

    gate_M: the logits of the copy gate. input_M: the input tokens. labels_M: the target tokens.
    """

    def chunk_losses(gate: Tensor, hidden: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        generated = F.logsigmoid(-gate.float()) - F.cross_entropy(
            head(hidden, table_VW).float(), labels, reduction="none"
        )
        copied = F.logsigmoid(gate.float()).masked_fill(inputs != labels, -torch.inf)
        return -torch.logaddexp(copied, generated)

    chunks = [
        checkpoint(chunk_losses, *chunk, use_reentrant=False)
        for chunk in zip(*(tensor.split(_ROWS) for tensor in (gate_M, hidden_MH, input_M, labels_M)), strict=True)
    ]
    return torch.cat(chunks) if chunks else hidden_MH.new_zeros(0, dtype=torch.float32)


@torch.no_grad()
def copy_predictions(
    head: MaskedLMHead, gate_M: Tensor, hidden_MH: Tensor, table_VW: Tensor, input_M: Tensor
) -> Tensor:
    """Returns (M,): the most probable tokens of a head with a copy gate. The arguments are those of `copy_losses`."""
    best = [input_M.new_zeros(0)]
    for gate, hidden, inputs in zip(*(tensor.split(_ROWS) for tensor in (gate_M, hidden_MH, input_M)), strict=True):
        copy = torch.sigmoid(gate.float())[:, None]
        probabilities = head(hidden, table_VW).float().softmax(-1) * (1 - copy)
        best.append(probabilities.scatter_add_(1, inputs[:, None], copy).argmax(-1))
    return torch.cat(best)
