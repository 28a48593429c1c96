"""What every plan of text needs: the room for it, at least one example, its facts.

Shape letters: N examples of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.errors import UserError


def room_for(max_length: int, overhead: int, texts: int) -> int:
    """Tokens of text that fit; raises UserError where a text would have fewer than two."""
    room = max_length - overhead
    if room < 2 * texts:
        raise UserError(
            f"max_length={max_length} leaves {max(room, 0)} tokens of text beside {overhead} special ones",
            f"max_length={overhead + 2 * texts} or more",
        )
    return room


def some(plan: Plan, split: str) -> Plan:
    if not len(plan.lengths):
        raise UserError(
            f"the {split} text has nothing to learn from: no window of two tokens", "give more text with data.path="
        )
    return plan


def numbers_of(examples_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples and parts of a batch: no example has parts here."""
    examples_N = np.asarray(examples_N, dtype=np.int64)
    return torch.from_numpy(examples_N), torch.zeros(len(examples_N), dtype=torch.int32)


def plan_facts(plan: Plan, store: TokenStore, split: str) -> dict[str, Any]:
    """What the screens say of an objective's examples, and of the store that they are cut from."""
    return {
        "split": split,
        "documents": int(len(store.document_offsets) - 1),
        "documents_without_tokens": int(store.facts.get("documents_without_tokens", 0)),
        "store_tokens": int(store.document_offsets[-1]),
        "truncated_fraction": 0.0,  # long documents are split
        **plan.facts(),
    }
