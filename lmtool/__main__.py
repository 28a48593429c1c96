"""`python -m lmtool`."""

from __future__ import annotations

import sys

from lmtool.cli import main

if __name__ == "__main__":
    sys.exit(main())
