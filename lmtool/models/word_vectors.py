"""Static word vectors: Mikolov, Sutskever, Chen, Corrado, Dean, "Distributed Representations of Words and Phrases and
their Compositionality", NeurIPS 2013 (word2vec); Pennington, Socher, Manning, "GloVe: Global Vectors for Word
Representation", EMNLP 2014.

          token
            |
         hidden        a row of the table, independent of other words

Text tasks use the mean of the vectors, token tasks each vector. `objective=skip_gram` and `objective=glove` train them,
and `lmtool import` reads files of word vectors.
"""

from __future__ import annotations

from lmtool.models.base import Encoder
from lmtool.models.pretransformer_configs import WordVectorsConfig
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.positions import Position


class WordVectorModel(Encoder):
    """An embedding without layers."""

    def __init__(self, config: WordVectorsConfig):
        super().__init__(config, Embeddings(config.vocab_size, config.hidden_size, Position(), 0.0), ())
