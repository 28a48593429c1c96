"""Disks that become full while a command runs, full disks and read-only disks.

Each trial mounts a file system in memory (tmpfs) in its own mount namespace, so that no other process sees it. If the
system forbids mounts, the outcome is `not possible here`.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lmtool.runs.finding import saved_steps, verify
from lmtool.system.files import Damaged
from tests.faults.harness import is_refusal, refused_or_done, require_success, run_lmtool
from tests.faults.outcomes import Outcome, TrialFailed, Verdict, fault_prefix, kind, trial_rng
from tests.faults.stage import (
    EVALUATE,
    HERE,
    RUNS,
    VOCABULARY,
    copy,
    last_overrides,
    require_same_result,
    run_arguments,
    with_overrides,
)
from tests.training.kill_harness import fork

# Flags of unshare(2) and mount(2).
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _RECURSIVE, _PRIVATE = 1, 32, 1 << 14, 1 << 18
_SIZE = 64 << 20  # bytes of a disk


class Disk:
    """A file system in memory, mounted at a folder."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder = folder
        user = os.geteuid()
        _call("unshare", _NEW_MOUNTS | (_NEW_USER if user else 0))
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
        self._mount(0)

    def _mount(self, flags: int) -> None:
        _call("mount", b"none", os.fsencode(self.folder), b"tmpfs", flags, f"size={_SIZE}".encode())

    def set_read_only(self) -> None:
        self._mount(_REMOUNT | _READ_ONLY)

    def fill(self, leave: int = 0) -> None:
        """Writes a file until only `leave` bytes are free."""
        with (self.folder / "filler").open("ab", buffering=0) as file, suppress(OSError):
            while (excess := shutil.disk_usage(self.folder).free - leave) > 0:
                file.write(bytes(min(excess, 1 << 20)))


def _call(name: str, *arguments: object) -> None:
    """Calls a function of the C library. Raises OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_WRITERS = {
    "predict": ["predict", "checkpoint=done/tuned", *HERE, "input=text.txt", "output=disk/out"],
    "evaluate": [*EVALUATE, "output=disk/out"],
    "export": ["export", "checkpoint=done/tuned", "output=disk/out"],
    "import": ["import", "checkpoint=published", "output=disk/out"],
    "tokenizer": [*with_overrides(VOCABULARY, "output=disk/out")],
    "inspect": ["inspect", "pretrain", *run_arguments("pre", "x")[1:-1], "n=20", "tokens=5000", "output=disk/out"],
}
"""Commands that write to disk/out."""


@kind("disks", trials=72)
def disks(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Runs a command on a disk that is full, becomes full, or is read-only."""
    rng = trial_rng("disks", seed)
    scene = list(_SCENES)[seed % len(_SCENES)]
    copy(stage, workdir, "text.txt", "rows", "cache", "done", "published")
    try:
        disk = Disk(workdir / "disk")
    except OSError as error:
        return Verdict(Outcome.IMPOSSIBLE, f"cannot mount a disk: {error.strerror}")
    return _SCENES[scene](stage, workdir, disk, scene, rng)


def _fill_during_run(stage: Path, workdir: Path, disk: Disk, scene: str, rng: random.Random) -> Verdict:
    """Fills the disk during a run, then frees it and runs the command again, which must reach the same result."""
    run = rng.choice(RUNS)
    arguments = run_arguments(run, "disk/run")
    seconds, leave = rng.uniform(0, 2.0), rng.choice((0, 0, 4096, 50_000, 300_000))
    if "resumed" in scene:
        shutil.copytree(stage / "runs" / run, disk.folder / "run")
        arguments, seconds = ["resume", "disk/run"], seconds / 2

    def fill(folder: Path) -> None:
        time.sleep(seconds)
        disk.fill(leave)

    shape = f"the disk {scene} ({run}) after {seconds:.2f} s, {leave} bytes left"
    with fault_prefix(shape):
        filler = fork(fill, workdir)
        answer = run_lmtool(workdir, *arguments)
        os.waitpid(filler, 0)
        stopped = is_refusal(answer, "disk/run", "disk")
        for folder in saved_steps(disk.folder / "run" / "checkpoints"):
            try:
                verify(folder)
            except Damaged as damage:
                raise TrialFailed(Outcome.SILENT, f"a checkpoint does not verify: {damage}") from damage
        (disk.folder / "filler").unlink(missing_ok=True)
        require_success(run_lmtool(workdir, *arguments), "after space was freed: ")
        require_same_result(disk.folder / "run", stage / "done" / run)
    return Verdict(Outcome.RECOVERED, f"{shape}: {answer.errors[:100] if stopped else 'survived'}")


def _write_to_bad_disk(stage: Path, workdir: Path, disk: Disk, scene: str, rng: random.Random) -> Verdict:
    """Writes to a read-only disk, or to one with little or no space. The error must name the disk, and no partial
    output may remain."""
    command, free = rng.choice(list(_WRITERS)), 0
    if scene == "is full":
        free = rng.choice((0, 0, 1000, 30_000))
        disk.fill(free)
    else:
        disk.set_read_only()
    with fault_prefix(f"{command}: the disk {scene}, {free} bytes left"):
        answer = run_lmtool(workdir, *_WRITERS[command])
        if is_refusal(answer, "disk"):
            remaining = sorted(path.name for path in disk.folder.rglob("*") if path.name != "filler")
            if remaining:
                raise TrialFailed(Outcome.LEFTOVER, f"{answer.errors[:100]}, and leaves {', '.join(remaining[:3])}")
        elif scene != "is full" or not (disk.folder / "out").exists():
            raise TrialFailed(Outcome.SILENT, "writes no output, without a message")
    return refused_or_done(answer, f"{command}: {scene}")


def _use_read_only_run(stage: Path, workdir: Path, disk: Disk, scene: str, rng: random.Random) -> Verdict:
    """Runs a command that would write into a run on a read-only disk. The error must name the disk; only resuming a
    finished run may succeed."""
    run, command = rng.choice(RUNS), rng.choice(("resume", "report", "start", "finished"))
    shutil.copytree(stage / ("done" if command in ("report", "finished") else "runs") / run, disk.folder / "run")
    disk.set_read_only()
    others = {"report": ["report", "disk/run"], "start": run_arguments(run, "disk/new")}
    with fault_prefix(f"{command} on a read-only disk ({run})"):
        answer = run_lmtool(workdir, *others.get(command, ["resume", "disk/run"]))
        if not is_refusal(answer, "disk") and command != "finished":
            raise TrialFailed(Outcome.SILENT, "writes no output, without a message")
    return refused_or_done(answer, command)


def _read_from_read_only_disk(stage: Path, workdir: Path, disk: Disk, scene: str, rng: random.Random) -> Verdict:
    """Runs a command whose input is on a read-only disk, which must succeed."""
    shutil.copytree(workdir / "done" / "tuned", disk.folder / "run")
    shutil.copytree(workdir / "rows", disk.folder / "rows")
    shutil.copy(workdir / "text.txt", disk.folder / "text.txt")
    disk.set_read_only()
    command = rng.choice([*_WRITERS, "finetune"])
    arguments = _WRITERS.get(command, ["finetune", *run_arguments("tuned", "out")[1:], "max_steps=1"])
    for before, after in (
        ("disk/out", "out"), ("done/tuned", "disk/run"), ("done/pre", "disk/run"), ("text.txt", "disk/text.txt"),
        ("task.path=rows", "task.path=disk/rows"),
    ):  # fmt: skip
        arguments = [word.replace(before, after) for word in arguments]
    with fault_prefix(f"{command} from a read-only disk"):
        answer = run_lmtool(workdir, *last_overrides(arguments))
        if not (command == "inspect" and answer.status == 3):
            require_success(answer)
    return Verdict(Outcome.DONE, f"{command} from a read-only disk")


def _use_bad_cache(stage: Path, workdir: Path, disk: Disk, scene: str, rng: random.Random) -> Verdict:
    """Runs a command with its cache on a full or read-only disk. With a complete cache it must succeed; with an empty
    one it may be refused with an error that names cache_dir."""
    if warm := rng.random() < 0.5:
        shutil.copytree(workdir / "cache", disk.folder / "cache")
    if scene == "full cache":
        disk.fill(rng.choice((0, 5000)))
    else:
        disk.set_read_only()
    with fault_prefix(f"{'warm' if warm else 'cold'}, {scene}"):
        answer = run_lmtool(workdir, *with_overrides(run_arguments("pre", "run"), "cache_dir=disk/cache"))
        if is_refusal(answer, "disk/cache", "cache_dir"):
            if warm:
                require_success(answer, "the cache is complete: ")
        else:
            require_same_result(workdir / "run", stage / "done" / "pre")
    return refused_or_done(answer, f"{warm=}, {scene}")


_SCENES: dict[str, Callable[[Path, Path, Disk, str, random.Random], Verdict]] = {
    "fills under a run": _fill_during_run,
    "fills under a resumed run": _fill_during_run,
    "is full": _write_to_bad_disk,
    "read-only output": _write_to_bad_disk,
    "read-only run": _use_read_only_run,
    "read-only input": _read_from_read_only_disk,
    "full cache": _use_bad_cache,
    "read-only cache": _use_bad_cache,
}
