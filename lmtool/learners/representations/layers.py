"""Linear probes on every layer: targets, classifiers, and accuracy by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lmtool.data.examples import Examples, Plan, batch_boundaries
from lmtool.data.formats import FormatTemplate, assemble, ragged_ranges
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.learners.metrics.intervals import ratio_standard_error
from lmtool.learners.representations.vectors import HiddenStates
from lmtool.models.heads.sequence import summary
from lmtool.objectives.examples.windows import Stream, windows
from lmtool.random_streams import Permutation
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target

# A linear probe: multinomial logistic regression from hidden states to classes (Alain and Bengio 2017; Belinkov
# 2022).
#
# Shape letters: N examples, H hidden width, C classes.


RIDGE = 1.0
"""Half of this times the squared weights is added to the sum of the cross entropies; biases are free. States are
standardised first, so that it weighs alike at every layer and in every model."""
ITERATIONS = 50
"""Of L-BFGS over all examples, at most."""


@dataclass(frozen=True)
class Probe:
    """mean_H, scale_H: of the examples it learned from. weight_CH, bias_C: of the standardised states. iterations: that
    it took."""

    mean_H: Tensor
    scale_H: Tensor
    weight_CH: Tensor
    bias_C: Tensor
    iterations: int

    def logits(self, x_NH: Tensor) -> Tensor:
        """(N, C)."""
        return ((x_NH - self.mean_H) * self.scale_H) @ self.weight_CH.T + self.bias_C


def fit(x_NH: Tensor, labels_N: Tensor, classes: int, iterations: int = ITERATIONS) -> Probe:
    """The probe of these examples. It starts from zero and the loss is convex: nothing is drawn."""
    mean_H = x_NH.mean(0)
    spread_H = x_NH.std(0, correction=0)
    # A dimension that never changes says nothing, and is not blown up.
    scale_H = torch.where(spread_H > 1e-6, 1 / spread_H.clamp(min=1e-6), torch.zeros_like(spread_H))
    z_NH = (x_NH - mean_H) * scale_H
    weight_CH = x_NH.new_zeros(classes, x_NH.shape[1], requires_grad=True)
    bias_C = x_NH.new_zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight_CH, bias_C], max_iter=iterations, tolerance_grad=1e-6, tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> object:
        optimizer.zero_grad()
        total = cross_entropy(z_NH @ weight_CH.T + bias_C, labels_N)
        total = total + RIDGE / 2 / len(labels_N) * weight_CH.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    taken = optimizer.state[weight_CH].get("n_iter", 0)
    return Probe(mean_H, scale_H, weight_CH.detach(), bias_C.detach(), int(taken))


# What a probe predicts of text: the token at a place, the one before it or the one after it (Voita et al. 2019),
# among the most frequent types of the vocabulary.
#
# Shape letters: V vocabulary, D windows of text, N of them in a batch, T tokens of the batch, M places that predict.


TERM = "target"
OFFSETS = {"token": 0, "previous": -1, "next": 1}


def windows_of(store: TokenStore, room: int) -> np.ndarray:
    """(D,) records `start`, `length`: consecutive windows of at most `room` tokens, each within one document."""
    return windows(Stream.of(store, None), room, joined=False)


def frequent_types(store: TokenStore, windows_D: np.ndarray, tokenizer: Tokenizer, count: int) -> np.ndarray:
    """(V,) int64: the class of each token, 0 for the most frequent of these windows; -1 where it is none of the `count`
    most frequent, or is no text."""
    tokens = store.tokens[ragged_ranges(windows_D["start"], windows_D["length"].astype(np.int64))]
    counts_V = np.bincount(tokens, minlength=tokenizer.vocab_size)
    counts_V[[number for number in tokenizer.special_ids if number < len(counts_V)]] = 0
    chosen = np.argsort(-counts_V, kind="stable")[:count]
    chosen = chosen[counts_V[chosen] > 0]
    classes_V = np.full(len(counts_V), -1, dtype=np.int64)
    classes_V[chosen] = np.arange(len(chosen))
    return classes_V


class TokenTargets:
    """Windows of text in the layout of a model. Nothing of it is masked.

    template: the layout. offset: of the token that is predicted from the place that predicts. classes_V: as
    `frequent_types` gives them.
    """

    def __init__(
        self,
        store: TokenStore,
        windows_D: np.ndarray,
        tokenizer: Tokenizer,
        template: FormatTemplate,
        offset: int,
        classes_V: np.ndarray,
    ):
        self.store, self.template, self.offset, self.classes_V = store, template, offset, classes_V
        self.text_V = np.ones(len(classes_V), dtype=bool)
        self.text_V[[number for number in tokenizer.special_ids if number < len(classes_V)]] = False
        self._plan = Plan(windows_D, windows_D["length"].astype(np.int64) + template.special_count)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        """The batch with the term `target`: classes at the (M,) places that have one to predict."""
        lengths_N = rows["length"].astype(np.int64)
        ids = np.asarray(self.store.tokens[ragged_ranges(rows["start"], lengths_N)], dtype=np.int64)
        assembled = assemble(self.template, [(ids, lengths_N)])
        document_T = np.repeat(np.arange(len(rows)), assembled.lengths)
        other_T = np.arange(len(document_T)) + self.offset
        inside_T = (other_T >= 0) & (other_T < len(document_T))
        other_T = np.where(inside_T, other_T, 0)
        inside_T &= document_T[other_T] == document_T
        class_T = np.where(inside_T, self.classes_V[assembled.tokens[other_T]], -1)
        at_M = np.flatnonzero((class_T >= 0) & self.text_V[assembled.tokens])
        target = Target(torch.from_numpy(class_T[at_M]), at=torch.from_numpy(at_M))
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        return Batch(assembled.packed(), {TERM: target}, numbers, torch.zeros(len(numbers), dtype=torch.int32))

    def metadata(self) -> dict[str, object]:
        return {"windows": len(self._plan)}


# A probe on every layer: the hidden states of examples are cached once, then each layer's probe is fitted and scored.
#
# Shape letters: W layers, M places of a batch, N cached places, T tokens, C classes, H hidden width.


# Of the stream "sample": which examples are cached.
_DRAW = 7


@dataclass(frozen=True)
class LabeledStates:
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
) -> LabeledStates:
    """The states of `limit` places at most, of examples drawn by the seed: those that the term names in a text, or one
    of each text, pooled. UserError where the term predicts no classes."""
    plan, device = examples.plan(0), states.precision.device
    order = Permutation(len(plan), seed, "sample", _DRAW)(np.arange(len(plan)))
    boundaries = batch_boundaries(plan.lengths[order], None, batch_tokens)
    kept: list[Tensor] = []
    labels: list[Tensor] = []
    groups: list[np.ndarray] = []
    count = 0
    for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
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
                "use a classification or a tagging task, or target=token, previous or next",
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
        raise UserError("there is nothing to probe: no place has a class to predict", "use more text or rows")
    return LabeledStates(torch.cat(kept, 1), torch.cat(labels).to(device), np.concatenate(groups))


def score_layers(
    train: LabeledStates, held_out: LabeledStates, classes: int, progress: Callable[[], None]
) -> list[dict[str, Any]]:
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


def majority(train: LabeledStates, held_out: LabeledStates, classes: int) -> dict[str, float]:
    """The `accuracy` and `standard_error` of the commonest class of the training places."""
    best = torch.bincount(train.labels_N, minlength=classes).argmax()
    accuracy, error = _share(held_out.labels_N == best, held_out.groups_N)
    return {"accuracy": accuracy, "standard_error": error}


def _share(correct_N: Tensor, groups_N: np.ndarray) -> tuple[float, float]:
    correct = correct_N.cpu().numpy().astype(np.float64)
    _, number_N = np.unique(groups_N, return_inverse=True)
    sums, counts = np.bincount(number_N, correct), np.bincount(number_N)
    return float(correct.mean()), ratio_standard_error(sums, counts)
