"""A convolutional network over windows of words: Collobert, Weston, Bottou, Karlen, Kavukcuoglu, Kuksa, "Natural
Language Processing (Almost) from Scratch", JMLR 2011, for words; Kim, "Convolutional Neural Networks for Sentence
Classification", EMNLP 2014, for sentences.

               token                 embedding_size wide
                 |
              project                hidden_size wide; omitted if the two are equal
                 |
      +----------+----------+
      |          |          |
  3 words     4 words     5 words    filters around each token; zeros outside its text
      |          |          |
      +-------  relu -------+        x num_layers
                 |
              hidden

Token classification uses each hidden state (window approach). Text classification uses the maximum of the hidden states
over all tokens (max over time). Dropout precedes both heads. With filter_widths=[5], the model is the window network of
Collobert et al., with a ReLU instead of their hard tanh. Kim's constraint on the norm of the classifier's rows is
omitted.

Shape letters: T tokens, M selected tokens, S tokens of a window, H hidden width, F filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.models.base import Encoder
from lmtool.models.pretransformer_configs import CnnConfig
from lmtool.nn.context import Context
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import Draw, initialize_each, normal
from lmtool.nn.positions import Position
from lmtool.nn.regions import region
from lmtool.types import Packed


def windows_of(x_TH: Tensor, packed: Packed, left: int, right: int, read_M: Tensor | None = None) -> Tensor:
    """Returns (M, S, H): the states of a window around each token, from `left` tokens before it to `right` tokens after
    it, with zeros outside the text. read_M: flat indices of the tokens; None for all."""
    position_M, document_M, tokens = packed.positions, packed.documents, len(x_TH)
    length_M = packed.segments.cu_lengths.diff().long()[document_M]
    if read_M is not None:
        position_M, length_M = position_M[read_M], length_M[read_M]
    position_MS = position_M[:, None] + torch.arange(-left, right + 1, device=x_TH.device)
    in_text_MS = (position_MS >= 0) & (position_MS < length_M[:, None])
    padded = F.pad(x_TH, (0, 0, left, right))
    shifted = [
        padded[offset : offset + tokens] if read_M is None else padded.index_select(0, read_M + offset)
        for offset in range(left + right + 1)
    ]
    return torch.stack(shifted, 1) * in_text_MS[:, :, None].to(x_TH.dtype)


class WindowLayer(nn.Module):
    """relu(W [x_-l ... x_r] + b) of a window around each token, with filters of several widths concatenated.

    widths: the numbers of tokens in the windows of filters; an even width has one more token after the center than
    before it. size: F, distributed evenly over the widths. reach: S, the largest width.
    """

    def __init__(self, hidden_size: int, widths: Sequence[int], size: int):
        super().__init__()
        self.widths, kinds = tuple(widths), len(widths)
        self.left, self.right = (max(widths) - 1) // 2, max(widths) // 2
        self.reach, self.hidden_size, self.size = max(widths), hidden_size, size
        bounds = [size * number // kinds for number in range(kinds + 1)]
        self.filters = nn.ModuleList(
            nn.Linear(width * hidden_size, last - first)
            for width, first, last in zip(widths, bounds[:-1], bounds[1:], strict=True)
        )

    def saved_activations(self, keys: float, read: float) -> tuple[float, float]:
        """Returns the windows and the result, at the selected tokens."""
        return read * self.reach * self.hidden_size, read * self.size

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """Maps (T, H) to (T, F), or (M, F) of the selected tokens."""
        return self.apply_filters(windows_of(x_TH, context.packed, self.left, self.right, context.read_M))

    @region(1)
    def apply_filters(self, windows_MSH: Tensor) -> Tensor:
        """Maps (M, S, H) to (M, F)."""
        parts = []
        for width, linear in zip(self.widths, self.filters, strict=True):
            first = self.left - (width - 1) // 2
            parts.append(linear(windows_MSH[:, first : first + width].flatten(1)))
        return torch.cat(parts, -1).relu()


class Cnn(Encoder):
    """The encoder without heads."""

    def __init__(self, config: CnnConfig):
        narrow, width, widths = config.embedding_size, config.hidden_size, config.filter_widths
        project = nn.Linear(narrow, width) if narrow != width else None
        embed = Embeddings(config.vocab_size, narrow, Position(), 0.0, project=project)
        layers = [WindowLayer(width, widths, width) for _ in range(config.num_layers)]
        super().__init__(config, embed, layers)

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Draws word vectors with initializer_std, filters as in He et al. (2015), which preserves the variance through
        ReLUs, and other layers with half the variance of filters."""

        def draw_of(name: str, part: nn.Module) -> Draw:
            if isinstance(part, nn.Embedding):
                return normal(self.config.initializer_std)
            inputs = part.in_features if isinstance(part, nn.Linear) else self.hidden_size
            return normal(math.sqrt((2 if ".filters." in name else 1) / inputs))

        initialize_each(module, seed, draw_of, prefix)
