"""Disks that fill while a command runs, full disks and read-only disks.

Each trial mounts a file system in memory (tmpfs) in its own mount namespace, so that no other process sees it. If the
system forbids that, the outcome is `not possible here`.
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

from lmtool.config.checkpoint import saved_steps, verify
from lmtool.system.files import Damaged
from tests.training.kill_harness import fork
from trials.harness import ended, refused, require_success, typed
from trials.outcomes import Failed, Outcome, Verdict, chance_of, kind, planted
from trials.stage import EVALUATE, HERE, RUNS, VOCABULARY, copy, last_of_each, replaced, require_same_result, words_of

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _RECURSIVE, _PRIVATE = 1, 32, 1 << 14, 1 << 18
_SIZE = 64 << 20


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
        """Fills the disk until `leave` bytes are free."""
        with (self.folder / "filler").open("ab", buffering=0) as file, suppress(OSError):
            while (left := shutil.disk_usage(self.folder).free - leave) > 0:
                file.write(bytes(min(left, 1 << 20)))


def _call(name: str, *arguments: object) -> None:
    """Calls a function of the C library. OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_WRITERS = {
    "predict": ["predict", "checkpoint=done/tuned", *HERE, "input=text.txt", "output=disk/out"],
    "evaluate": [*EVALUATE, "output=disk/out"],
    "export": ["export", "checkpoint=done/tuned", "output=disk/out"],
    "import": ["import", "checkpoint=published", "output=disk/out"],
    "tokenizer": [*replaced(VOCABULARY, "output=disk/out")],
    "inspect": ["inspect", "pretrain", *words_of("pre", "x")[1:-1], "n=20", "tokens=5000", "output=disk/out"],
}
"""Commands that write disk/out."""


@kind("disks", trials=72)
def disks(stage: Path, place: Path, seed: int) -> Verdict:
    """Runs a command on a full, filling or read-only disk."""
    chance = chance_of("disks", seed)
    scene = list(_SCENES)[seed % len(_SCENES)]
    copy(stage, place, "text.txt", "rows", "cache", "done", "published")
    try:
        disk = Disk(place / "disk")
    except OSError as error:
        return Verdict(Outcome.IMPOSSIBLE, f"cannot mount a disk: {error.strerror}")
    return _SCENES[scene](stage, place, disk, scene, chance)


def _filling(stage: Path, place: Path, disk: Disk, scene: str, chance: random.Random) -> Verdict:
    """Fills the disk during a run, frees it, and runs the same command to the same result."""
    run = chance.choice(RUNS)
    words = words_of(run, "disk/run")
    seconds, leave = chance.uniform(0, 2.0), chance.choice((0, 0, 4096, 50_000, 300_000))
    if "resumed" in scene:
        shutil.copytree(stage / "runs" / run, disk.folder / "run")
        words, seconds = ["resume", "disk/run"], seconds / 2

    def fill(folder: Path) -> None:
        time.sleep(seconds)
        disk.fill(leave)

    shape = f"the disk {scene} ({run}) after {seconds:.2f} s, {leave} bytes left"
    with planted(shape):
        filler = fork(fill, place)
        answer = typed(place, *words)
        os.waitpid(filler, 0)
        stopped = refused(answer, "disk/run", "disk")
        for folder in saved_steps(disk.folder / "run" / "checkpoints"):
            try:
                verify(folder)
            except Damaged as damage:
                raise Failed(Outcome.SILENT, f"a checkpoint does not verify: {damage}") from damage
        (disk.folder / "filler").unlink(missing_ok=True)
        require_success(typed(place, *words), "after space was freed: ")
        require_same_result(disk.folder / "run", stage / "done" / run)
    return Verdict(Outcome.RECOVERED, f"{shape}: {answer.errors[:100] if stopped else 'survived'}")


def _output(stage: Path, place: Path, disk: Disk, scene: str, chance: random.Random) -> Verdict:
    """Writes to a disk with little or no room: the error names it, and no partial output stays."""
    command, left = chance.choice(list(_WRITERS)), 0
    if scene == "is full":
        left = chance.choice((0, 0, 1000, 30_000))
        disk.fill(left)
    else:
        disk.set_read_only()
    with planted(f"{command}: the disk {scene}, {left} bytes left"):
        answer = typed(place, *_WRITERS[command])
        if refused(answer, "disk"):
            there = sorted(path.name for path in disk.folder.rglob("*") if path.name != "filler")
            if there:
                raise Failed(Outcome.LEFTOVER, f"{answer.errors[:100]}, and leaves {', '.join(there[:3])}")
        elif scene != "is full" or not (disk.folder / "out").exists():
            raise Failed(Outcome.SILENT, "writes no output, without a message")
    return ended(answer, f"{command}: {scene}")


def _read_only_run(stage: Path, place: Path, disk: Disk, scene: str, chance: random.Random) -> Verdict:
    run, command = chance.choice(RUNS), chance.choice(("resume", "report", "start", "finished"))
    shutil.copytree(stage / ("done" if command in ("report", "finished") else "runs") / run, disk.folder / "run")
    disk.set_read_only()
    others = {"report": ["report", "disk/run"], "start": words_of(run, "disk/new")}
    with planted(f"{command} on a read-only disk ({run})"):
        answer = typed(place, *others.get(command, ["resume", "disk/run"]))
        if not refused(answer, "disk") and command != "finished":
            raise Failed(Outcome.SILENT, "writes no output, without a message")
    return ended(answer, command)


def _input(stage: Path, place: Path, disk: Disk, scene: str, chance: random.Random) -> Verdict:
    """Reads from a read-only disk, which must work."""
    shutil.copytree(place / "done" / "tuned", disk.folder / "run")
    shutil.copytree(place / "rows", disk.folder / "rows")
    shutil.copy(place / "text.txt", disk.folder / "text.txt")
    disk.set_read_only()
    command = chance.choice([*_WRITERS, "finetune"])
    words = _WRITERS.get(command, ["finetune", *words_of("tuned", "out")[1:], "max_steps=1"])
    for before, after in (
        ("disk/out", "out"), ("done/tuned", "disk/run"), ("done/pre", "disk/run"), ("text.txt", "disk/text.txt"),
        ("task.path=rows", "task.path=disk/rows"),
    ):  # fmt: skip
        words = [word.replace(before, after) for word in words]
    with planted(f"{command} from a read-only disk"):
        answer = typed(place, *last_of_each(words))
        if not (command == "inspect" and answer.status == 3):
            require_success(answer)
    return Verdict(Outcome.DONE, f"{command} from a read-only disk")


def _cache(stage: Path, place: Path, disk: Disk, scene: str, chance: random.Random) -> Verdict:
    """A warm cache may be read-only or full; the error for a cold one names its key."""
    if warm := chance.random() < 0.5:
        shutil.copytree(place / "cache", disk.folder / "cache")
    if scene == "full cache":
        disk.fill(chance.choice((0, 5000)))
    else:
        disk.set_read_only()
    with planted(f"{'warm' if warm else 'cold'}, {scene}"):
        answer = typed(place, *replaced(words_of("pre", "run"), "cache_dir=disk/cache"))
        if refused(answer, "disk/cache", "cache_dir"):
            if warm:
                require_success(answer, "the cache is complete: ")
        else:
            require_same_result(place / "run", stage / "done" / "pre")
    return ended(answer, f"{warm=}, {scene}")


_SCENES: dict[str, Callable[[Path, Path, Disk, str, random.Random], Verdict]] = {
    "fills under a run": _filling, "fills under a resumed run": _filling, "is full": _output,
    "read-only output": _output, "read-only run": _read_only_run, "read-only input": _input, "full cache": _cache,
    "read-only cache": _cache,
}  # fmt: skip
