"""Jobs in separate processes: the joblib and submitit launchers, signals, GPUs and the copied code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmtool import errors
from lmtool.cli import main as cli
from lmtool.errors import Stopped
from lmtool.runs import identity
from lmtool.sweeps import folders, job, table
from tests.commands.conftest import TINY, write_text
from tests.sweeps import fakes

TYPED = ["pretrain", "-m", "model=bert_tiny", "name=mine"]


@pytest.fixture
def fake_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "run_job", fakes.run_job)
    monkeypatch.setattr(table, "show", lambda folder: [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def results(sweep: Path) -> dict[str, Any]:
    return {path.parent.name: json.loads(path.read_text()) for path in sweep.glob("*/result.json")}


def test_joblib_runs_jobs_in_worker_processes(fake_jobs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert cli.main([*TYPED, "seed=1,2", *launcher]) == errors.USER_ERROR
    shown = capfd.readouterr().out
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"2 jobs by joblib, 2 at a time, {threads} thread" in shown and "OMP_NUM_THREADS" in shown
    assert "job 0 done: loss 0.1" in shown and "speaks" not in shown
    assert "job 1: no such seed" in shown and "job 1 failed" in shown
    assert "seed 1 speaks" in Path("runs/mine/0_seed-1/job.log").read_text()
    assert "hint: use another" in Path("runs/mine/1_seed-2/job.log").read_text()
    result = results(Path("runs/mine"))["0_seed-1"]
    assert result["threads"] == str(threads) and result["pid"] != os.getpid()
    assert cli.main([*TYPED, "seed=1,3", *launcher]) == 0  # reuses the worker processes
    assert "job 0 (0_seed-1): already done, skipped\n1 job by joblib" in capfd.readouterr().out
    assert results(Path("runs/mine")).keys() == {"0_seed-1", "2_seed-3"}


def make_job(folder: Path, **changes: Any) -> job.SweepJob:
    folder.mkdir(parents=True, exist_ok=True)
    fixed: dict[str, Any] = {
        "number": 0, "folder": str(folder), "overrides": ["seed=1"], "varied": {"seed": "1"}, "data": {"seed": 1},
        "launch": "one", "launcher": "submitit_slurm", "code": identity.fingerprint(), "plugins": [],
        "has_result": False,
        "parent": os.getpid(),
    }  # fmt: skip
    return job.SweepJob(**(fixed | changes))


def test_preempted_job_is_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def stop(data: dict[str, Any]) -> None:
        raise Stopped("stopped by SIGUSR2: a checkpoint of step 3 is saved", errors.REQUEUE)

    before = signal.signal(signal.SIGUSR2, lambda number, frame: called.append(number))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    try:
        job.perform(stop, {"job": make_job(tmp_path / "0_a").to_base64()})
    finally:
        signal.signal(signal.SIGUSR2, before)
    record = folders.read_record(tmp_path / "0_a")
    assert called == [signal.SIGUSR2] and record["exit_status"] == errors.REQUEUE and record["slurm"] == "12"
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    # submitit raises after too many timeouts: the job is terminated.
    signal.signal(signal.SIGUSR2, lambda number, frame: [][number])
    try:
        job.perform(stop, {"job": make_job(tmp_path / "0_a").to_base64()})
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert folders.read_record(tmp_path / "0_a")["exit_status"] == errors.TERMINATED


def test_jobs_of_stopped_launch_do_not_start(tmp_path: Path) -> None:
    (tmp_path / job.STOPPED).mkdir()
    (tmp_path / job.STOPPED / "one").touch()
    job.perform(lambda data: pytest.fail("the job started"), {"job": make_job(tmp_path / "0").to_base64()})
    assert folders.read_record(tmp_path / "0") == {}


def test_queue_state_is_read_from_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    known = {"exit_status": 1, "slurm": "12"}
    for script, answer in [("echo RUNNING", "RUNNING"), ("true", None), ("echo down >&2; exit 1", "")]:
        squeue.write_text(f"#!/bin/sh\n{script}\n")
        squeue.chmod(0o755)
        assert folders.queue_state("12") == answer
        assert folders.running_process(known) == ("SLURM job 12" if answer else None)
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    assert folders.queue_state("12") is None


def test_each_process_takes_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for _ in range(3):  # three processes, each with its locks
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
        monkeypatch.setattr(job, "_device_locks", [])
        job.take_device(tmp_path, "auto")
        taken.append((os.environ["CUDA_VISIBLE_DEVICES"], job._device_locks))
    assert [name for name, _ in taken[:2]] == ["4", "7"] and taken[2][0] in ("4", "7") and not taken[2][1]
    for _, held in taken:
        for handle in held:
            os.close(handle)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(job, "_device_locks", [])
    job.take_device(tmp_path, "cuda:1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_copied_code_is_verified_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "my_own_plugin.py"
    plugin.write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    copy = identity.copy_code(tmp_path / "sweep", ["my_own_plugin"])
    assert (copy / "my_own_plugin.py").read_text() == "x = 1\n"
    assert (copy / "lmtool/runs/identity.py").is_file() and (copy / "lmtool/conf/pretrain.yaml").is_file()
    assert not list(copy.rglob("__pycache__"))
    before = identity.fingerprint(["my_own_plugin"])
    made = copy.stat().st_ino
    assert copy.name == before and identity.copy_code(tmp_path / "sweep", ["my_own_plugin"]) == copy
    assert copy.stat().st_ino == made and [path.name for path in copy.parent.iterdir()] == [before]
    for planted in ("json.py", "lmtool/errors.py", "lmtool/__pycache__/errors.pyc"):
        (copy / planted).parent.mkdir(exist_ok=True)
        (copy / planted).write_text("planted here")
        assert identity.copy_code(tmp_path / "sweep", ["my_own_plugin"]) == copy
        assert not [path for path in copy.rglob("*.py*") if "planted here" in path.read_text()]
    assert (copy / "lmtool/errors.py").read_bytes() == Path(errors.__file__).read_bytes()
    plugin.write_text("x = 2\n")
    assert identity.fingerprint(["my_own_plugin"]) != before


def command(folder: Path, *words: str) -> list[str]:
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    budget = ["max_steps=6", "checkpoint_every=2", "evaluate_every=3", "log_every=1", "batch_tokens=256"]
    data = ["data=text", f"data.path={text}", f"cache_dir={folder / 'cache'}", "objective.pairs=none"]
    return [sys.executable, "-m", "lmtool", "pretrain", "-m", "model=bert_tiny", *TINY, *budget, *data, *words]


def start(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    root = str(Path(cli.__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **more}
    return subprocess.Popen(
        command(folder, *words),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def job_weights(sweep: Path) -> dict[str, tuple[bytes, list[Any]]]:
    """Last weights and losses of each job, by the name of its folder."""
    return {
        path.name: (
            (path / "checkpoints/step_00000006/model.safetensors").read_bytes(),
            [json.loads(line).get("loss") for line in (path / "metrics.jsonl").read_text().splitlines()],
        )
        for path in sweep.glob("*_*")
    }


GRID = ["seed=1,2", "optimizer.lr=1e-3,3e-3"]


def all_done(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
def test_launchers_give_same_losses_and_weights(tmp_path: Path) -> None:
    all_done(start(tmp_path, *GRID, "name=basic"))
    all_done(start(tmp_path, *GRID, "name=joblib", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"))
    all_done(start(tmp_path, *GRID, "name=local", "hydra/launcher=submitit_local"))
    reference = job_weights(tmp_path / "runs/basic")
    assert len(reference) == 4
    assert job_weights(tmp_path / "runs/joblib") == reference and job_weights(tmp_path / "runs/local") == reference


def wait_until(reached: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_sweep_runs_missing_jobs(tmp_path: Path, number: signal.Signals) -> None:
    all_done(start(tmp_path, *GRID, "name=whole"))
    typed = [*GRID, "name=halved", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    process, sweep = start(tmp_path, *typed), tmp_path / "runs/halved"
    wait_until(lambda: any(folders.is_done(path.parent, has_result=True) for path in sweep.glob("*/job.json")), process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    # Job processes stop after their parent died.
    wait_until(lambda: not any(sweep.glob("*/LOCK")), start(tmp_path, "--cfg", "job"))
    done = [path.parent for path in sweep.glob("*/job.json") if folders.is_done(path.parent, has_result=True)]
    before = {folder / "result.json": (folder / "result.json").stat().st_mtime_ns for folder in done}
    again = all_done(start(tmp_path, *typed))
    assert again.count("already done, skipped") == len(before) < 4
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
    assert job_weights(sweep) == job_weights(tmp_path / "runs/whole")


@pytest.mark.slow
def test_later_jobs_run_submitted_code(tmp_path: Path) -> None:
    """submitit jobs import the copy even if another lmtool is in the working folder."""
    (tmp_path / "lmtool").mkdir()
    (tmp_path / "lmtool/__init__.py").write_text("raise ImportError('the one of today')\n")
    all_done(start(tmp_path, "seed=1,2", "name=local", "hydra/launcher=submitit_local", PYTHONSAFEPATH="1"))
    copies = list((tmp_path / "runs/local/.code").iterdir())
    codes = {json.loads(path.read_text())["code"] for path in tmp_path.glob("runs/local/*/job.json")}
    assert [copy.name for copy in copies] == list(codes)


@pytest.mark.slurm
def test_slurm_jobs_match_basic_launcher_and_requeue(tmp_path: Path) -> None:
    """Two jobs equal those of the basic launcher; then one job is preempted in its first steps and requeued."""
    slurm = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=low", "hydra.launcher.timeout_min=20"]
    all_done(start(tmp_path, "seed=1,2", "name=basic"))
    all_done(start(tmp_path, "seed=1,2", "name=slurm", *slurm))
    assert job_weights(tmp_path / "runs/slurm") == job_weights(tmp_path / "runs/basic")
    process, run = start(tmp_path, "seed=1,3", "name=slurm", *slurm), tmp_path / "runs/slurm/2_seed-3"
    wait_until(lambda: (run / "metrics.jsonl").exists(), process)
    queued = folders.read_record(run)["slurm"]
    subprocess.run(["scancel", "--signal=USR2", queued], check=True)
    wait_until(lambda: folders.queue_state(queued) == "PENDING", process)
    assert folders.read_record(run)["exit_status"] == errors.REQUEUE
    subprocess.run(["scontrol", "update", f"JobId={queued}", "StartTime=now"], check=True)
    assert "already done, skipped" in all_done(process)
    all_done(start(tmp_path, "seed=3", "name=whole"))
    assert job_weights(tmp_path / "runs/slurm")["2_seed-3"][0] == (
        next((tmp_path / "runs/whole").glob("0*/checkpoints/step_00000006/model.safetensors")).read_bytes()
    )
