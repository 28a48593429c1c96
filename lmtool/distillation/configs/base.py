"""Base configuration of distillation modes and terms. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Component, Config
from lmtool.config.registry import component
from lmtool.errors import Problem, UserError
from lmtool.learners.configs import LearnedConfig, needs_uneven_forwards
from lmtool.models.configs import ModelConfig
from lmtool.nn.configs import Side
from lmtool.system.terminal import counted

Layer = Annotated[int, Field(ge=0)]
Layers = Literal["uniform", "last", "pkd_skip", "pkd_last"] | dict[Layer, Layer]
"""The teacher layer that each student layer learns from: a map {student layer: teacher layer}, or the name of a rule
that computes the map from the number of layers S of the student and T of the teacher.

uniform: student layer i learns from teacher layer i T/S, rounded (TinyBERT, section 3.1: g(m) = 3m for 12 teacher
    layers and 4 student layers).
last: only the student's last layer learns, from the teacher's last layer (MiniLM).
pkd_skip: all student layers except the last learn, from the same teacher layers as with uniform (Patient Knowledge
    Distillation, section 3.2).
pkd_last: all student layers except the last learn, from the S - 1 teacher layers just before the teacher's last
    (section 3.2 of the same paper).
"""


@dataclass(frozen=True)
class LayerMap:
    """The teacher layer that each student layer learns from, by student layer, for each stack that both models have.
    Stacks are named by the side of the batch that they read: "outputs" for the decoder of an encoder-decoder, else
    "inputs"."""

    sides: Mapping[Side, Mapping[int, int]]

    def __iter__(self) -> Iterator[tuple[Side, int, int]]:
        """Yields (side, student layer, teacher layer) for each student layer in the map."""
        for side, layers in self.sides.items():
            yield from ((side, student, teacher) for student, teacher in layers.items())

    def screen_text(self) -> str:
        """Formats the map for screens: "1 <- 4, 2 <- 8" if student layer 1 learns from teacher layer 4."""
        stacks = {
            side: ", ".join(f"{student} <- {teacher}" for student, teacher in layers.items())
            for side, layers in self.sides.items()
        }
        return "; ".join(stacks.values() if len(stacks) == 1 else (f"{side} {text}" for side, text in stacks.items()))


@dataclass(frozen=True)
class ModelPair:
    """The model configurations of a student and its teacher."""

    student: ModelConfig
    teacher: ModelConfig

    def __iter__(self) -> Iterator[ModelConfig]:
        yield from (self.student, self.teacher)

    @property
    def sides(self) -> list[Side]:
        """The stacks that both models have, each named by the side of the batch that it reads."""
        return [side for side in self.student.depths if side in self.teacher.depths]

    def without_common_stack(self) -> str:
        """Explains, for an error message, why the two models have no layers to compare."""
        without_layers = next((model.name for model in self if not model.depths), None)
        problem = "have no stack in common"
        if without_layers is not None:
            problem = f"cannot be compared: model={without_layers} has no layers"
        return f"the layers of model={self.student.name} and of its teacher, model={self.teacher.name}, {problem}"


def shared_sides(student: ModelConfig, teacher: ModelConfig) -> list[Side]:
    """Returns the stacks that both models have, each named by the side of the batch that it reads. Raises UserError if
    the models have no stack in common."""
    pair = ModelPair(student, teacher)
    if not pair.sides:
        raise UserError(f"distill.terms: {pair.without_common_stack()}", "use terms over predictions: distill=soft")
    return pair.sides


def layer_map(layers: Layers, decoder_layers: Layers | None, student: ModelConfig, teacher: ModelConfig) -> LayerMap:
    """Computes which teacher layer each student layer learns from. decoder_layers: for the decoder of an
    encoder-decoder; None means `layers`. Raises UserError if a map names layers that do not exist, the rule yields no
    layer, or the models have no stack in common."""
    sides = {}
    for side in shared_sides(student, teacher):
        key, selected = "distill.layers", layers
        if side == "outputs" and decoder_layers is not None:
            key, selected = "distill.decoder_layers", decoder_layers
        sides[side] = _map_of_stack(key, selected, student.depths[side], teacher.depths[side])
    return LayerMap(sides)


def _map_of_stack(key: str, layers: Layers, student_depth: int, teacher_depth: int) -> dict[int, int]:
    def refusal(problem: str) -> UserError:
        uniform = ", ".join(f"{layer}: {teacher_layer}" for layer, teacher_layer in evenly_spaced.items())
        return UserError(
            f"{problem}: the student has {counted(student_depth, 'layer')}, the teacher {teacher_depth}; 0 is the "
            "embeddings",
            f"set {key}=uniform, which is {key}={{{uniform}}} here, or map only layers that exist",
        )

    # layer * teacher_depth / student_depth in integer arithmetic: rounded to the nearest layer, halves up, at least 1.
    evenly_spaced = {
        layer: max(1, (2 * layer * teacher_depth + student_depth) // (2 * student_depth))
        for layer in range(1, student_depth + 1)
    }
    below_last = range(1, student_depth)
    if not isinstance(layers, str):
        invalid = next((pair for pair in layers.items() if pair[0] > student_depth or pair[1] > teacher_depth), None)
        if invalid is not None:
            raise refusal(f"{key} maps layer {invalid[0]} to layer {invalid[1]} of the teacher")
        if not layers:
            raise refusal(f"{key}={{}} maps no layer")
        return dict(sorted(layers.items()))
    if layers == "last":
        return {student_depth: teacher_depth}
    if layers == "uniform":
        return evenly_spaced
    if student_depth == 1 or (layers == "pkd_last" and teacher_depth < student_depth):
        raise refusal(f"{key}={layers} leaves no layer before the last to train")
    if layers == "pkd_skip":
        return {layer: evenly_spaced[layer] for layer in below_last}
    return {layer: teacher_depth - student_depth + layer for layer in below_last}


Initialize = Literal["none", "alternate"] | tuple[Annotated[int, Field(ge=1)], ...]
"""The teacher layers that initialize the student's layers.

none: no layer is copied. alternate: evenly spaced layers from the teacher's first to its last; a student with 6 layers
starts from layers 1, 3, 5, 8, 10 and 12 of a teacher with 12, as in DistilBERT. A list: for each student layer, in
order, the number of the teacher layer to copy, counted from 1.
"""

# Model fields that determine the shapes of tensors. Layers can be copied only between models that agree in all of
# these.
_SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "embedding_size",
    "num_heads",
    "num_key_value_heads",
    "head_size",
    "feedforward_size",
    "max_positions",
)
DROP_INITIALIZATION = "set distill.initialize=none"


def initial_layers(initialize: Initialize, student: ModelConfig, teacher: ModelConfig) -> dict[Side, tuple[int, ...]]:
    """Returns the teacher layers that initialize the student (`distill.initialize`): for each stack that both models
    have, the teacher layer to copy to each student layer, counted from 1. Raises UserError if the models differ in a
    size or in sharing layers, or if a list has another length than the student's layers or names a layer that the
    teacher lacks."""
    if initialize == "none":
        return {}
    for field in _SHAPE_FIELDS:
        student_size, teacher_size = (getattr(model, field, None) for model in (student, teacher))
        if student_size != teacher_size:
            set_size = f"set model.{field}={teacher_size} or distill.initialize=none"
            raise UserError(
                f"distill.initialize: the student has model.{field}={student_size}, its teacher {teacher_size}; "
                "copied tensors must have equal shapes",
                # The student's family lacks the field, so it cannot be set.
                DROP_INITIALIZATION if student_size is None else set_size,
            )
    if student.shares_layers != teacher.shares_layers:
        sharing = student.name if student.shares_layers else teacher.name
        raise UserError(
            f"distill.initialize: model={sharing} shares one layer among all depths, but the other model does not",
            DROP_INITIALIZATION,
        )
    layers_by_side: dict[Side, tuple[int, ...]] = {}
    for side in shared_sides(student, teacher):
        student_depth, teacher_depth = student.depths[side], teacher.depths[side]
        # Evenly spaced layers from the first to the last, in integer arithmetic and rounded to the nearest.
        steps = max(student_depth - 1, 1)
        alternate = tuple(
            1 + (2 * number * (teacher_depth - 1) + steps) // (2 * steps) for number in range(student_depth)
        )
        layers = alternate if isinstance(initialize, str) else initialize
        if len(layers) != student_depth or max(layers) > teacher_depth:
            raise UserError(
                f"distill.initialize={list(layers)}: name a layer of the teacher, 1 to {teacher_depth}, for each of "
                f"the student's {counted(student_depth, 'layer')}",
                f"set distill.initialize=alternate, which is {list(alternate)} here",
            )
        layers_by_side[side] = layers
    return layers_by_side


class DistillConfig(Component):
    """The base of the configuration of every distillation mode."""

    group: ClassVar[str] = "distill"

    name: str = Field(description="Which mode.")

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The teachers' checkpoints, as the user wrote them."""
        return ()

    @property
    def compares(self) -> bool:
        """Whether the student is trained on the teacher's outputs or states, not only on texts that the teacher
        generates."""
        return bool(self.checkpoints)

    @property
    def compares_rows_only(self) -> bool:
        """Whether all terms compare predictions for whole rows, so that student and teacher may have different
        tokenizers."""
        return False

    @property
    def same_batches(self) -> bool:
        """Whether teachers run on the student's batches, which requires the same vocabulary and text format."""
        return bool(self.checkpoints)

    @property
    def starts_from_teacher(self) -> bool:
        """Whether layers of the teacher initialize the student."""
        return False

    @property
    def teaches_heads(self) -> bool:
        """Whether the student's output heads are trained. Metrics of untrained heads mean nothing."""
        return True

    def missing_teacher(self) -> Problem | None:
        """Returns the problem if a setting needs a teacher but no teacher is set, or if the student learns nothing from
        the teacher."""
        return None

    def conflicts(self) -> Iterator[Problem]:
        """Yields the problems of values that contradict each other or have no effect."""
        return iter(())

    def conflicts_with_learned(self, learned: LearnedConfig, model: ModelConfig) -> Iterator[Problem]:
        """Yields the reasons why an objective or a task, and its model, cannot be learned in this mode."""
        return iter(())

    def conflicts_with_fsdp(self) -> Iterator[Problem]:
        """Yields the reasons why weights cannot be sharded (parallel=fsdp)."""
        return iter(())

    @property
    def teacher_key(self) -> str:
        """The configuration key that names the teachers, for messages."""
        return "distill.teacher"

    @property
    def label_file(self) -> str | None:
        """The file of teacher predictions that replaces a running teacher; None without one."""
        return None

    @property
    def comparisons(self) -> Mapping[str, TermConfig]:
        """The distillation terms with a nonzero weight, by name."""
        return {}

    def exit_layers(self, model: ModelConfig) -> tuple[int, ...]:
        """Returns the layers after which the model has early exits, in ascending order."""
        return ()

    def conflicts_of_pair(self, pair: ModelPair) -> Iterator[Problem]:
        """Yields the reasons why this student cannot learn from this teacher. Called after the teacher's configuration
        has been read from its checkpoint."""
        return iter(())


def several_forwards(name: str) -> Problem:
    """Returns the problem with parallel=fsdp of a mode that runs several models, or only some layers of one, in a
    step."""
    return needs_uneven_forwards("distill", f"distill={name} runs several models, or parts of one", "set distill=soft")


def different_inputs(key: str, peer: ModelConfig, model: ModelConfig) -> Iterator[Problem]:
    """Yields the reasons why a peer cannot read the batches of the run's model. key: the configuration key that sets
    the peer, for messages."""
    for name in ("architecture", "text_format", "vocab_size"):
        expected, actual = getattr(model, name), getattr(peer, name)
        if expected != actual:
            field = "vocab_size" if name == "vocab_size" else "name"
            yield Problem(
                key,
                f"{key}: a peer reads the batches of the run's model, but its {name} is {actual}, not {expected}",
                f"set distill.model.{field}={getattr(model, field)}",
            )


@component("distill", "none", builder="lmtool.distillation.distilled:none")
class NoDistillConfig(DistillConfig):
    """No distillation."""

    name: Literal["none"] = Field("none", description="No distillation.")


class TermConfig(Config):
    """The base of the configuration of every distillation term: one summand of the distillation loss."""

    supports_store: ClassVar[bool] = False
    """Whether the term can use stored teacher outputs, so that the teacher need not run."""
    teaches_heads: ClassVar[bool] = True
    """Whether the term trains the student's output heads."""
    compares_layers: ClassVar[bool] = False
    """Whether the term uses the layer map (distill.layers)."""
    supports_labels: ClassVar[bool] = False
    """Whether the term needs only the teacher's hard labels, so that a file of predictions can replace the teacher."""
    supports_average: ClassVar[bool] = False
    """Whether the term can learn from the average of several teachers."""

    weight: float = Field(1.0, ge=0, description="weight of the term in the loss")

    def conflicts_of_pair(self, name: str, pair: ModelPair, layers: LayerMap | None) -> Iterator[Problem]:
        """Yields the reasons why the term cannot compare a student with a teacher. name: the term's name in
        distill.terms, for messages. layers: the layer map; None if no term compares layers."""
        return iter(())
