"""`lmtool resume RUN`: resumes a stopped run with its saved configuration."""

from __future__ import annotations

import os

from lmtool.config import saved
from lmtool.config.base import CommandConfig
from lmtool.errors import UserError
from lmtool.resolver.decoding import decode_config
from lmtool.runs.finding import no_run, run_folder
from lmtool.system.ranks import started_together


def read(words: list[str]) -> tuple[str, CommandConfig]:
    """Returns the command of a run and its configuration. words: the run folder."""
    if len(words) != 1 or "=" in words[0]:
        raise UserError(f"{' '.join(['resume', *words])}: give one run folder", "lmtool resume runs/NAME")
    folder = run_folder(words[0])
    if not (folder / "config.yaml").is_file():
        if os.path.lexists(folder / "config.yaml"):  # a socket, a folder, a link that leads nowhere
            raise UserError(f"{folder}/config.yaml is not a regular file", "copy it again from the original run")
        raise no_run(folder)
    data = saved.read(folder / "config.yaml")
    verb = data.get("command")
    if verb not in ("pretrain", "finetune"):
        raise UserError(f"{folder}/config.yaml names no training command", "name a run: lmtool resume runs/NAME")
    # The configuration is complete, and the checkpoint that the run started from may not exist any more.
    config = decode_config(verb, saved.body(data), running=True, reads_checkpoint=False)
    changes: dict[str, object] = {"name": None, "run_dir": str(folder)}
    if started_together(os.environ):  # torchrun determines the number of devices
        changes["devices"] = None
    return verb, config.model_copy(update=changes)
