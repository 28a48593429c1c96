"""Atomic writes: drafts of dead processes are removed, those of running ones stay, and links are not followed."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from lmtool.runs.files import write_rows
from lmtool.system import files
from lmtool.system.files import draft_path, open_to_append, real_folder, replace_bytes


def _start_draft(path: Path) -> tuple[int, Path]:
    """A child process that holds an unfinished draft of a path, and that draft."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        draft_path(path).write_text("half")
        os.write(write, b"x")
        signal.pause()
        os._exit(0)
    os.read(read, 1)
    (draft,) = (entry for entry in path.parent.glob(".tmp-*") if entry.name.endswith(f"-{child}"))
    return child, draft


def _kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_only_drafts_of_dead_processes_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    child, draft = _start_draft(path)
    replace_bytes(tmp_path / "other.json", b"{}")
    assert draft.read_text() == "half"
    _kill(child)
    replace_bytes(tmp_path / "other.json", b"{}")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other.json"]


def test_only_old_drafts_of_other_machines_are_removed(tmp_path: Path) -> None:
    new, old, own = (tmp_path / f".tmp-result.json-{machine}-1" for machine in ("0123abcd", "0123abce", "mine"))
    for draft in (new, old, own):
        draft.mkdir()
    os.utime(old, (0, 0))
    os.utime(own, (0, 0))  # does not match the name of a draft
    replace_bytes(tmp_path / "other.json", b"{}")
    assert new.exists() and not old.exists() and own.exists()


def test_interrupted_write_keeps_old_content_and_removes_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_bytes(path, b"new")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_links_in_run_folders_are_never_followed(tmp_path: Path) -> None:
    own, place = tmp_path / "own", tmp_path / "place"
    own.mkdir()
    place.mkdir()
    (own / "file").write_text("mine")
    for name in ("replaced", "appended", "folder", draft_path(place / "replaced").name):
        (place / name).symlink_to(own if name == "folder" else own / "file")
    replace_bytes(place / "replaced", b"new")
    assert not (place / "replaced").is_symlink() and (place / "replaced").read_text() == "new"
    with pytest.raises(OSError) as caught:
        open_to_append(place / "appended")
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(OSError, match="folder is a link, which is not followed"):
        real_folder(place / "folder")
    (place / "hard").hardlink_to(own / "file")
    os.write(open_to_append(place / "hard"), b" and more")
    assert (place / "hard").read_text() == "mine and more"
    assert (own / "file").read_text() == "mine" and [entry.name for entry in own.iterdir()] == ["file"]


def test_link_in_user_path_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out.jsonl").symlink_to("disk/real.jsonl")
    write_rows(tmp_path / "out.jsonl", [{"prediction": 1}])
    assert (tmp_path / "out.jsonl").is_symlink() and (tmp_path / "disk/real.jsonl").read_text() == '{"prediction": 1}\n'
    write_rows(tmp_path / "out.jsonl", [{"prediction": 2}], named_by_user=False)
    assert not (tmp_path / "out.jsonl").is_symlink()
    assert (tmp_path / "disk/real.jsonl").read_text() == '{"prediction": 1}\n'
