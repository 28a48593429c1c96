"""Base classes of the configuration of tuning methods, and the training schemes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Component, Config, JsonObject
from lmtool.config.registry import Choice, component
from lmtool.errors import Problem
from lmtool.learners.configs import LearnedConfig, needs_whole_weights
from lmtool.models import recipes
from lmtool.models.configs import ModelConfig, TransformerConfig
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

    def conflicts(self) -> Iterator[Problem]:
        """Yields the problems of values that contradict each other or have no effect."""
        return iter(())

    def conflicts_with_model(self, model: ModelConfig, task: LearnedConfig | None) -> Iterator[Problem]:
        """Yields the reasons why the method cannot tune a model for a task, the most fundamental first. task: None if
        it is unknown."""
        hint = "set tuning=full or tuning=head"
        if self.requires_transformer and not isinstance(model, TransformerConfig):
            message = f"tuning={self.name} edits the layers of a transformer; model={model.name} is not a transformer"
            yield Problem("tuning", message, hint)
        if self.requires_stack and not model.depths:
            message = f"tuning={self.name} needs a stack of layers; model={model.name} has no stack of layers"
            yield Problem("tuning", message, hint)

    def conflicts_with_fsdp(self) -> Iterator[Problem]:
        """Yields the reasons why weights cannot be sharded (parallel=fsdp)."""
        for scheme in self.schemes:
            if scheme.name != "none":
                group = "tuning/schedule" if isinstance(scheme, UnfreezingConfig) else "tuning/regularization"
                reason = f"{group}={scheme.name} tracks single weights from step to step"
                yield needs_whole_weights("tuning", reason, f"set {group}=none")


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
    def different_stacks(self) -> str | None:
        """The reason why no single stack can be selected: the heads read both. None if they read one."""
        if len(self.sides) == 1:
            return None
        return f"the members of task={self.task.name} read different stacks of model={self.model.name}"

    @property
    def depth_text(self) -> str:
        """The depth in words."""
        return f"model={self.model.name} has {counted(self.depth, 'layer')} before the head"

    @property
    def has_only_frozen_heads(self) -> bool:
        """Whether no head can be trained, because all answers come from an output layer that is tied to the frozen
        token embedding. This is never so in an encoder, whose masked language model head has more layers."""
        generates_text = all(member.writes_text for member in self.task.member_configs())
        return generates_text and self.model.architecture != "encoder" and not self.model.untied_output


def one_layer(model: ModelConfig) -> str:
    """Returns the reason why layers of a model that shares them cannot differ."""
    return f"model={model.name} has one layer, applied at every depth"


class SchemeConfig(Config):
    """Base class of the configuration of training schemes."""

    name: str = Field(description="Name of the scheme.")

    @property
    def needs_initial_weights(self) -> bool:
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

    def conflicts_with_model(self, model: ModelConfig, task: LearnedConfig | None) -> Iterator[Problem]:
        if self.schedule.name != "none" and model.shares_layers:
            reason = f"tuning/schedule={self.schedule.name} unfreezes one layer after another"
            yield Problem("tuning.schedule", f"{reason}; {one_layer(model)}", "set tuning/schedule=none")
        yield from super().conflicts_with_model(model, task)


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
