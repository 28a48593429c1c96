"""Text-to-text tasks: source texts as published, generated labels, and outputs that are not labels."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from task_fixtures import SIZES, TEXTS, evaluation, examples_of, glue, table, task_config

from lmtool.config.registry import build
from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config
from lmtool.tasks.kinds.text_to_text import sources
from lmtool.tasks.loading import load_task
from lmtool.tokenizers.configs import ByteBpeConfig

NO_DROPOUT = {**SIZES, "dropout": 0.0}
FAMILIES = {
    "t5": (T5Config(**NO_DROPOUT, head_size=8), "gpt2"),
    "bart": (BartConfig(**NO_DROPOUT, activation_dropout=0.0), "roberta"),
    "gpt": (GptConfig(**NO_DROPOUT), "gpt2"),
}


def data_of(name, folder, **overrides):
    overrides = {"head": "text_to_text", **overrides}
    return load_task(task_config(name, path=glue(name, folder / name), **overrides), 0, folder, True)


def learner_of(data, family="t5"):
    config, special_tokens = FAMILIES[family]
    tokenizer = build(ByteBpeConfig(minimum_count=1, special_tokens=special_tokens), TEXTS * 3, 290)
    return data.config.learner(build(config, 0), tokenizer, 0)


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("sst2", "sst2 sentence: a fine"),
        ("mnli", "mnli hypothesis: a fine and warm film 0 no premise: a fine"),
        ("boolq", "boolq passage: a fine and warm film 0 question: a fine and warm film 0"),
        ("wic", "wic sentence1: a fine and warm film 0 sentence2: a fine and warm film 0 word: a fine"),
    ],
)
def test_source_texts_match_published_format(name, starts, tmp_path):
    data = data_of(name, tmp_path)
    texts, labels = build(data.config).texts(data.train)
    assert texts == sources(name, data.train) and texts[0].startswith(starts)
    assert set(labels) == set(("False", "True") if name in ("wic", "boolq") else data.config.labels)
    assert [build(data.config).parse(label).value for label in labels] == data.train.labels.tolist()
    assert build(data.config).parse("true") is None


def test_joined_columns_are_refused_as_sources(tmp_path):
    data = data_of("wic", tmp_path, head=None)
    with pytest.raises(UserError, match=r"names word\+sentence1"):
        sources("wic", data.train)


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_learned_and_generated(family, tmp_path):
    rows = [("a fine film", "good"), ("a dull mess", "bad"), ("warm", "good"), ("cold", "bad")]
    for split in ("train", "dev"):
        table(tmp_path / f"{split}.tsv", ["text", "label"], rows)
    config = task_config("classification", path=tmp_path, head="text_to_text")
    data = load_task(config, 0, tmp_path, True)
    learner, rows = learner_of(data, family), data.train
    examples = examples_of(learner, rows, 64)
    batch = next(iter(PackedLoader(examples, 0, len(rows), None, shuffle=False).epoch_batches()))
    optimizer = torch.optim.Adam(learner.parameters(), 1e-2)
    for _ in range(160 if family == "gpt" else 70):
        optimizer.zero_grad()
        loss = learner.train()(batch, 1).sums["classification"] / learner.counts(batch)["classification"]
        loss.backward()
        optimizer.step()
        if loss < 0.03:
            break
    scored = evaluation(learner.eval(), rows, max_length=64)
    assert scored.metrics()["accuracy"] == 1.0 and scored.warnings == ()
    assert [record["written"] for record in scored.records()] == [record["gold"] for record in scored.records()]
    # Unlabeled rows give the same predictions.
    unlabeled = build(data.config).rows({"text": rows.columns["text"]}, rows.origin, False)
    answers = [record["prediction"] for record in evaluation(learner, unlabeled, max_length=64).records()]
    assert answers == [record["prediction"] for record in scored.records()]


def test_truncated_rows_pass_inspection(tmp_path):
    data = data_of("sst2", tmp_path)
    learner = learner_of(data)
    stats = learner.inspector(examples_of(learner, data.train, 12), 12).measure(500)
    assert stats.statistics["truncated fraction"].measured == 1.0 and not stats.broken()


def evaluate_with_outputs(learner, rows, texts, monkeypatch):
    """Evaluate the learner with these texts as its generated output."""
    given = dict(zip(sources(learner.term, rows), texts, strict=True))

    def text(prompt, _):
        return given[learner.tokenizer.decode(prompt)]

    writer = types.SimpleNamespace(write=lambda prompts, *_: prompts, text=text)
    monkeypatch.setattr(learner, "writer", lambda: writer)
    return evaluation(learner.eval(), rows, max_length=128)


def test_generated_non_labels_are_wrong_and_counted(tmp_path, monkeypatch):
    data = data_of("sst2", tmp_path)  # gold: positive, negative, positive, ...
    texts = [" positive", "negative", "Positive", "negative positive", "positive", ""]
    scored = evaluate_with_outputs(learner_of(data), data.validation["dev"], texts, monkeypatch)
    assert scored.metrics()["accuracy"] == 3 / 6
    assert scored.warnings == ("3 of 6 written texts are not labels and count as wrong, such as 'Positive'",)
    records = list(scored.records())
    assert [record["prediction"] for record in records][2:4] == ["(no label)", "(no label)"]
    assert records[3]["written"] == "negative positive"
    assert scored.details["labels"] == ["negative", "positive", "(no label)"]
    assert scored.details["confusion"] == [[1, 0, 2], [0, 2, 1], [0, 0, 0]]
    assert "calibration_error" not in scored.details


def test_regression_values_are_rounded_to_fifths(tmp_path, monkeypatch):
    data = data_of("stsb", tmp_path)
    kind = build(data.config)
    assert kind.label_texts(np.array([5.0, 0.25, 3.8, 3.72, -0.05])) == ["5.0", "0.2", "3.8", "3.8", "0.0"]
    texts = ["5.0", "0.4", "nan", "3.8", "x", "-1"]
    scored = evaluate_with_outputs(learner_of(data), data.validation["dev"], texts, monkeypatch)
    assert [record["prediction"] for record in scored.records()] == [5.0, 0.4, 0.0, 3.8, 0.0, -1.0]
    assert "2 of 6 written texts are not labels" in scored.warnings[0]


@pytest.mark.parametrize(
    ("name", "model", "fields", "key"),
    [
        ("sst2", BertConfig(), {}, "task.head"),
        ("multi_label", GptConfig(), {}, "task.head"),
        ("sst2", GptConfig(), {"windows": "mean"}, "task.windows"),
        ("stsb", T5Config(), {"dropout": 0.1}, "task.dropout"),
        ("sst2", T5Config(), {"loss__focal_gamma": 2.0}, "task.loss.focal_gamma"),
    ],
)
def test_text_to_text_conflicts_name_key(name, model, fields, key):
    assert task_config(name, head="text_to_text", **fields).first_conflict(model).key == key
    assert task_config(name, head="text_to_text").first_conflict(T5Config()) is None or name == "multi_label"


def test_text_to_text_checkpoint_keeps_head():
    form = {"head": "text_to_text", "pooling": "auto", "head_layers": None}
    model = T5Config()
    assert task_config("sst2").takes_head(form, model) and task_config("sst2").with_head(form).head == "text_to_text"
    assert not task_config("sst2", head="paper").takes_head(form, model)
    assert not task_config("sst2", head="text_to_text").takes_head({**form, "head": "paper"}, model)
