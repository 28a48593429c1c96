"""Reuse of a checkpoint's head: labels are matched by name, and its rows put into the task's order."""

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
def test_matching_classes_reuse_head(theirs, ours, order, note):
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
def test_different_classes_do_not_reuse_head(theirs, ours):
    assert load_head(section(theirs), task(ours)) is None


def test_subset_of_classes_reuses_head():
    taken = load_head(section(["a", "b", "c"]), task(("c", "a")), partial=True)
    assert (taken.labels, taken.order) == (("c", "a", "b"), (2, 0, 1))
    assert load_head(section(["LABEL_0", "LABEL_1", "LABEL_2"]), task(("c", "a")), partial=True) is None


def test_head_of_other_task_kind_is_not_reused():
    assert load_head(section(["a", "b"]), RegressionConfig(name="mine")) is None
    assert load_head({"kind": "regression", "name": "classifier", "label": "x"}, task(("a", "b"))) is None
    assert load_head({"kind": "regression", "name": "old"}, RegressionConfig(name="mine")).settings == {}


def test_head_rows_follow_label_order():
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
