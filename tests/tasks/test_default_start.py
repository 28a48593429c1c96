"""What finetuning starts from if neither checkpoint= nor model= is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.config import compose, groups
from lmtool.config.registry import Choice
from lmtool.models.configs import ModelConfig
from lmtool.resolver.shorthands import CommandLine, with_published_weights, with_sections
from lmtool.tasks.configs.base import TaskConfig
from tests.commands.conftest import pretrain, skip_reports, write_text

TASKS = [name for name in groups.options("task") if name not in ("mixture", "custom")]
DEFAULTS = {"hf://google-bert/bert-base-uncased": "bert", "hf://google-t5/t5-base": "t5"}


@pytest.mark.parametrize("name", TASKS)
def test_the_default_model_can_learn_every_task(name: str) -> None:
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
def test_a_mixture_starts_from_what_all_its_members_can_use(members: list[str], head: str | None, start: str) -> None:
    section = with_sections({"task": {"kind": "mixture", "members": members, "head": head}})["task"]
    task = Choice("task", key="kind").validate(section)
    assert isinstance(task, TaskConfig) and DEFAULTS[task.default_checkpoint] == start


@pytest.mark.parametrize(
    "typed", [{"checkpoint": "none"}, {"checkpoint": "runs/a"}, {"model": {"name": "bert"}}, {"task": None}]
)
def test_what_is_typed_stays(typed: dict[str, object]) -> None:
    data = {"checkpoint": None, "model": {"name": "auto"}, "task": compose.option("task", "sst2")} | typed
    assert with_published_weights(data, CommandLine("finetune", ())) == data


def test_without_a_network_a_finished_run_that_fits_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    skip_reports(monkeypatch)
    write_text(tmp_path / "text.txt")
    pretrain("words", "max_steps=1")
    capsys.readouterr()
    for task, hint in (("sst2", "checkpoint=runs/words"), ("samsum", "checkpoint=none model=t5_tiny")):
        assert cli.main(["finetune", f"task={task}", "offline=true", "cache_dir=cache"]) == 2
        error = capsys.readouterr().err
        assert hint in error and error.count("error: ") == 2 and ("runs/words" in error) == (task == "sst2")
    assert [path.name for path in (tmp_path / "runs").iterdir() if not path.is_symlink()] == ["words"]
