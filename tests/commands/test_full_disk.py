"""Full and read-only disks: whichever file is being written, the user gets one error line and one hint."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmtool.cli import main as cli
from lmtool.runs import locks, run_folder
from lmtool.system import files
from tests.commands.conftest import TINY, finetune, pretrain


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Limits the size of every file that the process writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_one_error_and_hint(error: str) -> None:
    assert "Traceback" not in error and error.startswith("error: cannot write "), error
    assert [line.partition(": ")[0] for line in error.splitlines()] == ["error", "hint"], error


@pytest.mark.usefixtures("reports", "figures")
def test_full_disk_gives_one_error_and_hint(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("whole", "max_steps=2")  # fills the caches
    sizes = {file.name: file.stat().st_size for file in Path("runs/whole").rglob("*") if file.is_file()}
    limits = [0, 300, 700, sizes["facts.json"] - 1, 20_000, sizes["model.safetensors"] - 1]
    for number, limit in enumerate(limits):
        capsys.readouterr()
        with limited_file_size(limit):
            pretrain(f"cut{number}", "max_steps=2", status=2)
        assert_one_error_and_hint(capsys.readouterr().err)
        # A run that fails before training leaves no folder.
        assert Path(f"runs/cut{number}").exists() == (Path(f"runs/cut{number}/metrics.jsonl").exists()), limit


@pytest.mark.usefixtures("reports", "figures")
def test_report_is_written_after_disk_recovers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=bert_tiny", "checkpoint=none", *TINY, "max_steps=2")
    folder = finetune("whole", *words)
    assert (folder / "report.html").stat().st_size > 10_000
    (folder / "report.html").unlink()
    with limited_file_size(1000):
        capsys.readouterr()
        assert cli.main(["report", str(folder)]) == 2
        assert_one_error_and_hint(capsys.readouterr().err)
        finetune("whole", *words, status=2)
        assert_one_error_and_hint(capsys.readouterr().err)
    finetune("whole", *words)
    assert (folder / "report.html").read_text().endswith("</html>\n")


def test_full_disk_for_log_only_warns(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = run_folder.open_to_append
    monkeypatch.setattr(
        run_folder,
        "open_to_append",
        lambda path: os.open("/dev/full", os.O_WRONLY) if path.name == "log.txt" else opened(path),
    )
    for name, more, status in (("trained", (), 0), ("refused", ("data.path=nowhere.txt",), 2)):
        folder = Path("runs") / name
        capsys.readouterr()
        assert pretrain(name, "max_steps=2", *more, status=status) == folder
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert (captured.out.count("warning: the log file cannot be written any more") == 1) == (status == 0)
        assert ("error: data.path=nowhere.txt: no such file" in captured.err) == (status == 2)


@pytest.mark.parametrize("many", [False, True])
def test_report_on_read_only_disk_is_refused(
    many: bool, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [f"runs/{name}" for name in ("a", "b")][: 1 + many]
    for run in runs:
        Path(run).mkdir(parents=True)
        Path(run, "config.yaml").write_text("seed: 0\n")

    def refuse(path: Path, *arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(files, "write_bytes", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    capsys.readouterr()
    assert cli.main(["report", *runs]) == 2
    error = capsys.readouterr().err
    assert_one_error_and_hint(error)
    assert "read-only file system" in error and "hint: free space there, or copy the folder to a writable disk" in error


def test_lock_that_cannot_be_removed_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk becomes read-only while the lock is held."""
    lock = locks.Lock(tmp_path / "LOCK")
    lock.acquire()

    def refuse(path: Path, *arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    lock.release()
    assert (tmp_path / "LOCK").exists()


def test_disk_error_of_other_path_is_a_user_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/where")

    monkeypatch.setattr(cli, "run", run)
    assert cli.main(["pretrain", "model=bert_tiny"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: /some/where: no space left on device\nhint: free some space")
