"""Configuration of the distillation modes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lmtool.config.registry import Choice, Several, component
from lmtool.distillation.configs.base import (
    DROP_INITIALIZATION,
    DistillConfig,
    Initialize,
    LayerMap,
    Layers,
    ModelPair,
    TermConfig,
    different_inputs,
    initial_layers,
    layer_map,
    several_forwards,
)
from lmtool.errors import Problem, UserError
from lmtool.learners.configs import LearnedConfig, needs_uneven_forwards
from lmtool.models.configs import ModelConfig
from lmtool.system.terminal import counted

_SET_TEACHER = "set distill.teacher=RUN, a run of lmtool or a published folder; or distill=none"


@component("distill", "standard", builder="lmtool.distillation.standard:Standard")
class StandardConfig(DistillConfig):
    """A student that learns from one or several frozen teachers (Hinton, Vinyals and Dean 2015)."""

    name: Literal["standard"] = Field("standard", description="A student learns from frozen teachers.")
    teacher: str | None = Field(
        None,
        min_length=1,
        description="the teacher: a run or checkpoint of lmtool, a published folder, or hf://org/name@revision",
    )
    teachers: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="several teachers, used instead of teacher; the predictions of teachers for the same task are "
        "averaged",
    )
    teacher_weights: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        None, description="weight of each teacher in the average, in the order of teachers; null: equal weights"
    )
    average: Literal["probabilities", "logits"] = Field(
        "probabilities", description="quantity that is averaged over several teachers: probabilities or logits"
    )
    predictions: str | None = Field(
        None,
        min_length=1,
        description="file of hard labels, instead of a teacher: the output of `lmtool predict` on the training rows",
    )
    gold: float = Field(
        0.5,
        ge=0,
        description="weight of the student's own loss on its targets (gold labels, unless targets= sets others)",
    )
    terms: Annotated[dict[str, TermConfig], Several("distill/term")] = Field(
        {},
        description="distillation terms by name, each with a weight (`lmtool list distill/term`); null removes one",
    )

    every_token: bool = Field(
        False,
        description="compare predictions of masked words at every token, masked or not, as DistilBERT does; false: at "
        "the masked tokens. Takes the time of predicting every token",
    )
    layers: Layers = Field(
        "uniform",
        description="teacher layer for each student layer: uniform, last, pkd_skip, pkd_last, or {1: 4, 2: 8}. In "
        "{1: 4, 2: 8} student layer 1 learns from teacher layer 4; 0 stands for the embeddings",
    )
    decoder_layers: Layers | None = Field(
        None, description="teacher layer for each decoder layer of an encoder-decoder student; null: as layers"
    )
    initialize: Initialize = Field(
        "none",
        description="teacher layers copied to the student before training: none, alternate, or [1, 3, 5, 8, 10, 12]. "
        "Layers are counted from 1; alternate: evenly spaced layers from the first to the last; the embeddings and "
        "heads of the same name are copied too",
    )
    targets: Literal["gold", "teacher", "both"] = Field(
        "gold",
        description="targets of a generative student: gold, teacher (texts that the teacher generates), or both. The "
        "teacher generates as task.generation says (sequence-level distillation, Kim and Rush 2016); with both, each "
        "row is read twice, once with each target",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="number of most probable tokens to learn, with all other tokens as one class; null: all tokens",
    )
    store: bool | str | None = Field(
        None,
        description="where to save the teacher's outputs: true (below cache_dir), or a folder; null: not saved. With "
        "saved outputs the teacher runs once over the data, and every run with the same teacher and data reads the "
        "files; otherwise the teacher runs in every training step",
    )
    store_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="number format of the stored outputs: float32, float16 or bfloat16"
    )

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return self.teachers if self.teacher is None else (self.teacher,)

    @property
    def same_batches(self) -> bool:
        return self.compares and not self.store

    @property
    def compares_rows_only(self) -> bool:
        # Only terms over predictions can average teachers; the others compare hidden states instead of rows.
        return all(term.supports_average for term in self.comparisons.values())

    @property
    def compares(self) -> bool:
        return super().compares and bool(self.comparisons)

    @property
    def starts_from_teacher(self) -> bool:
        return self.initialize != "none"

    @property
    def teaches_heads(self) -> bool:
        return self.gold > 0 or any(term.teaches_heads for term in self.comparisons.values())

    @property
    def compares_layers(self) -> bool:
        """Whether any term uses the layer map."""
        return any(term.compares_layers for term in self.terms.values())

    def layer_map(self, student: ModelConfig, teacher: ModelConfig) -> LayerMap:
        """Computes the layer map. Raises UserError if it does not fit the numbers of layers of the two models."""
        return layer_map(self.layers, self.decoder_layers, student, teacher)

    def conflicts_of_pair(self, pair: ModelPair) -> Iterator[Problem]:
        try:
            layers = self.layer_map(*pair) if self.compares_layers else None
        except UserError as error:
            yield Problem("distill.layers", error.message, error.hint)
            return
        try:
            initial_layers(self.initialize, *pair)
        except UserError as error:
            yield Problem("distill.initialize", error.message, error.hint)
            return
        conflicts = (term.conflicts_of_pair(name, pair, layers) for name, term in self.terms.items())
        yield from islice(chain.from_iterable(conflicts), 1)

    @property
    def weight_by_teacher(self) -> dict[str, float]:
        """The weight of each teacher in the average, by the teacher's checkpoint."""
        weights = self.teacher_weights or (1.0,) * len(self.checkpoints)
        return dict(zip(self.checkpoints, weights, strict=True))

    @property
    def comparisons(self) -> dict[str, TermConfig]:
        return {name: term for name, term in self.terms.items() if term.weight > 0}

    def missing_teacher(self) -> Problem | None:
        if self.targets != "gold" and not self.checkpoints:
            message = f"distill.targets={self.targets} needs a teacher to generate the targets, but no teacher is set"
            return Problem("distill.teacher", message, _SET_TEACHER, absent=True)
        if not self.comparisons and self.targets == "gold":
            message = f"distill={self.name}: no term has a weight above 0, so the student learns nothing from a teacher"
            return Problem(
                "distill.terms", message, "set distill=soft, or distill.terms.soft.weight=0.5, or distill=none"
            )
        if self.starts_from_teacher and not self.checkpoints:
            message = f"distill.initialize={self.initialize} copies layers of a teacher, but no teacher is set"
            return Problem("distill.teacher", message, _SET_TEACHER, absent=True)
        terms_with_teacher = [
            name for name, term in self.comparisons.items() if self.predictions is None or not term.supports_labels
        ]
        if not terms_with_teacher or self.checkpoints:
            return None
        message = f"distill.terms.{terms_with_teacher[0]} learns from a teacher, but no teacher is set"
        return Problem("distill.teacher", message, _SET_TEACHER, absent=True)

    @property
    def teacher_key(self) -> str:
        return "distill.teachers" if self.teachers else "distill.teacher"

    @property
    def label_file(self) -> str | None:
        return self.predictions

    def conflicts_with_learned(self, learned: LearnedConfig, model: ModelConfig) -> Iterator[Problem]:
        if self.predictions is not None:
            key, override = "distill.predictions", f"distill.predictions={self.predictions}"
            if (several := not_one_task(learned)) is not None:
                message = f"{override} contains labels for the rows of a single task; {several}"
                yield Problem(key, message, "use a teacher instead: distill.teacher=RUN")
            if learned.writes_text:
                message = f"{override} contains one label per row, not generated texts; {learned.typed} trains a "
                hint = "use the file as the task's data (task.path=), or distill=sequence"
                yield Problem(key, f"{message}language model", hint)
        if self.targets != "gold" and not (learned.reads_labeled_rows and learned.learns_texts):
            message = (
                f"distill.targets={self.targets}: a teacher generates targets only for a task whose targets are texts; "
                f"{learned.name} has none"
            )
            hint = "set distill.targets=gold, or a task that generates texts: task=seq2seq"
            yield Problem("distill.targets", message, hint)

    def conflicts_with_fsdp(self) -> Iterator[Problem]:
        if "interchange" in self.comparisons:
            reason = "distill.terms.interchange runs additional forwards through some layers, for some texts"
            yield needs_uneven_forwards("distill.terms", reason, "set distill.terms.interchange=null")

    def conflicts(self) -> Iterator[Problem]:
        problems = (
            self._several_teachers_problem(),
            self._label_source_problem(),
            self._targets_problem(),
            self._store_problem(),
        )
        yield from filter(None, problems)

    def _several_teachers_problem(self) -> Problem | None:
        if len(self.checkpoints) < 2:
            return None
        count = len(self.teachers)
        single = [name for name, term in self.comparisons.items() if not term.supports_average]
        if single:
            message = f"distill.terms.{single[0]} learns from one teacher, but distill.teachers has {count}"
            hint = f"use one: distill.teacher={self.teachers[0]}; only the terms soft and hard average teachers"
            return Problem("distill.teachers", message, hint)
        if self.starts_from_teacher:
            message = f"distill.initialize copies layers of one teacher, but distill.teachers has {count}"
            return Problem("distill.initialize", message, DROP_INITIALIZATION)
        if self.average == "logits" and (self.top_k is not None or self.store):
            setting = "distill.store" if self.store else f"distill.top_k={self.top_k}"
            message = f"distill.average=logits needs logits, but {setting} retains only probabilities"
            return Problem("distill.average", message, "set distill.average=probabilities")
        return None

    def _label_source_problem(self) -> Problem | None:
        if self.predictions is None or not self.checkpoints:
            return None
        setting = f"distill.predictions={self.predictions} and distill.teacher={self.checkpoints[0]}"
        message = f"{setting}: the labels come from the file or from the teacher, not from both"
        return Problem("distill.predictions", message, "omit distill.predictions= or distill.teacher=")

    def _targets_problem(self) -> Problem | None:
        if self.targets == "gold" or (self.gold and len(self.checkpoints) < 2):
            return None
        setting = f"distill.targets={self.targets}"
        if not self.gold:
            message = (
                f"{setting}: the student learns the teacher's texts by its own loss, which distill.gold=0 disables"
            )
            return Problem("distill.targets", message, "set distill.gold=1")
        message = f"{setting}: the texts come from one teacher, but distill.teachers has {len(self.teachers)}"
        hint = f"use one: distill.teacher={self.teachers[0]}"
        return Problem("distill.targets", message, hint)

    def _store_problem(self) -> Problem | None:
        setting = f"distill.store={'true' if self.store is True else self.store}"
        unsupported = [name for name, term in self.comparisons.items() if not term.supports_store]
        if self.store and unsupported:
            message = f"{setting} stores only outputs, but distill.terms.{unsupported[0]} needs the running teacher"
            return Problem("distill.store", message, f"set distill.store=null, or distill.terms.{unsupported[0]}=null")
        if isinstance(self.store, str) and len(self.teachers) > 1:
            message = f"{setting} is one folder, but each of the distill.teachers needs a separate folder"
            return Problem("distill.store", message, "set distill.store=true")
        if self.store and self.every_token:
            message = f"{setting} stores the predictions of masked tokens, but distill.every_token=true compares all"
            return Problem("distill.store", message, "set distill.store=null, or distill.every_token=false")
        return None

    @model_validator(mode="after")
    def _teachers_fit(self) -> StandardConfig:
        if self.teacher is not None and self.teachers:
            raise ValueError("teacher and teachers are both set: omit one of them")
        if len(set(self.teachers)) < len(self.teachers):
            raise ValueError("teachers names a teacher twice; give it a larger weight with teacher_weights")
        if self.teacher_weights is not None and len(self.teacher_weights) != len(self.teachers):
            setting, count = list(self.teacher_weights), counted(len(self.teachers), "teacher")
            raise ValueError(f"teacher_weights={setting} must have one number per teacher, but teachers has {count}")
        return self


@component("distill", "codistillation", builder="lmtool.distillation.codistillation:Codistillation")
class CodistillationConfig(DistillConfig):
    """Several models trained together on the same data, each of which also learns from the predictions of the others
    (Anil et al. 2018; Zhang et al. 2018, deep mutual learning)."""

    name: Literal["codistillation"] = Field("codistillation", description="Models that learn from each other.")
    learners: int = Field(
        2,
        ge=2,
        description="number of models: the run's model and its peers. Each peer is initialized as in a run with the "
        "next higher seed",
    )
    model: Annotated[ModelConfig | None, Choice("model", optional=True)] = Field(
        None, description="model of the peers, with random weights: {name: bert, num_layers: 2, ...}; null: the run's"
    )
    checkpoint: str | None = Field(
        None,
        min_length=1,
        description="checkpoint that the peers start from, which also determines their model; null: the run's",
    )
    weight: float = Field(1.0, ge=0, description="weight of the loss on the other models' predictions")
    burn_in_steps: int = Field(0, ge=0, description="first steps, in which each model learns from the data only")
    refresh_steps: int | None = Field(
        None,
        ge=1,
        description="steps between updates of the copies that the models learn from; null: no copies. Without "
        "copies, each model learns from the current predictions of the others",
    )

    @property
    def same_batches(self) -> bool:
        return True

    def conflicts_with_learned(self, learned: LearnedConfig, model: ModelConfig) -> Iterator[Problem]:
        if self.model is not None:
            yield from different_inputs("distill.model", self.model, model)

    def conflicts_with_fsdp(self) -> Iterator[Problem]:
        yield several_forwards(self.name)

    def conflicts(self) -> Iterator[Problem]:
        if self.model is not None and self.checkpoint is not None:
            message = "distill.model and distill.checkpoint both determine the model of the peers"
            hint = "omit distill.checkpoint= for peers with random weights; otherwise omit distill.model="
            yield Problem("distill.model", message, hint)


@component("distill", "self", builder="lmtool.distillation.self_distillation:SelfDistillation")
class SelfConfig(DistillConfig):
    """A model with early exits, heads after some of its layers, which learn from the predictions of its last layer
    (Zhang et al. 2019, "Be Your Own Teacher"). The trained model can predict at each exit."""

    name: Literal["self"] = Field("self", description="Early exits learn from the last layer.")
    exits: Literal["all"] | tuple[int, ...] = Field(
        "all", description="layers followed by an early exit, counted from 1: all (every layer but the last), or a list"
    )
    soft: float = Field(
        0.3,
        ge=0,
        le=1,
        description="weight of the last layer's predictions in the loss of an exit; the labels have weight 1 - soft",
    )
    temperature: float = Field(3.0, gt=0, description="temperature of the softmax, for the exits and the last layer")
    states: float = Field(
        0.03, ge=0, description="weight of the squared difference between an exit's hidden states and the last layer's"
    )

    def exit_layers(self, model: ModelConfig) -> tuple[int, ...]:
        return tuple(range(1, model.num_layers)) if self.exits == "all" else tuple(sorted(self.exits))

    def conflicts_with_learned(self, learned: LearnedConfig, model: ModelConfig) -> Iterator[Problem]:
        reason, omit = "distill=self adds early exits to a model that learns one task with labels", "set distill=none"
        if (several := not_one_task(learned)) is not None:
            yield Problem("distill", f"{reason}; {several}", omit)
        if learned.writes_text:
            yield Problem("distill", f"{reason}; {learned.typed} trains a language model", omit)
        if learned.domain_adaptation is not None:
            message = f"{reason}; {learned.typed} has a loss over two domains"
            yield Problem("distill", message, "set task.domain=null, or distill=none")
        if model.architecture == "encoder_decoder":
            message = f"{reason}; model={model.name} has two stacks, an encoder and a decoder"
            yield Problem("distill", message, "set model=bert, or distill=none")
        if model.num_layers < 2:
            message = f"{reason}: model.num_layers={model.num_layers}: there is no layer before the last"
            yield Problem("distill", message, "set model.num_layers=2, or distill=none")
        exits = self.exit_layers(model)
        invalid = [f"layer {depth}" for depth in exits if not 1 <= depth < model.num_layers]
        repeated = ["a layer twice"] if len(set(exits)) < len(exits) else []
        if not exits or invalid or repeated:
            yield Problem(
                "distill.exits",
                f"distill.exits={list(exits)} names {[*invalid, *repeated, 'no layer'][0]}: exits may follow layers 1 "
                f"to {model.num_layers - 1}, all but the last",
                f"set distill.exits=[{max(1, (model.num_layers - 1) // 2)}], or all",
            )

    def conflicts_with_fsdp(self) -> Iterator[Problem]:
        yield several_forwards(self.name)


def not_one_task(learned: LearnedConfig) -> str | None:
    """Returns the reason why an objective or a task is not a single task, or None."""
    if len(learned.member_configs()) > 1:
        return f"{learned.typed} is a mixture"
    single = learned.reads_labeled_rows and [*learned.member_configs()] == [learned]
    return None if single else f"{learned.name} is not a task"
