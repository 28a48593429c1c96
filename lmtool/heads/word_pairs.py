"""How well a word goes with another: the output vectors of skip-gram, apart from the input vectors.

Shape letters: T tokens, M pairs, J words beside each, H hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmtool.nn.embeddings import Embeddings
from lmtool.nn.positions import Position


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
        words_MJH = self.output.tokens(words_MJ.reshape(-1)).view(*words_MJ.shape, -1)
        return torch.einsum("mjh,mh->mj", words_MJH, hidden_TH.index_select(0, at_M))
