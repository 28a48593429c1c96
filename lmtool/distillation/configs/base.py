"""Base configuration of distillation modes and terms. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.needs import Component, Offer, Requirement
from lmtool.config.tables import component
from lmtool.errors import Problem, UserError
from lmtool.learners.configs import FORWARDS_OF_ONE_PROCESS
from lmtool.models.configs import ModelConfig
from lmtool.nn.configs import Side
from lmtool.system.terminal import counted

Layer = Annotated[int, Field(ge=0)]
Layers = Literal["uniform", "last", "pkd_skip", "pkd_last"] | dict[Layer, Layer]
"""A rule for any two depths, or a map from student to teacher layers. For a student of S layers and a teacher of T:

uniform: layer i learns from layer i T/S, rounded (TinyBERT, section 3.1: g(m) = 3m of 12 and 4 layers). last: only S
learns, from T (MiniLM). pkd_skip, pkd_last: all layers but the last learn, from layers at a distance of T/S, or from
those just before the teacher's last (Patient Knowledge Distillation, section 3.2).
"""


@dataclass(frozen=True)
class LayerMap:
    """sides: for each stack that both models have, by the batch side it reads, a map from student to teacher layers."""

    sides: Mapping[Side, Mapping[int, int]]

    def __iter__(self) -> Iterator[tuple[Side, int, int]]:
        """Yields (side, student layer, teacher layer)."""
        for side, layers in self.sides.items():
            yield from ((side, student, teacher) for student, teacher in layers.items())

    def screen_text(self) -> str:
        """The map as shown on screens: "1 <- 4, 2 <- 8"."""
        stacks = {
            side: ", ".join(f"{student} <- {teacher}" for student, teacher in layers.items())
            for side, layers in self.sides.items()
        }
        return "; ".join(stacks.values() if len(stacks) == 1 else (f"{side} {text}" for side, text in stacks.items()))


@dataclass(frozen=True)
class ModelPair:
    """The configurations of a student and its teacher."""

    student: ModelConfig
    teacher: ModelConfig

    def __iter__(self) -> Iterator[ModelConfig]:
        yield from (self.student, self.teacher)

    @property
    def sides(self) -> list[Side]:
        """The stacks that both models have, by the batch side they read."""
        return [side for side in self.student.depths if side in self.teacher.depths]

    def without_common_stack(self) -> str:
        """The reason why no layers can be compared."""
        bare = next((model.name for model in self if not model.depths), None)
        problem = "have no stack in common" if bare is None else f"cannot be compared: model={bare} has no layers"
        return f"the layers of model={self.student.name} and of its teacher, model={self.teacher.name}, {problem}"


def shared_sides(student: ModelConfig, teacher: ModelConfig) -> list[Side]:
    """The stacks that both models have, by the batch side they read. UserError if there is none."""
    pair = ModelPair(student, teacher)
    if not pair.sides:
        raise UserError(f"distill.terms: {pair.without_common_stack()}", "use terms over predictions: distill=soft")
    return pair.sides


def layer_map(layers: Layers, decoder_layers: Layers | None, student: ModelConfig, teacher: ModelConfig) -> LayerMap:
    """The map between two models. decoder_layers: for the stack that reads the outputs, if different from `layers`.

    UserError, with both depths, if the map does not fit, or a model has no layers.
    """
    sides = {}
    for side in shared_sides(student, teacher):
        key, selected = "distill.layers", layers
        if side == "outputs" and decoder_layers is not None:
            key, selected = "distill.decoder_layers", decoder_layers
        sides[side] = _map_of_stack(key, selected, student.depths[side], teacher.depths[side])
    return LayerMap(sides)


def _map_of_stack(key: str, layers: Layers, student_depth: int, teacher_depth: int) -> dict[int, int]:
    """The map from student to teacher layers of one stack. key: of the setting, for messages."""

    def refusal(problem: str) -> UserError:
        uniform = ", ".join(f"{layer}: {teacher_layer}" for layer, teacher_layer in evenly_spaced.items())
        return UserError(
            f"{problem}: the student has {counted(student_depth, 'layer')}, the teacher {teacher_depth}; 0 is the "
            "embeddings",
            f"set {key}=uniform, which is {key}={{{uniform}}} here, or layers that both have",
        )

    # The nearest layer to layer * teacher_depth / student_depth, halves rounded up, at least 1.
    evenly_spaced = {
        layer: max(1, (2 * layer * teacher_depth + student_depth) // (2 * student_depth))
        for layer in range(1, student_depth + 1)
    }
    below_last = range(1, student_depth)
    if not isinstance(layers, str):
        absent = next((pair for pair in layers.items() if pair[0] > student_depth or pair[1] > teacher_depth), None)
        if absent is not None:
            raise refusal(f"{key} maps layer {absent[0]} to layer {absent[1]} of the teacher")
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
"""none: random weights. alternate: the teacher's first layer, its last, and those at even distances between them: 1, 3,
5, 8, 10, 12 of 12 for 6, as in DistilBERT. Or the teacher's layer for each of the student's, in order."""

# Fields that must be equal so that tensors can be copied between two models.
_SHAPES = (
    "vocab_size", "hidden_size", "embedding_size", "num_heads", "num_key_value_heads", "head_size", "feedforward_size",
    "max_positions",
)  # fmt: skip
DROP_INITIALIZATION = "set distill.initialize=none"


def initial_layers(initialize: Initialize, student: ModelConfig, teacher: ModelConfig) -> dict[Side, tuple[int, ...]]:
    """For each stack that both models have, the teacher's layer of each of the student's, counted from 1; {} for none.

    UserError if the two differ in a size, with both values, or if the layers do not exist.
    """
    if initialize == "none":
        return {}
    for field in _SHAPES:
        student_size, teacher_size = (getattr(model, field, None) for model in (student, teacher))
        if student_size != teacher_size:
            same_size = f"set model.{field}={teacher_size} or distill.initialize=none"
            raise UserError(
                f"distill.initialize: the student has model.{field}={student_size}, its teacher {teacher_size}; "
                "tensors are copied unchanged",
                DROP_INITIALIZATION if student_size is None else same_size,
            )
    if student.shares_layers != teacher.shares_layers:
        sharing = student.name if student.shares_layers else teacher.name
        raise UserError(
            f"distill.initialize: model={sharing} shares one layer between all depths, the other model does not",
            DROP_INITIALIZATION,
        )
    initial: dict[Side, tuple[int, ...]] = {}
    for side in shared_sides(student, teacher):
        student_depth, teacher_depth = student.depths[side], teacher.depths[side]
        # The first, the last, and the nearest to even distances between them.
        steps = max(student_depth - 1, 1)
        alternate = tuple(
            1 + (2 * number * (teacher_depth - 1) + steps) // (2 * steps) for number in range(student_depth)
        )
        layers = alternate if isinstance(initialize, str) else initialize
        if len(layers) != student_depth or max(layers) > teacher_depth:
            raise UserError(
                f"distill.initialize={list(layers)}: the student has {counted(student_depth, 'layer')}, the teacher "
                f"{teacher_depth}",
                f"set distill.initialize=alternate, which is {list(alternate)} here",
            )
        initial[side] = layers
    return initial


# Teacher outputs are stored for a single configuration of examples.
_ONE_PHASE: Offer[tuple[object, ...]] = Offer(
    "phases", lambda phases: not phases, lambda phases: "", wording="{reason}"
)


class DistillConfig(Component):
    """The base of every mode."""

    group: ClassVar[str] = "distill"

    name: str = Field(description="Which mode.")

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The teachers' checkpoints, as typed."""
        return ()

    @property
    def compares(self) -> bool:
        """Whether outputs or states of student and teacher are compared, not only texts that the teacher generates."""
        return bool(self.checkpoints)

    @property
    def of_rows(self) -> bool:
        """Whether only predictions of rows are compared, so that the tokenizers may differ."""
        return False

    @property
    def same_batches(self) -> bool:
        """Whether teachers run on the student's batches: they then share its vocabulary and text format."""
        return bool(self.checkpoints)

    @property
    def starts_from_teacher(self) -> bool:
        """Whether the student is initialized from the teacher."""
        return False

    @property
    def teaches_heads(self) -> bool:
        """Whether the output heads are trained, so that metrics are meaningful."""
        return True

    def untaught(self) -> Problem | None:
        """The setting that needs a teacher although none is configured, if any."""
        return None

    def needs(self) -> Iterator[Requirement]:
        if self.name != "none":
            reason = f"distill={self.name}: a distilled run has no phases"
            hint = "set phases=[], and run each phase as a run of its own from the checkpoint of the previous one"
            yield Requirement(_ONE_PHASE, "phases", reason, hint)

    @property
    def teacher_key(self) -> str:
        """The key of the teachers."""
        return "distill.teacher"

    @property
    def label_file(self) -> str | None:
        """A file of teacher predictions, used instead of a teacher."""
        return None

    @property
    def comparisons(self) -> Mapping[str, TermConfig]:
        """The terms with a nonzero weight, by name."""
        return {}

    def exit_layers(self, model: ModelConfig) -> tuple[int, ...]:
        """The layers after which a model has early exits, in order."""
        return ()

    def refusals_of_pair(self, pair: ModelPair) -> Iterator[Problem]:
        """The reasons why a student cannot learn from a teacher, checked once the teacher's configuration is read."""
        return iter(())


def runs_models(name: str) -> Requirement:
    """Requirements of modes that train several models or run parts of one; frozen teachers run on the student's
    batches."""
    reason = f"distill={name} runs several models, or parts of one"
    return Requirement(FORWARDS_OF_ONE_PROCESS, "distill", reason, "set distill=soft")


def requires_same_inputs(key: str, peer: ModelConfig) -> Iterator[Requirement]:
    """Requires that a peer reads the run's batches. key: the key that names the peer."""
    fields: dict[str, Callable[[ModelConfig], object]] = {
        "architecture": lambda model: model.architecture,
        "text_format": lambda model: model.text_format,
        "vocab_size": lambda model: model.vocab_size,
    }
    for name, value in fields.items():
        reason = f"{key}: a peer reads the batches of the run's model, but its {name} is {value(peer)}"
        yield Requirement(_same(value, peer), key, reason, _same_vocabulary if name == "vocab_size" else _same_model)


def _same(value: Callable[[ModelConfig], object], peer: ModelConfig) -> Offer[ModelConfig]:
    return Offer(
        "model",
        lambda model: value(model) == value(peer),
        lambda model: f"not {value(model)}",
        wording="{reason}, {lacking}",
    )


def _same_vocabulary(model: ModelConfig) -> str:
    return f"set distill.model.vocab_size={model.vocab_size}"


def _same_model(model: ModelConfig) -> str:
    return f"set distill.model.name={model.name}"


@component("distill", "none", builder="lmtool.distillation.distilled:none")
class NoDistillConfig(DistillConfig):
    """No distillation."""

    name: Literal["none"] = Field("none", description="No distillation.")


class TermConfig(Config):
    """The base of distillation terms."""

    needs_teacher: ClassVar[bool] = True
    """Whether the teacher must run."""
    stored: ClassVar[bool] = False
    """Whether stored teacher outputs suffice."""
    teaches_heads: ClassVar[bool] = True
    """Whether the output heads are trained by it."""
    compares_layers: ClassVar[bool] = False
    """Whether it uses the layer map."""
    of_labels: ClassVar[bool] = False
    """Whether the teacher's hard labels suffice."""
    averages: ClassVar[bool] = False
    """Whether the mean of several teachers can be used."""

    weight: float = Field(1.0, ge=0, description="weight of the term in the loss")

    def needs_of_term(self, name: str, layers: LayerMap | None) -> Iterator[Requirement]:
        """The requirements on student and teacher. name: of the term. layers: the layer map, for terms that use it."""
        return iter(())
