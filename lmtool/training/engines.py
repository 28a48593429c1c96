"""Which engine trains a learner."""

from __future__ import annotations

from lmtool.training.configs import Parallel
from lmtool.training.engine import Ddp, Engine, Plain
from lmtool.training.group import Group
from lmtool.training.sharded import Fsdp
from lmtool.types import Learner


def engine_for(learner: Learner, parallel: Parallel, group: Group) -> Engine:
    """The engine that trains a learner in the processes of a group, which must hold the same weights; with fsdp the
    learner is cut over them already."""
    if group.size == 1:
        return Plain(learner)
    return Ddp(learner, group) if parallel == "ddp" else Fsdp(learner, group)
