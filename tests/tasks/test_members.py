"""Tasks as objectives of pretraining, alone and in a mixture with text and other tasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from task_fixtures import evaluation, singles, table

from lmtool.config.registry import Choice
from lmtool.data.examples import Rows, SplitData
from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.learners.base import Inference
from lmtool.learners.baseline import mean_losses
from lmtool.learners.configs import MixtureConfig
from lmtool.learners.evaluation import evaluate
from lmtool.objectives import configs as configs
from lmtool.tasks.configs.mixture import tasks_of
from lmtool.tasks.mixture import read_tasks, rows_of
from lmtool.training.precision import FP32_CPU
from tests.objectives.objective_fixtures import backbone, gradients, store, tokenizer
from tests.objectives.objective_fixtures import rows_of as first_rows

FAMILIES = {"bert": "wordpiece", "gpt": "bytebpe", "t5": "t5"}
TEXT = {"bert": {"name": "mlm", "pairs": "nsp"}, "gpt": "clm", "t5": "span_corruption"}


@pytest.fixture(scope="module")
def tokenizers():
    return {family: tokenizer(kind) for family, kind in FAMILIES.items()}


@pytest.fixture
def sections(tmp_path):
    """Two tasks as members: a classification with balanced weights and a regression."""
    table(tmp_path / "mood.tsv", ["text", "label"], singles(31, ["good", "bad", "bad"]))
    table(tmp_path / "score.tsv", ["text", "label"], singles(20, [0.5, 2.5, 4.0]))
    mood = {
        "kind": "classification", "name": "mood", "path": str(tmp_path / "mood.tsv"),
        "metrics": ["accuracy", "macro_f1"], "loss": {"class_weights": "balanced"},
    }  # fmt: skip
    score = {"kind": "regression", "name": "score", "path": str(tmp_path / "score.tsv")}
    return {"name": "task", "task": mood}, {"name": "task", "task": score}


def make_learner(section, family, tokens):
    """The resolved objective, its learner, and the data of both splits."""
    objective, read = read_tasks(Choice("objective").validate(section), 3, "unread", True)
    learner = objective.learner(backbone(family), tokens, 3)
    text = store(tokens)
    data = {split: SplitData(split, text, rows=rows_of(read, split)) for split in ("train", "validation")}
    return objective, learner, data


@pytest.mark.parametrize("family", FAMILIES)
def test_task_objective_matches_task_learner(sections, family, tokenizers):
    """Same names, losses and gradients, with and without dropout."""
    objective, learner, stores = make_learner(sections[0], family, tokenizers[family])
    assert objective.task.labels == ("bad", "good") and objective.task.loss.class_weights[1] > 1
    own = objective.task.learner(backbone(family), tokenizers[family], 3)
    assert learner.state_dict().keys() == own.state_dict().keys()
    for training in (True, False):
        batch = first_rows(learner.examples(stores["train"], 32), 9)
        mine = gradients(learner.train(training), [batch])
        theirs = gradients(own.train(training), [first_rows(own.examples(stores["train"], 32), 9)])
        assert mine[0] == theirs[0] and mine[1].keys() == theirs[1].keys() == dict(own.named_parameters()).keys()
        assert all(torch.equal(tensor, theirs[1][name]) for name, tensor in mine[1].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_mixture_of_text_and_tasks_matches_members(sections, family, tokenizers):
    section = {"name": "mixture", "members": [TEXT[family], *sections], "weights": [0.5, 0.3, 0.2]}
    objective, learner, stores = make_learner(section, family, tokenizers[family])
    assert [part.title for part in objective.member_configs()][1:] == ["mood", "score"] and objective.weights == (
        0.5,
        0.3,
        0.2,
    )
    assert tasks_of(objective)[0].labels == ("bad", "good")
    assert learner.loss_weights["mood"] == 0.3 and {"mood", "score"} <= set(learner.heads)
    assert {name.split(".")[0] for name in learner.state_dict()} == {"backbone", "heads"}
    learner.train()
    examples = learner.examples(stores["train"], 32)
    numbers = np.linspace(0, len(examples.plan(0)) - 1, 14).astype(int)
    losses, grads = gradients(learner, [examples.batch(examples.plan(0).rows[numbers], numbers, 0)])
    assert set(losses) == set(learner.loss_weights) and set(grads) == dict(learner.named_parameters()).keys()
    parts = [examples.batch(examples.plan(0).rows[some], some, 0) for some in np.array_split(numbers, 5)]
    again, part_gradients = gradients(learner, parts)
    assert again == pytest.approx(losses, rel=1e-5)
    for name, gradient in grads.items():
        torch.testing.assert_close(part_gradients[name], gradient, rtol=1e-4, atol=1e-6)

    held_out = learner.examples(stores["validation"], 32)
    assert len(held_out.plan(0)) == sum(len(member.plan(0)) for member in held_out.members.values()), (
        "every held-out row, whatever its fraction"
    )
    batches = list(PackedLoader(held_out, 0, None, 300, shuffle=False).epoch_batches())
    predictors = learner.predictors(stores["train"], examples)
    joined = evaluate(learner, learner.scorer(stores["validation"], held_out, predictors), batches)
    metrics, before = joined.metrics(), mean_losses(predictors, batches)
    alone = evaluation(learner.members["mood"], stores["validation"].rows["mood"]).metrics()
    assert {name: metrics[f"mood_{name}"] for name in alone} == pytest.approx(alone, rel=1e-6)
    rows = stores["validation"].rows
    assert (metrics["mood_count"], metrics["score_count"]) == (len(rows["mood"]), len(rows["score"]))
    assert {"mood_macro_f1", "score_pearson", "score_mse"} <= set(metrics) and "score_accuracy" not in metrics
    assert metrics["score_mse"] == pytest.approx(metrics["score_loss"], rel=1e-5)
    mean = stores["train"].rows["score"].labels.mean()
    assert before["score"] == pytest.approx(np.mean((rows["score"].labels - mean) ** 2)) == metrics["score_baseline"]
    learner.eval()
    samples = [sample for batch in batches for sample in learner.samples(batch, 3)]
    golds = {sample["gold"] for sample in samples if "gold" in sample}
    assert golds & {"good", "bad"} and golds & {0.5, 2.5, 4.0}


def test_task_objective_labels_texts(sections, tokenizers):
    _, learner, _ = make_learner(sections[0], "bert", tokenizers["bert"])
    responder, rows = learner.responder(), Rows.of_texts(text=["a fine film", "a mess"])
    records = list(responder.answers(rows, Inference(32, 100, FP32_CPU)).records)
    assert [record["text"] for record in records] == ["a fine film", "a mess"]
    assert all(record["prediction"] in ("good", "bad") and 0.5 <= record["score"] <= 1 for record in records)
    assert responder.columns == ("text",) and responder.line(records[0]).endswith("  a fine film")


def test_repeated_head_names_are_refused(sections, tokenizers):
    def named(name, *members):
        task = {"name": "task", "task": sections[0]["task"] | {"name": name}}
        make_learner({"name": "mixture", "members": [*members, task]}, "bert", tokenizers["bert"])

    with pytest.raises(UserError, match="the task masked_lm has the name of another member's head"):
        named("masked_lm", "mlm")
    with pytest.raises(UserError, match="task.name=pooler is the name of an existing head"):
        named("pooler")
    for members, message in (
        (
            [*sections, sections[0]],
            r"\[mood, score, mood\] repeats a name or has a mixture: name each objective once, ",
        ),
        ([{"name": "task", "task": {"kind": "regresion"}}], "members: task: kind=regresion is not known"),
        ([{"name": "task", "task": sections[0]["task"] | {"pat": "x"}}], "members: task.pat: unknown key"),
        (["task"], "members: task: missing required value"),
    ):
        with pytest.raises(ValueError, match=message):
            MixtureConfig(members=tuple(members))


def test_fingerprint_depends_on_rows(sections, tmp_path):
    def hashed():
        (data,) = read_tasks(Choice("objective").validate(sections[0]), 3, "unread", True)[1].values()
        return data.metadata["fingerprint"]

    before = hashed()
    assert before == hashed()
    file = tmp_path / "mood.tsv"
    file.write_text(file.read_text().replace("good", "fair"))
    assert before == hashed(), "the fingerprint excludes class names"
    file.write_text(file.read_text().replace("story", "tale"))
    assert before != hashed()
