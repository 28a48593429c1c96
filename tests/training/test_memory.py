"""The allocator keeps freed memory between steps."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import numpy as np
from lmtool.training.precision import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for step in range(30):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(2_500_000) for _ in range(5)]
    del blocks
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc")
def test_keep_freed_memory_stops_page_faults():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < 100 < faults("leave")
