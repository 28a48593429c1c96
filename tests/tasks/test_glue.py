"""GLUE as one task: member folders, scores, the average, and submission files."""

from __future__ import annotations

import pytest
from task_fixtures import glue, task_config

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.tasks.configs.mixture import GlueConfig
from lmtool.tasks.loading import load_task
from lmtool.tasks.mixture import folder_of, glue_average, score_of, submission


def test_glue_folders_are_found_by_name(tmp_path):
    for name in ("CoLA", "mnli_10k", "STS-B", "axb"):
        (tmp_path / name).mkdir()
    members = ("cola", "mnli", "stsb", "rte", "ax")
    names = [path and path.name for path in (folder_of(member, tmp_path) for member in members)]
    assert names == ["CoLA", "mnli_10k", "STS-B", None, None]
    (tmp_path / "mnli_full").mkdir()
    with pytest.raises(UserError, match="mnli_10k and mnli_full are both mnli"):
        folder_of("mnli", tmp_path)


def test_glue_scores_and_average():
    assert score_of("mrpc", {"f1": 0.8, "accuracy": 0.6, "loss": 1.0}) == pytest.approx(0.7)
    assert score_of("mnli", {"accuracy": 0.5, "dev_matched_accuracy": 0.5, "dev_mismatched_accuracy": 0.7}) == 0.6
    assert score_of("mnli", {"accuracy": 0.5}) == 0.5
    assert glue_average({"cola": 0.2, "sst2": 0.8, "wnli": 0.0}) == 0.5 and glue_average({"wnli": 1.0}) is None


def test_submission_files_have_leaderboard_format():
    assert submission("sst2", ("negative", "positive"), ["positive", "negative"]) == "index\tprediction\n0\t1\n1\t0\n"
    assert submission("rte", ("entailment", "not_entailment"), ["entailment"]).endswith("0\tentailment\n")
    assert submission("stsb", None, [5.7, -1.0, 2.34567]).split("\n")[1:4] == ["0\t5.000", "1\t0.000", "2\t2.346"]


def test_glue_suite_is_refused_as_single_task(tmp_path):
    with pytest.raises(UserError, match="9 tasks"):
        build(GlueConfig())
    with pytest.raises(UserError, match="one after the other"):
        load_task(GlueConfig(path=str(tmp_path)), 0, tmp_path, True)


def test_diagnostic_set_has_only_test_split(tmp_path):
    folder = glue("mnli", tmp_path / "mnli")
    (folder / "test_matched.tsv").rename(tmp_path / "diagnostic.tsv")
    config = task_config("ax", path=tmp_path)
    data = load_task(config, 0, tmp_path, True, scoring=True)
    assert len(data.test["test"]) == 3 and not data.validation
    with pytest.raises(UserError, match="no train file"):
        load_task(config, 0, tmp_path, True)
