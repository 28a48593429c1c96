"""A checkpoint's head under a task's labels: matched by name, its rows in the task's order."""

from __future__ import annotations

import pytest
import torch

from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tasks.configs.sequence import RegressionConfig
from lmtool.tasks.labels import load_head


def task(labels):
    return ClassificationConfig(name="mine", labels=labels)


def section(labels, **more):
    return {"kind": "classification", "name": "classifier", "labels": labels, "head": "transformers", **more}


@pytest.mark.parametrize(
    ("theirs", "ours", "order", "note"),
    [
        (["a", "b"], ("a", "b"), None, ""),
        (["a", "b"], ("b", "a"), (1, 0), ""),
        (["POS", "NEG"], ("neg", "pos"), (1, 0), "NEG = neg, POS = pos"),
        (["a", "A"], ("A", "a"), (1, 0), ""),
        (["LABEL_0", "LABEL_1"], ("x", "y"), None, "LABEL_0 = x, LABEL_1 = y (by number: "),
        (["LABEL_0", "LABEL_1"], ("label_1", "label_0"), (1, 0), "LABEL_1 = label_1"),
    ],
)
def test_classes_are_matched(theirs, ours, order, note):
    taken = load_head(section(theirs), task(ours))
    assert (taken.order, taken.labels, taken.settings) == (order, ours, {"head": "transformers"})
    assert taken.note.startswith(note) and bool(taken.note) == bool(note)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["a", "b"], ("a", "c")),
        (["a", "b", "c"], ("a", "b")),
        (["a", "A"], ("a", "b")),
        (["LABEL_0", "LABEL_1"], ("x", "y", "z")),
        (["LABEL_1", "LABEL_0"], ("x", "y")),
        ([], ("a", "b")),
    ],
)
def test_others_are_not(theirs, ours):
    assert load_head(section(theirs), task(ours)) is None


def test_data_need_not_hold_every_class():
    taken = load_head(section(["a", "b", "c"]), task(("c", "a")), partial=True)
    assert (taken.labels, taken.order) == (("c", "a", "b"), (2, 0, 1))
    assert load_head(section(["LABEL_0", "LABEL_1", "LABEL_2"]), task(("c", "a")), partial=True) is None


def test_kinds_differ():
    assert load_head(section(["a", "b"]), RegressionConfig(name="mine")) is None
    assert load_head({"kind": "regression", "name": "classifier", "label": "x"}, task(("a", "b"))) is None
    assert load_head({"kind": "regression", "name": "old"}, RegressionConfig(name="mine")).settings == {}


def test_rows_follow_the_labels():
    tensors = {
        "backbone.x": torch.ones(1), "heads.pooler.dense.weight": torch.eye(2), "heads.mine.output.bias": torch.ones(9),
        "heads.classifier.output.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "heads.classifier.output.bias": torch.tensor([5.0, 6.0]),
    }  # fmt: skip
    taken = load_head(section(["a", "b"]), task(("b", "a"))).tensors(tensors, "mine")
    assert taken.keys() == {
        "backbone.x", "heads.pooler.dense.weight", "heads.mine.output.weight", "heads.mine.output.bias"
    }  # fmt: skip
    assert taken["heads.mine.output.weight"].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert taken["heads.mine.output.bias"].tolist() == [6.0, 5.0]
    assert taken["heads.pooler.dense.weight"] is tensors["heads.pooler.dense.weight"]
