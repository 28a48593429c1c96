"""What the folder of a job says: submitted.json, what it is; job.json, how it stands. Masked, replaced in one move."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmtool.errors import DONE, TERMINATED
from lmtool.reporting.sweep.files import JOB as JOB
from lmtool.reporting.sweep.files import SUBMITTED as SUBMITTED
from lmtool.reporting.sweep.files import has_ended as has_ended
from lmtool.runs.files import replace_text
from lmtool.runs.identity import finished
from lmtool.runs.locks import Owner
from lmtool.secrets import masked_data

LOG = "job.log"


def write(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    text = json.dumps(masked_data(dict(record)), indent=1, ensure_ascii=False)
    replace_text(folder / name, text + "\n")


def read(folder: Path, name: str = JOB) -> dict[str, Any]:
    """What is written there; {} where nothing is, or no JSON."""
    with suppress(OSError, ValueError):
        record = json.loads((folder / name).read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
    return {}


def me() -> dict[str, Any]:
    return asdict(Owner.me())


def done(folder: Path, has_result: bool) -> bool:
    """Whether the job of a folder is finished. has_result: its command leaves a result.json."""
    return read(folder).get("exit_status") == DONE and (not has_result or finished(folder) is not None)


def under_way(record: Mapping[str, Any]) -> str | None:
    """Where a job is at work, or waits in a queue; None where that is not certain."""
    queued = record.get("slurm")
    if isinstance(queued, str) and (not has_ended(record) or record.get("exit_status") == TERMINATED):
        return f"SLURM job {queued}" if queue_state(queued) else None
    if not record or has_ended(record):
        return None
    with suppress(TypeError):
        owner = Owner(**record.get("owner", {}))
        if owner == Owner(**{**asdict(owner), "host": Owner.me().host}) and owner.alive():
            return f"process {owner.pid}"
    return None


def queue_state(job_id: str) -> str | None:
    """What SLURM says of a job that it has not forgotten (RUNNING, PENDING, ...); None: it has ended. "" where SLURM
    does not answer, which is no end."""
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return ""
    return answer.stdout.split()[0] if answer.stdout.split() else None
