"""Texts of another domain beside a task's, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import component


class DomainConfig(Config):
    """The base of the losses that bring a task's texts and unlabelled ones of another domain together."""

    name: str = Field(description="Which loss.")
    target: str = Field(
        min_length=1,
        description="Texts of the other domain: a folder with a train file, or one file, with the task's text columns. "
        "Labels are not read.",
    )
    weight: float = Field(1.0, gt=0, description="Weight of the loss beside the task's.")


@component("task/domain", "dann", builder="lmtool.tasks.kinds.domain:GradientReversal")
class DannConfig(DomainConfig):
    """Gradient reversal (Ganin et al. 2016): a classifier learns which domain a text is of, and what it reads learns to
    keep that from it."""

    name: Literal["dann"] = Field("dann", description="Gradient reversal.")
    steps: int = Field(
        1000,
        ge=1,
        description="Steps in which p rises from 0 to 1; the gradient is reversed 2 / (1 + exp(-10 p)) - 1 times.",
    )
    hidden_size: int = Field(100, ge=1, description="Units of the hidden layer of the domain classifier.")


@component("task/domain", "coral", builder="lmtool.tasks.kinds.domain:MomentMatching")
class CoralConfig(DomainConfig):
    """Correlation alignment (Sun and Saenko 2016): the covariances of both domains' features become alike."""

    name: Literal["coral"] = Field("coral", description="Correlation alignment.")
