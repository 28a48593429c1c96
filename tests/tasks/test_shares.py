"""Sampling fractions of the members of a task mixture, planned and realized."""

from __future__ import annotations

import numpy as np
import pytest
from task_fixtures import backbone, singles, table, tokenizer

from lmtool.config.registry import Choice
from lmtool.data.examples import Rows, SplitData
from lmtool.data.loader import PackedLoader
from lmtool.learners.mixed_examples import MixedExamples
from lmtool.tasks.kinds.texts import InputFormat, SequenceExamples
from lmtool.tasks.loading import load_task
from lmtool.tasks.mixture import with_members

SIZES = (40, 160, 1000)


def section(sampling: str, **more):
    members = [{"kind": "regression", "name": name, "path": "unread"} for name in ("one", "two", "three")]
    return {"kind": "mixture", "members": members, "sampling": sampling, "rows": list(SIZES), **more}


@pytest.mark.parametrize(
    ("sampling", "more", "expected"),
    [
        ("proportional", {}, SIZES),
        ("uniform", {}, (1, 1, 1)),
        ("temperature", {}, np.sqrt(SIZES)),
        ("temperature", {"temperature": 1.0}, SIZES),
        ("capped", {"cap": 100}, (40, 100, 100)),
    ],
)
def test_sampling_fractions_match_definitions(sampling, more, expected) -> None:
    fractions = Choice("task", key="kind").validate(section(sampling, **more)).fractions()
    assert fractions == pytest.approx(np.array(expected) / np.sum(expected))


@pytest.mark.parametrize("epochs", [1, 2, 25])
def test_annealed_fractions_match_their_definition_in_every_epoch(epochs) -> None:
    """Stickland and Murray 2019: N^alpha, alpha = 1 - 0.8 (e - 1) / (E - 1); alpha stays 0.2 after the last epoch."""
    config = Choice("task", key="kind").validate(section("annealed", annealing_epochs=epochs))
    for e in range(1, epochs + 1):
        alpha = 1.0 if epochs == 1 else 1 - 0.8 * (e - 1) / (epochs - 1)
        weights = [size**alpha for size in SIZES]
        assert config.fractions(e - 1) == pytest.approx([weight / sum(weights) for weight in weights])
    weights = [size**0.2 for size in SIZES]
    assert config.fractions(epochs + 3) == pytest.approx([weight / sum(weights) for weight in weights])


def test_epochs_of_annealed_sampling_have_their_own_counts_and_loss_weights() -> None:
    config = Choice("task", key="kind").validate(section("annealed", annealing_epochs=3))
    learner = config.learner(backbone(), tokenizer(), 0)
    rows = {name: rows_of(size) for name, size in zip(("one", "two", "three"), SIZES, strict=True)}
    examples = learner.examples(SplitData("train", rows=rows), 32)
    seen = []
    for epoch in (2, 0, 1):
        plan, shares = examples.plan(epoch), config.fractions(epoch)
        counts = [*examples.member_counts(plan.rows).values()]
        assert counts == [round(sum(SIZES) * share) for share in shares]
        few = np.array([0, len(plan) // 2, len(plan) - 1])
        output = learner(examples.batch(plan.rows[few], few, epoch), 1)
        assert output.loss_weights == pytest.approx(dict(zip(rows, shares, strict=True)))
        seen.append(counts)
    assert seen[1][2] > seen[2][2] > seen[0][2], "the largest member is seen less from epoch to epoch"
    held_out = learner.examples(SplitData("dev", rows=rows), 32)
    few = np.arange(3)
    assert learner(held_out.batch(held_out.plan(2).rows[few], few, 2), 1).loss_weights == learner.loss_weights


@pytest.mark.parametrize("sampling", ["uniform", "temperature", "proportional"])
def test_sampled_rows_match_fractions(sampling) -> None:
    """Counts within an epoch pass a chi-square test at p = 0.001; counts of whole epochs are exact."""
    fractions = Choice("task", key="kind").validate(section(sampling)).fractions()
    tokens, members = tokenizer(), {}
    for name, size in zip(("one", "two", "three"), SIZES, strict=True):
        members[name] = texts_of(tokens, size)
    examples = MixedExamples(members, fractions, 3, repeats=True)
    loader = PackedLoader(examples, 3, batch_examples=10)
    counts = np.array([len(rows) for rows in loader.rows_read(7)])
    assert counts.sum() == 70
    read = sum((np.array([*examples.member_counts(rows).values()]) for rows in loader.rows_read(50)), np.zeros(3))
    wanted = 500 * np.array(fractions)
    assert read.sum() == 500 and np.sum((read - wanted) ** 2 / wanted) < 13.8  # two degrees of freedom
    rows = examples.plan(0).rows
    assert [*examples.member_counts(rows).values()] == [round(sum(SIZES) * share) for share in fractions]
    for number, size in enumerate(SIZES):
        times = np.bincount(rows["row"][rows["member"] == number], minlength=size)
        assert times.max() - times.min() <= 1, "row counts differ by at most one"
    steps = loader.steps_in_epoch(0)
    first, second = list(loader.rows_read(steps + 3))
    assert len(first) == len(rows) and len(second) == 30


def rows_of(size):
    texts = [f"a film {number}" for number in range(size)]
    return Rows(list(range(size)), {"text": texts}, np.zeros(size), [("x", 1)] * size)


def texts_of(tokens, size):
    return SequenceExamples(rows_of(size), InputFormat(tokens, "bert", 32), "one", "train")


def test_extra_dev_splits_have_only_their_members(tmp_path) -> None:
    members = {}
    for name, splits in (("one", ("dev",)), ("two", ("dev_matched", "dev_mismatched"))):
        folder = tmp_path / name
        folder.mkdir()
        for split in ("train", *splits):
            table(folder / f"{split}.tsv", ["text", "label"], singles(12, ["good", "bad"]))
        config = {"kind": "classification", "name": name, "path": str(folder), "validation": list(splits)}
        members[name] = load_task(Choice("task", key="kind").validate(config), 0, tmp_path, True)
    given = [{"kind": "classification", "name": name, "path": "x"} for name in members]
    data = with_members(Choice("task", key="kind").validate({"kind": "mixture", "members": given}), members)
    assert {split: list(part.rows) for split, part in data.splits().items()} == {
        "train": ["one", "two"], "dev": ["one", "two"], "dev_mismatched": ["two"]
    }  # fmt: skip
    learner = data.config.learner(backbone(), tokenizer(), 0).eval()
    only = learner.examples(data.splits()["dev_mismatched"], 32)
    assert list(only.members) == ["two"] and len(only.plan(0)) == 12
    assert {name.split(".")[1] for name in learner.state_dict() if name.startswith("heads.")} == {
        "pooler",
        "one",
        "two",
    }
