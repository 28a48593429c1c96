"""Linear probes: against scikit-learn's logistic regression, targets of tokens, and scores of layers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from lmtool.data.examples import Plan
from lmtool.data.formats import FormatTemplate, text_format
from lmtool.errors import UserError
from lmtool.learners.metrics.intervals import ratio_standard_error
from lmtool.learners.representations.layers import (
    RIDGE,
    TERM,
    LabeledStates,
    TokenTargets,
    collect_states,
    fit,
    frequency_classes,
    majority,
    score_layers,
)
from lmtool.training.precision import FP32_CPU
from lmtool.types import Batch, Packed, Target


def test_fit_matches_scikit_learn_logistic_regression():
    """The minimum of scikit-learn, whose C is the inverse of the ridge."""
    draw = np.random.default_rng(0)
    x = draw.normal(2.0, 3.0, (120, 5)).astype(np.float32)
    x[:, 3] = 1.5  # a constant feature
    labels = (x[:, 0] + x[:, 1] + draw.normal(0, 2.0, 120) > 4).astype(int) + (x[:, 2] > 3)
    probe = fit(torch.from_numpy(x), torch.from_numpy(labels), 3, iterations=500)
    standard = (x - x.mean(0)) * np.where(x.std(0) > 1e-6, 1 / np.maximum(x.std(0), 1e-6), 0)
    theirs = LogisticRegression(C=1 / RIDGE, tol=1e-8, max_iter=10_000).fit(standard, labels)
    np.testing.assert_allclose(probe.weight_CH, theirs.coef_, atol=2e-3)
    expected = theirs.predict_proba(standard)
    np.testing.assert_allclose(probe.logits(torch.from_numpy(x)).softmax(-1), expected, atol=1e-3)


class Words:
    """A tokenizer of ten tokens, two of them special."""

    vocab_size, special_ids, roles = 10, frozenset({0, 1}), {"cls": 0, "sep": 1}

    def role(self, name):
        return self.roles[name]


# Three windows: 5 6 7 5 | 5 8 | 9
STORE = SimpleNamespace(tokens=np.array([5, 6, 7, 5, 5, 8, 9], dtype=np.uint16))
WINDOWS = np.array([(0, 4), (4, 2), (6, 1)], dtype=[("start", "i8"), ("length", "i4")])


@pytest.mark.parametrize(
    ("offset", "at", "labels"),
    # Tokens [CLS] 5 6 7 5 [SEP] | [CLS] 5 8 [SEP] | [CLS] 9 [SEP]; 5, 6 and 7 are the classes 0, 1 and 2.
    [(0, [1, 2, 3, 4, 7], [0, 1, 2, 0, 0]), (-1, [2, 3, 4, 8], [0, 1, 2, 0]), (1, [1, 2, 3], [1, 2, 0])],
)
def test_token_targets_stay_within_their_window(offset, at, labels):
    classes = frequency_classes(STORE, WINDOWS, Words(), 3)
    assert classes.tolist() == [-1] * 5 + [0, 1, 2, -1, -1]
    template = FormatTemplate.of(text_format("bert", Words()), 1)
    targets = TokenTargets(STORE, WINDOWS, Words(), template, offset, classes)
    batch = targets.batch(targets.plan(0).rows, np.arange(3), 0)
    assert batch.targets[TERM].at.tolist() == at and batch.targets[TERM].labels.tolist() == labels


class Planted:
    """Hidden states of two layers: noise, and the label."""

    precision = FP32_CPU

    def read(self, inputs):
        noise = torch.randn(len(inputs.tokens), 4, generator=torch.Generator().manual_seed(len(inputs.tokens)))
        return torch.stack([noise, torch.nn.functional.one_hot(inputs.tokens % 3, 4).float()])


class Texts:
    """Forty texts of five tokens, with one class per text or per token."""

    def __init__(self, whole):
        self.whole = whole

    def plan(self, epoch):
        return Plan(np.arange(40), np.full(40, 5))

    def batch(self, rows, examples, epoch):
        steps = 0 if self.whole else np.tile(np.arange(5), len(rows))
        tokens = torch.from_numpy(rows.repeat(5) + steps)
        inputs = Packed(tokens, (5,) * len(rows))
        labels = torch.from_numpy(rows % 3) if self.whole else tokens % 3
        target = Target(labels, at=None if self.whole else torch.arange(len(tokens)))
        return Batch(inputs, {"x": target}, torch.from_numpy(examples), torch.zeros(len(rows), dtype=torch.int32))


@pytest.mark.parametrize("whole", [True, False])
def test_layer_with_labels_scores_full_and_noise_does_not(whole):
    train = collect_states(Planted(), Texts(whole), "x", "mean", 30, 0, 20)
    held_out = collect_states(Planted(), Texts(whole), "x", "mean", 10_000, 1, 20)
    assert len(train) == 30 and len(held_out) == (40 if whole else 200)
    calls = []
    noise, label = score_layers(train, held_out, 3, lambda: calls.append(1))
    assert noise["accuracy"] < 0.6 and label["accuracy"] == 1.0 and label["standard_error"] == 0.0
    assert len(calls) == 2
    constant = majority(train, held_out, 3)
    best = torch.bincount(train.labels_N).argmax()
    assert constant["accuracy"] == pytest.approx(float((held_out.labels_N == best).float().mean()))


def test_standard_error_groups_tokens_by_text():
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    groups = np.array([4, 4, 4, 9, 9, 9])
    constant = majority(
        LabeledStates(torch.zeros(1, 1, 1), torch.tensor([0]), np.zeros(1)), LabeledStates(labels, labels, groups), 2
    )
    assert constant == {"accuracy": 0.5, "standard_error": ratio_standard_error(np.array([3, 0]), np.array([3, 3]))}


def test_target_without_classes_is_refused():
    texts = Texts(True)
    values = {"x": Target(torch.ones(40))}
    of_classes = texts.batch
    texts.batch = lambda *given: replace(of_classes(*given), targets=values)
    with pytest.raises(UserError, match="target=x: a probe predicts one class"):
        collect_states(Planted(), texts, "x", "mean", 30, 0, 20)
