"""Schemes beside a tuning method, as configuration: what learns when, and what holds weights at the pretrained ones.
Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import Choice, component
from lmtool.errors import Problem
from lmtool.tuning.configs.base import TuningConfig


class UnfreezingConfig(Config):
    """When each part of what learns begins to."""

    name: str = Field(description="Which order.")


@component("tuning/schedule", "none", builder="lmtool.tuning.schemes:Scheme")
class AtOnceConfig(UnfreezingConfig):
    """Everything learns from the first step."""

    name: Literal["none"] = Field("none", description="Everything learns from the first step.")


@component("tuning/schedule", "gradual_unfreezing", builder="lmtool.tuning.unfreezing:GradualUnfreezing")
class GradualUnfreezingConfig(UnfreezingConfig):
    """ULMFiT's gradual unfreezing (Howard and Ruder 2018, section 3.3)."""

    name: Literal["gradual_unfreezing"] = Field(
        "gradual_unfreezing", description="The head first, then one layer more from the top at a time, embeddings last."
    )
    every_steps: int | None = Field(
        None, ge=1, description="Steps until the next layer begins to learn. Null: a pass over the training examples."
    )


class RegularizationConfig(Config):
    """What holds the weights at the pretrained ones."""

    name: str = Field(description="Which regularization.")

    @property
    def needs_start(self) -> bool:
        """Whether it reads the weights that the run starts from, all along."""
        return self.name != "none"


@component("tuning/regularization", "none", builder="lmtool.tuning.schemes:Scheme")
class NoRegularizationConfig(RegularizationConfig):
    """Nothing beside dropout and weight decay."""

    name: Literal["none"] = Field("none", description="Nothing beside dropout and weight decay.")


@component("tuning/regularization", "l2_sp", builder="lmtool.tuning.l2_sp:L2Sp")
class L2SpConfig(RegularizationConfig):
    """A penalty on the distance from the pretrained weights (Li, Grandvalet and Davoine 2018, L2-SP), in the place of
    weight decay."""

    name: Literal["l2_sp"] = Field("l2_sp", description="A penalty on the distance from the pretrained weights.")
    alpha: float = Field(
        0.1, ge=0, description="Weight of half the squared distance from the pretrained weights; to be tuned."
    )
    beta: float = Field(0.01, ge=0, description="Weight of half the squares of new weights (the head); 0.01 published.")


@component("tuning/regularization", "mixout", builder="lmtool.tuning.mixout:Mixout")
class MixoutConfig(RegularizationConfig):
    """In each step a part of the weights are the pretrained ones again (Lee, Cho and Kang 2020)."""

    name: Literal["mixout"] = Field("mixout", description="In each step a part of the weights are the pretrained ones.")
    probability: float = Field(
        0.9, ge=0, le=1, description="Of each weight of a pretrained linear map; 0.7, 0.8 and 0.9 published."
    )


class ByDepthConfig(TuningConfig):
    """A method whose parameters stand in the layers, so that these can begin to learn one after the other."""

    schedule: Annotated[UnfreezingConfig, Choice("tuning/schedule")] = Field(
        AtOnceConfig(), description="When each layer begins to learn."
    )

    @property
    def schemes(self) -> tuple[Config, ...]:
        return (*super().schemes, self.schedule)

    def misfit(self, model: Any, task: Any) -> Problem | None:
        if self.schedule.name != "none" and model.shares_layers:
            return Problem(
                "tuning.schedule",
                f"tuning/schedule={self.schedule.name}: model={model.name} has one layer, applied at every depth",
                "give tuning/schedule=none",
            )
        return super().misfit(model, task)


class OfPretrainedConfig(TuningConfig):
    """A method by which pretrained weights learn, so that these can be held."""

    regularization: Annotated[RegularizationConfig, Choice("tuning/regularization")] = Field(
        NoRegularizationConfig(), description="What holds the weights at the pretrained ones."
    )

    @property
    def schemes(self) -> tuple[Config, ...]:
        return (*super().schemes, self.regularization)

    @property
    def needs_start(self) -> bool:
        return super().needs_start or self.regularization.needs_start
