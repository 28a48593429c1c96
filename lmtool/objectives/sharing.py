"""Gradient-disentangled embedding sharing (He et al. 2023, "DeBERTaV3", 3.3): the model reads tokens off the
generator's table, and what it would change there it learns apart,

    E_D = stop_gradient(E_G) + E_delta,   E_delta = 0 at the start.

The generator's table moves by its own loss alone, so the two do not pull it into two directions (3.2).

Shape letters: T tokens, V rows and W width of the table.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DELTA = "objective.sharing.delta"
"""The name of E_delta in a checkpoint. The model's table stands there as the sum, which finetuning begins with."""


class TableDelta(nn.Module):
    """E_delta. `delta`: (V, W), zeros."""

    def __init__(self, rows: int, width: int, device: torch.device):
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(rows, width, device=device))


class DisentangledTable(nn.Module):
    """The model's token table under this sharing: what it learns belongs to the generator and to `difference`, and is
    named there."""

    def __init__(self, generator: nn.Embedding, difference: TableDelta):
        super().__init__()
        self._parts = generator, difference  # in a tuple: they are registered elsewhere

    @property
    def num_embeddings(self) -> int:
        return self._parts[0].num_embeddings

    @property
    def weight(self) -> Tensor:
        """(V, W) the sum."""
        generator, difference = self._parts
        return generator.weight.detach() + difference.delta

    def forward(self, ids_T: Tensor) -> Tensor:
        """(T,) ids to (T, W)."""
        generator, difference = self._parts
        return F.embedding(ids_T, generator.weight.detach()) + F.embedding(ids_T, difference.delta)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], unexpected: list[str],
        errors: list[str],
    ) -> None:  # fmt: skip
        """A checkpoint of this sharing brings both parts. Of another, the table is what both begin with."""
        table_VW = state_dict.get(f"{prefix}weight")
        if table_VW is None:
            missing.append(f"{prefix}weight")
        elif DELTA not in state_dict:
            with torch.no_grad():
                self._parts[0].weight.copy_(table_VW)
                self._parts[1].delta.zero_()
