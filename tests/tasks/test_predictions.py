"""Predictions in columns: returned as stored, in few bytes per row."""

from __future__ import annotations

import gc
import json
import tracemalloc

import numpy as np
import pytest
from task_fixtures import backbone, glue, split_data, task_config, tokenizer
from token_fixtures import tagged_folder

from lmtool.data.loader import PackedLoader
from lmtool.learners.evaluation import evaluate
from lmtool.tasks.kinds.predictions import Prediction, PredictionColumns, column_of, values_of
from lmtool.tasks.loading import load_task

FORMS = {
    "classes": [3, 0, 2, 1],
    "values": [0.25, -1.0, 3.5, 0.0],
    "tags": [[1, 2], [], [0], [5, 5, 5]],
    "texts": ["yes", "no", "yes", ""],
    "several forms": [1, "no", [1], 2.0],
    "integers, then a float": [0, 1, 2, 0.5],
}


ORDER = (2, 0, 3, 1)


def assert_equal(stored, given):
    assert (stored.value, stored.score, stored.text) == (given.value, given.score, given.text)
    assert type(stored.value) is type(given.value) and (stored.probabilities == given.probabilities).all()


@pytest.mark.parametrize("values", FORMS.values(), ids=FORMS)
def test_prediction_columns_return_stored_values(values):
    fractions = np.eye(4, 3, dtype=np.float32)
    given = [Prediction(value, number / 8, fractions[number]) for number, value in enumerate(values)]
    given[2] = given[2]._replace(text="written")
    stored = PredictionColumns(4)
    for row in ORDER:
        stored.put(row, given[row])
    for prediction, expected in zip(stored, given, strict=True):
        assert_equal(prediction, expected)
    assert_equal(stored[-1], given[-1])
    assert list(values_of(stored)) == values == values_of(given)
    assert list(column_of(stored, "score")) == column_of(given, "score")


def test_prediction_columns_count_missing_rows():
    stored = PredictionColumns(4)
    for count, row in enumerate(ORDER):
        assert not stored.holds(row) and stored.missing == 4 - count
        stored.put(row, Prediction(1, 0.5))
        assert stored.holds(row)
    assert not stored.missing and len(stored) == 4


def test_row_outside_of_prediction_columns_raises_index_error():
    with pytest.raises(IndexError):
        PredictionColumns(4)[4]


def test_arrays_of_equal_shape_are_stacked():
    held = PredictionColumns(3)
    for row in range(3):
        held.put(row, Prediction(np.full(2, row, np.float32), 0.5))
    assert held.column("value").tolist() == [[0, 0], [1, 1], [2, 2]] and held.column("probabilities") is None
    held.put(1, Prediction(np.zeros(3), 0.5))  # another shape
    assert [row.value.tolist() for row in held] == [[0, 0], [0, 0, 0], [2, 2]]


def data_of(name, folder):
    if name == "wnut17":
        return load_task(task_config(name, path=tagged_folder(name, folder / name)), 0, folder, True)
    if name == "sst2":
        return load_task(task_config(name, path=glue(name, folder / name)), 0, folder, True)
    rows = [{"text": f"the end {number}", "label": [f"class {number}", "end"]} for number in range(20)]
    if name == "squad_v2":
        context = "a fine and warm film that nobody knows why " * 3
        answer = {"text": ["warm film"], "answer_start": [context.index("warm film")]}
        rows = [{"id": str(n), "question": "what is it?", "context": context, "answers": answer} for n in range(6)]
    for split in ("train", "dev"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(task_config(name, path=folder), 0, folder, True)


# Maximum bytes per row. sst2: class number, score, probabilities and loss; multi_label: a byte and a probability
# for each of 20 classes; wnut17: five tags of 8 bytes; squad_v2: 20 spans of 12 bytes and their objects.
@pytest.mark.parametrize(("name", "most"), [("sst2", 80), ("multi_label", 220), ("wnut17", 140), ("squad_v2", 900)])
def test_scoring_memory_per_row_is_small(name, most, tmp_path):
    data = data_of(name, tmp_path)
    learner = data.config.learner(backbone(num_layers=1, hidden_size=8, feedforward_size=8), tokenizer(), 0)
    (rows,), counts, kept = data.validation.values(), (6, 20, 420), []
    for count in counts:  # the first evaluation fills caches
        split = split_data(learner, rows.take(np.arange(count) % len(rows)), "dev")
        examples = learner.examples(split, 32)
        batches = list(PackedLoader(examples, 0, None, 256, shuffle=False).epoch_batches())
        scorer = learner.scorer(split, examples, {})
        gc.collect()
        tracemalloc.start()
        evaluation = evaluate(learner, scorer, checked_batches(batches, scorer))
        assert len(evaluation.predictions) == count and not scorer.partial_rows
        del scorer
        gc.collect()
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert (kept[2] - kept[1]) / (counts[2] - counts[1]) < most


def checked_batches(batches, scorer):
    """Yield the batches; after each, check that only incomplete rows are held."""
    for batch in batches:
        yield batch
        assert all(len(parts) < scorer.parts_N[row] for row, parts in scorer.partial_rows.items())
