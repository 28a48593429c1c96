"""Static word vectors: Mikolov, Sutskever, Chen, Corrado, Dean, "Distributed Representations of Words and Phrases and
their Compositionality", NeurIPS 2013 (word2vec); Pennington, Socher, Manning, "GloVe: Global Vectors for Word
Representation", EMNLP 2014.

          token
            |
         hidden        the row of the table: whatever stands around the word

What a task reads of a text is the mean of its words' vectors; of a word, its vector. `objective=skip_gram` learns them
from text, and `lmtool import` reads the files that others are published in.
"""

from __future__ import annotations

from lmtool.models.base import Encoder, new
from lmtool.models.word_configs import WordVectorsConfig
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import Draw, normal
from lmtool.nn.positions import Position


class WordVectorModel(Encoder):
    """A table, and no layer on it."""

    def __init__(self, config: WordVectorsConfig):
        super().__init__(config, Embeddings(config.vocab_size, config.hidden_size, Position(), 0.0), ())

    def initial_draw(self) -> Draw:
        return normal(self.config.initializer_std)


def build(config: WordVectorsConfig, seed: int) -> WordVectorModel:
    """New vectors on the default device."""
    return new(WordVectorModel, config, seed)
