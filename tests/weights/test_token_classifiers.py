"""Conversion of a token classifier's config.json to a task and back."""

from __future__ import annotations

from lmtool.weights.task_heads import head_of_class, labels_of, refusal, task_of


def test_token_classifier_config_survives_round_trip():
    config = {"architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "B-A", "2": "I-A"}}
    assert head_of_class(config).name == "token_classifier" and refusal(config) is None
    task = task_of(config)
    assert task["kind"] == "token_classification" and task["scheme"] == "bio" and task["labels"] == ["O", "B-A", "I-A"]
    assert labels_of(task) == {
        "num_labels": 3, "id2label": config["id2label"], "label2id": {"O": 0, "B-A": 1, "I-A": 2}
    }  # fmt: skip
    speech = task_of({**config, "id2label": {"0": "NOUN", "1": "VERB"}})
    assert speech["scheme"] == "none" and speech["metrics"] == ["accuracy"]
    assert "1 label;" in refusal({**config, "id2label": {"0": "NOUN"}})
