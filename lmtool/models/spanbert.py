"""SpanBERT: Joshi, Chen, Liu, Weld, Zettlemoyer, Levy, "SpanBERT: Improving Pre-training by Representing and Predicting
Spans", TACL 2020.

The architecture, its drawing and its published form are BERT's (bert.py), over a cased vocabulary; what is new is what
it learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtool.models import bert
from lmtool.models.base import new
from lmtool.models.bert import ARCHITECTURES as ARCHITECTURES
from lmtool.models.bert import Bert
from lmtool.models.bert import from_published as from_published
from lmtool.models.bert import published_config as published_config
from lmtool.models.bert import to_published as to_published
from lmtool.models.encoder_configs import SpanbertConfig


def build(config: SpanbertConfig, seed: int) -> Bert:
    """A new encoder on the default device."""
    return new(Bert, config, seed)


def from_published_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The model section of a config.json, which says `bert`. UserError where it is a variant that this family does not
    compute."""
    return {**bert.from_published_config(data), "name": "spanbert"}
