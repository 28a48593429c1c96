"""`task=FILE` expands to full overrides before the configuration is composed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.errors import UserError
from lmtool.resolver.shorthands import CommandLine, expand_arguments


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"a long review number {number},{'good' if number % 2 else 'bad'}\n" for number in range(20))
    Path("reviews.csv").write_text("review,mood\n" + rows)
    return "reviews.csv"


def test_task_file_is_expanded_and_printed(reviews: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["finetune", f"task={reviews}", "model=bert_tiny", "checkpoint=none", "--cfg", "job"]) == 0
    shown = capsys.readouterr()
    form = "task=custom task.kind=classification task.path=reviews.csv 'task.text=[review]' task.label=mood"
    assert f"task=reviews.csv is read as: {form}" in shown.err and "label: mood" in shown.out


def words_of(verb: str, words: list[str]) -> list[str]:
    return list(expand_arguments(CommandLine(verb, tuple(words))).words)


def test_task_file_keeps_other_overrides(reviews: str) -> None:
    assert words_of("finetune", ["task=sst2", "seed=1"]) == ["task=sst2", "seed=1"]
    typed = words_of("finetune", ["seed=1", f"task={reviews}", "task.label=mood", "task.name=mine"])
    assert typed == [
        "seed=1", "task=custom", "task.kind=classification", "task.path=reviews.csv", "task.text=[review]",
        "task.label=mood", "task.name=mine",
    ]  # fmt: skip
    assert words_of("evaluate", [f"task={reviews}"]) == ["task.path=reviews.csv"]
    with pytest.raises(UserError, match="both set task.path"):
        words_of("finetune", [f"task={reviews}", "task.path=x"])


def test_files_of_a_sweep_need_the_same_columns(reviews: str) -> None:
    content = Path(reviews).read_text()
    Path("others.csv").write_text(content.replace("long", "short"))
    Path("notes.csv").write_text(content.replace("mood", "tone"))
    assert words_of("finetune", [f"task={reviews},others.csv"]) == [
        "task=custom", "task.kind=classification", "task.path=reviews.csv,others.csv", "task.text=[review]",
        "task.label=mood",
    ]  # fmt: skip
    with pytest.raises(UserError, match="the files have different columns") as caught:
        words_of("finetune", [f"task={reviews},notes.csv"])
    assert caught.value.hint


def test_sweep_over_names_and_files_is_refused(reviews: str) -> None:
    assert words_of("finetune", ["task=sst2,rte"]) == ["task=sst2,rte"]
    with pytest.raises(UserError, match="either names or files") as caught:
        words_of("finetune", [f"task={reviews},sst2"])
    assert caught.value.hint
