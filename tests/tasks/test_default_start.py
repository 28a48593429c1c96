"""The default checkpoint of finetuning without checkpoint= and model=."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.config import compose, groups
from lmtool.config.registry import Choice
from lmtool.models.configs import ModelConfig
from lmtool.resolver.shorthands import with_published_weights, with_sections
from lmtool.tasks.configs.base import TaskConfig

# Minimal pairs are scored without training.
TASKS = [name for name in groups.options("task") if name not in ("mixture", "custom", "blimp", "minimal_pairs")]
DEFAULTS = {"hf://google-bert/bert-base-uncased": "bert", "hf://google-t5/t5-base": "t5"}


@pytest.mark.parametrize("name", TASKS)
def test_default_checkpoint_suits_every_task(name: str) -> None:
    task = Choice("task", key="kind").validate(compose.option("task", name))
    assert isinstance(task, TaskConfig)
    model = Choice("model").validate({"name": DEFAULTS[task.default_checkpoint]})
    assert isinstance(model, ModelConfig)
    for member in task.member_configs():
        assert member.first_conflict(model) is None


@pytest.mark.parametrize(
    ("members", "head", "start"),
    [(["sst2", "stsb"], None, "bert"), (["sst2", "stsb"], "text_to_text", "t5"), (["sst2", "samsum"], None, "t5")],
)
def test_default_checkpoint_of_mixture_suits_all_members(members: list[str], head: str | None, start: str) -> None:
    section = with_sections({"task": {"kind": "mixture", "members": members, "head": head}})["task"]
    task = Choice("task", key="kind").validate(section)
    assert isinstance(task, TaskConfig) and DEFAULTS[task.default_checkpoint] == start


@pytest.mark.parametrize(
    "typed", [{"checkpoint": "none"}, {"checkpoint": "runs/a"}, {"model": {"name": "bert"}}, {"task": None}]
)
def test_typed_start_is_kept(typed: dict[str, object]) -> None:
    data = {"checkpoint": None, "model": {"name": "auto"}, "task": compose.option("task", "sst2")} | typed
    assert with_published_weights(data) == data


def test_offline_error_suggests_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert cli.main(["finetune", "task=sst2", "offline=true", "cache_dir=cache"]) == 2
    error = capsys.readouterr().err
    assert "`lmtool runs`" in error and "checkpoint=none model=bert_tiny" in error and error.count("error: ") == 2
    assert not list(tmp_path.iterdir())
