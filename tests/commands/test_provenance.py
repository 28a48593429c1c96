"""A run resumes on unchanged data only; otherwise the message names the change."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from lmtool.cli import main as cli
from lmtool.runs.finding import find, read_state
from lmtool.system.terminal import counted
from tests.commands.conftest import TINY, finetune, pretrain, skip_reports, work_in_copy, write_rows, write_text

MIXTURE = "objective.members=[mlm,{name: task, task: {kind: classification, name: mood, path: rows, text: [sentence]}}]"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with runs on text, on rows and on both, with checkpoints but without results."""
    folder = tmp_path_factory.mktemp("stopped")
    write_text(folder / "text.txt")
    write_text(folder / "held_out.txt")
    (folder / "held_out.txt").write_text((folder / "held_out.txt").read_text().replace("cat", "ox")[:4000])
    write_rows(folder / "rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        skip_reports(patch)
        pretrain("text", "objective=mlm", "max_steps=1", "data.validation=held_out.txt")
        finetune("rows", "checkpoint=runs/text", "max_steps=1")
        pretrain("both", "objective=mixture", MIXTURE, "max_steps=1")
        for run in [*Path("runs").glob("[!l]*/result.json")]:  # not through runs/latest
            run.unlink()
    yield folder


@pytest.fixture
def place(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, for changes to its data."""
    return work_in_copy(stopped, tmp_path, monkeypatch)


def replace_text(name: str, old: str, new: str, count: int = 1) -> Callable[[], None]:
    def change() -> None:
        path = Path(name)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, count))

    return change


def append_text(name: str, text: str) -> Callable[[], None]:
    def change() -> None:
        with Path(name).open("a") as file:
            file.write(text)

    return change


def swap_labels() -> None:
    lines = Path("rows/train.tsv").read_text().splitlines()
    other = {"0": "1", "1": "0"}
    rows = [f"{line[:-1]}{other[line[-1]]}" for line in lines[1:]]
    Path("rows/train.tsv").write_text("\n".join([lines[0], *rows]) + "\n")


@pytest.mark.parametrize(
    ("run", "change", "named"),
    [
        ("text", replace_text("text.txt", "cat", "dog"), "data=text: other text"),
        ("text", replace_text("held_out.txt", "dog", "fox"), "data=text: other text"),
        ("text", append_text("text.txt", "\n\nOne more paragraph."), "documents 120 -> 121"),
        ("rows", replace_text("rows/train.tsv", "cat", "dog"), "task=sst2: other train texts"),
        ("rows", swap_labels, "task=sst2: other train labels"),
        (
            "rows",
            append_text("rows/train.tsv", "A kind road.\t1\n"),
            "task=sst2: train rows 96 -> 97, other train texts",
        ),
        ("rows", replace_text("rows/dev.tsv", "\t0\n", "\t1\n"), "task=sst2: other dev labels"),
        (
            "rows",
            lambda: Path("rows/dev.tsv").unlink(),
            "now held out: 10 of 96 training rows, as there is no development split",
        ),
        ("both", replace_text("text.txt", "cat", "dog"), "data=text: other text"),
        ("both", swap_labels, "task=mood: other train labels"),
    ],
)
def test_resume_on_changed_data_is_refused(
    place: Path, run: str, change: Callable[[], None], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change()
    files = {path: path.read_bytes() for path in Path("runs", run, "checkpoints").rglob("*") if path.is_file()}
    assert cli.main(["resume", f"runs/{run}"]) == 2
    error = capsys.readouterr().err
    assert f"error: the data of runs/{run} changed after step_00000001: " in error and named in error
    assert f"name=NEW checkpoint=runs/{run}" in error and "Traceback" not in error
    assert all(path.read_bytes() == content for path, content in files.items())
    assert not Path("runs", run, "result.json").exists()


def test_resume_with_changed_config_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("runs/text/config.yaml")
    before = path.read_text()
    replace_text(str(path), "max_length: 32", "max_length: 31")()
    assert cli.main(["resume", "runs/text"]) == 2
    error = capsys.readouterr().err
    assert "step_00000001 holds a run of another configuration: max_length 32 -> 31" in error
    assert "restore runs/text/config.yaml" in error
    path.unlink()
    pretrain("text", "objective=mlm", "max_steps=1", "data.validation=held_out.txt", "seed=5", status=2)
    error = capsys.readouterr().err
    assert "runs/text is not empty and not a run of lmtool: it has checkpoints, but no config.yaml" in error
    assert "or restore runs/text/config.yaml" in error and not path.exists()
    path.write_text(before)
    assert cli.main(["resume", "runs/text"]) == 0


def test_new_run_from_checkpoint_accepts_changed_data(place: Path) -> None:
    replace_text("rows/train.tsv", "cat", "dog")()
    finetune("rows", "checkpoint=runs/text", "max_steps=1", status=2)
    finetune("new", "checkpoint=runs/rows", "max_steps=1")
    replace_text("text.txt", "cat", "dog")()
    pretrain("new_text", "objective=mlm", "max_steps=1", "checkpoint=runs/text")


def test_rewritten_identical_data_resumes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("text.txt", "rows/train.tsv"):
        path = Path(name)
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, (1, 1))
    for run in ("text", "rows", "both"):
        assert cli.main(["resume", f"runs/{run}"]) == 0
        assert "threads" not in capsys.readouterr().out
        assert json.loads(Path("runs", run, "result.json").read_text())["status"] == "done"


def test_resume_does_not_need_start_checkpoint(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's own checkpoint is complete; a run without one names the missing start."""
    assert cli.main(["resume", "runs/rows"]) == 0
    weights = Path("runs/rows/checkpoints/step_00000001/model.safetensors").read_bytes()
    Path("runs/rows/result.json").unlink()
    shutil.rmtree("runs/text")
    assert cli.main(["resume", "runs/rows"]) == 0
    assert Path("runs/rows/checkpoints/step_00000001/model.safetensors").read_bytes() == weights
    assert json.loads(Path("runs/rows/result.json").read_text())["status"] == "done"
    Path("runs/rows/result.json").unlink()
    shutil.rmtree("runs/rows/checkpoints")
    capsys.readouterr()
    assert cli.main(["resume", "runs/rows"]) == 2
    assert "error: checkpoint=runs/text: no such folder" in capsys.readouterr().err


def test_changed_thread_count_is_reported(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    assert read_state(find("runs/text"))["threads"] == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: before + 1)
    assert cli.main(["resume", "runs/text"]) == 0
    screen = capsys.readouterr().out
    assert (
        f"warning: the run used {counted(before, 'thread')} before and uses {before + 1} now" in screen
        and f"OMP_NUM_THREADS={before} " in screen
    )


def test_latest_in_config_is_saved_as_run_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`runs/latest` changes when a run starts, so the configuration saves the run that it named before."""
    finetune("first", "model=bert_tiny", *TINY, "checkpoint=none", "max_steps=1")
    words = ["checkpoint=runs/latest", "distill=soft", "distill.teacher=runs/latest/checkpoints/last", "max_steps=1"]
    run = finetune("second", *words)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["checkpoint"] == "runs/first" and saved["distill"]["teacher"] == "runs/first/checkpoints/last"
    assert Path("runs/latest").readlink() == Path("second")
    capsys.readouterr()
    finetune("second", *words)  # the same command is the same run
    assert "runs/second is finished" in capsys.readouterr().out
    finetune("third", "checkpoint=runs/first", "max_steps=1")
    finetune("second", *words, status=2)
    assert 'checkpoint "runs/first" -> "runs/third"' in " ".join(capsys.readouterr().err.split())
