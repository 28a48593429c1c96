"""Learning from frozen teachers. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lmtool.config.tables import Several, component
from lmtool.distillation.configs.base import DistillConfig, TermConfig


@component("distill", "standard", builder="lmtool.distillation.standard:Standard")
class StandardConfig(DistillConfig):
    """A frozen teacher and a student (Hinton, Vinyals and Dean 2015)."""

    name: Literal["standard"] = Field("standard", description="A frozen teacher and a student.")
    teacher: str | None = Field(
        None,
        min_length=1,
        description="The teacher: a run or a checkpoint of lmtool, a published folder, or hf://org/name@revision.",
    )
    gold: float = Field(0.5, ge=0, description="Weight of the student's own loss, over the labels of the data.")
    terms: Annotated[dict[str, TermConfig], Several("distill/term")] = Field(
        {}, description="What is learned from the teacher: by name a section with its weight; null takes one out."
    )

    @property
    def teachers(self) -> tuple[str, ...]:
        return () if self.teacher is None else (self.teacher,)
