"""Signals outside of training: the exit status shows the signal, the lock is released, and the same command
continues."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmtool.cli import main as cli
from lmtool.data import store, vocabulary
from lmtool.distillation.store.outputs import TermWriter
from lmtool.reporting.run_files import read_run
from lmtool.runs import locks
from lmtool.runs.run_folder import RunFolder
from lmtool.session import open_run, screens
from lmtool.session.companions import PredictionsFile
from lmtool.system.signals import pop_late_signals
from tests.commands.conftest import TINY, finetune, pretrain

NUMBERS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGUSR1: 75, signal.SIGUSR2: 75}


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Sets default signal handlers, and checks that the command restores them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    yield
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in NUMBERS)
    for number, handler in before.items():
        signal.signal(number, handler)
    pop_late_signals()


def send_signals(
    patch: pytest.MonkeyPatch, owner: Any, name: str, *numbers: signal.Signals, call: int = 1
) -> list[int]:
    """Makes a function send signals to this process on the given call; returns the list of calls."""
    real: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def sending(*arguments: Any, **named: Any) -> Any:
        calls.append(len(calls) + 1)
        for number in numbers if len(calls) == call else ():
            os.kill(os.getpid(), number)
        return real(*arguments, **named)

    patch.setattr(owner, name, sending)
    return calls


def is_stop_message(error: str, number: signal.Signals, run: Path) -> bool:
    """Whether the error output consists of the stop message and its hint."""
    return error.splitlines() == [
        f"error: stopped by {number.name} while the run was prepared", f"hint: lmtool resume {run}"
    ]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_signal_during_tokenization_stops_run(
    place: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        send_signals(patch, store.StoreDraft, "_add", number)
        run = pretrain("a", "max_steps=2", status=NUMBERS[number])
    assert is_stop_message(capsys.readouterr().err, number, run)
    assert not (run / "LOCK").exists() and (run / "config.yaml").exists() and not (run / "checkpoints").exists()
    assert not [path for path in Path("cache/stores").iterdir() if path.name.startswith(".tmp-")]
    assert cli.main(["resume", str(run)]) == 0 and (run / "result.json").exists()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (locks, "_open"), (locks.fcntl, "flock"), (locks.os, "ftruncate"), (locks.os, "pwrite"),
        (RunFolder, "_save_or_check_config"), (RunFolder, "__init__"), (RunFolder, "__enter__"),
    ],
)  # fmt: skip
def test_signal_while_the_folder_is_opened_leaves_no_lock(
    place: Path, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = getattr(owner, name), list[int]()

    def then_sending(*arguments: Any) -> Any:
        result = real(*arguments)
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, then_sending)
        run = pretrain("a", "max_steps=2", status=143)
    assert calls and "error: stopped by SIGTERM while the run was prepared" in capsys.readouterr().err
    assert not (run / "LOCK").exists()
    assert (run / "config.yaml").exists() == (owner is RunFolder) and run.exists() == (owner is RunFolder)


def test_signal_during_vocabulary_training_stops_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizers library calls back for text and passes on exceptions."""
    parts = vocabulary.documents

    def sending(*arguments: Any) -> Iterator[str]:
        for part in parts(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            yield part

    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "documents", sending)
        run = pretrain("a", "max_steps=2", status=143)
    assert is_stop_message(capsys.readouterr().err, signal.SIGTERM, run) and not (run / "LOCK").exists()
    pretrain("a", "max_steps=2")


def test_signal_before_run_folder_leaves_none(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a run folder there is nothing to resume."""
    send_signals(monkeypatch, open_run, "RunFolder", signal.SIGTERM)
    run = pretrain("a", "max_steps=2", status=143)
    assert capsys.readouterr().err == "error: stopped by SIGTERM while the run was prepared\n" and not run.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_during_teacher_storage_stops_run(
    place: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint=none", "model=bert_tiny", *TINY, "max_steps=2", "max_epochs=null"]
    teacher = finetune("teacher", *words)
    words += ["distill=soft", f"distill.teacher={teacher}", "distill.store=true"]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        send_signals(patch, TermWriter, "add", number)
        run = finetune("a", *words, status=NUMBERS[number])
    assert is_stop_message(capsys.readouterr().err, number, run) and not (run / "LOCK").exists()
    assert not [path for path in Path("cache/teachers").iterdir() if path.is_dir()]
    finetune("a", *words)


@pytest.mark.parametrize(("numbers", "status"), [((signal.SIGTERM,), 0), ((signal.SIGUSR1, signal.SIGINT), 130)])
def test_signal_after_last_step_is_reported_as_late(
    place: Path, numbers: tuple[signal.Signals, ...], status: int, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """A late signal is reported; a second one ends the run, which writes its results when it is resumed."""
    with monkeypatch.context() as patch:
        send_signals(patch, PredictionsFile, "after", *numbers)
        run = pretrain("a", "max_steps=2", status=status)
    lines = capfd.readouterr().err.splitlines()
    came = (
        f"{numbers[0].name} came after the last step, too late to stop: the run has finished and is writing its results"
    )
    assert lines[0] == f"warning: {came}" and f" {came}\n" in (run / "log.txt").read_text()
    assert (run / "result.json").exists() == (status == 0) and not (run / "LOCK").exists()
    assert lines[1:] == [] if status == 0 else lines[1].startswith("error: stopped at once by a second SIGINT")
    assert cli.main(["resume", str(run)]) == 0 and json.loads((run / "result.json").read_text())["status"] == "done"


def test_signal_in_last_step_is_reported_as_late(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    from lmtool.training import loop

    send_signals(monkeypatch, loop, "apply_gradients", signal.SIGUSR1, call=2)
    run = pretrain("a", "max_steps=2")
    assert "warning: SIGUSR1 came after the last step, too late to stop" in capfd.readouterr().err
    assert (run / "result.json").exists()


def test_signal_stops_command_without_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pretrain("a", "max_steps=2")
    capsys.readouterr()
    send_signals(monkeypatch, cli, "run", signal.SIGTERM)
    assert cli.main(["evaluate", f"checkpoint={run}", "cache_dir=cache"]) == 143
    assert capsys.readouterr().err == "error: stopped by SIGTERM\n"


@pytest.mark.parametrize(
    ("owner", "name", "status"),
    [(store.StoreDraft, "_add", 143), (PredictionsFile, "after", 143)],
)
def test_signal_ends_sweep_after_its_job(
    place: Path, owner: Any, name: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No further job starts, even if the signal came at the end of a job; the same command continues the sweep."""
    words = ["pretrain", "model=bert_tiny", *TINY, "data=text", "data.path=text.txt", "cache_dir=cache", "max_steps=2"]
    words += ["-m", "seed=1,2", "name=s"]
    with monkeypatch.context() as patch:
        send_signals(patch, owner, name, signal.SIGTERM)
        assert cli.main(words) == status
    finished = name == "after"
    jobs = {path.parent.name: json.loads(path.read_text()) for path in Path("runs/s").glob("*/job.json")}
    assert {name: job["exit_status"] for name, job in jobs.items()} == {"0_seed-1": 0 if finished else 143}
    assert not [*Path("runs/s").rglob("LOCK")]
    assert cli.main(words) == 0 and len([*Path("runs/s").glob("*/result.json")]) == 2


def _delete(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _truncate(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[2:]))


ROWS = ["max_steps=6", "log_every=1", "evaluate_every=2", "checkpoint_every=2"]


def test_stopped_run_has_a_report(
    reports: None, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    send_signals(monkeypatch, screens.LiveReport, "on_evaluation", signal.SIGTERM)
    run = pretrain("a", "max_steps=6", "evaluate_every=3", status=143)
    page = (run / "report.html").read_text()
    assert "Stopped after step 3 of a run that ends at max_steps=6: stopped by SIGTERM" in page
    pretrain("a", "max_steps=6", "evaluate_every=3")
    assert "Stopped after" not in (run / "report.html").read_text()


def test_reports_of_a_training_run_take_little_time_and_never_fail_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, times, lines = [0.0], list[float](), list[str]()

    def write(run: Path, **state: Any) -> Path:
        times.append(now[0])
        now[0] += 10
        raise OSError("the disk is full")

    monkeypatch.setattr(screens, "write_report", write)
    folder = SimpleNamespace(writes=True, path=Path("run"), log=lines.append)
    live_report = screens.LiveReport(SimpleNamespace(folder=folder), clock=lambda: now[0])  # type: ignore[arg-type]
    for _ in range(110):
        now[0] += 10
        live_report.on_evaluation({})
    assert times == [50, 560, 1070], "at most 2% of the time after the first report"
    assert lines == ["report.html was not written: OSError: the disk is full"] * 3
    folder.writes = False  # another process of the run writes the report
    now[0] += 1000
    live_report.on_evaluation({})
    assert len(times) == 3


@pytest.mark.parametrize(
    ("damage", "lacks"),
    [
        (_delete, "4 of 4 train rows and 2 of 2 validation rows"),
        (_empty, "4 of 4 train rows and 2 of 2 validation rows"),
        (_truncate, "2 of 4 train rows"),
        (None, None),
    ],
)
def test_missing_rows_are_reported_on_resume(
    place: Path, damage: Any, lacks: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first resumed run reports the missing rows; later ones do not."""
    from lmtool.training import loop

    with monkeypatch.context() as patch:
        send_signals(patch, loop, "apply_gradients", signal.SIGTERM, call=4)
        run = pretrain("a", *ROWS, status=143)
    if damage is not None:
        damage(run / "metrics.jsonl")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        send_signals(patch, loop, "apply_gradients", signal.SIGTERM, call=1)
        pretrain("a", *ROWS, status=143)
    shown = capsys.readouterr().out
    warning = f"warning: runs/a/metrics.jsonl lacks {lacks} up to step 4: it was deleted or changed"
    assert (warning in shown) == (lacks is not None) and (warning in (run / "log.txt").read_text()) == bool(lacks)
    pretrain("a", *ROWS)
    assert "metrics.jsonl lacks" not in capsys.readouterr().out


def test_rows_deleted_during_run_are_reported_at_end(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmtool.training import loop

    real, calls = loop.apply_gradients, []

    def deleting(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            Path("runs/a/metrics.jsonl").unlink()
        return real(*arguments)

    monkeypatch.setattr(loop, "apply_gradients", deleting)
    run = pretrain("a", *ROWS)
    warning = "warning: runs/a/metrics.jsonl lacks 3 of 6 train rows and 1 of 3 validation rows up to step 6"
    assert warning in capsys.readouterr().out
    assert "no rows of training before step 4" in "".join(read_run(run).problems)
