"""Process groups, and the environment variables of torchrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lmtool.errors import UserError
from lmtool.system.ranks import RankInfo, rank_info
from lmtool.training.group import ALONE, ProcessGroup, process_group

from .ranks import Ranks, started

CPU = torch.device("cpu")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


def exchange_values(group: ProcessGroup) -> dict[str, Any]:
    counts = {"word": 2.0, "kind": 1.0} if group.rank else {"word": 3.0}
    group.wait()
    return {
        "rank": (group.rank, group.size),
        "sum": group.sum(counts),
        "first": group.first({"from": group.rank}),
        "all": group.all(["of", group.rank]),
        "added": group.add_up(torch.tensor([1.0, group.rank])).tolist(),
    }


def test_ranks_exchange_values(two: Ranks) -> None:
    common = {"sum": {"word": 5.0, "kind": 1.0}, "first": {"from": 0}, "all": [["of", 0], ["of", 1]], "added": [2, 1]}
    assert two.run(exchange_values) == [{"rank": (0, 2), **common}, {"rank": (1, 2), **common}]
    assert exchange_values(ALONE)["sum"] == {"word": 3.0} and exchange_values(ALONE)["all"] == [["of", 0]]


def sum_counts(group: ProcessGroup) -> list[dict[str, float]]:
    """Sums of few counts, of more counts than fit in a message, and of counts that one rank lacks."""
    many = {f"term {number}": 0.1 + number + group.rank for number in range(200)}
    return [group.sum({"word": 1.0}), group.sum(many), group.sum(many if group.rank else {})]


def test_counts_are_summed_over_ranks(two: Ranks) -> None:
    for few, many, some in two.run(sum_counts):
        assert few == {"word": 2.0}
        assert many == {f"term {number}": 0.1 + number + (0.1 + number + 1) for number in range(200)}
        assert some == {f"term {number}": 0.1 + number + 1 for number in range(200)}


def test_torchrun_environment_gives_rank() -> None:
    assert rank_info(TORCHRUN) == RankInfo(1, 2, 1, 2)
    assert rank_info({"MASTER_PORT": "29500", "RANK": ""}) == RankInfo()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "", "MASTER_PORT": ""}, "RANK=1, but not WORLD_SIZE, MASTER_PORT"),
        ({"RANK": "", "LOCAL_RANK": ""}, "WORLD_SIZE=2, but not RANK, LOCAL_RANK"),
        ({"RANK": "one"}, "RANK='one', which is not a number"),
        ({"RANK": "2"}, "RANK=2 of WORLD_SIZE=2"),
    ],
)
def test_incomplete_torchrun_environment_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        rank_info(TORCHRUN | changes)
    assert message in refused.value.message and "torchrun" in str(refused.value.hint)


def test_process_without_torchrun_has_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with process_group(CPU) as group:
        assert group is ALONE


def test_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in (TORCHRUN | {"RANK": "0", "MASTER_PORT": port}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(UserError) as refused, process_group(CPU):
            pass
    assert f"MASTER_PORT={port}" in refused.value.message and "in use" in refused.value.message
    assert "RANK" in os.environ and not dist.is_initialized()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_missing_backend_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, f"is_{backend}_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    device = CPU if backend == "gloo" else torch.device("cuda", 0)
    with pytest.raises(UserError) as refused, process_group(device):
        pass
    assert f"without {backend}" in refused.value.message
