"""A sampled softmax, which in training computes only the logits of the target and of a sample of words; the scores of
word pairs for skip-gram and GloVe.

Jean, Cho, Memisevic and Bengio 2015, "On Using Very Large Target Vocabulary for Neural Machine Translation", with the
log-uniform sampler of TensorFlow (`tf.nn.sampled_softmax_loss`, `tf.random.log_uniform_candidate_sampler`): words,
ordered by frequency, are sampled without replacement, and the log of a word's expected count in the sample is
subtracted from its logit. Evaluation computes all logits.

Shape letters: T tokens, M targets or pairs, K sampled words, J context words per pair, V words, P and H hidden widths,
R rows of a chunk.
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
    """A sample of the vocabulary for one step. ids_K: distinct words. words: V. tries: the number of draws with
    replacement until K distinct words were found."""

    ids_K: Tensor
    words: int
    tries: int

    def log_expected(self, ids: Tensor) -> Tensor:
        """Returns the log of the expected count of words in a sample of this size. ids: the words."""
        probabilities = torch.log1p(1 / (ids.double() + 1)) / math.log(self.words + 1)
        return torch.log(-torch.expm1(self.tries * torch.log1p(-probabilities)))

    def to(self, device: torch.device) -> Sample:
        """Moves the sample to a device."""
        return replace(self, ids_K=send(self.ids_K, device))


def log_uniform(words: int, size: int, seed: int, step: int) -> Sample:
    """Samples `size` distinct words of `words`. Each draw is word w with probability log((w + 2) / (w + 1)) / log(words
    + 1). size: less than words. step: the optimizer step; the sample is a function of (seed, step)."""
    generator = np.random.default_rng(key(seed, "sample", step))
    drawn = np.empty(0, dtype=np.int64)
    while True:
        uniform = generator.random(max(2 * size, len(drawn)))
        # Inverse of the cumulative distribution function.
        next_ids = np.exp(uniform * np.log(words + 1)).astype(np.int64) - 1
        drawn = np.concatenate([drawn, np.clip(next_ids, 0, words - 1)])
        ids, first_draws = np.unique(drawn, return_index=True)
        if len(ids) >= size:
            break
    kept_draws = np.sort(first_draws)[:size]
    return Sample(torch.from_numpy(drawn[kept_draws]), words, int(kept_draws[-1]) + 1)


class SampledLMHead(LMHead):
    """An untied output layer with a bias. sampled: the number of words in the sample in training; None if all logits
    are computed."""

    def __init__(self, width: int, words: int, sampled: int | None):
        super().__init__()
        self.untie(words, width)
        self.bias = nn.Parameter(torch.zeros(words))
        self.sampled = None if sampled is None or sampled >= words else sampled

    @property
    def output_table(self) -> Tensor:
        """(V, P), the weight of the output layer."""
        assert self.output is not None
        return self.output.weight

    @property
    def logits_per_target(self) -> int:
        """Number of logits per target in training."""
        return len(self.output_table) if self.sampled is None else self.sampled + 1

    def sampled_loss_sum(self, hidden_MP: Tensor, labels_M: Tensor, sample: Sample) -> Tensor:
        """Returns the sum of the cross entropies. The classes are the target and the sampled words other than the
        target."""
        assert self.bias is not None
        table_VP, bias_V, ids_K = self.output_table, self.bias, sample.ids_K
        # With a single lookup, the table has one gradient instead of two.
        words = torch.cat([labels_M, ids_K])
        target_MP, sampled_KP = F.embedding(words, table_VP).split([len(labels_M), len(ids_K)])
        offsets_K = bias_V[ids_K] - sample.log_expected(ids_K).to(bias_V.dtype)
        target_M = (hidden_MP * target_MP).sum(-1, dtype=bias_V.dtype)
        target_M = target_M + bias_V[labels_M] - sample.log_expected(labels_M).to(bias_V.dtype)
        total = target_M.new_zeros(())
        for start in range(0, len(labels_M), _ROWS):
            rows = slice(start, start + _ROWS)
            arguments = hidden_MP[rows], sampled_KP, offsets_K, labels_M[rows], ids_K
            sampled_R = checkpoint(_logsumexp, *arguments, use_reentrant=False, preserve_rng_state=False)
            total = total + F.softplus(sampled_R - target_M[rows]).sum()
        return total


def _logsumexp(hidden_RP: Tensor, sampled_KP: Tensor, offsets_K: Tensor, labels_R: Tensor, ids_K: Tensor) -> Tensor:
    """Returns (R,): the log-sum-exp of the logits of the sampled words, without the target of the row."""
    logits_RK = F.linear(hidden_RP, sampled_KP).to(offsets_K.dtype) + offsets_K
    return logits_RK.masked_fill(labels_R[:, None] == ids_K, -torch.inf).logsumexp(-1)


class WordPairsHead(nn.Module):
    """Skip-gram's output vectors. The score of a pair is the product of a token's hidden state and the output vector of
    another word (Mikolov et al. 2013, equation 4). words: J. counts: (V,) the frequency of each word in the training
    text, for negative sampling."""

    counts: Tensor

    def __init__(self, vocab_size: int, hidden_size: int, words: int):
        super().__init__()
        self.words = words
        self.output = Embeddings(vocab_size, hidden_size, Position(), 0.0)
        self.register_buffer("counts", torch.zeros(vocab_size, dtype=torch.int64))

    def forward(self, hidden_TH: Tensor, token_M: Tensor, words_MJ: Tensor) -> Tensor:
        """Returns (M, J): the score of each word of `words_MJ` with a token. token_M: flat indices of the tokens."""
        words_MJH = self.output.tokens(words_MJ.reshape(-1)).unflatten(0, words_MJ.shape)
        return torch.einsum("mjh,mh->mj", words_MJH, hidden_TH.index_select(0, token_M))


class CooccurrenceHead(nn.Module):
    """GloVe's scores of word pairs: w_i u_j + b_i + c_j, where w_i and b_i belong to a word, and u_j and c_j to a
    context word (Pennington et al. 2014, equation 7). The hidden state of a word is w_i + u_i, the word's vector in the
    paper, and this head has w_i - u_i, so that both are trained and the model's table is the sum at every step.

    total: (1,) the sum of the counts in the training text. words: context words of a pair, 1.
    """

    total: Tensor
    words = 1

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.output = Embeddings(vocab_size, hidden_size, Position(), 0.0)
        self.word_bias, self.context_bias = (nn.Parameter(torch.zeros(vocab_size)) for _ in range(2))
        self.register_buffer("total", torch.zeros(1, dtype=torch.float64))

    def forward(self, hidden_TH: Tensor, pairs_N2: Tensor) -> Tensor:
        """Returns (N,): the score of each pair. hidden_TH: the states of the words of all pairs, in order. pairs_N2:
        the ids of the word and of the context word of each pair."""
        difference_TH = self.output.tokens(pairs_N2.reshape(-1))
        word_NH = (hidden_TH[0::2] + difference_TH[0::2]) / 2
        context_NH = (hidden_TH[1::2] - difference_TH[1::2]) / 2
        return (word_NH * context_NH).sum(-1) + self.word_bias[pairs_N2[:, 0]] + self.context_bias[pairs_N2[:, 1]]
