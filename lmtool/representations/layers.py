"""A probe on every layer: the hidden states of examples are cached once, then each layer's probe is fitted and scored.

Shape letters: W layers, M places of a batch, N cached places, T tokens, C classes, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lmtool.data.plan import Examples, batch_borders
from lmtool.errors import UserError
from lmtool.heads.sequence import summary
from lmtool.metrics.intervals import ratio_standard_error
from lmtool.representations.hidden import HiddenStates
from lmtool.representations.probe import fit
from lmtool.streams import Permutation

# Of the stream "sample": which examples are cached.
_DRAW = 7


@dataclass(frozen=True)
class Places:
    """states_WNH: float32. labels_N: classes. groups_N: the text each place is of; those of one lean on each other."""

    states_WNH: Tensor
    labels_N: Tensor
    groups_N: np.ndarray

    def __len__(self) -> int:
        return len(self.labels_N)


def cached(
    states: HiddenStates,
    examples: Examples,
    term: str,
    pooling: Literal["first", "mean", "max", "last"],
    limit: int,
    seed: int,
    batch_tokens: int,
) -> Places:
    """The states of `limit` places at most, of examples drawn by the seed: those that the term names in a text, or one
    of each text, pooled. UserError where the term predicts no classes."""
    plan, device = examples.plan(0), states.precision.device
    order = Permutation(len(plan), seed, "sample", _DRAW)(np.arange(len(plan)))
    borders = batch_borders(plan.lengths[order], None, batch_tokens)
    kept: list[Tensor] = []
    labels: list[Tensor] = []
    groups: list[np.ndarray] = []
    count = 0
    for start, end in zip(borders[:-1], borders[1:], strict=True):
        if count >= limit:
            break
        chosen = order[start:end]
        batch = examples.batch(plan.rows[chosen], chosen, 0)
        target = batch.targets[term]
        of_documents = (batch.examples if batch.rows is None else batch.rows).numpy()
        own = target.labels
        expected = len(of_documents) if target.at is None else len(target.at)
        if own is None or own.dtype != torch.int64 or own.shape != (expected,):
            raise UserError(
                f"target={term} is no task of one class a text or a word, which a probe predicts",
                "give a classification or a tagging task, or target=token, previous or next",
            )
        inputs = batch.inputs.to(device)
        states_WTH = states.read(inputs)
        if target.at is None:
            read_WMH = torch.stack([summary(states_TH, inputs, pooling) for states_TH in states_WTH])
            group_M = of_documents
        else:
            read_WMH = states_WTH[:, target.at.to(device)]
            group_M = of_documents[batch.inputs.documents[target.at].numpy()]
        taken = min(len(own), limit - count)
        kept.append(read_WMH[:, :taken].clone())
        labels.append(own[:taken])
        groups.append(group_M[:taken])
        count += taken
    if count == 0:
        raise UserError("there is nothing to probe: no place has a class to predict", "give more text or rows")
    return Places(torch.cat(kept, 1), torch.cat(labels).to(device), np.concatenate(groups))


def score_layers(train: Places, held_out: Places, classes: int, progress: Callable[[], None]) -> list[dict[str, Any]]:
    """For each layer the `accuracy` of its probe on held-out places, its `standard_error` (places of one example lean
    on each other), and the `iterations` of its fit."""
    rows = []
    for train_NH, held_out_NH in zip(train.states_WNH, held_out.states_WNH, strict=True):
        probe = fit(train_NH, train.labels_N, classes)
        correct_N = probe.logits(held_out_NH).argmax(-1) == held_out.labels_N
        accuracy, error = _share(correct_N, held_out.groups_N)
        rows.append({"accuracy": accuracy, "standard_error": error, "iterations": probe.iterations})
        progress()
    return rows


def majority(train: Places, held_out: Places, classes: int) -> dict[str, float]:
    """The `accuracy` and `standard_error` of the commonest class of the training places."""
    best = torch.bincount(train.labels_N, minlength=classes).argmax()
    accuracy, error = _share(held_out.labels_N == best, held_out.groups_N)
    return {"accuracy": accuracy, "standard_error": error}


def _share(correct_N: Tensor, groups_N: np.ndarray) -> tuple[float, float]:
    correct = correct_N.cpu().numpy().astype(np.float64)
    _, number_N = np.unique(groups_N, return_inverse=True)
    sums, counts = np.bincount(number_N, correct), np.bincount(number_N)
    return float(correct.mean()), ratio_standard_error(sums, counts)
