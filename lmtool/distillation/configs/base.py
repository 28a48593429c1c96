"""What every mode of distillation and every term is as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import component
from lmtool.distillation.configs.layers import LayerMap
from lmtool.errors import Problem
from lmtool.models.configs import ModelConfig


class DistillConfig(Config):
    """The base of every mode."""

    name: str = Field(description="Which mode.")

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The teachers, as they were typed."""
        return ()

    @property
    def compares(self) -> bool:
        """Whether what a student computes is compared with what a teacher does; else it has its texts alone."""
        return bool(self.checkpoints)

    @property
    def of_rows(self) -> bool:
        """Whether all that is compared is predicted, so that it may be of rows, whatever their tokens."""
        return False

    @property
    def same_batches(self) -> bool:
        """Whether teachers run beside the student, on the batches that it reads: they share a vocabulary, and how a
        text is laid out."""
        return bool(self.checkpoints)

    @property
    def starts_from_teacher(self) -> bool:
        """Whether a student starts from weights of its teacher."""
        return False

    @property
    def teaches_heads(self) -> bool:
        """Whether what predicts learns, so that its scores say how far a run is."""
        return True

    def untaught(self) -> Problem | None:
        """What it learns from a teacher, where none is named."""
        return None

    def exits_in(self, model: Any) -> tuple[int, ...]:
        """Of a model's configuration, the layers behind which the student has early exits, in their order."""
        return ()

    def misfit(self, model: Any, learned: Any) -> Problem | None:
        """Why it does not go with a model's configuration and that of a task or an objective, if it does not: what is
        given, why not, and the nearest override that does."""
        return None

    def misfit_of_teacher(self, student: ModelConfig, teacher: ModelConfig) -> Problem | None:
        """The same of the two models, once that of a teacher is read."""
        return None


@component("distill", "none", builder="lmtool.distillation.distilled:none")
class NoDistillConfig(DistillConfig):
    """A model learns from its data alone."""

    name: Literal["none"] = Field("none", description="From the data alone.")


class TermConfig(Config):
    """The base of what a student learns from."""

    needs_teacher: ClassVar[bool] = True
    """Whether a teacher runs beside the student for it."""
    stored: ClassVar[bool] = False
    """Whether it learns from what a store of the teacher's outputs holds."""
    teaches_heads: ClassVar[bool] = True
    """Whether what predicts learns by it."""
    compares_layers: ClassVar[bool] = False
    """Whether it goes by the map between the layers of both models."""
    of_labels: ClassVar[bool] = False
    """Whether the teacher's hard labels are enough for it."""
    averages: ClassVar[bool] = False
    """Whether it learns from several teachers, as from their mean."""

    weight: float = Field(1.0, ge=0, description="Weight of the term in the loss.")

    def misfit(self, student: ModelConfig, teacher: ModelConfig, layers: LayerMap | None) -> Problem | None:
        """Why the two models cannot be compared by it, if they cannot. layers: where a term goes by their map."""
        return None
