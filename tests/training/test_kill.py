"""After kill -9 at any time, a resumed run has bitwise the rows and weights of an uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("kill_harness.py")


def run_harness(job: str, root: Path, kills: int) -> list[dict[str, int]]:
    """Counts of each job from the harness, run as a program with one thread."""
    command = [sys.executable, str(HARNESS), job, "--kills", str(kills), "--root", str(root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, cwd=HARNESS.parents[2], check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_and_resumed_runs_match_uninterrupted_run(tmp_path: Path, kills: int) -> None:
    (counts,) = run_harness("tests.training.jobs:fake", tmp_path, kills)
    assert counts["kills"] == kills and counts["runs"] >= 2
    assert counts["kills_in_a_save"] >= kills // 10  # some kills hit a save
    assert (counts["unreadable"], counts["differing"]) == (0, 0), counts
