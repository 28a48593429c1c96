"""SpanBERT: Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving Pre-training by Representing and Predicting
Spans", TACL 2020.

The architecture, its drawing and its published names are BERT's (bert.py), over a cased vocabulary; what is new is what
it learns.
"""

from __future__ import annotations

from lmtool.models.bert import Bert
from lmtool.models.bert import from_published as from_published
from lmtool.models.bert import to_published as to_published
from lmtool.models.encoder_configs import SpanbertConfig
from lmtool.nn.initialization import materialize


def build(config: SpanbertConfig, seed: int) -> Bert:
    """A new encoder on the default device."""
    model = materialize(lambda: Bert(config))
    model.initialize(model, seed, "backbone.")
    return model
