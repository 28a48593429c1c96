"""Linear probes: classifiers that are trained on the hidden states of each layer, and their accuracy by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
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

# --- linear probes: multinomial logistic regression (Alain and Bengio 2017; Belinkov 2022) --------------------------
#
# Shape letters: N examples, H hidden width, C classes.

RIDGE = 1.0
"""The coefficient of L2 regularization: half of it, times the squared weights, is added to the sum of the cross
entropies. Biases are not regularized. States are standardized first, so that the effect is the same in every layer and
model."""
ITERATIONS = 50
"""Maximum number of iterations of L-BFGS, each over all examples."""


@dataclass(frozen=True)
class Probe:
    """A fitted probe. mean_H, scale_H: the mean of the training states and 1 / their standard deviation, for
    standardization. weight_CH, bias_C: for standardized states. iterations: those of the fit."""

    mean_H: Tensor
    scale_H: Tensor
    weight_CH: Tensor
    bias_C: Tensor
    iterations: int

    def logits(self, x_NH: Tensor) -> Tensor:
        """Returns the logits (N, C) of states."""
        return ((x_NH - self.mean_H) * self.scale_H) @ self.weight_CH.T + self.bias_C


def fit(x_NH: Tensor, labels_N: Tensor, classes: int, iterations: int = ITERATIONS, ridge: float = RIDGE) -> Probe:
    """Fits a probe to states and their classes. The weights start from zero and the loss is convex, so there is no
    randomness. iterations: at most. ridge: the coefficient of L2 regularization."""
    mean_H = x_NH.mean(0)
    deviation_H = x_NH.std(0, correction=0)
    # A constant dimension has no information: its factor is 0 instead of a huge number.
    scale_H = torch.where(deviation_H > 1e-6, 1 / deviation_H.clamp(min=1e-6), torch.zeros_like(deviation_H))
    z_NH = (x_NH - mean_H) * scale_H
    weight_CH = x_NH.new_zeros(classes, x_NH.shape[1], requires_grad=True)
    bias_C = x_NH.new_zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight_CH, bias_C],
        max_iter=iterations,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def loss() -> object:
        optimizer.zero_grad()
        total = cross_entropy(z_NH @ weight_CH.T + bias_C, labels_N)
        total = total + ridge / 2 / len(labels_N) * weight_CH.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    iterations_run = int(optimizer.state[weight_CH].get("n_iter", 0))
    return Probe(mean_H, scale_H, weight_CH.detach(), bias_C.detach(), iterations_run)


# --- token targets: the token at a position, the previous token or the next token (Voita et al. 2019) ----------------
#
# Shape letters: V vocabulary, D windows of text, N windows in a batch, T tokens of the batch, M predicting positions.

TERM = "target"
"""The name of the term of `TokenTargets`."""
OFFSETS = {"token": 0, "previous": -1, "next": 1}
"""The offset from a position to the token that is predicted there, for each value of the key target."""


def windows_of(store: TokenStore, max_tokens: int) -> np.ndarray:
    """Returns consecutive windows of text as records (D,) with `start` and `length`. Each window has at most
    `max_tokens` tokens of one document."""
    return windows(Stream.from_store(store, None), max_tokens, joined=False)


def frequency_classes(store: TokenStore, windows_D: np.ndarray, tokenizer: Tokenizer, count: int) -> np.ndarray:
    """Returns the class (V,) of each token, int64: its rank by frequency in windows of the text, from 0. Special
    tokens, and tokens that are not among the `count` most frequent tokens, have the class -1."""
    tokens = store.tokens[ragged_ranges(windows_D["start"], windows_D["length"].astype(np.int64))]
    counts_V = np.bincount(tokens, minlength=tokenizer.vocab_size)
    counts_V[[number for number in tokenizer.special_ids if number < len(counts_V)]] = 0
    frequent = np.argsort(-counts_V, kind="stable")[:count]
    frequent = frequent[counts_V[frequent] > 0]
    classes_V = np.full(len(counts_V), -1, dtype=np.int64)
    classes_V[frequent] = np.arange(len(frequent))
    return classes_V


class TokenTargets:
    """Examples for a probe that predicts tokens: windows of unmasked text in a model's text format.

    windows_D: see `windows_of`. offset: from a position to the token that is predicted there, see OFFSETS. classes_V:
    the class of each token, see `frequency_classes`.
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
        self.is_text_V = np.ones(len(classes_V), dtype=bool)
        self.is_text_V[[number for number in tokenizer.special_ids if number < len(classes_V)]] = False
        self._plan = Plan(windows_D, windows_D["length"].astype(np.int64) + template.special_count)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        """Returns a batch with the term `target`: the classes that the M predicting positions predict."""
        lengths_N = rows["length"].astype(np.int64)
        ids = np.asarray(self.store.tokens[ragged_ranges(rows["start"], lengths_N)], dtype=np.int64)
        assembled = assemble(self.template, [(ids, lengths_N)])
        document_T = np.repeat(np.arange(len(rows)), assembled.lengths)
        predicted_T = np.arange(len(document_T)) + self.offset
        inside_T = (predicted_T >= 0) & (predicted_T < len(document_T))
        predicted_T = np.where(inside_T, predicted_T, 0)
        inside_T &= document_T[predicted_T] == document_T
        class_T = np.where(inside_T, self.classes_V[assembled.tokens[predicted_T]], -1)
        at_M = np.flatnonzero((class_T >= 0) & self.is_text_V[assembled.tokens])
        target = Target(torch.from_numpy(class_T[at_M]), at=torch.from_numpy(at_M))
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        return Batch(assembled.packed(), {TERM: target}, numbers, torch.zeros(len(numbers), dtype=torch.int32))

    def metadata(self) -> dict[str, object]:
        return {"windows": len(self._plan)}


# --- a probe for each layer -------------------------------------------------------------------------------------
#
# Shape letters: W layers, M positions of a batch, N cached positions, T tokens, C classes, H hidden width.

_SAMPLING_EPOCH = 7
"""The epoch that keys the random selection of examples; an arbitrary number."""


@dataclass(frozen=True)
class LabeledStates:
    """Hidden states of each layer, float32, with the class of each position, on which probes are trained or scored.
    groups_N: the index of the text that each position belongs to. Positions of one text are not independent."""

    states_WNH: Tensor
    labels_N: Tensor
    groups_N: np.ndarray

    def __len__(self) -> int:
        return len(self.labels_N)


def collect_states(
    states: HiddenStates,
    examples: Examples,
    term: str,
    pooling: Literal["first", "mean", "max", "last"],
    limit: int,
    seed: int,
    batch_tokens: int,
) -> LabeledStates:
    """Computes the states of randomly selected examples at the target positions of a term, or one pooled state per
    text.

    term: the term whose targets are the classes. If its targets have positions, the states at these positions are
    collected; otherwise the pooled state of each text. limit: maximum number of positions. batch_tokens: maximum tokens
    of a forward. Raises UserError if the term does not predict classes, or no position has a class.
    """
    plan, device = examples.plan(0), states.precision.device
    order = Permutation(len(plan), seed, "sample", _SAMPLING_EPOCH)(np.arange(len(plan)))
    boundaries = batch_boundaries(plan.lengths[order], tokens=batch_tokens)
    collected, labels = list[Tensor](), list[Tensor]()
    groups: list[np.ndarray] = []
    count = 0
    for start, end in pairwise(boundaries):
        if count >= limit:
            break
        selected = order[start:end]
        batch = examples.batch(plan.rows[selected], selected, 0)
        target, classes_M = batch.targets[term], batch.targets[term].labels
        text_of_document = (batch.examples if batch.rows is None else batch.rows).numpy()
        target_count = len(text_of_document) if target.at is None else len(target.at)
        if classes_M is None or classes_M.dtype != torch.int64 or classes_M.shape != (target_count,):
            raise UserError(
                f"target={term}: a probe predicts one class per text or per word, but this task has other targets",
                "use a classification or a tagging task, or target=token, previous or next",
            )
        inputs = batch.inputs.to(device)
        states_WTH = states.read(inputs)
        if target.at is None:
            target_states_WMH = torch.stack([summary(states_TH, inputs, pooling) for states_TH in states_WTH])
            group_M = text_of_document
        else:
            target_states_WMH = states_WTH[:, target.at.to(device)]
            group_M = text_of_document[batch.inputs.documents[target.at].numpy()]
        retained = min(len(classes_M), limit - count)
        collected.append(target_states_WMH[:, :retained].clone())
        labels.append(classes_M[:retained])
        groups.append(group_M[:retained])
        count += retained
    if count == 0:
        raise UserError("there is nothing to probe: no position has a class", "use more text or rows")
    return LabeledStates(torch.cat(collected, 1), torch.cat(labels).to(device), np.concatenate(groups))


def score_layers(
    train: LabeledStates, held_out: LabeledStates, classes: int, progress: Callable[[], None]
) -> list[dict[str, Any]]:
    """Trains and scores a probe for each layer. Returns the `accuracy` of each on held-out positions, the
    `standard_error` (clustered by text), and the `iterations` of the fit. progress: called after each layer."""
    rows = []
    for train_NH, held_out_NH in zip(train.states_WNH, held_out.states_WNH, strict=True):
        probe = fit(train_NH, train.labels_N, classes)
        correct_N = probe.logits(held_out_NH).argmax(-1) == held_out.labels_N
        accuracy, error = _accuracy(correct_N, held_out.groups_N)
        rows.append({"accuracy": accuracy, "standard_error": error, "iterations": probe.iterations})
        progress()
    return rows


def majority(train: LabeledStates, held_out: LabeledStates, classes: int) -> dict[str, float]:
    """Returns the `accuracy` and the `standard_error` of always predicting the most frequent class of the training
    data."""
    majority_class = torch.bincount(train.labels_N, minlength=classes).argmax()
    accuracy, error = _accuracy(held_out.labels_N == majority_class, held_out.groups_N)
    return {"accuracy": accuracy, "standard_error": error}


def _accuracy(correct_N: Tensor, groups_N: np.ndarray) -> tuple[float, float]:
    """The standard error is clustered by group."""
    correct = correct_N.cpu().numpy().astype(np.float64)
    _, group_index_N = np.unique(groups_N, return_inverse=True)
    sums, counts = np.bincount(group_index_N, correct), np.bincount(group_index_N)
    return float(correct.mean()), ratio_standard_error(sums, counts)
