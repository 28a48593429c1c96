"""How a branch begins: a copy of its trunk's checkpoint, in its own folder, and the rows until there.

The copy has the branch's configuration, no best checkpoint yet, and a line more in its lineage. From then on the branch
is a run that resumes, and needs its trunk no more. The trunk is read only: it may be under way.
"""

from __future__ import annotations

import math
from typing import Any, cast

from lmtool.config.checkpoint import CONFIG, STATE, read_state, saved_steps
from lmtool.config.tables import Choice, build
from lmtool.errors import UserError, cannot_write
from lmtool.resolver.trunks import Trunk
from lmtool.runs.checkpoints import copy_checkpoint
from lmtool.runs.files import to_json
from lmtool.runs.identity import budgets
from lmtool.runs.run_folder import read_rows
from lmtool.session.open_run import OpenRun
from lmtool.session.provenance import LINEAGE, branched
from lmtool.system.files import Damaged
from lmtool.training.configs import ScheduleConfig
from lmtool.training.progress import Progress


def begin_branch(opened: OpenRun) -> None:
    """Make the first checkpoint of a branch that has none. UserError where that of the trunk is damaged, or was taken
    away while it was copied."""
    if opened.folder.writes:
        _begin_branch(opened)
    opened.group.wait()


def _begin_branch(opened: OpenRun) -> None:
    run, branch = opened.folder, opened.config.branch
    if branch is None or saved_steps(run.checkpoints):
        return
    trunk = Trunk.of(branch)
    trunk.require_same(run.config)
    state = _state(read_state(trunk.point), trunk, run.config)
    warning = _jump(trunk, opened)
    if warning is not None:
        opened.output.line(f"warning: {warning}", "yellow")
    run.begin_at(trunk.step, (row for row in read_rows(trunk.run) if row["step"] <= trunk.step))
    replaced = {CONFIG: run.config, STATE: state, LINEAGE: {"checkpoints": list(branched(trunk))}}
    try:
        copy_checkpoint(
            trunk.point, run.checkpoints, {name: to_json(content).encode() for name, content in replaced.items()}
        )
    except OSError as error:
        raise cannot_write(run.checkpoints, error) from error
    except Damaged as damage:
        if trunk.point.is_dir():
            raise trunk.refusal(damage) from damage
        raise UserError(
            f"{trunk.point} was taken away while it was copied: its run is under way, and keeps others",
            f"give branch={trunk.run}@last; keep=all, or keep_every=, keeps more of a run",
        ) from damage


def _jump(trunk: Trunk, opened: OpenRun) -> str | None:
    """What to say where the learning rate of the first step is another than the trunk's would have been, by a twentieth
    or more. None where the branch's end is not known yet."""
    config, before = opened.config, trunk.config()
    if set(budgets(opened.folder.config)) != {"max_steps"}:
        return None
    horizon = read_state(trunk.point).get("total_steps") or math.inf
    rates = [
        build(schedule)(trunk.step + 1, steps) * config.optimizer.lr
        for schedule, steps in (
            (cast(ScheduleConfig, Choice("schedule").validate(before["schedule"])), horizon),
            (config.schedule, float(config.max_steps or math.inf)),
        )
    ]
    if abs(rates[1] - rates[0]) <= 0.05 * max(rates):
        return None
    return (
        f"the learning rate jumps: step {trunk.step + 1} of {trunk.run} has {rates[0]:.3g}; it has {rates[1]:.3g} with "
        f"schedule={config.schedule.name} and max_steps={config.max_steps}"
    )


def _state(saved: dict[str, Any], trunk: Trunk, config: dict[str, Any]) -> dict[str, Any]:
    """The counters that a branch begins with: its best checkpoint will be one of its own, and another budget has a
    horizon of its own."""
    try:
        progress = Progress.from_plain(saved)
    except ValueError as error:
        raise UserError(f"{trunk.point / STATE}: {error}", "give another step of the trunk") from error
    progress.forget_best()
    progress.stale_evaluations = 0
    progress.ended = None
    if budgets(trunk.config()) != budgets(config):
        progress.forget_horizon()
    return progress.to_plain()
