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

uniform: layer i from layer i T/S, rounded (TinyBERT, section 3.1: g(m) = 3m of 12 and 4 layers). last: S from T only
(MiniLM). pkd_skip, pkd_last: all but the last, from layers T/S apart, or from those just before the teacher's last
(Patient Knowledge Distillation, section 3.2).
"""


@dataclass(frozen=True)
class LayerMap:
    """sides: for each stack that both models have, by the batch side it reads, a map from student to teacher layers."""

    sides: Mapping[Side, Mapping[int, int]]

    def __iter__(self) -> Iterator[tuple[Side, int, int]]:
        """Yields (side, student layer, teacher layer)."""
        for side, pairs in self.sides.items():
            yield from ((side, student_value, teacher_value) for student_value, teacher_value in pairs.items())

    def words(self) -> str:
        """The map as shown on screens: "1 <- 4, 2 <- 8"."""
        stacks = {
            side: ", ".join(f"{student_value} <- {teacher_value}" for student_value, teacher_value in pairs.items())
            for side, pairs in self.sides.items()
        }
        return "; ".join(stacks.values() if len(stacks) == 1 else (f"{side} {pairs}" for side, pairs in stacks.items()))


def shared_sides(student: ModelConfig, teacher: ModelConfig) -> list[Side]:
    """The stacks that both models have, by the batch side they read. UserError if there is none."""
    shared = [side for side in student.depths if side in teacher.depths]
    if not shared:
        bare = next((model for model in (student, teacher) if not model.depths), None)
        problem = "have no stack in common" if bare is None else f"cannot be compared: model={bare.name} has no layers"
        raise UserError(
            f"distill.terms: the layers of model={student.name} and of its teacher, model={teacher.name}, {problem}",
            "use terms over predictions: distill=soft",
        )
    return shared


def layer_map(layers: Layers, decoder_layers: Layers | None, student: ModelConfig, teacher: ModelConfig) -> LayerMap:
    """The map between two models. decoder_layers: for the stack that reads the outputs, if different from `layers`.

    UserError, with both depths, if the map does not fit, or a model has no layers.
    """
    student_value, teacher_value = student.depths, teacher.depths
    sides = {}
    for side in shared_sides(student, teacher):
        decoder = side == "outputs" and decoder_layers is not None
        key, problem_text = ("decoder_layers", decoder_layers) if decoder else ("layers", layers)
        sides[side] = _pairs(
            f"distill.{key}", layers if problem_text is None else problem_text, student_value[side], teacher_value[side]
        )
    return LayerMap(sides)


def _pairs(key: str, layers: Layers, student_value: int, teacher_value: int) -> dict[int, int]:
    """The map of one stack. own, its: the depths of student and teacher."""
    if not isinstance(layers, str):
        wrong = next((pair for pair in layers.items() if pair[0] > student_value or pair[1] > teacher_value), None)
        if wrong is not None or not layers:
            problem_text = (
                "={} maps no layer" if wrong is None else f" maps layer {wrong[0]} to layer {wrong[1]} of the teacher"
            )
            raise _unmapped(key + problem_text, key, student_value, teacher_value)
        return dict(sorted(layers.items()))
    if layers == "last":
        return {student_value: teacher_value}
    if layers == "uniform":
        return {layer: _evenly(layer, student_value, teacher_value) for layer in range(1, student_value + 1)}
    if student_value == 1 or (layers == "pkd_last" and teacher_value < student_value):
        problem_text = f"{key}={layers} leaves no layer before the last to train"
        raise _unmapped(problem_text, key, student_value, teacher_value)
    if layers == "pkd_skip":
        return {layer: _evenly(layer, student_value, teacher_value) for layer in range(1, student_value)}
    return {layer: teacher_value - student_value + layer for layer in range(1, student_value)}


def _evenly(layer: int, student_value: int, teacher_value: int) -> int:
    """The nearest layer to layer * its / own, halves rounded up, at least 1."""
    return max(1, (2 * layer * teacher_value + student_value) // (2 * student_value))


def _unmapped(problem_text: str, key: str, student_value: int, teacher_value: int) -> UserError:
    uniform = ", ".join(
        f"{layer}: {_evenly(layer, student_value, teacher_value)}" for layer in range(1, student_value + 1)
    )
    return UserError(
        f"{problem_text}: the student has {counted(student_value, 'layer')}, the teacher "
        f"{teacher_value}; 0 is the embeddings",
        f"set {key}=uniform, which is {key}={{{uniform}}} here, or layers that both have",
    )


Initialize = Literal["none", "alternate"] | tuple[Annotated[int, Field(ge=1)], ...]
"""none: random weights. alternate: the teacher's first layer, its last, and those at even distances between them: 1, 3,
5, 8, 10, 12 of 12 for 6, as in DistilBERT. Or the teacher's layer for each of the student's, in order."""

# Fields that must be equal so that tensors can be copied between two models.
_SHAPES = (
    "vocab_size", "hidden_size", "embedding_size", "num_heads", "num_key_value_heads", "head_size", "feedforward_size",
    "max_positions",
)  # fmt: skip


def taken_layers(initialize: Initialize, student: ModelConfig, teacher: ModelConfig) -> dict[Side, tuple[int, ...]]:
    """For each stack that both models have, the teacher's layer of each of the student's, counted from 1; {} for none.

    UserError if the two differ in a size, with both values, or if the layers do not exist.
    """
    if initialize == "none":
        return {}
    for field in _SHAPES:
        student_value, teacher_value = (getattr(model, field, None) for model in (student, teacher))
        if student_value != teacher_value:
            raise UserError(
                f"distill.initialize: the student has model.{field}={student_value}, its teacher {teacher_value}; "
                "tensors are copied unchanged",
                f"set model.{field}={teacher_value} or distill.initialize=none" if student_value is not None else _NONE,
            )
    if student.shares_layers != teacher.shares_layers:
        sharing = student.name if student.shares_layers else teacher.name
        raise UserError(
            f"distill.initialize: model={sharing} shares one layer between all depths, the other model does not", _NONE
        )
    taken: dict[Side, tuple[int, ...]] = {}
    for side in shared_sides(student, teacher):
        student_value, teacher_value = student.depths[side], teacher.depths[side]
        layers = _alternate(student_value, teacher_value) if isinstance(initialize, str) else initialize
        if len(layers) != student_value or max(layers) > teacher_value:
            raise UserError(
                f"distill.initialize={list(layers)}: the student has {counted(student_value, 'layer')}, the teacher "
                f"{teacher_value}",
                f"set distill.initialize=alternate, which is {list(_alternate(student_value, teacher_value))} here",
            )
        taken[side] = layers
    return taken


def _alternate(student_value: int, teacher_value: int) -> tuple[int, ...]:
    """The first, the last, and the nearest to even distances between them."""
    steps = max(student_value - 1, 1)
    return tuple(1 + (2 * number * (teacher_value - 1) + steps) // (2 * steps) for number in range(student_value))


_NONE = "set distill.initialize=none"


@dataclass(frozen=True)
class ModelPair:
    """The configurations of a student and its teacher."""

    student: ModelConfig
    teacher: ModelConfig

    def __iter__(self) -> Iterator[ModelConfig]:
        yield from (self.student, self.teacher)


# Teacher outputs are stored for a single form of examples.
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
        """Whether outputs or states of student and teacher are compared; otherwise only the teacher's texts are used."""
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
            hint = "set phases=[], and one run per phase, each from the checkpoint of the previous one"
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
        """The reasons why a student cannot learn from this teacher, checked once the teacher's configuration is read."""
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
        reason = f"{key}: a peer reads the batches of the run's model, and its {name} is {value(peer)}"
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
        """The requirements on the two compared models. name: of the term. layers: the layer map, for terms that use it."""
        return iter(())
