"""Feature extraction as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.errors import Problem
from lmtool.tuning.configs.base import TuningConfig, depth_read, members_of, sides_read

_SIDE_BY_SIDE = 4


@component("tuning", "head", builder="lmtool.tuning.head:HeadTuning")
class HeadConfig(TuningConfig):
    """Feature extraction: the backbone is frozen, the task's head learns."""

    of_transformers: ClassVar[bool] = False

    name: Literal["head"] = Field(
        "head",
        description="Feature extraction: only the task's head learns; the pooler too where it is new.",
    )
    layers: Literal["last", "scalar_mix", "concat_last_4"] = Field(
        "last",
        description="What the head reads. last: the last layer. scalar_mix: a learned mean of all, the embedding too "
        "(ELMo, Peters et al. 2018). concat_last_4: the last four side by side (Devlin et al. 2019, section 5.3). Of "
        "several layers the pooler learns too.",
    )

    def misfit(self, model: Any, task: Any) -> Problem | None:
        written = all(member.writes_text for member in members_of(task))
        # A head that fills masks has layers of its own.
        if written and model.architecture != "encoder" and getattr(model, "tied", True):
            return Problem(
                "tuning",
                f"tuning=head: the answers of task={task.name} are given by the language model's head, which is the "
                f"frozen token table of model={model.name}: nothing would learn",
                "give tuning=last_n, tuning=lora or tuning=full",
            )
        return None if self.layers == "last" else self._unread(model, task)

    def _unread(self, model: Any, task: Any) -> Problem | None:
        """Why several layers are not read, if they are not."""
        typed = f"tuning.layers={self.layers}"
        if not model.depths:
            message = f"{typed} reads the layers of a stack; model={model.name} has none"
            return Problem("tuning.layers", message, "give tuning.layers=last")
        if self.layers == "scalar_mix" and not model.even_states:
            message = f"{typed} adds up states of one width; model={model.name} has states of several"
            return Problem("tuning.layers", message, "give tuning.layers=last")
        for member in members_of(task):
            if member.writes_text or getattr(member, "auxiliary_lm", 0.0):
                message = f"{typed}: the language model's head of task={member.name} reads the last layer alone"
                return Problem("tuning.layers", message, "give tuning.layers=last")
        if len(sides_read(model, task)) > 1:
            message = f"{typed}: the members of task={task.name} read different stacks of model={model.name}"
            return Problem("tuning.layers", message, "give tuning.layers=last")
        if self.layers == "concat_last_4" and depth_read(model, task) < _SIDE_BY_SIDE:
            message = f"{typed}: {depth_read(model, task)} layers stand before the head of model={model.name}"
            return Problem("tuning.layers", message, "give tuning.layers=scalar_mix")
        return None
