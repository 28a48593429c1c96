"""Where the weights of a run come from: the checkpoints before it, oldest first, each with the command that made it and
the hash of its weights. Every checkpoint keeps those before it, so that a chain outlives the runs that it is of.

lineage.json   {"checkpoints": [{"checkpoint": "runs/a", "step": 100, "command": "lmtool pretrain ...", "sha256": ...}]}
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmtool.config.checkpoint import MODEL, find, read_config, read_json, read_manifest, read_state
from lmtool.errors import UserError
from lmtool.manifest import sha256
from lmtool.resolver.trunks import Trunk
from lmtool.secrets import masked
from lmtool.session.open_run import OpenRun
from lmtool.session.start import starts_from
from lmtool.weights.folders import WEIGHTS, published_folder

LINEAGE = "lineage.json"
Lineage = Sequence[dict[str, Any]]


def lineage_of(opened: OpenRun) -> Lineage:
    """The checkpoints before a run; none where it starts from random weights. One that resumes finds them in its own
    checkpoint: what it started from may be gone."""
    if opened.checkpoint is not None:
        return _before(opened.checkpoint)
    origin = starts_from(opened.config)
    if origin is None:
        return []
    published = published_folder(origin, opened.config.offline)
    if published is not None:
        file = published.path / WEIGHTS[0]
        hashed = {"sha256": sha256(file)} if file.is_file() else {}
        revision = {} if published.revision is None else {"revision": published.revision}
        return [{"checkpoint": origin, **revision, **hashed}]
    folder = find(origin)
    return [*_before(folder), {"checkpoint": origin, **_facts(folder)}]


def branched(trunk: Trunk) -> Lineage:
    """The checkpoints before a branch: those of its trunk, and the one that it takes up, with the tokens and seconds
    that were spent until there."""
    state = read_state(trunk.point)
    spent = {key: state[key] for key in ("tokens", "seconds") if key in state}
    return [*_before(trunk.point), {"checkpoint": str(trunk), **_facts(trunk.point), **spent}]


def _facts(folder: Path) -> dict[str, Any]:
    """Step, command and hash of a checkpoint."""
    manifest = read_manifest(folder)
    own = {"step": manifest.facts.get("step"), "command": _command(folder), **manifest.files[MODEL]}
    return {key: own[key] for key in ("step", "command", "sha256") if own.get(key) is not None}


def lineage_line(lineage: Lineage) -> str:
    """A lineage on one line."""
    return " → ".join(str(entry["checkpoint"]) for entry in lineage)


def _before(folder: Path) -> Lineage:
    """The checkpoints before one of lmtool's."""
    if LINEAGE not in read_manifest(folder).files:
        return []
    entries = read_json(folder, LINEAGE).get("checkpoints")
    return [entry for entry in entries or [] if isinstance(entry, dict) and "checkpoint" in entry]


def _command(folder: Path) -> str:
    """The command line that made a checkpoint, as its run's environment.json has it; else the command alone."""
    with suppress(OSError, ValueError, TypeError, LookupError):
        argv = json.loads((folder.parents[1] / "environment.json").read_text(encoding="utf-8"))["arguments"]
        if len(argv) > 1:
            return masked(shlex.join(["lmtool", *map(str, argv[1:])]))
    with suppress(UserError):
        return f"lmtool {read_config(folder).get('command', '')}".strip()
    return "lmtool"
