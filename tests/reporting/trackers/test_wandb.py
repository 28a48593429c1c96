"""The mode of wandb is chosen before its library is imported: without prompts, and within seconds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtool.reporting.trackers import wandb
from lmtool.reporting.trackers.wandb import has_key, mode_of, replies

KEY = {"WANDB_API_KEY": "0" * 40}


@pytest.fixture
def address() -> Iterator[str]:
    """Address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("mode", "offline", "environ", "expected"),
    [
        ("disabled", False, KEY, "disabled"),
        ("offline", False, KEY, "offline"),
        ("auto", False, {"WANDB_MODE": "offline", **KEY}, "offline"),
        ("auto", False, {"WANDB_MODE": "disabled", **KEY}, "disabled"),
        ("auto", False, {"WANDB_MODE": "dryrun", **KEY}, "offline"),
        ("auto", True, {"WANDB_MODE": "disabled"}, "disabled"),
        ("auto", True, {"WANDB_MODE": "online", **KEY}, "offline"),
        ("auto", False, {"WANDB_DISABLED": "true", **KEY}, "disabled"),
        ("auto", True, KEY, "offline"),
        ("auto", False, {}, "offline"),
        ("online", False, {}, "offline"),
    ],
)
def test_modes_without_server_open_no_connection(
    mode: str, offline: bool, environ: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(wandb, "replies", lambda server: pytest.fail("a connection"))
    chosen, reason = mode_of(mode, offline, environ)
    assert chosen == expected and reason


def test_hanging_server_selects_offline_mode(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.monotonic()
    assert not replies(address, seconds=0.2)
    assert time.monotonic() - before < 5
    monkeypatch.setattr(wandb, "PATIENCE", 0.2)
    monkeypatch.setattr(wandb, "replies", lambda server: replies(server, 0.2))
    assert mode_of("auto", False, {**KEY, "WANDB_BASE_URL": address})[0] == "offline"


@pytest.mark.parametrize("server", ["http://127.0.0.1:9", "no address", "http://[::bad", "ftp://nowhere.invalid"])
def test_unreachable_server_does_not_reply(server: str) -> None:
    assert not replies(server, seconds=0.2)


def test_refusing_server_replies() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=refuse, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert replies(address, seconds=5)


def test_api_key_is_read_from_netrc(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text(f"machine api.wandb.ai\n  login user\n  password {'0' * 40}\n")
    file.chmod(0o600)
    assert has_key("https://api.wandb.ai", {"NETRC": str(file)})
    assert not has_key("https://elsewhere.example", {"NETRC": str(file)})
    file.write_text("not a netrc {")
    assert not has_key("https://api.wandb.ai", {"NETRC": str(file)})
