"""Learning from frozen teachers. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lmtool.config.tables import Several, component
from lmtool.distillation.configs.base import DistillConfig, TermConfig
from lmtool.distillation.configs.layers import LayerMap, Layers, layer_map
from lmtool.errors import Problem, UserError
from lmtool.models.configs import ModelConfig


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

    layers: Layers = Field(
        "uniform",
        description="Which layer learns from which of the teacher's: uniform, last, pkd_skip, pkd_last, or {1: 4, 2: "
        "8}, the teacher's layer by the student's; 0 stands for the embeddings.",
    )
    decoder_layers: Layers | None = Field(
        None, description="The same of the decoder of an encoder-decoder. Null: as layers."
    )

    @property
    def teachers(self) -> tuple[str, ...]:
        return () if self.teacher is None else (self.teacher,)

    @property
    def compares_layers(self) -> bool:
        """Whether a term goes by the layer map."""
        return any(term.compares_layers for term in self.terms.values())

    def layer_map(self, student: ModelConfig, teacher: ModelConfig) -> LayerMap:
        """The teacher's layer by the student's. UserError where it does not fit their depths."""
        return layer_map(self.layers, self.decoder_layers, student, teacher)

    def misfit_of_teacher(self, student: ModelConfig, teacher: ModelConfig) -> Problem | None:
        if not self.compares_layers:
            return None
        try:
            layers = self.layer_map(student, teacher)
        except UserError as error:
            return Problem("distill.layers", error.message, error.hint)
        problems = (term.misfit(student, teacher, layers) for term in self.terms.values() if term.compares_layers)
        return next(filter(None, problems), None)
