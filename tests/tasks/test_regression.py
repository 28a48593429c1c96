"""Standardized regression: the loss is in standard deviations, predictions and metrics in the original unit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from task_fixtures import backbone, evaluation, examples_of, singles, table, task_config, tokenizer

from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.models.encoder_decoder_configs import T5Config
from lmtool.tasks.configs.mixture import MixtureTaskConfig
from lmtool.tasks.loading import load_task
from lmtool.tasks.mixture import with_members

VALUES = [500.0, 2500.0, 4000.0]


def data_of(folder, values=VALUES, name="regression", **fields):
    for split, count in (("train", 20), ("dev", 6)):
        table(folder / f"{split}.tsv", ["text", "label"], singles(count, values))
    return load_task(task_config(name, path=folder, **fields), 0, folder / "cache", True)


def test_standardized_loss_is_in_standard_deviations(tmp_path):
    data, words = data_of(tmp_path, standardize="train"), tokenizer()
    labels = np.asarray(data.train.labels)
    assert data.config.standardize == pytest.approx((labels.mean(), labels.std()))
    learner = data.config.learner(backbone(), words, 0).eval()
    head, plain = (
        own.heads["regression"].output
        for own in (learner, data_of(tmp_path).config.learner(backbone(), words, 0).eval())
    )
    torch.testing.assert_close(head.weight, plain.weight * labels.std())
    assert head.bias.item() == pytest.approx(labels.mean())
    (batch,) = PackedLoader(examples_of(learner, data.train), 0, shuffle=False, batch_examples=20).epoch_batches()
    with torch.no_grad():
        values = learner.outputs(batch, 0)[:, 0].numpy()
        loss = learner(batch, 1).sums["regression"].item()
    assert loss == pytest.approx(((values - labels) ** 2).sum() / labels.var(), rel=1e-4)
    assert 5 < loss < 80, "a new head predicts near the mean, whose loss is 20"
    dev = evaluation(learner, data.validation["dev"])
    predicted = [row["prediction"] for row in dev.records()]
    errors = np.array(predicted) - np.asarray(data.validation["dev"].labels)
    assert dev.loss == pytest.approx(np.square(errors).mean() / labels.var(), rel=1e-4)
    assert dev.metrics()["mse"] == pytest.approx(np.square(errors).mean(), rel=1e-4)
    assert len(errors) == 6 and abs(np.mean(errors)) < 3000
    predictor = learner.predictors(data.splits()["train"], None)["regression"]
    assert predictor.losses(labels).mean() == pytest.approx(1.0)


def test_invalid_standardization_is_refused(tmp_path):
    with pytest.raises(UserError, match="all training rows have the value 3") as raised:
        data_of(tmp_path, [3.0], standardize="train")
    assert "omit task.standardize=" in str(raised.value.hint)
    with pytest.raises(ValueError, match="the standard deviation, the second number, must be above 0"):
        task_config("regression", standardize=(1.0, 0.0))
    problem = task_config("regression", standardize="train", head="text_to_text").first_conflict(T5Config())
    assert problem.key == "task.standardize" and "has none" in problem.message


def test_dominating_mixture_member_warns(tmp_path):
    (tmp_path / "mood").mkdir()
    mood = data_of(tmp_path / "mood", ["good", "bad"], "classification", text=["text"])

    def warnings(values, **fields):
        member = data_of(tmp_path, values, **fields)
        members = {"classification": mood, "regression": member}
        config = MixtureTaskConfig(members=tuple({"kind": name, "name": name} for name in members))
        return with_members(config, members).metadata.get("warnings", [])

    (warning,) = warnings([1.0, 3.0])
    assert "the loss of regression" in warning and "starts at 5.0" in warning
    assert "task.with.regression.standardize=train" in warning
    assert warnings([0.2, 0.6]) == warnings([1.0, 3.0], standardize="train") == []
    assert warnings([1.0, 3.0], head="text_to_text") == []
