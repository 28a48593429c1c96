"""What was tuned, as the files of this package take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lmtool.models.configs import ModelConfig
from lmtool.weights.peft.maps import PublishedMap

MERGE = "merge it with PEFT (merge_and_unload), save the model, and import that"
"""What to do with an adapter that lmtool cannot read."""


@dataclass(frozen=True)
class Tuned:
    """section: the `tuning` of a configuration. tensors: what the method added, without what training alone needs.
    maps: of the published model. task_type: PEFT's name for what the model is used for; None where it has none. heads:
    names of the published tensors of heads that learned."""

    model: ModelConfig
    section: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    maps: Sequence[PublishedMap]
    task_type: str | None
    heads: Sequence[str]
