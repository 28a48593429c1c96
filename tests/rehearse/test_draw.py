"""A sample of the tests of `make rehearse`, in a separate process whose torch has a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearse import guard

ROOT = Path(__file__).resolve().parents[2]
WALK = "tests/rehearse/test_walk.py::test_"
# All tests of the device; of the walk, tests that plan on the host, use separate kernels, or report waits; one test of
# each GPU file, because no other run notices changes of the code that it tests.
SAMPLE = (
    "tests/objectives/test_cuda.py::test_losses_and_gradients_match_cpu[mlm-bf16]",
    "tests/objectives/test_cuda.py::test_training_step_does_not_synchronize[mlm-0.1]",
    "tests/training/test_cuda.py::test_half_precision_losses_match_fp32[fp16]",
    "tests/commands/test_cuda.py::test_pretraining_on_cuda_reduces_loss[bert_tiny]",
    "tests/rehearse/test_device.py",
    f"{WALK}family_trains_with_dropout[elmo-precision=bf16]",
    f"{WALK}adaptive_softmax_does_not_wait",
    f"{WALK}family_trains_with_dropout[rnn_attention-precision=bf16]",
    f"{WALK}family_trains_with_attention_dropout[bert]",
    f"{WALK}wait_in_a_step_is_reported_once",
)


def test_sample_of_device_tests_passes() -> None:
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
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, *words, *SAMPLE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
