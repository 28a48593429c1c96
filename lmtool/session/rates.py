"""The learning rates of a run by depth, and the step from which each part learns, for first screen and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lmtool.learners.base import BaseLearner
from lmtool.training.configs import OptimizerConfig
from lmtool.training.depth import levels
from lmtool.training.optimizers import training_groups


class _Kind(NamedTuple):
    """What the parameters of a row have in common. rate: full learning rate. decay: weight decay. first: the step from
    which they learn, None: not in this run."""

    rate: float
    decay: float
    first: int | None


def rates(learner: BaseLearner, optimizer: OptimizerConfig, steps: int) -> list[dict[str, Any]]:
    """Rows from the head down, levels that are treated alike together: {"group": "layer 12 to layer 7" ("all" of a
    single row), "parameters", "learning_rate" (before the schedule), "weight_decay", "without_decay" (parameters: norms
    and biases), "from_step" (None: not within these many steps)}. What does not learn is in none."""
    decay = getattr(optimizer, "weight_decay", getattr(optimizer, "l2", 0.0))
    of_name = {
        name: (group.learning_rate_scale, decay * group.weight_decay_scale, parameter.numel())
        for group in training_groups(learner, optimizer.layer_decay)
        for name, parameter in group.parameters
    }
    rows: list[tuple[list[str], int, int, _Kind]] = []
    for level, members in levels(name for name, _ in learner.named_parameters()).items():
        learning = [name for name in members if name in of_name]
        for scale in dict.fromkeys(of_name[name][0] for name in learning):
            names = [name for name in learning if of_name[name][0] == scale]
            firsts = [learner.first_step(name, steps) for name in names]
            first = None if None in firsts else max(step for step in firsts if step is not None)
            kind = _Kind(optimizer.lr * scale, max(of_name[name][1] for name in names), first)
            size = sum(of_name[name][2] for name in names)
            without = sum(of_name[name][2] for name in names if not of_name[name][1])
            titles: list[str] = []
            if rows and rows[-1][3] == kind:
                titles, above, above_without, _ = rows.pop()
                size, without = size + above, without + above_without
            rows.append(([*titles, level], size, without, kind))
    return [
        {
            "group": titles[0] if len(titles) == 1 else "all" if len(rows) == 1 else f"{titles[0]} to {titles[-1]}",
            "parameters": size,
            "learning_rate": kind.rate,
            "weight_decay": kind.decay,
            "without_decay": without,
            "from_step": kind.first,
        }
        for titles, size, without, kind in rows
    ]


def never(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """A warning where the run ends before everything that should learn does."""
    names = [str(row["group"]) for row in rows if row["from_step"] is None]
    if not names:
        return None
    hint = "give more epochs, or tuning.schedule.every_steps="
    return f"the run ends before these begin to learn: {', '.join(names)}; {hint}"
