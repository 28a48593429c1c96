"""Budgets that grow: whether a run may train further under the same name.

It may where its schedule, with the new end, has the rates at every step of the past that it had: a level one, one that
is counted in steps, one whose way down has not begun.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.config.checkpoint import read_config, read_state
from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.resolver.trunks import phases_ended
from lmtool.runs.identity import BUDGETS, budgets
from lmtool.schema.run import RunConfig

_COMPARED = 10_000  # steps of the past, evenly spaced


def require_same_past(verb: str, config: RunConfig, folder: Path, point: Path) -> None:
    """UserError, with the command of a branch, where the past of a run is not what it would have been with the budgets
    that it has now. folder: the run's. point: the checkpoint that it resumes from."""
    state, before = read_state(point), read_config(point)
    given = {key: getattr(config, key) for key in budgets(before) if getattr(config, key) != before[key]}
    typed = [f"{key}={'null' if value is None else value}" for key, value in given.items()]
    command = ["lmtool", verb, f"branch={folder}@{state['step']}", *typed]
    if state.get("ended") == "patience":
        raise UserError(
            f"{folder} was ended by patience after step {state['step']}: a larger budget does not train it further",
            " ".join(map(shlex.quote, [*command, "patience=null", "name=NEW"])),
        )
    if phases_ended(state):
        raise UserError(
            f"{folder} cannot be extended: its phases are shares of the budget, and those of a larger one would "
            f"have had other borders before step {state['step']}",
            f"start another run from its weights: the same command with checkpoint={folder} name=NEW",
        )
    old, new = _horizon(before, state), _new_horizon(config, before, state)
    schedule, done = build(config.schedule), state["step"]
    for step in np.unique(np.linspace(1, done, min(done, _COMPARED)).round()).astype(int).tolist():
        then, now = schedule(step, old), schedule(step, new)
        if then != now:
            keys = ", ".join(f"{key} {before[key]:g} -> {value or math.inf:g}" for key, value in given.items())
            raise UserError(
                f"{folder} cannot be extended ({keys}): schedule={config.schedule.name} depends on the end of the run. "
                f"The learning rate of step {step} was {then * config.optimizer.lr:.3g}, and would have been "
                f"{now * config.optimizer.lr:.3g}",
                " ".join(map(shlex.quote, [*command, "name=NEW"])),
            )


def _horizon(before: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    """The steps of the run as its schedule saw them."""
    return state.get("total_steps") or before.get("max_steps") or math.inf


def _new_horizon(config: RunConfig, before: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    """The steps of the run with its new budgets; where these are no steps, in proportion to the one that set them."""
    steps, bound = config.max_steps or math.inf, state.get("horizon")
    if bound not in BUDGETS or bound == "max_steps" or bound not in before:
        return steps
    limit = getattr(config, str(bound))
    return min(steps, math.inf if limit is None else math.ceil(_horizon(before, state) * limit / before[bound]))
