"""The table that ends a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmtool.errors import DONE
from lmtool.reporting.console import Output
from lmtool.reporting.table import print_sweep


def show(jobs: Sequence[dict[str, Any]]) -> None:
    """Print the jobs of a sweep, best first, failed ones last with their reason. jobs: of `sweeps.jobs.read_jobs`."""
    rows = []
    for job in jobs:
        done = job["exit_status"] == DONE
        status = "done" if done else job.get("error") or "stopped on the way"
        overrides = dict(text.split("=", 1) for text in job["overrides"] if "=" in text)
        value = job.get("value") if done else None
        rows.append({**job, "overrides": overrides, "status": status, "value": value, "run_dir": job["folder"]})
    print_sweep(Output(), rows)
