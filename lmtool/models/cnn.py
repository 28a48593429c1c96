"""A convolutional network over windows of words: Collobert, Weston, Bottou, Karlen, Kavukcuoglu, Kuksa, "Natural
Language Processing (Almost) from Scratch", JMLR 2011 (of words); Kim, "Convolutional Neural Networks for Sentence
Classification", EMNLP 2014 (of sentences).

               token                 embedding_size wide
                 |
              project                hidden_size wide; left out where the two are equal
                 |
      +----------+----------+
      |          |          |
  3 words     4 words     5 words    filters around each token; zeros outside its text
      |          |          |
      +-------  relu -------+        x num_layers
                 |
              hidden

A task over words reads the hidden state of each (a window approach); one over texts their maximum over all tokens (max
over time), behind dropout. With filter_widths=[5] it is the window network of Collobert et al., with a ReLU for their
hard tanh. Kim's constraint on the norm of the classifier's rows is left out.
"""

from __future__ import annotations

import math

from torch import nn

from lmtool.models.base import Encoder, new
from lmtool.models.word_configs import CnnConfig
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import Draw, initialize_each, normal
from lmtool.nn.positions import Position
from lmtool.nn.windows import WindowLayer


class Cnn(Encoder):
    """The encoder, without its heads."""

    def __init__(self, config: CnnConfig):
        narrow, width, widths = config.embedding_size, config.hidden_size, config.filter_widths
        project = nn.Linear(narrow, width) if narrow != width else None
        embed = Embeddings(config.vocab_size, narrow, Position(), 0.0, project=project)
        layers = [WindowLayer(width, widths, width) for _ in range(config.num_layers)]
        super().__init__(config, embed, layers)

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Vectors by initializer_std; filters so that ReLUs keep the variance (He et al. 2015), other maps half of
        it."""

        def draw_of(name: str, part: nn.Module) -> Draw:
            if isinstance(part, nn.Embedding):
                return normal(self.config.initializer_std)
            inputs = part.in_features if isinstance(part, nn.Linear) else self.hidden_size
            return normal(math.sqrt((2 if ".filters." in name else 1) / inputs))

        initialize_each(module, seed, draw_of, prefix)


def build(config: CnnConfig, seed: int) -> Cnn:
    """A new encoder on the default device."""
    return new(Cnn, config, seed)
