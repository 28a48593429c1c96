"""What the processes of a run say when they end: each error once, and nothing of what only follows from another."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from lmtool.system import ranks
from lmtool.system.ranks import PID, RankExit, RankExits, RankInfo


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """Two processes of a machine; neither waits long."""
    monkeypatch.setattr(ranks, "JOINT_SECONDS", 0.2)
    monkeypatch.setattr(ranks, "CAUSE_SECONDS", 0.2)
    for number in ("0", "1"):
        (tmp_path / number).mkdir()
        (tmp_path / number / PID).write_text(str(os.getpid()))
    return [RankExits(tmp_path, RankInfo(rank, 2, rank, 2)) for rank in (0, 1)]


def test_the_same_error_is_printed_once(ends):
    assert ends[0].record_error(2, ("no data", "use some")) == ""
    assert ends[1].record_error(2, ("no data", "use some")) is None
    assert {number: end.exit_status for number, end in ends[1].read().items()} == {0: 2, 1: 2}


def test_rank_0_may_say_more(ends):
    ends[0].record_error(4, ("the loss exploded; its batch is saved", "a lower rate"))
    assert ends[1].record_error(4, ("the loss exploded", "a lower rate")) is None


def test_another_error_has_its_rank_before_it(ends):
    assert ends[1].record_error(2, ("no room",)) == "rank 1: "
    assert ends[0].record_error(2, ("no data",)) == ""


def test_what_follows_from_another_end_is_not_printed(ends):
    ends[1].write(RankExit(1, 2, ("no room",), at=2.0))
    assert ends[0].record_exception(1, ("RuntimeError: Connection closed by peer",)) is None


def test_a_rank_that_the_launcher_ends_after_a_failure_prints_nothing(ends):
    ends[0].record_exception(1, ("RuntimeError: timed out",))
    assert ends[1].record_error(143, ("stopped by SIGTERM",)) is None
    assert [ends[0].read()[number].reported for number in (0, 1)] == [True, False]


def test_a_signal_to_one_rank_is_printed_if_no_other_has_reported_a_failure(ends):
    ends[0].write(RankExit(0, 1, ("RuntimeError: Connection closed by peer",), False, False, at=2.0))
    assert ends[1].record_error(143, ("stopped by SIGTERM",)) == "rank 1: "


def test_a_rank_whose_launcher_has_ended_neither_waits_nor_prints(tmp_path):
    """The launcher printed why it ended, and removed the folder of the ranks."""
    started = time.monotonic()
    for rank in (0, 1):
        assert RankExits(tmp_path / "removed", RankInfo(rank, 2, rank, 2)).record_error(143, ("stopped",)) is None
    assert time.monotonic() - started < ranks.JOINT_SECONDS / 2


def test_a_rank_that_starts_after_its_launcher_ended_ends_too(tmp_path):
    """Linux tells a process only of the end of a parent that still runs when it asks."""
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    group = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    environment = {name: str(value) for name, value in group.items()} | {ranks.LAUNCHER: ended.stdout.decode().strip()}
    words = [sys.executable, "-m", "lmtool", "pretrain", "model=bert_tiny", "data=text", "data.path=text.txt"]
    done = subprocess.run(
        words, env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 143 and "stopped by SIGTERM" in done.stderr


def test_of_two_bugs_the_first_is_printed(ends):
    assert ends[1].record_exception(1, ("KeyError: 'x'",)) == "rank 1: "
    assert ends[0].record_exception(1, ("KeyError: 'x'",)) is None
    assert [ends[0].read()[number].reported for number in (0, 1)] == [False, True]


def test_a_killed_process_is_left_to_the_launcher(ends):
    """So is what another says of its lost connection; one that hangs is named by those who waited."""
    assert not ends[0].any_killed() and ends[0].running_ranks() == [0, 1]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    (ends[0].folder / "1" / PID).write_text(str(ended.pid))
    ended.wait()
    assert ends[0].any_killed()
    assert ends[0].record_exception(1, ("RuntimeError: Connection closed by peer",)) is None
    assert ends[0].running_ranks() == [1]


def test_one_process_and_no_files(tmp_path):
    alone = RankExits(None, RankInfo())
    assert alone.record_error(2, ("no data",)) == "" and alone.record_exception(1, ("KeyError",)) == ""
    without = RankExits(None, RankInfo(1, 2, 1, 2))
    assert without.record_error(2, ("no data",)) == "rank 1: " and without.read() == {}
