"""Shorthands on the command line expand to full overrides, and expanding twice changes nothing."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.config.base import CommandConfig
from lmtool.errors import UserError
from lmtool.resolver.shorthands import (
    CommandLine,
    expand_arguments,
    expand_sections,
)
from lmtool.resolver.verbs import command_classes


@pytest.mark.parametrize(
    ("verb", "words", "full"),
    [
        ("predict", ["runs/a", "some words"], ["checkpoint=runs/a", "text=some words"]),
        ("probe", ["runs/a", "target=sst2"], ["checkpoint=runs/a", "target=task", "task=sst2"]),
        ("probe", ["target=next"], ["target=next"]),
        ("pretrain", ["data=task:sst2", "seed=1"], ["data=task", "data.task.name=sst2", "seed=1"]),
        ("pretrain", ["objective.task=sst2"], ["objective.task.name=sst2"]),
        ("finetune", ["task=sst2", "task.domain=dann"], ["task=sst2", "task.domain.name=dann"]),
        ("pretrain", ["data.members.wiki.weight=2"], ["data.with.wiki.weight=2"]),
        ("pretrain", ["bert_tiny"], ["bert_tiny"]),
    ],
)
def test_shorthands_expand_once(verb: str, words: list[str], full: list[str]) -> None:
    line = expand_arguments(CommandLine(verb, tuple(words)))
    assert list(line.words) == full and expand_arguments(line) == line


def test_task_file_expands_after_other_shorthands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("text,label\n" + "".join(f"some text {n},{n % 2}\n" for n in range(8)))
    full = ("task=custom", "task.kind=classification", "task.path=mine.csv")
    assert expand_arguments(CommandLine("check", ("mine.csv",))).words[:3] == full
    assert expand_arguments(CommandLine("probe", ("target=mine.csv",))).words[:4] == ("target=task", *full)
    assert expand_arguments(CommandLine("predict", ("task=mine.csv",))).words == ("task=mine.csv",)


def test_each_command_has_its_class() -> None:
    assert all(issubclass(command, CommandConfig) for command in command_classes().values())


def test_checkpoint_none_needs_exactly_one_other_checkpoint() -> None:
    line = CommandLine("finetune", ("checkpoint=runs/a,runs/b,none",))
    with pytest.raises(UserError, match="in the model of the other checkpoint, but there are 2 others"):
        expand_sections({"checkpoint": "none"}, line)
    assert expand_sections({"checkpoint": "runs/a"}, CommandLine("finetune", ("checkpoint=runs/a",))) == {
        "checkpoint": "runs/a"
    }


def test_latest_run_is_replaced_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/first").mkdir(parents=True)
    Path("runs/latest").symlink_to("first")
    data = {"checkpoint": "runs/latest", "name": "latest", "distill": {"teachers": ["runs/latest/checkpoints"]}}
    assert expand_sections(data, CommandLine("pretrain", ())) == {
        "checkpoint": "runs/first", "name": "latest", "distill": {"teachers": ["runs/first/checkpoints"]},
    }  # fmt: skip
    assert expand_sections(data, CommandLine("evaluate", ())) == data


def test_refused_command_reenables_garbage_collection(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "model=brt"]) == 2 and gc.isenabled()
