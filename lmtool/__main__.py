"""`python -m lmtool`, as torchrun starts it too.

With -m, Python imports from the working folder first: a file `json.py` there would replace Python's own module. This
module therefore removes the working folder from the path, as `python -P` does, unless lmtool itself is imported from
it. Without -P, modules that Python imports earlier (`contextlib`, `typing`, ...) are still looked up there.
"""

from __future__ import annotations

import contextlib
import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with contextlib.suppress(OSError):  # the working folder may have been deleted
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        if os.path.samefile(sys.path[0], _ROOT):  # so that child processes import this lmtool too
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
        else:
            del sys.path[0]

from lmtool.cli.main import main  # noqa: E402 imported with the changed path

if __name__ == "__main__":
    sys.exit(main())
