"""Saved configurations: masked, read safely, found in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtool.config import saved
from lmtool.config.decode import decode
from lmtool.errors import UserError

from .fakes import DriveConfig
from .test_decode import drive


def test_what_is_saved_decodes_to_the_same() -> None:
    config = decode(DriveConfig, drive(stops=["a", "b"], wheels="auto"))
    data = saved.save(config, "drive", {})
    assert data["version"] == saved.VERSION and data["command"] == "drive"
    import yaml

    again = yaml.safe_load(saved.to_yaml(data))
    assert again == data and decode(DriveConfig, saved.body(again)) == config


def test_secrets_are_masked() -> None:
    environ = {"MY_API_KEY": "open sesame", "DB_password": "hunter2!", "HOME": "/home/me", "A_TOKEN": "ab"}
    config = decode(
        DriveConfig, drive(road="open sesame street", stops=["hf_" + "a" * 20, "0123456789abcdef" * 2 + "01234567"])
    )
    data = saved.save(config, "drive", environ)
    assert data["road"] == "*** street" and data["stops"] == ["***", "***"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: [1", "config.yaml:"),
        (b"\xff\xfe\x00a", "UTF-8"),
        (b"just text", "no keys"),
        (b"version: 9\nseed: 1", "version 9"),
        (b"a: !!python/object/apply:os.system ['true']", "config.yaml:1"),
        (b"#" * 1_000_001, "at most 1000000"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=says):
        saved.read(file)


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        saved.read(tmp_path / "config.yaml")


def checkpoint(run: Path, step: int, hidden: int) -> Path:
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"version": 1, "model": {"hidden_size": hidden}}))
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_checkpoint_is_found_where_a_user_points(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    old, new = checkpoint(run, 5, 16), checkpoint(run, 10, 32)
    assert saved.checkpoint_folder(str(run)) == new
    (run / "checkpoints" / "last").write_text(new.name + "\n")
    (run / "checkpoints" / "best").write_text(old.name + "\n")
    (tmp_path / "runs" / "latest").write_text("a\n")
    assert saved.checkpoint_folder(str(run)) == old
    assert saved.checkpoint_folder(str(run / "checkpoints" / "last")) == new
    assert saved.checkpoint_folder(str(tmp_path / "runs" / "latest")) == old
    assert saved.run_folder(str(tmp_path / "runs" / "latest")) == run == saved.run_folder(run)
    assert saved.checkpoint_folder(str(new)) == new
    assert saved.read_checkpoint(str(run))["model"] == {"hidden_size": 16}


def test_no_checkpoint(tmp_path: Path) -> None:
    for given in (str(tmp_path), str(tmp_path / "x"), "hf://org/name"):
        with pytest.raises(UserError, match="checkpoint="):
            saved.read_checkpoint(given)
    folder = checkpoint(tmp_path / "b", 1, 8)
    (folder / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(UserError, match="not one of lmtool"):
        saved.read_checkpoint(str(folder))
