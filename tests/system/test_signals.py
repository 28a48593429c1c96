"""Signals: a run saves a checkpoint, exits with the right status, and resumes to the same weights."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtool.errors import Stopped, UserError
from lmtool.runs import checkpoints
from lmtool.runs.finding import find
from lmtool.system.signals import Interrupted, Interrupts, Signals
from lmtool.training import keeper
from lmtool.training.loop import train
from tests.training.fakes import FakeLearner, FakeLoader, evaluator, open_run, settings

STATUSES = {
    signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGUSR1: 75, signal.SIGUSR2: 75,
}  # fmt: skip


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Handle all signals: lmtool leaves ignored signals ignored, as under nohup or in a background job."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STATUSES}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Signalled(FakeLearner):
    """Receives a signal in the middle of a step."""

    def __init__(self, number: signal.Signals, step: int):
        super().__init__()
        self.number, self.at = number, step

    def on_step(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.number)


def run_training(path: Path, learner: FakeLearner) -> Any:
    with open_run(path) as run:
        return train(learner, FakeLoader(), evaluator(learner), run, settings(max_steps=8))


@pytest.mark.parametrize("number", STATUSES)
def test_signal_saves_checkpoint_and_run_resumes(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught:
        run_training(tmp_path / "run", Signalled(number, 3))
    assert caught.value.exit_status == STATUSES[number] and number.name in caught.value.message
    assert caught.value.hint is not None and "lmtool resume" in caught.value.hint
    assert find(tmp_path / "run").name == "step_00000003"
    assert signal.getsignal(number) is before and not (tmp_path / "run/LOCK").exists()
    again, whole = FakeLearner(), FakeLearner()
    run_training(tmp_path / "run", again)
    run_training(tmp_path / "whole", whole)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))


def test_second_signal_stops_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(keeper.disk, "write_checkpoint", slow)
    with pytest.raises(Stopped, match="at once") as caught:
        run_training(tmp_path / "run", Signalled(signal.SIGINT, 3))
    assert caught.value.exit_status == 143
    assert not (tmp_path / "run/LOCK").exists()


def test_second_signal_leaves_no_partial_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoints.write_manifest

    def write(folder: Path, step: int) -> None:
        real(folder, step)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(checkpoints, "write_manifest", write)
    with pytest.raises(Stopped, match="at once"):
        run_training(tmp_path / "run", Signalled(signal.SIGINT, 3))
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


class Finalized:
    """Receives a signal in a finalizer, where Python drops exceptions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):  # the handler runs between two instructions
            pass


def test_signal_dropped_by_finalizer_is_raised_again() -> None:
    hook = sys.unraisablehook
    with pytest.raises(Interrupted) as caught, Interrupts():
        Finalized()
        time.sleep(5)
    assert caught.value.signal is signal.SIGTERM and sys.unraisablehook is hook
    with pytest.raises(Interrupted), Interrupts():  # the inner context ends first
        with Interrupts():
            Finalized()
        raise AssertionError("not interrupted")
    with Interrupts():  # no signal after the last context
        Finalized()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_library_error_caused_by_signal_is_an_interrupt() -> None:
    with pytest.raises(Interrupted) as caught, Interrupts():
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        except KeyboardInterrupt as interrupt:
            raise ValueError("no value") from interrupt
    assert caught.value.signal is signal.SIGUSR1
    with pytest.raises(UserError), Interrupts():  # an error of lmtool is not replaced
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        except KeyboardInterrupt:
            raise UserError("no such file") from None
    with pytest.raises(ValueError), Signals("lmtool resume runs/x"):
        os.kill(os.getpid(), signal.SIGUSR1)
        raise ValueError("a bug in a step")


def test_third_signal_ends_process() -> None:
    child = os.fork()
    if child == 0:
        try:
            with Signals("lmtool resume runs/x"):
                os.kill(os.getpid(), signal.SIGTERM)  # requests a stop
                try:
                    os.kill(os.getpid(), signal.SIGTERM)  # raises Stopped
                except Stopped:
                    os.kill(os.getpid(), signal.SIGTERM)  # ends the process
        finally:
            os._exit(1)  # the process did not end
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == STATUSES[signal.SIGTERM]


def test_ignored_signals_and_threads_keep_handlers() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals("lmtool resume runs/x") as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    seen: list[Any] = []

    def enter() -> None:
        with Signals("lmtool resume runs/x"):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
