"""A softmax over words that training computes on the true word and a sample of the others.

Jean, Cho, Memisevic and Bengio 2015, "On Using Very Large Target Vocabulary for Neural Machine Translation", with the
log-uniform sampler of TensorFlow (`tf.nn.sampled_softmax_loss`, `tf.random.log_uniform_candidate_sampler`): words of a
vocabulary in the order of their frequency, drawn without replacement, and each logit less the log of how often its word
is expected in the sample. Evaluation computes all of them.

Shape letters: M targets, K sampled words, V words, P hidden width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmtool.models.heads.lm import LMHead
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.positions import Position
from lmtool.random_streams import key
from lmtool.types import send

# Rows of logits computed at once.
_ROWS = 512


@dataclass(frozen=True)
class Sample:
    """Words that stand for all of a vocabulary in a step. ids_K: the words. words: V. tries: draws that it took to find
    so many different ones."""

    ids_K: Tensor
    words: int
    tries: int

    def log_expected(self, ids: Tensor) -> Tensor:
        """Of some words, the log of how often each is expected in such a sample."""
        probabilities = torch.log1p(1 / (ids.double() + 1)) / math.log(self.words + 1)
        return torch.log(-torch.expm1(self.tries * torch.log1p(-probabilities)))

    def to(self, device: torch.device) -> Sample:
        """On the device."""
        return replace(self, ids_K=send(self.ids_K, device))


def log_uniform(words: int, size: int, seed: int, step: int) -> Sample:
    """`size` different words of so many, fewer than there are: a function of (seed, step). Word w is drawn with a
    chance of log((w + 2) / (w + 1)) / log(words + 1), again and again until enough different ones have come."""
    generator = np.random.default_rng(key(seed, "sample", step))
    samples = np.empty(0, dtype=np.int64)
    while True:
        uniform = generator.random(max(2 * size, len(samples)))
        # The inverse of the distribution function.
        more = np.exp(uniform * np.log(words + 1)).astype(np.int64) - 1
        samples = np.concatenate([samples, np.clip(more, 0, words - 1)])
        ids, first = np.unique(samples, return_index=True)
        if len(ids) >= size:
            break
    earliest = np.sort(first)[:size]
    return Sample(torch.from_numpy(samples[earliest]), words, int(earliest[-1]) + 1)


class SampledLMHead(LMHead):
    """logits = table hidden + bias, with a table of its own. sampled: words that training computes beside the true
    one; None: all."""

    def __init__(self, width: int, words: int, sampled: int | None):
        super().__init__()
        self.untie(words, width)
        self.bias = nn.Parameter(torch.zeros(words))
        self.sampled = None if sampled is None or sampled >= words else sampled

    @property
    def output_table(self) -> Tensor:
        """(V, P) what it reads words off."""
        assert self.output is not None
        return self.output.weight

    @property
    def computed(self) -> int:
        """Words whose logits training computes at each target."""
        return len(self.output_table) if self.sampled is None else self.sampled + 1

    def sampled_loss_sum(self, hidden_MP: Tensor, labels_M: Tensor, sample: Sample) -> Tensor:
        """Sum of the cross entropies over the true word and the sample, in which the true one counts no second
        time."""
        assert self.bias is not None
        table_VP, bias_V, ids_K = self.output_table, self.bias, sample.ids_K
        # One lookup gives the table one gradient instead of two.
        words = torch.cat([labels_M, ids_K])
        true_MP, sampled_KP = F.embedding(words, table_VP).split([len(labels_M), len(ids_K)])
        offsets_K = bias_V[ids_K] - sample.log_expected(ids_K).to(bias_V.dtype)
        true_M = (hidden_MP * true_MP).sum(-1, dtype=bias_V.dtype)
        true_M = true_M + bias_V[labels_M] - sample.log_expected(labels_M).to(bias_V.dtype)
        total = true_M.new_zeros(())
        for start in range(0, len(labels_M), _ROWS):
            rows = slice(start, start + _ROWS)
            sampled_R: Tensor = checkpoint(
                _logsumexp, hidden_MP[rows], sampled_KP, offsets_K, labels_M[rows], ids_K,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
            total = total + F.softplus(sampled_R - true_M[rows]).sum()
        return total


def _logsumexp(hidden_RP: Tensor, sampled_KP: Tensor, offsets_K: Tensor, labels_R: Tensor, ids_K: Tensor) -> Tensor:
    """(R,) of the sampled words' logits; none of a row's true word."""
    logits_RK = F.linear(hidden_RP, sampled_KP).to(offsets_K.dtype) + offsets_K
    return logits_RK.masked_fill(labels_R[:, None] == ids_K, -torch.inf).logsumexp(-1)


# Scores of word pairs: the output vectors of skip-gram, separate from the input vectors.
#
# Shape letters: T tokens, M pairs, J context words per pair, H hidden width, V vocabulary.


class WordPairsHead(nn.Module):
    """Scores of pairs: the product of a token's hidden state and another word's output vector (Mikolov et al. 2013,
    equation 4). words: J. counts: (V,) how often each word stands in the training text, from which others are drawn."""

    counts: Tensor

    def __init__(self, vocab_size: int, hidden_size: int, words: int):
        super().__init__()
        self.words = words
        self.output = Embeddings(vocab_size, hidden_size, Position(), 0.0)
        self.register_buffer("counts", torch.zeros(vocab_size, dtype=torch.int64))

    def forward(self, hidden_TH: Tensor, at_M: Tensor, words_MJ: Tensor) -> Tensor:
        """(M, J) of each word with the token at its place."""
        words_MJH = self.output.tokens(words_MJ.reshape(-1)).unflatten(0, words_MJ.shape)
        return torch.einsum("mjh,mh->mj", words_MJH, hidden_TH.index_select(0, at_M))
