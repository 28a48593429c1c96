"""Base classes of the configuration of tuning methods, and the training schemes. Imports no torch."""

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
from lmtool.system.terminal import counted
from lmtool.training.configs import OptimizerConfig


class TuningConfig(Component):
    """Base class of the configuration of tuning methods.

    The published settings of a method, above all the learning rate, are in `conf/recipe/tuning/NAME.yaml`. A method
    without such a file uses the recipe of the model.
    """

    group: ClassVar[str] = "tuning"
    requires_transformer: ClassVar[bool] = True
    """Whether the method requires a transformer, because it edits the layers of a transformer."""
    requires_stack: ClassVar[bool] = False
    """Whether the method requires a stack of layers, which need not be those of a transformer."""

    name: str = Field(description="Tuning method.")

    @property
    def earlier_runs(self) -> tuple[str, ...]:
        """Paths of the earlier runs whose added parameters the method loads and freezes; () by default."""
        return ()

    @property
    def recipe_name(self) -> str:
        """Name of the YAML file in `conf/recipe/tuning/` with the published settings: the method's name, unless the
        fields of the method select another file."""
        return self.name

    def recipe(self) -> JsonObject:
        """Returns the sections for `optimizer=auto` and `schedule=auto`; {} if there is no YAML file."""
        return recipes.tuning_recipe(type(self), self.recipe_name)

    @property
    def positions(self) -> int:
        """Number of positions that the method takes up in every input text, such as those of virtual tokens."""
        return 0

    def reserved_positions(self, model: ModelConfig) -> int:
        """Returns by how many tokens the method shortens texts in this model; 0 if the model's positions are
        unlimited."""
        return self.positions if model.has_limited_positions else 0

    def warnings(self, optimizer: OptimizerConfig, model: ModelConfig) -> list[str]:
        """Returns warnings for training this model with this optimizer."""
        return []

    @property
    def schemes(self) -> tuple[SchemeConfig, ...]:
        """The training schemes of the run: the order of unfreezing and the regularization, if the method has them."""
        return ()

    @property
    def needs_initial_weights(self) -> bool:
        """Whether training needs the initial weights in every step, so that a resumed run has to load them."""
        return False

    def needs(self) -> Iterator[Requirement]:
        """Yields the requirements of the method and of its schemes for other components."""
        if self.requires_transformer:
            reason = f"tuning={self.name} edits the layers of a transformer"
            yield Requirement(TRANSFORMER, "tuning", reason, "set tuning=full or tuning=head")
        if self.requires_stack:
            reason = f"tuning={self.name} needs a stack of layers"
            yield Requirement(STACK, "tuning", reason, "set tuning=full or tuning=head")
        for scheme in self.schemes:
            if scheme.name != "none":
                group = "tuning/schedule" if isinstance(scheme, UnfreezingConfig) else "tuning/regularization"
                reason = f"{group}={scheme.name} tracks single weights from step to step"
                yield Requirement(WHOLE_WEIGHTS, "tuning", reason, f"set {group}=none")


@dataclass(frozen=True)
class HeadInput:
    """A model and a task, which determine the hidden states that the task's heads read."""

    model: ModelConfig
    task: LearnedConfig

    @property
    def sides(self) -> set[Side]:
        """The stacks whose hidden states the heads read: "inputs" for the encoder or the only stack, "outputs" for the
        decoder of an encoder-decoder."""
        return {member.states_read(self.model) for member in self.task.member_configs()}

    @property
    def depth(self) -> int:
        """The number of layers of the stack that the heads read, or the smaller number if they read both stacks."""
        if self.model.architecture != "encoder_decoder":
            return self.model.num_layers
        depths = {"inputs": self.model.num_layers, "outputs": self.model.layers_of_decoder}
        return min(depths[side] for side in self.sides)

    @property
    def has_only_frozen_heads(self) -> bool:
        """Whether no head can be trained, because all answers come from an output layer that is tied to the frozen
        token embedding. This is never so in an encoder, whose masked language model head has more layers."""
        generates_text = all(member.writes_text for member in self.task.member_configs())
        return generates_text and self.model.architecture != "encoder" and not self.model.untied_output


def components_by_section(model: ModelConfig, task: LearnedConfig | None) -> dict[str, object]:
    """Returns the objects with which the requirements of a tuning method are compared, by section. task: None if it is
    unknown."""
    head = None if task is None else HeadInput(model, task)
    return {"model": model, "task": task, "head_input": head}


ONE_STACK: Offer[HeadInput] = Offer(
    "head_input",
    lambda head: len(head.sides) == 1,
    lambda head: f"the members of task={head.task.name} read different stacks of model={head.model.name}",
)


def minimum_depth(layers: int) -> Offer[HeadInput]:
    """Returns the requirement that the head reads a stack of at least this many layers."""
    return Offer(
        "head_input",
        lambda head: head.depth >= layers,
        lambda head: f"model={head.model.name} has {counted(head.depth, 'layer')} before the head",
        wording="{reason}: {lacking}",
    )


class SchemeConfig(Config):
    """Base class of the configuration of training schemes."""

    name: str = Field(description="Name of the scheme.")

    @property
    def needs_initial_weights(self) -> bool:
        """Whether the scheme needs the initial weights in every step."""
        return False


class UnfreezingConfig(SchemeConfig):
    """Base class of the orders in which trainable parts start training."""

    name: str = Field(description="Name of the order.")


@component("tuning/schedule", "none", builder="lmtool.tuning.schemes:Scheme")
class NoUnfreezingConfig(UnfreezingConfig):
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
    """Base class of regularizations towards the pretrained weights."""

    name: str = Field(description="Name of the regularization.")

    @property
    def needs_initial_weights(self) -> bool:
        return self.name != "none"


@component("tuning/regularization", "none", builder="lmtool.tuning.schemes:Scheme")
class NoRegularizationConfig(RegularizationConfig):
    """Only dropout and weight decay."""

    name: Literal["none"] = Field("none", description="Only dropout and weight decay.")


@component("tuning/regularization", "l2_sp", builder="lmtool.tuning.schemes:L2Sp")
class L2SpConfig(RegularizationConfig):
    """L2-SP: a penalty on the distance from the pretrained weights instead of weight decay (Li, Grandvalet and Davoine
    2018)."""

    name: Literal["l2_sp"] = Field("l2_sp", description="A penalty on the distance from the pretrained weights.")
    alpha: float = Field(
        0.1, ge=0, description="weight of half the squared distance from the pretrained weights; needs tuning"
    )
    beta: float = Field(
        0.01, ge=0, description="weight of half the squares of the new weights, those of the head; 0.01 is published"
    )


@component("tuning/regularization", "mixout", builder="lmtool.tuning.schemes:Mixout")
class MixoutConfig(RegularizationConfig):
    """Mixout: in each step, random weights are reset to their pretrained values (Lee, Cho and Kang 2020)."""

    name: Literal["mixout"] = Field(
        "mixout", description="In each step, random weights are reset to their pretrained values."
    )
    probability: float = Field(
        0.9, ge=0, le=1, description="probability that a weight is reset; published: 0.7, 0.8 and 0.9"
    )


class UnfreezableConfig(TuningConfig):
    """Base class of methods that train parameters in every layer, so that layers can be unfrozen one after another."""

    schedule: Annotated[UnfreezingConfig, Choice("tuning/schedule")] = Field(
        NoUnfreezingConfig(), description="when each layer starts training; `lmtool list tuning/schedule`"
    )

    @property
    def schemes(self) -> tuple[SchemeConfig, ...]:
        return (*super().schemes, self.schedule)

    def needs(self) -> Iterator[Requirement]:
        if self.schedule.name != "none":
            reason = f"tuning/schedule={self.schedule.name} unfreezes one layer after another"
            yield Requirement(LAYERS_OF_EACH_DEPTH, "tuning.schedule", reason, "set tuning/schedule=none")
        yield from super().needs()


class RegularizableConfig(TuningConfig):
    """Base class of methods that train pretrained weights, which can be regularized towards their initial values."""

    regularization: Annotated[RegularizationConfig, Choice("tuning/regularization")] = Field(
        NoRegularizationConfig(),
        description="regularization towards the pretrained weights; `lmtool list tuning/regularization`",
    )

    @property
    def schemes(self) -> tuple[SchemeConfig, ...]:
        return (*super().schemes, self.regularization)

    @property
    def needs_initial_weights(self) -> bool:
        return super().needs_initial_weights or self.regularization.needs_initial_weights
