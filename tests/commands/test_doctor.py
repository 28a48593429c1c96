"""`lmtool doctor` reports the installation, missing packages and problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.commands import doctor


def test_doctor_reports_speed_and_missing_packages(place: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "measure_rate", lambda *shape: 7e9)
    found = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    assert cli.main(["doctor", "trains=false", "offline=true", "cache_dir=cache", "device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert "✔ speed        fp32 10 GFLOP/s on cpu" in shown
    assert "· packages     without wandb (logger=wandb)" in shown and "pip install 'lmtool[trackers]'" in shown
    assert not Path("cache").exists() and not Path("runs").exists()


@pytest.mark.parametrize(("threads", "words"), [(1, " 1 thread, "), (4, " 4 threads, ")])
def test_doctor_reports_thread_count(threads: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: threads)
    assert words in doctor._processor().details


def test_doctor_fails_on_problems(place: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "measure_rate", lambda *shape: 7e9)
    Path("file").write_text("")
    assert cli.main(["doctor", "trains=false", "offline=true", "cache_dir=file/cache", "device=cpu"]) == 3
    shown = capsys.readouterr()
    assert "✘ cache_dir" in shown.out and "error: 1 problem found: cache_dir" in shown.err
    monkeypatch.setattr(doctor.torch, "__version__", "2.9.0")
    assert doctor._torch().state == "problem" and "2.11" in str(doctor._torch().hint)


@pytest.mark.slow
def test_doctor_trains_twice_with_equal_losses(place: Path, capsys) -> None:
    assert cli.main(["doctor", "offline=true", "cache_dir=cache", "device=cpu"]) == 0
    assert "equal losses, bit for bit" in capsys.readouterr().out
