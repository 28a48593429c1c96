"""The tensors of a model that have a row for each entry of its vocabulary, and these rows for another vocabulary.

Shape letters: V entries, N entries of the new vocabulary, P old pieces of all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from lmtool.models.configs import ModelConfig
from lmtool.models.heads.lm import LMHead
from lmtool.tokenizers.replacing import Replacement
from lmtool.weights.assemble import Blueprint, assemble


def vocabulary_tensors(smaller: Blueprint[Any], larger: Blueprint[Any], saved: Collection[str]) -> list[str]:
    """Names of the tensors whose first dimension is the vocabulary, in every family and every head: those that grow
    with it. smaller, larger: the same model with vocabularies of different sizes; neither is put in memory. saved:
    names of the tensors in the checkpoint, which say whether a head has a table of its own."""
    shapes = []
    with torch.device("meta"):
        for blueprint in (smaller, larger):
            learner, _ = assemble(blueprint, None)
            for name, module in learner.named_modules():
                if isinstance(module, LMHead) and module.output is None and f"{name}.output.weight" in saved:
                    module.untie(blueprint.model.vocab_size, 1)
            shapes.append({name: tensor.shape for name, tensor in learner.state_dict().items()})
    first, second = shapes
    return [name for name, shape in first.items() if name in second and shape != second[name]]


def with_vocabulary(model: ModelConfig, size: int) -> ModelConfig:
    """The same model for a vocabulary of another size."""
    return model.model_copy(update={"vocab_size": size})


def replaced_rows(tensors: Mapping[str, Tensor], names: Sequence[str], replacement: Replacement) -> dict[str, Tensor]:
    """All tensors, those named with the rows of the new vocabulary.

    An entry that was there has its row bit for bit; a new one the mean of its old pieces', or of all old entries' where
    it has none. Rows behind the old entries, which no token has, stand behind the new ones.
    """
    entries = replacement.old_size
    return {
        name: torch.cat([_rows(tensor[:entries], replacement), tensor[entries:]]) if name in names else tensor
        for name, tensor in tensors.items()
    }


def _rows(table: Tensor, replacement: Replacement) -> Tensor:
    """(N, ...) of (V, ...): rows as they were, or means of rows."""
    counts = np.array([len(ids) for ids in replacement.sources])
    pieces_P = torch.from_numpy(np.concatenate([*replacement.sources, np.empty(0, dtype=np.int64)]))
    starts_N = torch.from_numpy(np.cumsum(counts) - counts)
    flat_VW = table.reshape(len(table), -1).float()
    means_NW = embedding_bag(pieces_P, flat_VW, starts_N, mode="mean")
    means_NW[torch.from_numpy(counts == 0)] = flat_VW.double().mean(0).float()
    out = means_NW.reshape(len(counts), *table.shape[1:]).to(table.dtype)
    alone = torch.from_numpy(counts == 1)
    out[alone] = table[pieces_P[starts_N[alone]]]
    return out
