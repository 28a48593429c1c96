"""Checkpoints are found from any path of a run; damaged ones are refused and never replaced by another one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmtool.config import saved
from lmtool.errors import UserError
from lmtool.runs.finding import (  # fmt: skip
    checkpoint_folder,
    find,
    is_intact,
    read_checkpoint,
    read_config,
    read_state,
    run_folder,
    verify,
)
from lmtool.system.files import MANIFEST, Damaged, Manifest, write_manifest


def checkpoint(run: Path, step: int, hidden: int = 16, **state: Any) -> Path:
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"version": 1, "model": {"hidden_size": hidden}}))
    (folder / "state.json").write_text(json.dumps({"step": step, **state}))
    (folder / "model.safetensors").write_bytes(bytes(range(100)))
    write_manifest(folder, {"step": step})
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose first checkpoint is its best."""
    run = tmp_path / "runs" / "a"
    checkpoint(run, 5, 16, best_step=5)
    checkpoint(run, 10, 32, best_step=5)
    (run / "checkpoints" / "last").write_text("step_00000010\n")
    (run / "checkpoints" / "best").write_text("step_00000005\n")
    (tmp_path / "runs" / "latest").write_text("a\n")
    return run


def test_checkpoint_is_found_from_each_path_of_a_run(run: Path) -> None:
    old, new = (run / "checkpoints" / name for name in ("step_00000005", "step_00000010"))
    latest = run.parent / "latest"
    assert run_folder(str(latest)) == run == run_folder(run)
    for given in (run, run / "checkpoints", run / "checkpoints" / "best", latest, old):
        assert checkpoint_folder(str(given)) == find(given) == old
    for given in (run / "checkpoints" / "last", new):
        assert checkpoint_folder(str(given)) == find(given) == new
    assert read_checkpoint(str(run))["model"] == {"hidden_size": 16}


@pytest.mark.parametrize("content", ["x" * 100_000, "x" * 300, "é" * 200])
def test_latest_file_with_long_text_is_refused(run: Path, content: str) -> None:
    latest = run.parent / "latest"
    latest.write_text(content)
    with pytest.raises(UserError, match="latest does not contain the name of a run: its text has more than 255 bytes"):
        find(latest)
    latest.unlink()
    latest.symlink_to("x" * 300)
    assert run_folder(latest) == latest


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("step_00000010\n" if path.name == "best" else "step_00000005\n"),
        lambda path: path.write_text("step_00000007\n"),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("nowhere")),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["deleted", "empty", "not text", "wrong step", "unknown step", "folder", "dangling link", "pipe"],
)
def test_damaged_pointers_still_find_best_and_last(run: Path, damage: Callable[[Path], object]) -> None:
    for name in ("best", "last"):
        damage(run / "checkpoints" / name)
    assert find(run).name == "step_00000005" == find(run / "checkpoints").name
    if os.path.lexists(run / "checkpoints" / "best"):
        assert find(run / "checkpoints" / "best").name == "step_00000005"
        assert find(run / "checkpoints" / "last").name == "step_00000010"


def test_deleted_best_checkpoint_is_refused(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step_00000005")
    hint = f"use {run / 'checkpoints' / 'step_00000010'}, which is intact"
    with pytest.raises(UserError, match="best names step_00000005, which does not exist") as caught:
        find(run)
    assert caught.value.hint == hint
    (run / "checkpoints" / "best").unlink()
    with pytest.raises(UserError, match="the best checkpoint of .*, step 5, does not exist") as caught:
        find(run)
    assert caught.value.hint == hint
    (run / "checkpoints" / "best").write_text("step_00000010\n")  # as a resumed run writes it
    assert find(run).name == "step_00000010"


def test_best_pointer_is_used_if_newest_is_damaged(run: Path) -> None:
    flip_bit(run / "checkpoints" / "step_00000010" / "state.json")
    assert find(run).name == "step_00000005"
    (run / "checkpoints" / "best").unlink()
    with pytest.raises(UserError, match=r"step_00000010/state\.json is damaged") as caught:
        find(run)
    assert caught.value.hint == f"use {run / 'checkpoints' / 'step_00000005'}, which is intact"


@pytest.mark.parametrize("step", ["x", -1, 10**100, 1.5, [5]])
def test_best_step_without_checkpoint_is_refused(tmp_path: Path, step: Any) -> None:
    checkpoint(tmp_path / "b", 5, best_step=step)
    with pytest.raises(UserError, match="the best checkpoint of .* does not exist"):
        find(tmp_path / "b")


def test_newest_checkpoint_is_used_before_first_evaluation(tmp_path: Path) -> None:
    for step in (5, 10):
        checkpoint(tmp_path / "b", step, best_step=None)
    assert find(tmp_path / "b").name == "step_00000010"


def test_folder_without_lmtool_checkpoint_is_refused(tmp_path: Path) -> None:
    for given in (str(tmp_path), str(tmp_path / "x"), "hf://org/name"):
        with pytest.raises(UserError, match="checkpoint="):
            read_checkpoint(given)
    folder = tmp_path / "strange"
    folder.mkdir()
    for name in ("model.safetensors", "state.json"):
        (folder / name).write_text("{}")
    for content, words in (
        ('{"architectures": ["BertModel"]}', "not written by lmtool"),
        ("[1]", "does not contain a JSON object"),
        ("{" * 100_000, "does not contain a JSON object"),
        ('{"version": 9, "model": {}}', "version 9"),
    ):
        (folder / MANIFEST).unlink(missing_ok=True)
        (folder / "config.json").write_text(content)
        write_manifest(folder, {"step": 1})
        with pytest.raises(UserError, match=words):
            read_checkpoint(str(folder))


FILES = ["config.json", "state.json", "model.safetensors", MANIFEST]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "is missing"),
        (truncate, "is damaged: |was changed after it was written"),
        (flip_bit, "is damaged: |was changed after it was written"),
        (lambda path: path.write_bytes(b""), "is damaged: 0 bytes|was changed after it was written"),
        (replace_by_folder, "is not a regular file"),
    ],
    ids=["deleted", "truncated", "bit flip", "empty", "folder"],
)
def test_damaged_checkpoint_file_is_refused_by_name(
    run: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    folder = run / "checkpoints" / "step_00000005"
    damage(folder / name)
    assert not is_intact(folder)
    with pytest.raises(UserError, match=words) as caught:
        for given in (run, folder):
            find(given)
        verify(folder)
    assert str(folder / name) in caught.value.message
    for read, own in ((read_config, "config.json"), (read_state, "state.json")):
        if name in (own, MANIFEST):
            with pytest.raises(UserError, match=words) as caught:
                read(folder)
            assert str(folder / name) in caught.value.message
            assert caught.value.hint == f"use {run / 'checkpoints' / 'step_00000010'}, which is intact"
        else:
            assert read(folder)


def test_renamed_step_folder_is_refused(run: Path) -> None:
    (run / "checkpoints" / "step_00000005").rename(run / "checkpoints" / "step_00000015")
    with pytest.raises(UserError, match="says step 5, but its folder is called step_00000015"):
        find(run / "checkpoints" / "step_00000015")
    (run / "checkpoints" / "step_00000015").rename(run.parent / "mine")
    assert find(run.parent / "mine") == run.parent / "mine"


def test_changed_checkpoint_config_is_refused(run: Path) -> None:
    path = run / "checkpoints" / "step_00000005" / "config.json"
    assert saved.read(path)["model"] == {"hidden_size": 16}
    path.write_text(path.read_text().replace("16", "17"))
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        saved.read(path)


def test_invalid_manifest_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "b", 5)
    (folder / "model.safetensors").unlink()
    (folder / MANIFEST).unlink()
    write_manifest(folder, {"step": 5})
    with pytest.raises(UserError, match=r"does not list model\.safetensors"):
        find(folder)
    for content in ("[]", "null", "{}", '{"format": 1}', "[" * 100_000):
        (folder / MANIFEST).write_text(content)
        with pytest.raises(Damaged, match="changed after it was written"):
            Manifest.read(folder)


@pytest.mark.parametrize("step", [1.5, "5", None, True, -1])
def test_step_must_be_whole_number(tmp_path: Path, step: Any) -> None:
    folder = checkpoint(tmp_path / "runs" / "a", 5)
    (folder / "state.json").write_text(json.dumps({"step": step}))
    (folder / MANIFEST).unlink()
    write_manifest(folder, {"step": 5})
    with pytest.raises(UserError, match="state.json: step=.* is not a whole number"):
        read_state(folder)
