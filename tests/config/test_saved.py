"""Saved configurations: secrets are masked, and files are read safely."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from lmtool.config import saved
from lmtool.config.decode import decode
from lmtool.errors import UserError
from lmtool.system.terminal import visible

from .fakes import DriveConfig
from .test_decode import drive


def test_saved_config_decodes_to_same_config() -> None:
    config = decode(DriveConfig, drive(stops=["a", "b"], wheels="auto"))
    data = saved.save(config, "drive", {})
    assert data["version"] == saved.VERSION and data["command"] == "drive"
    again = yaml.safe_load(saved.to_yaml(data))
    assert again == data and decode(DriveConfig, saved.body(again)) == config


@pytest.mark.parametrize("text", ["a\u202eb", "\x1b[31m", "a\nb\u200b", "\x9b", "\u2028", "café"])
def test_printed_yaml_keeps_special_characters(text: str) -> None:
    printed = "\n".join(visible(line) for line in saved.to_yaml({"road": text}).split("\n"))
    assert yaml.safe_load(printed) == {"road": text}


def test_config_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(UserError, match="config.yaml is not a regular file"):
        saved.read(tmp_path / "config.yaml")


def test_saved_config_masks_secrets() -> None:
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
        (b"#" * 1_000_001, "more than 1000000 bytes"),
    ],
)
def test_invalid_config_file_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=says):
        saved.read(file)


def test_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        saved.read(tmp_path / "config.yaml")
