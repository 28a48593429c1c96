"""`inspect` shows the texts and label names of examples for every task kind."""

from __future__ import annotations

import json

import pytest
from task_fixtures import TEXTS, backbone, task_config, tokenizer

from lmtool.data.examples import SplitData
from lmtool.tasks.loading import load_task

CONTEXT = "the old cat met Zoe near a river"
KINDS = {
    "classification": ({"text": TEXTS[0], "label": "good"}, {"text": TEXTS[1], "label": "bad"}, "good"),
    "regression": ({"text": TEXTS[0], "label": 1.5}, {"text": TEXTS[1], "label": 2.5}, 1.5),
    "multi_label": ({"text": TEXTS[0], "label": ["a", "b"]}, {"text": TEXTS[1], "label": ["a"]}, "a,b"),
    "multiple_choice": (
        {"text": TEXTS[0], "choice1": TEXTS[1], "choice2": TEXTS[2], "label": 1},
        {"text": TEXTS[1], "choice1": TEXTS[0], "choice2": TEXTS[2], "label": 0},
        "wrong",
    ),
    "extractive_qa": (
        {"id": "1", "question": "who?", "context": CONTEXT, "answers": {"text": ["Zoe"], "answer_start": [16]}},
        {"id": "2", "question": "what?", "context": CONTEXT, "answers": {"text": ["cat"], "answer_start": [8]}},
        None,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_inspection_shows_texts_and_labels(kind, tmp_path):
    first, second, label = KINDS[kind]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, second)))
    data = load_task(task_config(kind, path=tmp_path), 0, tmp_path / "cache", True)
    learner = data.config.learner(backbone(), tokenizer(), 0)
    rows = SplitData("train", rows={data.config.name: data.train})
    inspector = learner.inspector(learner.examples(rows, 64), 64)
    shown = list(inspector.describe(2))
    assert len(shown) == 2 and not inspector.measure(50).broken()
    target = shown[0]["targets"][data.config.name]
    assert target == label or (label is None and target.startswith("tokens "))
    for name in data.config.text:
        # Only the first choice is shown.
        assert first[name] in shown[0]["text"] or name == "choice2"
