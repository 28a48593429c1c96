"""`lmtool resume RUN`: resume a run that was stopped, with the configuration it was started with."""

from __future__ import annotations

from typing import Any

from lmtool.commands import finetune, pretrain
from lmtool.commands.decoding import decoded
from lmtool.config import saved
from lmtool.config.checkpoint import run_folder
from lmtool.errors import UserError


def main(words: list[str]) -> dict[str, Any]:
    """words: the run folder. Returns result.json."""
    if len(words) != 1 or "=" in words[0]:
        raise UserError(f"{' '.join(['resume', *words])}: give one run folder", "lmtool resume runs/NAME")
    folder = run_folder(words[0])
    data = saved.read(folder / "config.yaml")
    verb = data.get("command")
    if verb not in ("pretrain", "finetune"):
        raise UserError(f"{folder}/config.yaml names no training command", "lmtool resume runs/NAME")
    # The configuration is complete, and the checkpoint it started from may be gone by now.
    config = decoded(verb, saved.body(data), running=True, reads_checkpoint=False)
    config = config.model_copy(update={"name": None, "run_dir": str(folder)})
    command = pretrain.run if verb == "pretrain" else finetune.run
    return command(config, [])
