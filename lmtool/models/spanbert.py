"""SpanBERT: Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving Pre-training by Representing and Predicting
Spans", TACL 2020.

The architecture and the format in transformers are those of BERT (bert.py), with a cased vocabulary. Only the objective
differs.
"""

from __future__ import annotations

from dataclasses import replace

from lmtool.models import bert
from lmtool.models.bert import Bert


class Spanbert(Bert):
    """The encoder without heads."""


# config.json has model_type `bert`.
HF_FORMAT = replace(bert.HF_FORMAT, model="spanbert", model_type_of="bert")
