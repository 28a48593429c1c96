"""Arrays shared by the processes of a machine: computed once, equal to arrays in memory, and removed at the end."""

from __future__ import annotations

import gc
import multiprocessing
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lmtool.data.examples import Plan
from lmtool.data.loader import PackedLoader
from lmtool.data.shared import UNSHARED, ArrayCache, identity
from lmtool.objectives.configs import DenoisingConfig, SpanCorruptionConfig
from lmtool.system.files import draft_name, machine

RECORD = np.dtype([("start", "i8"), ("length", "i4")])
_processes = multiprocessing.get_context("fork")


def arrays(count: int = 1000) -> dict[str, np.ndarray]:
    rows = np.zeros(count, dtype=RECORD)
    rows["start"], rows["length"] = np.arange(count), 7
    return {"rows": rows, "lengths": np.arange(count) * 3}


def assert_equal(loaded: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def cache_in(folder: Path, processes: int = 2, messages: list[str] | None = None) -> ArrayCache:
    def report(message: str, *_: Any) -> None:
        if messages is not None:
            messages.append(message)

    return ArrayCache(folder / "plans", "0" * 64, processes, report)


class Answer(NamedTuple):
    """A process's report: whether it computed the arrays, whether they are mapped and correct, and its messages."""

    computed: bool
    mapped: bool
    correct: bool
    messages: list[str]


def load_and_wait(folder: Path, processes: int, most_bytes: int, pipe: Any) -> None:
    """Loads the arrays in a process and keeps them until a message arrives; most_bytes limits the size of its files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    computed, messages = [], list[str]()

    def compute() -> dict[str, np.ndarray]:
        computed.append(True)
        return arrays()

    loaded = cache_in(folder, processes, messages).load(compute)
    correct = all(np.array_equal(loaded[name], array) for name, array in arrays().items())
    pipe.send(Answer(bool(computed), not loaded["rows"].flags.owndata, correct, messages))
    pipe.recv()


class Siblings:
    """Processes with one parent that load the same arrays."""

    def __init__(self, folder: Path, processes: int):
        self._arguments, self._children = (folder, processes), list[tuple[Any, Any]]()

    def load(self, count: int, most_bytes: int = resource.RLIM_INFINITY) -> list[Answer]:
        """Starts `count` more processes at once."""
        pipes = []
        for _ in range(count):
            ours, theirs = _processes.Pipe()
            child = _processes.Process(target=load_and_wait, args=(*self._arguments, most_bytes, theirs), daemon=True)
            child.start()
            self._children.append((ours, child))
            pipes.append(ours)
        assert all(pipe.poll(30) for pipe in pipes)
        return [pipe.recv() for pipe in pipes]

    def end(self) -> None:
        for pipe, child in self._children:
            pipe.send(None)
            child.join(30)


def test_processes_compute_once_and_leave_no_file(tmp_path: Path) -> None:
    siblings = Siblings(tmp_path, 4)
    answers = siblings.load(4)
    assert sorted(answer.computed for answer in answers) == [False, False, False, True]
    assert all(answer.mapped and answer.correct and not answer.messages for answer in answers)
    assert not list((tmp_path / "plans").iterdir()), "the file is removed once all have mapped it"
    siblings.end()


def test_single_process_keeps_arrays_in_memory(tmp_path: Path) -> None:
    computed = arrays()
    assert cache_in(tmp_path, processes=1).load(lambda: computed) is computed
    assert not list(tmp_path.iterdir())


def test_partly_mapped_file_is_removed_with_its_arrays(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    loaded = cache.load(arrays)
    again = cache.load(lambda: pytest.fail("computed twice"))
    assert_equal(loaded, arrays())
    assert np.shares_memory(loaded["rows"], again["rows"]) and len(files(tmp_path)) == 1
    del loaded, again
    gc.collect()
    assert not list((tmp_path / "plans").iterdir())


@pytest.mark.parametrize("damage", ["none", "byte", "header", "short", "gone"])
def test_damaged_or_missing_file_is_recomputed(tmp_path: Path, damage: str) -> None:
    siblings = Siblings(tmp_path, 3)
    siblings.load(1)
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    place = {"byte": 5000, "header": 1, "short": len(content) - 1}.get(damage, 0)
    content[place] ^= 255 if place else 0
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[:place] if damage == "short" else content)
    (answer,) = siblings.load(1)
    assert answer.computed == (damage != "none") and answer.mapped and answer.correct
    siblings.end()


def test_full_disk_keeps_arrays_in_memory_and_reports(tmp_path: Path) -> None:
    siblings = Siblings(tmp_path, 3)
    answers = siblings.load(1, most_bytes=8192) + siblings.load(1)
    assert all(answer.computed and not answer.mapped and answer.correct for answer in answers)
    assert all(len(answer.messages) == 1 and "each of 3 processes" in answer.messages[0] for answer in answers)
    assert "File too large" in answers[0].messages[0] and [file.stat().st_size for file in files(tmp_path)] == [0]
    siblings.end()
    assert not files(tmp_path)


def test_unwritable_folder_keeps_arrays_in_memory(tmp_path: Path) -> None:
    messages: list[str] = []
    (tmp_path / "plans").write_text("a file")
    assert_equal(cache_in(tmp_path, messages=messages).load(arrays), arrays())
    assert len(messages) == 1


def test_files_of_killed_runs_are_removed(tmp_path: Path) -> None:
    child = _processes.Process(target=int)
    child.start()
    child.join()
    cache = cache_in(tmp_path)
    folder = cache.folder / machine()
    folder.mkdir(parents=True)
    left = folder / draft_name("1" * 32, child.pid or 0)
    left.write_bytes(b"left")
    loaded = cache.load(arrays)
    assert not left.exists() and len(files(tmp_path)) == 1
    assert_equal(loaded, arrays())


class Windows:
    """Examples with a shared plan."""

    def __init__(self, cache: ArrayCache, count: int):
        self._plan = Plan(**arrays(count), cache=cache)

    def plan(self, epoch: int) -> Plan:
        return replace(self._plan, lengths=1 + self._plan.lengths % 9)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Any:
        raise NotImplementedError

    def metadata(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("sizes", [{"batch_examples": 700}, {"batch_tokens": 3000}])
def test_shared_order_equals_unshared_order(tmp_path: Path, sizes: dict[str, int]) -> None:
    alone, shared = (
        PackedLoader(Windows(cache, 40_000), 3, **sizes)  # type: ignore[arg-type]
        for cache in (UNSHARED, cache_in(tmp_path))
    )
    assert alone.steps_in_epoch(2) == shared.steps_in_epoch(2) and alone.metadata() == shared.metadata()
    for own, other in zip(alone.rows_read(80), shared.rows_read(80), strict=True):
        assert np.array_equal(own, other)


def test_identities_of_different_values_differ() -> None:
    rows = arrays()
    values: list[object] = [
        None, 1, 1.0, "1", True, (1, 2), ((1,), 2), [1, 2, 3], rows["rows"], rows["lengths"], Plan(**rows),
        Plan(rows["rows"], rows["lengths"] + 1), arrays, SpanCorruptionConfig(), SpanCorruptionConfig(density=0.2),
        DenoisingConfig(), replace(UNSHARED, key="2", processes=2).of("a").key,
    ]  # fmt: skip
    assert len({identity(value) for value in values}) == len(values)
    assert [identity(value) for value in values] == [identity(value) for value in values]
    with pytest.raises(TypeError, match="no identity"):
        identity(lambda: rows)
