"""Runs with `logger=`: files of wandb and TensorBoard, written and read with their packages, without a network."""

from __future__ import annotations

import http.server
import json
import re
import secrets
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from lmtool.cli import main as cli
from lmtool.reporting.trackers import tracking
from lmtool.reporting.trackers.base import RunMetadata
from lmtool.reporting.trackers.tensorboard import TensorBoard, TensorBoardConfig
from tests.commands.conftest import pretrain
from tests.reporting.trackers import offline

BOTH = "logger=[wandb,tensorboard]"


@pytest.fixture(autouse=True)
def no_user_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the user's keys and configuration, and allows enough time on slow machines."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_ENTITY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tracking, "BEGIN_SECONDS", 120.0)
    monkeypatch.setattr(tracking, "END_SECONDS", 60.0)


def rows_of(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(row["split"], row["step"]): row for row in rows}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def assert_rows_tracked_once(run: Path) -> None:
    """Checks that both trackers have the losses of metrics.jsonl, each step once and in order."""
    expected: dict[str, list[tuple[int, float]]] = {"train": [], "validation": []}
    for (split, step), row in rows_of(run).items():
        expected[split].append((step, pytest.approx(row["loss"], rel=1e-6)))
    written, of_wandb = scalars(run / "tensorboard"), offline.rows(run)
    for split, losses in expected.items():
        assert losses and written[f"{split}/loss"] == losses
        assert [(row["_step"], row[f"{split}/loss"]) for row in of_wandb if f"{split}/loss" in row] == losses


def test_both_trackers_get_all_rows_and_no_secret(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve secrets in the environment, addresses, overrides, and the folder name."""
    planted = [secrets.token_hex(12) for _ in range(9)]
    names = (
        "A_KEY",
        "B_TOKEN",
        "C_SECRET",
        "D_PASSWORD",
        "E_AUTH",
        "F_CREDENTIAL",
        "G_COOKIE",
        "H_PASS",
        "WANDB_API_KEY",
    )
    for name, value in zip(names, planted, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("DATABASE_URL", "postgres://bob:hunter-two-two@db/x")
    hub, tracker = "hf_" + "Ab1" * 9, secrets.token_hex(20)
    (place / "text.txt").rename(place / f"{planted[0]}.txt")
    tags = "','".join([*planted, "https://bob:hunter-two-two@host", hub, tracker])
    words = [f"data.path={planted[0]}.txt", f"run_dir=runs/{planted[1]}", f"logger.wandb.tags=['{tags}']"]
    pretrain("null", BOTH, *words, "evaluate_every=3")
    run = place / "runs" / planted[1]
    assert_rows_tracked_once(run)
    (start,), result = offline.starts(run), json.loads((run / "result.json").read_text())
    assert start.project == "lmtool" and start.job_type == "pretrain" and not start.run_group
    config = {item.key: json.loads(item.value_json) for item in start.config.update}
    assert config["model"]["name"] == "bert" and config["max_steps"] == 6 and config["data"]["path"] == "***.txt"
    summary = offline.summary(run)
    assert summary["metric"] == result["metric"] and summary["value"] == pytest.approx(result["value"])
    assert scalars(run / "tensorboard")["result/value"] == [(6, pytest.approx(result["value"], rel=1e-6))]
    files = [path for folder in ("wandb", "tensorboard") for path in (run / folder).rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        for secret in [*planted, "hunter-two-two", hub, tracker]:
            assert secret.encode() not in path.read_bytes(), path
    assert "wandb sync" in capsys.readouterr().out


@pytest.mark.slow
def test_resumed_run_continues_its_tracker_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is stopped by a signal, then killed, so that the rows after its checkpoint are written again."""
    from lmtool.training import loop

    step = loop.apply_gradients
    counted: list[int] = []

    def stopping(*arguments: Any, **keywords: Any) -> Any:
        counted.append(1)
        if len(counted) == 5:
            signal.raise_signal(signal.SIGTERM)
        if len(counted) == 8:
            raise RuntimeError("killed")
        return step(*arguments, **keywords)

    monkeypatch.setattr(loop, "apply_gradients", stopping)
    words = [BOTH, "max_steps=10", "checkpoint_every=5", "evaluate_every=5"]
    run = pretrain("a", *words, status=143)
    # The run fails in step 8; its checkpoint is of step 5, so it repeats steps 6 and 7.
    assert pretrain("a", *words, status=1) == run
    assert [number for split, number in rows_of(run) if split == "train"][-1] == 7
    pretrain("a", *words)
    assert_rows_tracked_once(run)
    assert len(offline.files(run)) == 3 and len({start.run_id for start in offline.starts(run)}) == 1


@pytest.mark.slow
def test_unresponsive_server_does_not_stop_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server accepts connections and never answers: the run finishes, with files for `wandb sync`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        run = pretrain("a", "logger=wandb")
    assert "does not answer within 2 seconds" in capsys.readouterr().out
    assert len(offline.rows(run)) == 6


class Refusing(http.server.BaseHTTPRequestHandler):
    """A wandb server that refuses every key."""

    def refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = refuse

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.mark.slow
def test_refused_key_switches_to_offline_tracking(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tracking that cannot start online starts again offline, with the same id and all rows."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        run = pretrain("a", "logger=wandb")
        server.shutdown()
    said = capsys.readouterr().out
    assert said.count("warning: logger=wandb") == 1 and "401" in said and "starting again" in said
    assert len(offline.rows(run)) == 6
    assert {path.name.rpartition("-")[2] for path in run.glob("wandb/*run-*-*")} == {offline.starts(run)[0].run_id}


@pytest.mark.slow
def test_sweep_jobs_are_one_wandb_group(place: Path) -> None:
    words = ["finetune", "-m", "task=sst2", "task.path=rows", "cache_dir=cache", "checkpoint=none", "model=bert_tiny"]
    words += ["device=cpu", "precision=fp32", "max_steps=1", "seed=1,2", "name=s", "logger=wandb", "offline=true"]
    assert cli.main([*words, "batch_examples=16", "max_length=32"]) == 0
    folders = sorted(path.parent for path in Path("runs/s").glob("*/job.json"))
    jobs = [offline.starts(folder)[0] for folder in folders]
    assert [(start.run_group, start.display_name) for start in jobs] == [("s", f"s/{path.name}") for path in folders]
    assert len({start.run_id for start in jobs}) == 2


def test_events_of_repeated_steps_are_dropped(tmp_path: Path) -> None:
    for first, last, step in ((1, 5, 0), (4, 8, 3)):
        metadata = RunMetadata(str(tmp_path / "a"), "a", None, "pretrain", {"seed": 1}, True, step)
        tracker = TensorBoard(TensorBoardConfig(folder=str(tmp_path / "all")), metadata)
        tracker.start()
        for number in range(first, last):
            tracker.write({"step": number, "split": "train", "loss": float(first)})
        tracker.end(None if step == 0 else {"value": 2.0})
    assert scalars(tmp_path / "all" / "a") == {
        "train/loss": [(1, 1.0), (2, 1.0), (3, 1.0), (4, 4.0), (5, 4.0), (6, 4.0), (7, 4.0)],
        "result/value": [(7, 2.0)],
    }


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["logger=[wandb,tensorbord]"], ["did you mean logger=tensorboard?"]),
        (["logger=wandb,tensorboard"], ["for all in one run, logger=[wandb,tensorboard]"]),
        (["logger=wandb", "logger=tensorboard"], ["for both, set logger=[wandb,tensorboard]"]),
        (
            ["logger=wandb", "logger=tensorboard", "model=[bert,gpt]"],
            ["a run takes one logger", "a run takes one model, not a list"],
        ),
        (
            ["logger=wandb", "logger.wandb.prject=x", "logger.wandb.api_key=x", "logger.tensorboard=3", "max_stps=3"],
            [
                "did you mean logger.wandb.project=x?",
                "unknown key logger.wandb.api_key",
                "this is a section of keys",
                "did you mean max_steps=3?",
            ],
        ),
        (["logger=wandb", "logger.wandb.mode=off"], ["allowed: auto, online, offline or disabled"]),
        (
            ["logger=wandb", "logger.wandb.mode=online", "offline=true", "max_stps=3"],
            ["logger.wandb.mode=online contradicts offline=true", "there is no key for https://api.wandb.ai"],
        ),
    ],
)
def test_invalid_logger_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], messages: list[str]
) -> None:
    assert cli.main(["pretrain", *words]) == 2
    said = capsys.readouterr().err
    assert all(message in said for message in messages)
    assert not Path("runs").exists()


def test_missing_tracker_package_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["pretrain", BOTH]) == 2
    said = capsys.readouterr().err
    assert re.search(r"logger\.wandb needs the Python package wandb", said)
    assert said.count("pip install 'lmtool[trackers]'") == 2
