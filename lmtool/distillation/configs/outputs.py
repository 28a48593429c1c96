"""The terms over what a teacher predicts. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from lmtool.config.tables import component
from lmtool.distillation.configs.base import TermConfig


@component("distill/term", "hard", builder="lmtool.distillation.terms.outputs:Hard")
class HardConfig(TermConfig):
    """The teacher's hard labels: the loss of the task against what the teacher predicts."""

    of_labels: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    stored: ClassVar[bool] = True


@component("distill/term", "soft", builder="lmtool.distillation.terms.outputs:Soft")
class SoftConfig(TermConfig):
    """Soft targets (Hinton, Vinyals and Dean 2015): T^2 KL(teacher || student), both at temperature T; of values the
    squared error."""

    averages: ClassVar[bool] = True
    stored: ClassVar[bool] = True

    temperature: float = Field(2.0, gt=0, description="What logits of both are divided by; 2 for DistilBERT.")
