"""`lmtool doctor`: what is there, what is missing, what is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.commands import doctor


def test_what_is_there_and_what_is_missing(place: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "measure_rate", lambda *shape: 7e9)
    found = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    assert cli.main(["doctor", "trains=false", "offline=true", "cache_dir=cache", "device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert "✔ speed        fp32 10 GFLOP/s on cpu" in shown
    assert "· packages     without wandb (logger=wandb)" in shown and "pip install 'lmtool[trackers]'" in shown
    assert not Path("cache").exists() and not Path("runs").exists()


@pytest.mark.parametrize(("threads", "words"), [(1, " 1 thread, "), (4, " 4 threads, ")])
def test_threads_are_counted(threads: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: threads)
    assert words in doctor._processor().details


def test_what_is_broken_fails(place: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "measure_rate", lambda *shape: 7e9)
    Path("file").write_text("")
    assert cli.main(["doctor", "trains=false", "offline=true", "cache_dir=file/cache", "device=cpu"]) == 3
    shown = capsys.readouterr()
    assert "✘ cache_dir" in shown.out and "error: 1 problem found: cache_dir" in shown.err
    monkeypatch.setattr(doctor.torch, "__version__", "2.9.0")
    assert doctor._torch().state == "problem" and "2.11" in str(doctor._torch().hint)


@pytest.mark.slow
def test_a_tiny_model_learns_twice_the_same(place: Path, capsys) -> None:
    assert cli.main(["doctor", "offline=true", "cache_dir=cache", "device=cpu"]) == 0
    assert "equal losses, bit for bit" in capsys.readouterr().out
