"""Few-shot sampling of rows per class: by seed, disjoint, and uniform."""

from __future__ import annotations

import json

import numpy as np
import pytest
from task_fixtures import task_config

from lmtool.config.registry import build
from lmtool.data.examples import unlabeled_name
from lmtool.errors import UserError
from lmtool.tasks.loading import draw_shots, load_task

LABELS = ("negative", "positive")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty training texts; two occur twice, and one is also held out."""
    place = tmp_path_factory.mktemp("shots")
    train = [{"sentence": f"text {n % 40}", "label": LABELS[n % 2]} for n in range(42)]
    dev = [{"sentence": f"dev {n}", "label": LABELS[n % 2]} for n in range(6)]
    dev.insert(0, {"sentence": "text 7", "label": "positive"})
    for split, rows in (("train", train), ("dev", dev), ("test", dev[1:4])):
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def data_of(folder, seed=13, **overrides):
    return load_task(task_config("sst2", path=folder, **{"shots_per_class": 4, **overrides}), seed, folder, True)


def test_shots_are_sampled_by_seed_with_checksums(folder):
    draws = [data_of(folder, seed) for seed in (13, 21, 13)]
    for data in draws:
        train, dev = data.train, data.validation["dev"]
        assert np.bincount(train.labels).tolist() == np.bincount(dev.labels).tolist() == [4, 4]
        texts = [*train.columns["sentence"], *dev.columns["sentence"]]
        assert len({*texts}) == 16 and "text 7" not in texts
        assert len(data.test["full_dev"]) == 7 and list(data.test) == ["test", "full_dev"]
        assert list(data.labeled_tests()) == ["test", "full_dev"]
        assert data.metadata["few_shot"]["rows_of_a_class"] == 4
    first, second, again = (data.metadata["few_shot"] for data in draws)
    assert first == again and first["train_sha256"] != second["train_sha256"] != first["dev_sha256"]
    # Frozen values: every version of lmtool samples the same rows for the same seed.
    assert (first["seed"], first["train_sha256"][:12], first["dev_sha256"][:12]) == (13, "bd521cec9d65", "9d2dc6238345")


def test_shots_are_sampled_uniformly(folder):
    config = task_config("sst2", path=folder)
    data = load_task(config, 0, folder, True)
    kind, held_out = build(data.config), list(data.validation.values())
    counts = np.zeros(42)
    for seed in range(400):
        train, development, rest = draw_shots(kind, data.train, held_out, 4, seed)
        chosen = [*train.ids, *development.ids]
        counts[chosen] += 1
        assert len({*chosen, *rest.ids}) == 39 and len(chosen) == 16
    assert counts[[7, 40, 41]].tolist() == [0, 0, 0]
    for label, rows in ((0, 20), (1, 19)):
        own = counts[np.flatnonzero(data.train.labels == label)]
        share = 8 / rows
        np.testing.assert_allclose(own[own > 0] / 400, share, atol=4.5 * (share * (1 - share) / 400) ** 0.5)


def test_remaining_rows_become_unlabeled_text(folder):
    data = data_of(folder, head="prompt", auxiliary_mlm=1e-4)
    rows = data.splits()["train"].rows
    assert len(rows["sst2"]) == 8 and len(rows[unlabeled_name("sst2")]) == 39 - 16
    assert list(data_of(folder).splits()["train"].rows) == ["sst2"]


def test_too_few_rows_are_refused(folder):
    with pytest.raises(
        UserError, match="requires 20 training rows of each class with different texts; positive has 19"
    ):
        data_of(folder, shots_per_class=10)
    with pytest.raises(ValueError, match="both limit the training rows"):
        data_of(folder, train_examples=8)
