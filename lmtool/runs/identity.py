"""What makes two configurations the same run, the names of runs, and whether one is done. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lmtool.errors import UserError
from lmtool.runs.files import LONGEST_ROW, to_json

# Where and how fast a run computes, and what it is called: these may differ when it resumes. Everything else is part
# of what is learned; evaluate_every and patience too, since they decide when a run ends and which weights are best.
FREE_KEYS = frozenset(
    {
        "name", "run_dir", "device", "devices", "parallel", "precision", "micro_batch_tokens", "gradient_checkpointing",
        "compile", "log_every", "checkpoint_every", "keep", "keep_every", "cache_dir", "offline", "logger",
    }
)  # fmt: skip
SUBMITTED = "submitted.json"
"""In the folder of a job of a sweep: what the job is."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
BUDGETS = frozenset({"max_steps", "max_epochs", "max_tokens", "max_minutes", "max_flops"})
# A branch has its own end, and its own way there.
BRANCH_KEYS = FREE_KEYS | BUDGETS | {"branch", "schedule", "evaluate_every", "patience"}


def require_name(name: str) -> None:
    """UserError where a name is no plain name of a folder."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"name={name!r} is no name: letters, digits, '.', '_' and '-', up to 100, no '.' or '-' in front",
            f"name={re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('.-')[:100] or 'my-run'}",
        )


def differing(before: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str] = FREE_KEYS) -> list[str]:
    """The keys, with both values, in which two configurations as plain data are not the same run. free: keys that may
    differ. No value is as good as null."""
    old, new = flatten(before), flatten(now)
    if old.get("command") != new.get("command"):
        # Two commands share few keys: their list would say nothing.
        old, new = ({"command": values.get("command")} for values in (old, new))
    return [
        f"{key} {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if key.split(".")[0] not in free and old.get(key) != new.get(key)
    ]


def budgets(config: Mapping[str, Any]) -> dict[str, Any]:
    """The budgets that a configuration as plain data has."""
    return {key: config[key] for key in sorted(BUDGETS) if config.get(key) is not None}


def grows(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two configurations differ in budgets alone, none of which is smaller now, or new."""
    old, new = budgets(before), budgets(now)
    larger = all(key in old and new[key] >= old[key] for key in new)
    return larger and old != new and not differing(before, now, FREE_KEYS | BUDGETS)


def finished(path: Path) -> dict[str, Any] | None:
    """The result of a run folder that is done, else None."""
    try:
        with (path / "result.json").open(encoding="utf-8") as file:
            result = json.loads(file.read(LONGEST_ROW))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("status") == "done" else None


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """`{"model": {"name": "bert"}}` as `{"model.name": "bert"}`. Lists are values."""
    if not isinstance(config, Mapping) or not config:
        return {prefix: config}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return to_json(flat[key], indent=None) if key in flat else "(absent)"
