"""A draw of what `make rehearse` runs, in a process of its own, whose torch has a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearse import guard

ROOT = Path(__file__).resolve().parents[2]
WALK = "tests/rehearse/test_walk.py::test_"
# Of the device itself all; of the walk what plans on the host, reads by a kernel of its own, or watches; of each file
# for a GPU one test, since no other run would notice that the code under it has changed.
DRAW = (
    "tests/objectives/test_cuda.py::test_losses_and_gradients_are_those_of_a_cpu[mlm-bf16]",
    "tests/objectives/test_cuda.py::test_a_step_does_not_wait_for_the_device[mlm-0.1]",
    "tests/training/test_cuda.py::test_half_precision_losses_match_fp32[fp16]",
    "tests/commands/test_cuda.py::test_a_tiny_experiment_pretrains[bert_tiny]",
    "tests/rehearse/test_device.py",
    f"{WALK}a_family_drops[elmo-precision=bf16]",
    f"{WALK}an_adaptive_softmax",
    f"{WALK}a_family_drops[rnn_attention-precision=bf16]",
    f"{WALK}a_family_drops_weights_of_attention[bert]",
    f"{WALK}a_wait_in_a_step_is_told_once",
)


def test_a_draw() -> None:
    try:
        guard.built()
    except guard.NotBuilt as reason:
        pytest.skip(str(reason))
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.rehearse.plugin",
        "-m",
        "gpu or rehearse",
        *DRAW,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, *words, *DRAW]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
