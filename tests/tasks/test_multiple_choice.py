"""Multiple choice: texts of a row, one softmax over its choices, and rows kept in one batch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from task_fixtures import TEXTS, backbone, evaluation, examples_of, split_data, task_config, tokenizer

from lmtool.config.registry import build
from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.tasks.loading import load_task


@pytest.fixture(scope="module")
def tokenizers():
    return {"bert": tokenizer(), "gpt": tokenizer("bytebpe")}


def rows_of(name, count=6):
    texts = [TEXTS[number % len(TEXTS)] for number in range(count + 8)]
    if name == "swag":
        return [
            {"sent1": texts[n], "sent2": "she", **{f"ending{k}": texts[n + k] for k in range(4)}, "label": n % 4}
            for n in range(count)
        ]
    columns = ("premise", "choice1", "choice2") if name == "copa" else ("text", "choice1", "choice2")
    more = {"question": "cause", "idx": 7} if name == "copa" else {}
    return [
        {**more, **{column: texts[n + k] for k, column in enumerate(columns)}, "label": n % 2} for n in range(count)
    ]


def data_of(name, folder, **overrides):
    for split in ("train", "dev"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))
    return load_task(task_config(name, path=folder, **overrides), 0, folder / "cache", True)


def batch_of(examples, numbers):
    numbers = np.asarray(numbers)
    return examples.batch(examples.plan(0).rows[numbers], numbers, 0)


@pytest.mark.parametrize("family", ["bert", "gpt"])
@pytest.mark.parametrize("name", ["multiple_choice", "copa", "swag"])
def test_packing_keeps_loss_and_predictions(name, family, tokenizers, tmp_path):
    data = data_of(name, tmp_path)
    learner = data.config.learner(backbone(family), tokenizers[family], 0).train()
    examples = examples_of(learner, data.train, 48)
    batch, term, choices = batch_of(examples, range(6)), data.config.name, data.config.choices
    assert batch.groups.tolist() == np.repeat(range(6), choices).tolist() and learner.counts(batch) == {term: 6.0}
    loss = learner(batch, 1).sums[term]
    single = sum(learner(batch_of(examples, [number]), 1).sums[term] for number in range(6))
    torch.testing.assert_close(single, loss, rtol=1e-5, atol=1e-5)
    learner.eval()
    scores = learner.outputs(batch, 0).detach().reshape(6, choices)
    torch.testing.assert_close(learner(batch, 1).sums[term], F.cross_entropy(scores, batch.targets[term].labels) * 6)
    scored = evaluation(learner, data.validation["dev"], max_length=48)
    assert scored.metrics().keys() == {"loss", "accuracy"}
    assert [row.value for row in scored.predictions] == scores.argmax(1).tolist()
    assert scored.predictions[0].score == pytest.approx(float(scores[0].softmax(0).max()), abs=1e-5)
    sets = split_data(learner, data.train), split_data(learner, data.validation["dev"], "dev")
    assert learner.baseline(*sets, [], {})["metric"] == "accuracy"


def test_copa_and_swag_rows_become_pairs():
    rows = Rows(["a"], {"premise": ["It broke."], "question": ["cause"], "choice1": ["x"], "choice2": ["y"]}, None, [])
    rows.origin.append(("f", 1))
    pairs = build(task_config("copa", path="x")).pairs(rows).columns
    assert pairs == {"first": ["It broke. What was the cause of this?"] * 2, "second": ["x", "y"]}
    columns = {"sent1": ["He sits."], "sent2": ["Then he"], **{f"ending{k}": [f"e{k}"] for k in range(4)}}
    pairs = build(task_config("swag", path="x")).pairs(Rows(["a"], columns, None, rows.origin)).columns
    assert pairs == {"first": ["He sits."] * 4, "second": [f"Then he e{k}" for k in range(4)]}


def test_invalid_choices_and_labels_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there must be a text before the choices"):
        task_config("multiple_choice", choices=3)
    (tmp_path / "train.jsonl").write_text(json.dumps({**rows_of("copa")[0], "label": 2}) + "\n")
    with pytest.raises(UserError, match="train.jsonl:1: label '2' is unknown; the labels of copa are choice1, choice2"):
        load_task(task_config("copa", path=tmp_path), 0, tmp_path / "cache", True)
