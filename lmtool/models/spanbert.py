"""SpanBERT: Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving Pre-training by Representing and Predicting
Spans", TACL 2020.

The architecture and the format in transformers are those of BERT (bert.py), with a cased vocabulary. Only the objective
differs.
"""

from __future__ import annotations

from dataclasses import replace

from lmtool.models import bert
from lmtool.models.base import new_model
from lmtool.models.bert import TIED as TIED
from lmtool.models.bert import Bert
from lmtool.models.bert import from_hf as from_hf
from lmtool.models.encoder_configs import SpanbertConfig


def build(config: SpanbertConfig, seed: int) -> Bert:
    """Returns a new encoder on the default device."""
    return new_model(Bert, config, seed)


# config.json has model_type `bert`.
HF_FORMAT = replace(bert.HF_FORMAT, model="spanbert", model_type_of="bert")
to_hf = HF_FORMAT.to_hf
to_hf_config, from_hf_config = HF_FORMAT.to_hf_config, HF_FORMAT.from_hf_config
