"""Classification of spans and span pairs: token positions, span vectors, and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from task_fixtures import backbone, evaluation, examples_of, split_data, task_config, tokenizer

from lmtool.errors import UserError
from lmtool.models.heads.sequence import span_vectors
from lmtool.tasks.loading import load_task

TEXT = "a fine and warm film, what a lovely story: this is a waste of time"
SPANS = [("fine", "story"), ("film", "film"), ("waste of", "lovely"), ("warm film", "time")]


@pytest.fixture(scope="module")
def tokenizers():
    return {"bert": tokenizer(), "gpt": tokenizer("bytebpe")}


def span(words):
    return [TEXT.index(words), TEXT.index(words) + len(words)]


def rows_of(pair=True):
    rows = []
    for number, (first, second) in enumerate(SPANS * 2):
        start, end = span(second)
        spans = {"span1": span(first), "span2": {"start": start, "end": end}} if pair else {"span": span(first)}
        rows.append({"text": TEXT, **spans, "label": ["none", "same"][number % 2]})
    return rows


def data_of(folder, rows, **overrides):
    for split in ("train", "dev"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(task_config("span_classification", path=folder, **overrides), 0, folder / "cache", True)


@pytest.mark.parametrize("family", ["bert", "gpt"])
@pytest.mark.parametrize("pair", [False, True])
def test_span_tokens_match_characters_and_train(pair, family, tokenizers, tmp_path):
    text = ["text", "span1", "span2"] if pair else ["text", "span"]
    data = data_of(tmp_path, rows_of(pair), text=text, metrics=["accuracy", "f1"])
    learner = data.config.learner(backbone(family), tokenizers[family], 0).train()
    term = data.config.name
    # No text is truncated at length 64; at the smaller length, texts longer than their spans are.
    for length in (64, 40 if pair else 12):
        examples = examples_of(learner, data.train, length)
        batch = examples.batch(examples.plan(0).rows, np.arange(8), 0)
        assert max(batch.inputs.lengths) <= length
        assert examples.metadata()["truncated"] == (
            8 if length == 12 or (pair and family == "gpt" and length == 40) else 0
        )
        spans = batch.targets[term].span.reshape(8, -1, 2)
        for number in range(8):
            words = [tokenizers[family].decode(batch.inputs.tokens[start : end + 1]) for start, end in spans[number]]
            expected = SPANS[number % 4][: len(words)]
            assert [part.strip(" ,:") for part in words] == list(expected)
    loss = learner(batch, 1).sums[term]
    loss.backward()
    assert all(parameter.grad is not None for name, parameter in learner.named_parameters() if "heads" in name)
    single = sum(
        learner(examples.batch(examples.plan(0).rows[[number]], np.array([number]), 0), 1).sums[term]
        for number in range(8)
    )
    torch.testing.assert_close(single, loss, rtol=1e-5, atol=1e-5)
    scored = evaluation(learner.eval(), data.validation["dev"], max_length=64)
    assert scored.metrics().keys() == {"loss", "accuracy", "f1"}
    records = list(scored.records())
    assert records[0]["gold"] == "none" and records[0][text[1]] == span("fine")
    assert learner.kind.line(records[0]).endswith(TEXT)
    sets = split_data(learner, data.train), split_data(learner, data.validation["dev"], "dev")
    assert learner.baseline(*sets, [], {})["value"] == 0.5


def test_span_vector_is_start_end_and_mean():
    hidden = torch.arange(12.0).reshape(6, 2)
    vectors = span_vectors(hidden, torch.tensor([[1, 3], [5, 5]]))
    torch.testing.assert_close(vectors, torch.tensor([[2.0, 3, 6, 7, 4, 5], [10.0, 11, 10, 11, 10, 11]]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([4], "train.jsonl:2: span1=.4. is not a span"),
        (["a", 2], "is not a span"),
        ([4, 4], "selects no text; the text has 66"),
        ([60, 67], "selects no text"),
        ([1, 2], "selects no text"),
    ],
)
def test_invalid_spans_are_refused(value, message, tmp_path):
    rows = rows_of()
    rows[1]["span1"] = value
    with pytest.raises(UserError, match=message):
        data_of(tmp_path, rows, text=["text", "span1", "span2"])


def test_spans_beyond_max_length_are_refused(tokenizers, tmp_path):
    data = data_of(tmp_path, rows_of(), text=["text", "span1", "span2"])
    learner = data.config.learner(backbone(), tokenizers["bert"], 0)
    with pytest.raises(
        UserError, match=r"train.jsonl:1: the spans of this row extend over \d+ tokens; max_length=8 allows 6"
    ):
        examples_of(learner, data.train, 8)
