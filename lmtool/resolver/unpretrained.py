"""`-m checkpoint=RUN,none`: what pretraining is worth. The job of `none` has random weights in the shape of RUN's
model, with RUN's vocabulary: the two differ in their weights alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmtool.config.checkpoint import read_checkpoint
from lmtool.errors import UserError
from lmtool.weights.folders import hf_folder

NONE = "none"


def shape_giver(words: Sequence[str]) -> str | None:
    """The checkpoint whose shape the job of `none` has, by what was typed; None without such a sweep. UserError where
    there are several."""
    typed = next((word.partition("=")[2] for word in words if word.startswith("checkpoint=")), "")
    values = [value.strip() for value in typed.split(",")]
    others = [value for value in values if value != NONE]
    if NONE not in values or not others or any(word.startswith(("model=", "tokenizer=")) for word in words):
        return None
    if len(others) > 1:
        raise UserError(
            f"checkpoint={typed}: none has the shape of the checkpoint beside it, and there are {len(others)}",
            f"a sweep for each: -m checkpoint={others[0]},{NONE}",
        )
    return others[0]


def with_shape(data: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """A job's data: of one with checkpoint=none, the model of `checkpoint` and its vocabulary."""
    if data.get("checkpoint") != NONE:
        return data
    published = hf_folder(checkpoint, bool(data.get("offline")))
    saved = read_checkpoint(checkpoint) if published is None else published.saved_config()
    return {**data, "model": saved["model"], "tokenizer": {"name": "folder", "path": checkpoint}}
