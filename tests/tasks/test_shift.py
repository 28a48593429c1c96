"""Divergence of words and labels between splits, domains and tasks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from task_fixtures import table, task_config

from lmtool.data.examples import Rows
from lmtool.tasks import checking as shift_module
from lmtool.tasks.checking import compared_rows, divergence, independent_passages, shift
from lmtool.tasks.loading import load_task


def test_divergence_matches_scipy() -> None:
    chance = np.random.default_rng(0)
    first, second = (Counter(dict(enumerate(chance.integers(0, 9, 30).tolist()))) for _ in range(2))
    sides = [[side.get(name, 0) for name in range(30)] for side in (first, second)]
    assert divergence(first, second) == pytest.approx(jensenshannon(*sides, base=2) ** 2)
    assert divergence(first, first) == 0.0 and divergence({"a": 3}, {"b": 5}) == 1.0
    assert math.isnan(divergence({}, {"b": 5}))


def data_of(folder, name, kind, rows, dev):
    (folder / name).mkdir()
    for split, own in (("train", rows), ("dev", dev)):
        table(folder / name / f"{split}.tsv", ["text", "label"], own)
    config = task_config(kind, path=folder / name).model_copy(update={"name": name})
    return load_task(config, 0, folder, True)


def test_shifts_compare_splits_domains_and_tasks(tmp_path, monkeypatch) -> None:
    train = [("a good film", "good"), ("A bad film!", "bad")] * 6
    mood = data_of(tmp_path, "mood", "classification", train, [("a new new film", "good")] * 4)
    others = Rows.of_texts(text=["over there"] * 3)
    value = data_of(
        tmp_path, "value", "regression", [("a good car", 0.0), ("a bad car", 1.0)] * 5, [("a car", 1.0)] * 2
    )
    first, second, third, between = map(shift, compared_rows({"mood": replace(mood, unlabeled=others), "value": value}))
    assert (first.source, first.target, first.rows) == ("mood train", "mood dev", 4)
    assert first.unknown == 0.5 and first.unknown_types == pytest.approx(1 / 3)
    assert first.labels == pytest.approx(divergence({"good": 1, "bad": 1}, {"good": 1}))
    assert first.chance < 0.1 < first.words < 1
    assert (second.target, second.words, second.unknown, second.labels) == ("mood unlabeled texts", 1.0, 1.0, None)
    assert third.labels == pytest.approx(first.labels) and third.target == "value dev"
    assert (between.source, between.target, between.labels) == ("mood train", "value train", None)
    monkeypatch.setattr(shift_module, "MAX_ROWS", 3)
    assert shift(next(compared_rows({"mood": mood}))).rows == 4


def test_passages_that_share_a_line_or_a_long_text_are_read_once() -> None:
    paragraph = "a paragraph of nine words about a quiet old river"
    columns = {"question": ["who ?", "why ?", "who ?", "where ?"], "context": [paragraph, paragraph, "a", "b"]}
    rows = replace(Rows.of_texts(**columns), origin=[("file", line) for line in (1, 2, 3, 3)])
    assert independent_passages(rows) == [f"who ? {paragraph}", "who ? a"]
