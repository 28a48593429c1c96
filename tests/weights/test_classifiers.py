"""Conversion of a classifier's config.json to a task and back."""

from __future__ import annotations

import pytest

from lmtool.errors import UserError
from lmtool.weights.task_heads import HEADS, head_of_class, label_names, labels_of, refusal, task_of


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, ["LABEL_0", "LABEL_1"]),
        ({"num_labels": 1}, ["LABEL_0"]),
        ({"num_labels": 3}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"id2label": {"1": "b", "0": "a"}, "label2id": {"wrong": 7}}, ["a", "b"]),
        ({"id2label": {"0": "score"}}, ["score"]),
        ({"id2label": {str(number): f"c{number}" for number in range(12)}}, [f"c{number}" for number in range(12)]),
    ],
)
def test_labels_survive_round_trip(config, names):
    assert label_names(config) == names
    task = task_of(config)
    assert task["kind"] == ("regression" if len(names) == 1 else "classification")
    written = labels_of(task)
    assert label_names(written) == names and refusal(written) is None
    assert written["label2id"] == {name: number for number, name in enumerate(names)}
    assert written["num_labels"] == len(names)


def test_multi_label_survives_round_trip():
    config = {"problem_type": "multi_label_classification", "id2label": {"0": "a", "1": "b"}}
    task = task_of(config)
    assert (task["kind"], task["labels"], task["thresholds"]) == ("multi_label", ["a", "b"], None)
    assert labels_of(task)["problem_type"] == config["problem_type"]


@pytest.mark.parametrize("names", [{"1": "a", "2": "b"}, {"a": "b"}, ["a", "b"], {"0": "a", "2": "b"}])
def test_unnumbered_labels_are_refused(names):
    with pytest.raises(UserError, match="does not number the labels"):
        label_names({"id2label": names})


@pytest.mark.parametrize(
    ("kind", "count"),
    [("token_classification", 3), ("regression", 2), ("single_label_classification", 1), (None, 0)],
)
def test_unsupported_problem_types_are_refused(kind, count):
    config = {"problem_type": kind, "num_labels": count}
    assert task_of(config) is None and f"{count} label" in refusal(config)


def test_head_is_chosen_by_architecture():
    assert head_of_class({"architectures": ["BertForSequenceClassification"]}) is HEADS["classifier"]
    assert head_of_class({"architectures": ["XLNetForQuestionAnsweringSimple"]}) is HEADS["question_answering"]
    assert head_of_class({"architectures": ["BertForMultipleChoice"]}) is HEADS["multiple_choice"]
    for classes in (None, [], ["BertForMaskedLM"], ["BertForNextSentencePrediction"]):
        assert head_of_class({"architectures": classes}) is None
