"""Multi-label classification: labels as lists or text, losses as in torch, and tuned thresholds."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from task_fixtures import backbone, evaluation, examples_of, split_data, task_config, tokenizer

from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.learners.evaluation import evaluate
from lmtool.tasks.configs.sequence import MultiLabelConfig
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.loading import load_task

LABELS = [["b"], ["a", "b"], [], ["c"], ["a"], ["b", "c"], ["a", "b", "c"], ["b"]]


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def write(folder, labels=LABELS, split="train"):
    rows = [{"text": f"a text {number}", "label": label} for number, label in enumerate(labels)]
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(folder, **overrides):
    return load_task(task_config("multi_label", path=folder, **overrides), 0, folder, True)


def test_label_lists_and_delimited_text_are_equal(tmp_path):
    for name, labels, given in (
        ("lists", LABELS, {}), ("text", ["; ".join(label) for label in LABELS], {"delimiter": ";"})
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        write(tmp_path / name, labels), write(tmp_path / name, labels, "dev")
        data = load(tmp_path / name, **given)
        assert data.config.labels == ("a", "b", "c") and data.metadata["labels"] == {"a": 3, "b": 5, "c": 3}
        assert data.train.labels[:3].tolist() == [[0, 1, 0], [1, 1, 0], [0, 0, 0]]
        assert data.config.learner  # the kind has a learner


@pytest.mark.parametrize(
    ("labels", "message"), [([["a"], ["d", "b"]], "dev.jsonl:2: label 'd' is unknown"), ([["a", "b", "a b"]], "'a b'")]
)
def test_unknown_labels_are_refused(labels, message, tmp_path):
    write(tmp_path), write(tmp_path, labels, "dev")
    with pytest.raises(UserError, match=message):
        load(tmp_path)


def test_column_without_labels_is_refused(tmp_path):
    write(tmp_path, [[], []])
    with pytest.raises(UserError, match="empty in all 2 training rows"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"thresholds": 1.0}, "between 0 and 1"),
        ({"labels": ("a", "b"), "thresholds": (0.5,)}, "one number for each of the 2 labels, not 1"),
        ({"loss": {"label_smoothing": 0.1, "focal_gamma": 2.0}}, "give one of them"),
    ],
)
def test_invalid_settings_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        MultiLabelConfig(**fields)


@pytest.mark.parametrize("weights", ["none", "balanced"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_matches_torch_bce(weights, smoothing, words, tmp_path):
    write(tmp_path), write(tmp_path, split="dev")
    data = load(tmp_path, loss__class_weights=weights, loss__label_smoothing=smoothing)
    learner = data.config.learner(backbone(), words, 0).eval()
    examples = examples_of(learner, data.train)
    rows = [examples.plan(0).rows[[number]] for number in range(8)]
    batches = [examples.batch(row, np.array([number]), 0) for number, row in enumerate(rows)]
    count = sum(learner.counts(batch)["multi_label"] for batch in batches)
    ours = sum(learner(batch, 1).sums["multi_label"] for batch in batches) / count
    logits = torch.cat([learner.outputs(batch, 0) for batch in batches])
    labels = torch.from_numpy(data.train.labels)
    tensor = None if weights == "none" else torch.tensor([5 / 3, 3 / 5, 5 / 3])
    target = labels * (1 - smoothing) + smoothing / 2
    torch.testing.assert_close(ours, F.binary_cross_entropy_with_logits(logits, target, pos_weight=tensor))


def test_focal_loss_matches_definition(words, tmp_path):
    write(tmp_path), write(tmp_path, split="dev")
    learner = load(tmp_path, loss__focal_gamma=2.0).config.learner(backbone(), words, 0).eval()
    data = load(tmp_path)
    examples = examples_of(learner, data.train)
    batch = examples.batch(examples.plan(0).rows, np.arange(8), 0)
    p, labels = learner.outputs(batch, 0).sigmoid(), torch.from_numpy(data.train.labels)
    p = torch.where(labels > 0, p, 1 - p)
    torch.testing.assert_close(learner(batch, 1).sums["multi_label"], ((1 - p) ** 2 * -p.log()).sum())


def test_thresholds_are_tuned_and_stored_with_head(words, tmp_path):
    write(tmp_path), write(tmp_path, split="dev")
    data = load(tmp_path)
    learner = data.config.learner(backbone(), words, 0)
    rows = data.validation["dev"]
    plain = evaluation(learner, rows)
    split, examples = split_data(learner, rows, "dev"), examples_of(learner, rows)
    scorer = learner.scorer(split, examples, {})
    scorer.calibrates = True
    tuned = evaluate(learner, scorer, PackedLoader(examples, 0, batch_examples=4, shuffle=False).epoch_batches())
    thresholds = learner.heads["multi_label"].thresholds
    assert (thresholds != 0.5).all() and tuned.metrics()["macro_f1"] > plain.metrics()["macro_f1"]
    other = data.config.learner(backbone(), words, 0)
    other.load_state_dict(learner.state_dict())
    assert evaluation(other, rows).metrics() == tuned.metrics()
    record = next(iter(tuned.records()))
    assert record["gold"] == "b" and set(record["prediction"].split(",")) <= {"", "a", "b", "c"}
    # Records have the probability of each class.
    assert list(record["probabilities"]) == ["a", "b", "c"]
    fractions = zip(record["probabilities"].items(), thresholds, strict=True)
    decided = [name for (name, share), threshold in fractions if share >= threshold]
    assert record["prediction"] == ",".join(decided)
    given = load(tmp_path, thresholds=0.25).config.learner(backbone(), words, 0)
    given.load_state_dict(learner.state_dict())
    values = [prediction.value for prediction in given.with_thresholds([Prediction((0.2, 0.3, 0.9), 0.9)])]
    assert [value.tolist() for value in values] == [[0, 1, 1]]
