"""Available memory: limits of the machine, of control groups, and of the process."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtool.costs import memory_of_run

CPU = torch.device("cpu")
GB = 10**9


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake /proc with 8 GB of memory and 1 GB of swap available, and no limits."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "groups").mkdir()
    lines = ["MemTotal: 16000000 kB", "MemAvailable: 7812500 kB", "SwapFree: 976562 kB", "HugePages_Total: 0"]
    (tmp_path / "proc/meminfo").write_text("\n".join(lines) + "\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/statm").write_text("1000 1 1 1 0 1 0\n")
    monkeypatch.setattr(memory_of_run, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory_of_run, "_CONTROL_GROUPS", tmp_path / "groups")
    return tmp_path


def group(folder: Path, **files: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_dot_", ".")).write_text(f"{content}\n")


def test_available_memory_includes_swap(machine: Path) -> None:
    assert memory_of_run.available_bytes(CPU) == pytest.approx(9 * GB, rel=1e-6)


def test_parent_control_group_limits_its_children(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/batch/job\n")
    group(machine / "groups/batch", memory_dot_max=4 * GB, memory_dot_current=3 * GB)
    group(machine / "groups/batch/job", memory_dot_max="max", memory_dot_current=GB)
    assert memory_of_run.available_bytes(CPU) == GB
    # File pages count as free, and so does the free swap of the group.
    group(
        machine / "groups/batch",
        memory_dot_stat=f"anon 1\ninactive_file {GB}\nactive_file 5",
        memory_dot_swap_dot_max=7,
    )
    assert memory_of_run.available_bytes(CPU) == 2 * GB + 5 + 7


def test_container_limit_is_read_from_root_group(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/docker/0a1b\n")
    group(machine / "groups", memory_dot_max=2 * GB, memory_dot_current=0)
    assert memory_of_run.available_bytes(CPU) == 2 * GB


def test_cgroup_v1_limit_is_read(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("5:cpu,memory:/job\n3:pids:/job\n")
    group(machine / "groups/memory/job", memory_dot_limit_in_bytes=3 * GB, memory_dot_usage_in_bytes=GB)
    assert memory_of_run.available_bytes(CPU) == 2 * GB


def test_process_limit_is_respected(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (GB, GB))
    assert memory_of_run.available_bytes(CPU) == GB - 1000 * resource.getpagesize()


# Less than a test process needs, and more than any machine has.
TOO_LITTLE, TOO_MUCH = 10**7, 10**15


def test_available_memory_of_this_machine_is_plausible() -> None:
    available = memory_of_run.available_bytes(CPU)
    assert available is not None and TOO_LITTLE < available < TOO_MUCH


def test_available_memory_works_without_proc_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_of_run, "_PROC", tmp_path)
    available = memory_of_run.available_bytes(CPU)
    assert available is not None and TOO_LITTLE < available < TOO_MUCH
