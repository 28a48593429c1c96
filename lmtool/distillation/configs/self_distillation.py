"""A model that learns from its own last layer. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.distillation.configs.base import DistillConfig
from lmtool.errors import Problem


@component("distill", "self", builder="lmtool.distillation.self_distillation:SelfDistillation")
class SelfConfig(DistillConfig):
    """Exits behind some layers, each with heads of its own, learn what the last layer predicts (Zhang et al. 2019, "Be
    Your Own Teacher"); the model can answer at each of them."""

    name: Literal["self"] = Field("self", description="Exits learn from the last layer.")
    exits: Literal["all"] | tuple[int, ...] = Field(
        "all", description="Layers, counted from 1, behind which there is an exit: all below the last, or a list."
    )
    soft: float = Field(
        0.3, ge=0, le=1, description="Of an exit's loss the share of what the last layer predicts; the rest is its own."
    )
    temperature: float = Field(3.0, gt=0, description="What the logits of both are divided by.")
    states: float = Field(
        0.03, ge=0, description="Weight of the squared difference between an exit's states and the last ones."
    )

    def exits_in(self, model: Any) -> tuple[int, ...]:
        return tuple(range(1, model.num_layers)) if self.exits == "all" else tuple(sorted(self.exits))

    def misfit(self, model: Any, learned: Any) -> Problem | None:
        if not hasattr(learned, "writes_text"):
            return _problem(f"objective={learned.name} is none")
        if [*learned.parts()] != [learned]:
            return _problem(f"task={learned.name} is a mixture of several")
        if model.architecture == "encoder_decoder":
            return _problem(f"model={model.name} has two stacks, whose layers do not follow one another", "model=bert")
        if learned.writes_text:
            return _problem(f"task={learned.name} reads what a language model writes")
        if getattr(learned, "domain", None) is not None:
            return _problem(f"task={learned.name} has an auxiliary loss over two domains", "task.domain=null")
        return self._out_of_place(model)

    def _out_of_place(self, model: Any) -> Problem | None:
        if model.num_layers < 2:
            return _problem(f"model.num_layers={model.num_layers}: no layer is below the last", "model.num_layers=2")
        deepest, exits = model.num_layers - 1, self.exits_in(model)
        wrong = next((depth for depth in exits if not 1 <= depth <= deepest), None)
        if wrong is None and exits and len(set(exits)) == len(exits):
            return None
        reason = "names none" if not exits else f"names {wrong}" if wrong is not None else "names a layer twice"
        message = f"distill.exits={list(exits)} {reason}: exits are behind layers 1 to {deepest}, the last but one"
        return Problem("distill.exits", message, f"give distill.exits=[{max(1, deepest // 2)}], or all")


def _problem(reason: str, instead: str | None = None) -> Problem:
    message = f"distill=self puts exits behind the layers of a model of one task of labels: {reason}"
    return Problem("distill", message, "give distill=none" if instead is None else f"give {instead}, or distill=none")
