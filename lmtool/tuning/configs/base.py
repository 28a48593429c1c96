"""What a tuning method and a scheme beside it are as configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.needs import Component, Offer, Requirement
from lmtool.config.tables import Choice, component
from lmtool.learners.configs import WHOLE_WEIGHTS, LearnedConfig
from lmtool.models import recipes
from lmtool.models.configs import LAYERS_OF_EACH_DEPTH, STACK, TRANSFORMER, ModelConfig
from lmtool.nn.configs import Side

# What a tuning method is as configuration: a file a method. Imports no torch.


class TuningConfig(Component):
    """The base of every tuning method. What a paper gives for it, its learning rate above all, stands in
    `conf/recipe/tuning/NAME.yaml`; without one it learns as the model's recipe has it."""

    group: ClassVar[str] = "tuning"
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

    def reserved_positions(self, model: ModelConfig) -> int:
        """Those that a text of a model of this configuration lacks then: none where positions have no end."""
        return self.positions if model.table_of_positions else 0

    def warnings(self, optimizer: Any, model: Any) -> list[str]:
        """What a user should know before training a model of this configuration with such an optimizer."""
        return []

    @property
    def schemes(self) -> tuple[SchemeConfig, ...]:
        """The schemes beside the method: when its parameters learn, and what holds them."""
        return ()

    @property
    def needs_start(self) -> bool:
        """Whether the weights that a run starts from are read all along, also where it resumes."""
        return False

    def needs(self) -> Iterator[Requirement]:
        """What it edits, what it trains, and what the schemes beside it follow."""
        if self.of_transformers:
            reason = f"tuning={self.name} edits the layers of a transformer"
            yield Requirement(TRANSFORMER, "tuning", reason, "give tuning=full or tuning=head")
        if self.of_stacks:
            reason = f"tuning={self.name} takes layers of a stack"
            yield Requirement(STACK, "tuning", reason, "give tuning=full or tuning=head")
        for scheme in self.schemes:
            if scheme.name != "none":
                reason = f"tuning with {scheme.name} follows single weights from step to step"
                yield Requirement(WHOLE_WEIGHTS, "tuning", reason, "give none in its place")


@dataclass(frozen=True)
class HeadInput:
    """What the heads of a task read of a model."""

    model: ModelConfig
    task: LearnedConfig

    @property
    def sides(self) -> set[Side]:
        """The sides of a batch whose states are read."""
        return {member.states_read(self.model) for member in self.task.parts()}

    @property
    def depth(self) -> int:
        """How many layers the stack has whose states are read; of two the fewer."""
        if self.model.architecture != "encoder_decoder":
            return self.model.num_layers
        depths = {"inputs": self.model.num_layers, "outputs": self.model.layers_of_decoder}
        return min(depths[side] for side in self.sides)

    @property
    def frozen_table(self) -> bool:
        """Whether all answers are those of an output layer that is the token embedding. A head that fills masks has
        layers of its own."""
        written = all(member.writes_text for member in self.task.parts())
        return written and self.model.architecture != "encoder" and not self.model.learned_output


def offered(model: ModelConfig, task: LearnedConfig | None) -> dict[str, Any]:
    """What a method is matched with, by section. task: None where it is not known."""
    head = None if task is None else HeadInput(model, task)
    return {"model": model, "task": task, "head_input": head}


ONE_STACK: Offer[HeadInput] = Offer(
    "head_input",
    lambda head: len(head.sides) == 1,
    lambda head: f"the members of task={head.task.name} read different stacks of model={head.model.name}",
)


def depth_of(layers: int) -> Offer[HeadInput]:
    """So many layers before the head."""
    return Offer(
        "head_input",
        lambda head: head.depth >= layers,
        lambda head: f"{head.depth} layers stand before the head of model={head.model.name}",
        wording="{reason}: {lacking}",
    )


# Schemes beside a tuning method, as configuration: what learns when, and what holds weights at the pretrained ones.
# Imports no torch.


class SchemeConfig(Config):
    """The base of what stands beside a method."""

    name: str = Field(description="Which scheme.")

    @property
    def needs_start(self) -> bool:
        """Whether it reads the weights that the run starts from, all along."""
        return False


class UnfreezingConfig(SchemeConfig):
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
        None, ge=1, description="steps until the next layer is unfrozen; null: one pass over the training examples"
    )


class RegularizationConfig(SchemeConfig):
    """What holds the weights at the pretrained ones."""

    name: str = Field(description="Which regularization.")

    @property
    def needs_start(self) -> bool:
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
        0.1, ge=0, description="weight of half the squared distance from the pretrained weights; needs tuning"
    )
    beta: float = Field(
        0.01, ge=0, description="weight of half the squared new weights, those of the head; as published"
    )


@component("tuning/regularization", "mixout", builder="lmtool.tuning.schemes:Mixout")
class MixoutConfig(RegularizationConfig):
    """In each step a part of the weights are the pretrained ones again (Lee, Cho and Kang 2020)."""

    name: Literal["mixout"] = Field("mixout", description="In each step a part of the weights are the pretrained ones.")
    probability: float = Field(
        0.9, ge=0, le=1, description="replacement probability of a weight; published: 0.7, 0.8 and 0.9"
    )


class ByDepthConfig(TuningConfig):
    """A method whose parameters stand in the layers, so that these can begin to learn one after the other."""

    schedule: Annotated[UnfreezingConfig, Choice("tuning/schedule")] = Field(
        AtOnceConfig(), description="when each layer starts training; `lmtool list tuning/schedule`"
    )

    @property
    def schemes(self) -> tuple[SchemeConfig, ...]:
        return (*super().schemes, self.schedule)

    def needs(self) -> Iterator[Requirement]:
        if self.schedule.name != "none":
            reason = f"tuning/schedule={self.schedule.name} begins with some layers"
            yield Requirement(LAYERS_OF_EACH_DEPTH, "tuning.schedule", reason, "give tuning/schedule=none")
        yield from super().needs()


class OfPretrainedConfig(TuningConfig):
    """A method by which pretrained weights learn, so that these can be held."""

    regularization: Annotated[RegularizationConfig, Choice("tuning/regularization")] = Field(
        NoRegularizationConfig(),
        description="penalty that keeps weights near the pretrained ones; `lmtool list tuning/regularization`",
    )

    @property
    def schemes(self) -> tuple[SchemeConfig, ...]:
        return (*super().schemes, self.regularization)

    @property
    def needs_start(self) -> bool:
        return super().needs_start or self.regularization.needs_start
