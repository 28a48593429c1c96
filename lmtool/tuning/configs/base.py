"""What a tuning method and a scheme beside it are as configuration. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import Choice, component
from lmtool.errors import Problem
from lmtool.models import recipes

# What a tuning method is as configuration: a file a method. Imports no torch.


class TuningConfig(Config):
    """The base of every tuning method. What a paper gives for it, its learning rate above all, stands in
    `conf/recipe/tuning/NAME.yaml`; without one it learns as the model's recipe has it."""

    of_transformers: ClassVar[bool] = True
    """Whether it edits the layers of a transformer; False: any model will do."""
    of_stacks: ClassVar[bool] = False
    """Whether it needs a stack of layers, of whatever kind, where it needs no transformer."""

    name: str = Field(description="Which tuning method.")

    @property
    def builds_on(self) -> tuple[str, ...]:
        """Earlier runs whose additions to the model it takes as they are: none."""
        return ()

    @property
    def recipe_name(self) -> str:
        """Which YAML of `conf/recipe/tuning/` is its: that of its name, where its fields do not choose another."""
        return self.name

    def recipe(self) -> dict[str, Any]:
        """What `optimizer=auto` and `schedule=auto` stand for with this method: by section, {} where its YAML does not
        say."""
        return recipes.of_tuning(type(self), self.recipe_name)

    @property
    def positions(self) -> int:
        """Positions that it takes in every text of the input."""
        return 0

    def reserved_positions(self, model: Any) -> int:
        """Those that a text of a model of this configuration lacks then: none where positions have no end."""
        return self.positions if getattr(getattr(model, "positions", None), "ends", False) else 0

    def warnings(self, optimizer: Any, model: Any) -> list[str]:
        """What a user should know before training a model of this configuration with such an optimizer."""
        return []

    @property
    def schemes(self) -> tuple[Config, ...]:
        """The schemes beside the method: when its parameters learn, and what holds them."""
        return ()

    @property
    def needs_start(self) -> bool:
        """Whether the weights that a run starts from are read all along, also where it resumes."""
        return False

    def misfit(self, model: Any, task: Any) -> Problem | None:
        """Why this method does not go with a model's or a task's configuration, if it does not: what is given, why
        not, and the nearest override that does."""
        if self.of_transformers and not hasattr(model, "num_heads"):
            return Problem(
                "tuning",
                f"tuning={self.name} edits the layers of a transformer; model={model.name} is none",
                "give tuning=full or tuning=head",
            )
        if self.of_stacks and not model.depths:
            message = f"tuning={self.name} takes layers of a stack; model={model.name} has none"
            return Problem("tuning", message, "give tuning=full or tuning=head")
        return None


def members_of(task: Any) -> tuple[Any, ...]:
    """The tasks of a mixture; of any other it alone."""
    return task.parts() if hasattr(task, "parts") else (task,)


def sides_read(model: Any, task: Any) -> set[str]:
    """The sides of a batch whose states the heads of a task read."""
    return {member.states_read(model) for member in members_of(task)}


def depth_read(model: Any, task: Any) -> int:
    """How many layers the stack has whose states the heads of a task read; of two the fewer."""
    if model.architecture != "encoder_decoder":
        return model.num_layers
    depths = {"inputs": model.num_layers, "outputs": model.layers_of_decoder}
    return min(depths[side] for side in sides_read(model, task))


# Schemes beside a tuning method, as configuration: what learns when, and what holds weights at the pretrained ones.
# Imports no torch.


class UnfreezingConfig(Config):
    """When each part of what learns begins to."""

    name: str = Field(description="Which order.")


@component("tuning/schedule", "none", builder="lmtool.tuning.schemes:Scheme")
class AtOnceConfig(UnfreezingConfig):
    """Everything learns from the first step."""

    name: Literal["none"] = Field("none", description="Everything learns from the first step.")


@component("tuning/schedule", "gradual_unfreezing", builder="lmtool.tuning.schemes:GradualUnfreezing")
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


@component("tuning/regularization", "l2_sp", builder="lmtool.tuning.schemes:L2Sp")
class L2SpConfig(RegularizationConfig):
    """A penalty on the distance from the pretrained weights (Li, Grandvalet and Davoine 2018, L2-SP), in the place of
    weight decay."""

    name: Literal["l2_sp"] = Field("l2_sp", description="A penalty on the distance from the pretrained weights.")
    alpha: float = Field(
        0.1, ge=0, description="Weight of half the squared distance from the pretrained weights; to be tuned."
    )
    beta: float = Field(0.01, ge=0, description="Weight of half the squares of new weights (the head); 0.01 published.")


@component("tuning/regularization", "mixout", builder="lmtool.tuning.schemes:Mixout")
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
