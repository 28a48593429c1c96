"""Configuration base classes of tuning methods and training schemes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.needs import Component, Offer, Requirement
from lmtool.config.saved import JsonObject
from lmtool.config.tables import Choice, component
from lmtool.learners.configs import WHOLE_WEIGHTS, LearnedConfig
from lmtool.models import recipes
from lmtool.models.configs import LAYERS_OF_EACH_DEPTH, STACK, TRANSFORMER, ModelConfig
from lmtool.nn.configs import Side
from lmtool.training.configs import OptimizerConfig


class TuningConfig(Component):
    """The base of every tuning method. Its published settings, above all the learning rate, are in
    `conf/recipe/tuning/NAME.yaml`; without one, the model's recipe applies."""

    group: ClassVar[str] = "tuning"
    of_transformers: ClassVar[bool] = True
    """Whether it edits the layers of a transformer; False: any model."""
    of_stacks: ClassVar[bool] = False
    """Whether it needs a stack of layers of any kind, if it needs no transformer."""

    name: str = Field(description="Tuning method.")

    @property
    def builds_on(self) -> tuple[str, ...]:
        """Earlier runs whose additions to the model are loaded unchanged; none by default."""
        return ()

    @property
    def recipe_name(self) -> str:
        """The YAML of `conf/recipe/tuning/` with its settings; its name, unless its fields choose another."""
        return self.name

    def recipe(self) -> JsonObject:
        """The sections for `optimizer=auto` and `schedule=auto`; {} if the YAML has none."""
        return recipes.of_tuning(type(self), self.recipe_name)

    @property
    def positions(self) -> int:
        """Positions used in every input text."""
        return 0

    def reserved_positions(self, model: ModelConfig) -> int:
        """Positions that texts lose in a model of this configuration; 0 if positions are unlimited."""
        return self.positions if model.table_of_positions else 0

    def warnings(self, optimizer: OptimizerConfig, model: ModelConfig) -> list[str]:
        """Warnings for training a model of this configuration with this optimizer."""
        return []

    @property
    def schemes(self) -> tuple[SchemeConfig, ...]:
        """The training schemes: when parameters are trained, and what regularizes them."""
        return ()

    @property
    def needs_start(self) -> bool:
        """Whether the initial weights are read throughout training, also on resume."""
        return False

    def needs(self) -> Iterator[Requirement]:
        """The layers it edits, the parameters it trains, and the requirements of the schemes."""
        if self.of_transformers:
            reason = f"tuning={self.name} edits the layers of a transformer"
            yield Requirement(TRANSFORMER, "tuning", reason, "set tuning=full or tuning=head")
        if self.of_stacks:
            reason = f"tuning={self.name} needs a stack of layers"
            yield Requirement(STACK, "tuning", reason, "set tuning=full or tuning=head")
        for scheme in self.schemes:
            if scheme.name != "none":
                reason = f"tuning with {scheme.name} tracks single weights from step to step"
                yield Requirement(WHOLE_WEIGHTS, "tuning", reason, "use none instead")


@dataclass(frozen=True)
class HeadInput:
    """What a task's heads read from a model."""

    model: ModelConfig
    task: LearnedConfig

    @property
    def sides(self) -> set[Side]:
        """The batch sides whose states are read."""
        return {member.states_read(self.model) for member in self.task.parts()}

    @property
    def depth(self) -> int:
        """The number of layers of the stack that is read; of two stacks, the smaller number."""
        if self.model.architecture != "encoder_decoder":
            return self.model.num_layers
        depths = {"inputs": self.model.num_layers, "outputs": self.model.layers_of_decoder}
        return min(depths[side] for side in self.sides)

    @property
    def frozen_table(self) -> bool:
        """Whether all answers come from an output layer that is the frozen token embedding. A head that fills masks has
        its own layers."""
        written = all(member.writes_text for member in self.task.parts())
        return written and self.model.architecture != "encoder" and not self.model.learned_output


def offered(model: ModelConfig, task: LearnedConfig | None) -> dict[str, object]:
    """The objects that a method is matched with, by section. task: None if unknown."""
    head = None if task is None else HeadInput(model, task)
    return {"model": model, "task": task, "head_input": head}


ONE_STACK: Offer[HeadInput] = Offer(
    "head_input",
    lambda head: len(head.sides) == 1,
    lambda head: f"the members of task={head.task.name} read different stacks of model={head.model.name}",
)


def depth_of(layers: int) -> Offer[HeadInput]:
    """At least this many layers before the head."""
    return Offer(
        "head_input",
        lambda head: head.depth >= layers,
        lambda head: f"model={head.model.name} has {head.depth} layers before the head",
        wording="{reason}: {lacking}",
    )


class SchemeConfig(Config):
    """The base of training schemes."""

    name: str = Field(description="Which scheme.")

    @property
    def needs_start(self) -> bool:
        """Whether it reads the initial weights throughout training."""
        return False


class UnfreezingConfig(SchemeConfig):
    """When each trainable part starts training."""

    name: str = Field(description="Which order.")


@component("tuning/schedule", "none", builder="lmtool.tuning.schemes:Scheme")
class AtOnceConfig(UnfreezingConfig):
    """Everything is trained from the first step."""

    name: Literal["none"] = Field("none", description="Everything is trained from the first step.")


@component("tuning/schedule", "gradual_unfreezing", builder="lmtool.tuning.schemes:GradualUnfreezing")
class GradualUnfreezingConfig(UnfreezingConfig):
    """ULMFiT's gradual unfreezing (Howard and Ruder 2018, section 3.3)."""

    name: Literal["gradual_unfreezing"] = Field(
        "gradual_unfreezing", description="The head first, then one more layer from the top at a time, embeddings last."
    )
    every_steps: int | None = Field(
        None, ge=1, description="steps until the next layer is unfrozen; null: one pass over the training examples"
    )


class RegularizationConfig(SchemeConfig):
    """Regularization towards the pretrained weights."""

    name: str = Field(description="Which regularization.")

    @property
    def needs_start(self) -> bool:
        return self.name != "none"


@component("tuning/regularization", "none", builder="lmtool.tuning.schemes:Scheme")
class NoRegularizationConfig(RegularizationConfig):
    """Only dropout and weight decay."""

    name: Literal["none"] = Field("none", description="Only dropout and weight decay.")


@component("tuning/regularization", "l2_sp", builder="lmtool.tuning.schemes:L2Sp")
class L2SpConfig(RegularizationConfig):
    """A penalty on the distance from the pretrained weights (Li, Grandvalet and Davoine 2018, L2-SP), instead of weight
    decay."""

    name: Literal["l2_sp"] = Field("l2_sp", description="A penalty on the distance from the pretrained weights.")
    alpha: float = Field(
        0.1, ge=0, description="weight of half the squared distance from the pretrained weights; needs tuning"
    )
    beta: float = Field(
        0.01, ge=0, description="weight of half the squared new weights, those of the head; as published"
    )


@component("tuning/regularization", "mixout", builder="lmtool.tuning.schemes:Mixout")
class MixoutConfig(RegularizationConfig):
    """In each step, a random part of the weights is reset to the pretrained ones (Lee, Cho and Kang 2020)."""

    name: Literal["mixout"] = Field(
        "mixout", description="In each step, a random part of the weights is reset to the pretrained ones."
    )
    probability: float = Field(
        0.9, ge=0, le=1, description="replacement probability of a weight; published: 0.7, 0.8 and 0.9"
    )


class ByDepthConfig(TuningConfig):
    """A method whose parameters are in the layers, so that these can be unfrozen one after the other."""

    schedule: Annotated[UnfreezingConfig, Choice("tuning/schedule")] = Field(
        AtOnceConfig(), description="when each layer starts training; `lmtool list tuning/schedule`"
    )

    @property
    def schemes(self) -> tuple[SchemeConfig, ...]:
        return (*super().schemes, self.schedule)

    def needs(self) -> Iterator[Requirement]:
        if self.schedule.name != "none":
            reason = f"tuning/schedule={self.schedule.name} starts with some layers"
            yield Requirement(LAYERS_OF_EACH_DEPTH, "tuning.schedule", reason, "set tuning/schedule=none")
        yield from super().needs()


class OfPretrainedConfig(TuningConfig):
    """A method that trains pretrained weights, so that these can be regularized."""

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
