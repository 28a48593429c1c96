"""Run one command on the CUDA device that device.py plays, and print what it made the host wait for:

    python -m tests.rehearse pretrain model=bert_tiny data=text data.path=FILE max_steps=4

Numbers are computed, slowly: give few steps and small batches. The exit status is the command's, or 1 where a step
waits.
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
    from tests.rehearse.device import WaitRow, played, wait_lines, wait_rows

    with played() as device:
        status = cli.main(words)
    rows = Counter({WaitRow(*row): count for *row, count in wait_rows(device)})
    print("what the host waited for:", *wait_lines(rows), sep="\n")
    return status or int(any(row.phase == "step" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
