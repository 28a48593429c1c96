"""Run one command on the CUDA device that device.py simulates, and print the operations that the host waited for:

    python -m tests.rehearse pretrain model=bert_tiny data=text data.path=FILE max_steps=4

Numbers are computed, slowly: use few steps and small batches. The exit status is the command's, or 1 if a step waits.
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.rehearse import guard


def main(words: list[str]) -> int:
    try:
        guard.load()  # before torch is imported
    except guard.NotBuilt as reason:
        print(reason, file=sys.stderr)
        return 5
    from lmtool.cli import main as cli
    from tests.rehearse.device import WaitRow, simulated_device, wait_lines, wait_rows

    with simulated_device() as device:
        status = cli.main(words)
    rows = Counter({WaitRow(*row): count for *row, count in wait_rows(device)})
    print("operations that the host waited for:", *wait_lines(rows), sep="\n")
    return status or int(any(row.phase == "step" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
