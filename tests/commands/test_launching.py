"""`devices=`: refusals before processes start, and comparisons between ranks when a run starts."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from lmtool.cli import main as cli
from lmtool.errors import UserError
from lmtool.runs.run_folder import FollowedFolder
from lmtool.training import launching
from lmtool.training.group import require_same
from tests.commands.conftest import TINY
from tests.learners.test_evaluation import on_every_rank

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
WORDS = ["pretrain", *TINY, "data=text", "data.path=text.txt"]


@pytest.fixture
def started(monkeypatch):
    """The launches that `devices=` requests."""
    launches = []
    monkeypatch.setattr(launching, "launch", lambda processes, words: launches.append((processes, words)) or 0)
    return launches


def test_devices_relaunches_the_typed_command(place, started):
    assert cli.main(["--debug", *WORDS, "devices=2", "--config-dir", "."]) == 0
    assert started == [(2, ["--debug", "--config-dir=.", *WORDS, "devices=2"])]
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["devices=1000"], {}, "devices=1000, but this machine has no CUDA device, and "),
        (["devices=0"], {}, "devices: given 0"),
        (["devices=3"], TORCHRUN, "devices=3, but torchrun started 2 processes"),
        (["devices=2"], {**TORCHRUN, "WORLD_SIZE": "1"}, "devices=2, but torchrun started 1 process"),
        (["-m", "seed=1,2"], TORCHRUN, "-m under torchrun"),
        (["-m", "seed=1,2", "devices=2"], {}, "devices=2 with -m"),
    ],
)
def test_invalid_devices_are_refused(place, started, monkeypatch, capsys, words, environment, message):
    if torch.cuda.is_available():
        pytest.skip("the messages are those of a machine without CUDA")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main([*WORDS, *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not started and not (place / "runs").exists()


def test_devices_without_loopback_network_is_refused(place, started, monkeypatch, capsys):
    def unreachable(*_, **__):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(launching.socket, "create_connection", unreachable)
    assert cli.main([*WORDS, "devices=2", "device=cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: devices=2: ") and "127.0.0.1" in error and "Network is unreachable" in error
    assert "hint: start the loopback interface (ip link set lo up), or train in one process: devices=1" in error
    assert not started and not (place / "runs").exists()


def test_missing_cuda_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launching.processes_to_start("pretrain", 2, "auto") == 2
    with pytest.raises(UserError, match="this machine has 2 CUDA devices"):
        launching.processes_to_start("pretrain", 4, "cuda")
    with pytest.raises(UserError, match="devices=2 needs more than one device, but device=cuda:1 names one"):
        launching.processes_to_start("pretrain", 2, "cuda:1")


def test_other_commands_under_torchrun_are_refused(place, started, monkeypatch, capsys):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) == 2
    assert "lmtool doctor runs in one process, but torchrun started 2" in capsys.readouterr().err


def test_difference_between_ranks_is_named_in_all_ranks():
    def compared(group):
        things = {"lmtool code": "same", "seed": group.rank // 2}
        with pytest.raises(UserError) as caught:
            require_same(group, things)
        return caught.value.message

    assert on_every_rank(3, compared) == ["rank 2 differs from rank 0: seed is 1, not 0"] * 3
    assert on_every_rank(2, lambda group: require_same(group, {"seed": 1})) == [None, None]


def test_followed_folder_is_not_written(tmp_path):
    run = FollowedFolder(tmp_path / "run", {"seed": 1}, None)
    with run:
        run.write_environment([])
        run.write_json("result.json", {})
        run.write_rows("predictions.jsonl", [{}])
        run.append({"step": 1})
        run.begin_at(1, [])
        run.log("a line")
        run.sync()
        run.drop_rows_after(0)
        run.announce()
    assert not run.writes and not list(tmp_path.iterdir()) and run.resume_point() is None
    run.follow(tmp_path / "checkpoint")
    assert run.resume_point() == tmp_path / "checkpoint" and run.result() is None


def test_threads_are_divided_among_processes(monkeypatch):
    monkeypatch.delenv(launching.THREADS, raising=False)
    monkeypatch.setattr(launching, "available_cores", lambda: 8)
    with launching._environment(3):
        assert os.environ[launching.THREADS] == "2"
    assert launching.THREADS not in os.environ
    monkeypatch.setenv(launching.THREADS, "5")
    with launching._environment(3):
        assert os.environ[launching.THREADS] == "5"
