"""Errors of several ranks: each is printed once, and consequences of another rank's failure are not printed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from lmtool.system import ranks
from lmtool.system.ranks import PID, RankExit, RankExits, RankInfo


@pytest.fixture
def exits(tmp_path, monkeypatch):
    """Two ranks on one machine, with short waits."""
    monkeypatch.setattr(ranks, "JOINT_SECONDS", 0.2)
    monkeypatch.setattr(ranks, "CAUSE_SECONDS", 0.2)
    for number in ("0", "1"):
        (tmp_path / number).mkdir()
        (tmp_path / number / PID).write_text(str(os.getpid()))
    return [RankExits(tmp_path, RankInfo(rank, 2, rank, 2)) for rank in (0, 1)]


def test_same_error_is_printed_once(exits):
    assert exits[0].record_error(2, ("no data", "use some")) == ""
    assert exits[1].record_error(2, ("no data", "use some")) is None
    assert {number: end.exit_status for number, end in exits[1].read().items()} == {0: 2, 1: 2}


def test_rank_0_prints_longer_message_of_same_error(exits):
    exits[0].record_error(4, ("the loss exploded; its batch is saved", "a lower rate"))
    assert exits[1].record_error(4, ("the loss exploded", "a lower rate")) is None


def test_different_error_has_rank_prefix(exits):
    assert exits[1].record_error(2, ("no room",)) == "rank 1: "
    assert exits[0].record_error(2, ("no data",)) == ""


def test_lost_connection_is_not_printed_after_earlier_error(exits):
    exits[1].write(RankExit(1, 2, ("no room",), at=2.0))
    assert exits[0].record_exception(1, ("RuntimeError: Connection closed by peer",)) is None


def test_sigterm_after_failure_is_not_printed(exits):
    exits[0].record_exception(1, ("RuntimeError: timed out",))
    assert exits[1].record_error(143, ("stopped by SIGTERM",)) is None
    assert [exits[0].read()[number].reported for number in (0, 1)] == [True, False]


def test_sigterm_without_reported_failure_is_printed(exits):
    exits[0].write(RankExit(0, 1, ("RuntimeError: Connection closed by peer",), False, False, at=2.0))
    assert exits[1].record_error(143, ("stopped by SIGTERM",)) == "rank 1: "


def test_rank_without_launcher_exits_silently(tmp_path):
    """The launcher printed the reason and removed the folder of the ranks."""
    started = time.monotonic()
    for rank in (0, 1):
        assert RankExits(tmp_path / "removed", RankInfo(rank, 2, rank, 2)).record_error(143, ("stopped",)) is None
    assert time.monotonic() - started < ranks.JOINT_SECONDS / 2


def test_rank_started_after_launcher_died_exits(tmp_path):
    """Linux signals the death of a parent only if the parent still runs at the time of the request."""
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    group = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    environment = {name: str(value) for name, value in group.items()} | {ranks.LAUNCHER: ended.stdout.decode().strip()}
    words = [sys.executable, "-m", "lmtool", "pretrain", "model=bert_tiny", "data=text", "data.path=text.txt"]
    done = subprocess.run(
        words, env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 143 and "stopped by SIGTERM" in done.stderr


def test_rank_that_records_its_exit_and_ends_was_not_killed(exits, monkeypatch):
    def ends(process: int) -> bool:
        if process == 1:
            exits[1].write(RankExit(1, 2, ("no room",), at=2.0))
        return process != 1

    (exits[0].folder / "1" / PID).write_text("1")
    monkeypatch.setattr(ranks, "_is_running", ends)
    assert not exits[0].any_killed()


def test_first_of_two_exceptions_is_printed(exits):
    assert exits[1].record_exception(1, ("KeyError: 'x'",)) == "rank 1: "
    assert exits[0].record_exception(1, ("KeyError: 'x'",)) is None
    assert [exits[0].read()[number].reported for number in (0, 1)] == [False, True]


def test_killed_rank_silences_lost_connections_and_sigterm(exits):
    """The launcher reports the killed rank, and ends the others by SIGTERM; these name a rank that hangs."""
    assert not exits[0].any_killed() and exits[0].running_ranks() == [0, 1]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    (exits[0].folder / "1" / PID).write_text(str(ended.pid))
    ended.wait()
    assert exits[0].any_killed()
    assert exits[0].record_exception(1, ("RuntimeError: Connection closed by peer",)) is None
    assert exits[0].record_error(143, ("stopped by SIGTERM",)) is None
    assert not exits[0].read()[0].reported
    assert exits[0].running_ranks() == [1]


def test_ranks_without_folder_print_every_error(tmp_path):
    alone = RankExits(None, RankInfo())
    assert alone.record_error(2, ("no data",)) == "" and alone.record_exception(1, ("KeyError",)) == ""
    without = RankExits(None, RankInfo(1, 2, 1, 2))
    assert without.record_error(2, ("no data",)) == "rank 1: " and without.read() == {}
