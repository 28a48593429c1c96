"""`python -m lmtool`, as torchrun starts it too.

With -m Python imports from the working folder first: a `json.py` that lies there would be run in the place of Python's
own. So this folder is taken off the path, as the command `lmtool` and `python -P` have it, unless lmtool itself is
imported from it. What Python imports before it comes here (`contextlib`, `typing`, ...) is looked up there unless -P is
given.
"""

from __future__ import annotations

import contextlib
import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with contextlib.suppress(OSError):  # the working folder is gone
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        if os.path.samefile(sys.path[0], _ROOT):  # for the processes that are started from here
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
        else:
            del sys.path[0]

from lmtool.cli.main import main  # noqa: E402 found with the path as it is now

if __name__ == "__main__":
    sys.exit(main())
