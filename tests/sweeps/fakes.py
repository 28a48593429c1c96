"""A job that other processes import by name; it records its seed, process, threads and package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lmtool
from lmtool.errors import UserError


def run_job(verb: str, plugins: tuple[str, ...], data: dict[str, Any]) -> dict[str, Any]:
    """Replaces `cli.run_job`."""
    print(f"seed {data['seed']} speaks")
    if data["seed"] == 2:
        raise UserError("no such seed", "use another")
    seen = {"pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"], "package": lmtool.__file__}
    result = {"status": "done", "metric": "loss", "value": data["seed"] / 10, **seen}
    (Path(data["run_dir"]) / "result.json").write_text(json.dumps(result))
    return result
