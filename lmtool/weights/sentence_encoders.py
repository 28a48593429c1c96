"""What the folder of a published sentence encoder says of its pooling: `modules.json` and `1_Pooling/config.json`, as
sentence-transformers writes them. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmtool.errors import UserError
from lmtool.weights.folders import PublishedFolder, fetched

_MODULES, _POOLING = "modules.json", "1_Pooling"
# Its pooling modes, and what a task says for the same. The first token is read as it is, without a pooler.
_FIELDS: dict[str, dict[str, Any]] = {
    "mean": {"pooling": "mean"},
    "max": {"pooling": "max"},
    "cls": {"pooling": "first", "head_layers": 1},
    "lasttoken": {"pooling": "last"},
}
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}


def sentence_pooling(folder: PublishedFolder, offline: bool) -> tuple[dict[str, Any], str] | None:
    """The fields of a task that pool as the folder says, and the file that says it; None where it is no sentence
    encoder's. UserError for a pooling that lmtool does not have, and for files that cannot be read."""
    modules = fetched(folder, _MODULES, offline, required=False)
    place = _POOLING if modules is None else _pooling_module(modules)
    path = None if place is None else fetched(folder, f"{place}/config.json", offline, required=False)
    if path is None:
        return None
    config, file = _read(path), f"{place}/config.json"
    given = config.get("pooling_mode")
    modes = [given] if isinstance(given, str) else [
        name for name, value in config.items() if name.startswith("pooling_mode_") and value is True
    ]  # fmt: skip
    names = [_FLAGS.get(mode, mode) for mode in modes]
    if len(names) != 1 or names[0] not in _FIELDS:
        raise UserError(
            f"checkpoint={folder.checkpoint}: its {file} pools by {' and '.join(names) or 'nothing'}; lmtool has "
            f"{', '.join(_FIELDS)}",
            "give task.pooling=mean, or another checkpoint",
        )
    return _FIELDS[names[0]], file


def _pooling_module(path: Path) -> str | None:
    """The sub-folder of the pooling module; None where modules.json has none."""
    modules = _read(path, list)
    for module in modules:
        if isinstance(module, dict) and str(module.get("type", "")).rpartition(".")[2] == "Pooling":
            return str(module.get("path", ""))
    return None


def _read(path: Path, kind: type = dict) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise UserError(f"{path}: not JSON: {problem}", "copy the folder again") from problem
    if not isinstance(content, kind):
        raise UserError(f"{path}: no JSON {'list' if kind is list else 'object'}", "copy the folder again")
    return content
