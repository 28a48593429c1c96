"""Long texts in windows: every token is read, and the outputs of a row's windows are combined."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from task_fixtures import TEXTS, backbone, evaluation, examples_of, task_config, tokenizer

from lmtool.tasks.loading import load_task

LABELS = {"classification": [0, 1, 2], "regression": [0.5, 1.0, 2.5], "multi_label": ["a", "a,b", "b"]}


@pytest.fixture(scope="module")
def wordpiece():
    return tokenizer()


def data_of(kind, folder, pair=False, **overrides):
    rows = [
        {"text": TEXTS[number], "other": " ".join(TEXTS[: 2 * number + 1]), "label": LABELS[kind][number % 3]}
        for number in range(6)
    ]
    for split in ("train", "dev"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = ["text", "other"] if pair else ["other"]
    return load_task(task_config(kind, path=folder, text=text, **overrides), 0, folder / "cache", True)


@pytest.mark.parametrize("windows", ["mean", "max"])
@pytest.mark.parametrize("kind", LABELS)
def test_window_outputs_are_combined(kind, windows, wordpiece, tmp_path):
    data = data_of(kind, tmp_path, windows=windows, stride=3, **({"thresholds": 0.5} if kind == "multi_label" else {}))
    learner = data.config.learner(backbone(), wordpiece, 0).eval()
    examples = examples_of(learner, data.train, 16)
    plan = examples.plan(0)
    batch = examples.batch(plan.rows, np.arange(len(plan)), 0)
    assert len(plan) > len(data.train) and examples.metadata()["truncated"] == 0
    assert max(batch.inputs.lengths) <= 16 and batch.parts.tolist() == plan.rows["part"].tolist()
    # Every token of a row is read at its position.
    read = {row: {} for row in range(6)}
    pieces = batch.inputs.tokens.split(list(batch.inputs.lengths))
    for tokens, record in zip(pieces, plan.rows, strict=True):
        for offset, token in enumerate(tokens[1:-1].tolist()):
            assert read[int(record["row"])].setdefault(int(record["begin"]) + offset, token) == token
    for row, text in enumerate(data.train.columns["other"]):
        assert [read[row][place] for place in sorted(read[row])] == wordpiece.encode(text).tolist()
    # The outputs of a row's windows are combined.
    with torch.no_grad():
        outputs = learner.outputs(batch, 0).double()
    fractions = {"classification": outputs.softmax(-1), "regression": outputs, "multi_label": outputs.sigmoid()}[kind]
    predictions = evaluation(learner, data.validation["dev"], max_length=16).predictions
    for row, prediction in enumerate(predictions):
        own = fractions[plan.rows["row"] == row].numpy()
        joined = own.mean(axis=0) if windows == "mean" or len(own) == 1 else own.max(axis=0)
        if kind == "classification":
            assert prediction.value == joined.argmax()
            assert prediction.score == pytest.approx(joined.max() / joined.sum(), abs=1e-5)
        elif kind == "regression":
            assert prediction.value == pytest.approx(joined[0], abs=1e-5)
        else:
            assert list(prediction.value) == (joined >= 0.5).astype(int).tolist()


def test_second_text_of_pair_is_windowed(wordpiece, tmp_path):
    data = data_of("classification", tmp_path, pair=True, windows="mean")
    examples = examples_of(data.config.learner(backbone(), wordpiece, 0), data.train, 19)
    plan = examples.plan(0)
    assert len(plan) > 6 and (plan.lengths <= 19).all() and (plan.rows["first"] <= 8).all()
    seconds = np.bincount(plan.rows["row"], plan.rows["second"])
    assert seconds.tolist() == [len(wordpiece.encode(text)) for text in data.train.columns["other"]]
