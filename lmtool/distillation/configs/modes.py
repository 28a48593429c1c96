"""The modes of distillation, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import Choice, Several, component
from lmtool.distillation.configs.base import DistillConfig, LayerMap, Layers, TermConfig, layer_map, shared_sides
from lmtool.errors import Problem, UserError
from lmtool.models.configs import ModelConfig
from lmtool.nn.configs import Side
from lmtool.system.terminal import counted

# Which layers of its teacher a student starts from. Imports no torch.


Initialize = Literal["none", "alternate"] | tuple[Annotated[int, Field(ge=1)], ...]
"""none: from random weights. alternate: from the teacher's first layer, its last, and those at even distances between
them: 1, 3, 5, 8, 10, 12 of 12 for 6, which are DistilBERT's. Or a layer of the teacher for each of the student's, from
the first on."""

# What two models must share so that the tensors of one are those of the other.
_SHAPES = (
    "vocab_size", "hidden_size", "embedding_size", "num_heads", "num_key_value_heads", "head_size", "feedforward_size",
    "max_positions",
)  # fmt: skip


def taken_layers(initialize: Initialize, student: ModelConfig, teacher: ModelConfig) -> dict[Side, tuple[int, ...]]:
    """For each stack that both models have, the teacher's layer of each of the student's, counted from 1; {} for none.

    UserError where the two differ in a size, which names both, and where the layers given are others than there are.
    """
    if initialize == "none":
        return {}
    for field in _SHAPES:
        own, its = getattr(student, field, None), getattr(teacher, field, None)
        if own != its:
            raise UserError(
                f"distill.initialize: the student has model.{field}={own}, its teacher {its}; tensors are copied as "
                "they are",
                f"give model.{field}={its} or distill.initialize=none" if own is not None else _NONE,
            )
    if student.shares_layers != teacher.shares_layers:
        sharing = student.name if student.shares_layers else teacher.name
        raise UserError(f"distill.initialize: model={sharing} has one layer at all depths, the other one each", _NONE)
    taken: dict[Side, tuple[int, ...]] = {}
    for side in shared_sides(student, teacher):
        own, its = student.depths[side], teacher.depths[side]
        layers = _alternate(own, its) if isinstance(initialize, str) else initialize
        if len(layers) != own or max(layers) > its:
            raise UserError(
                f"distill.initialize={list(layers)}: the student has {counted(own, 'layer')}, the teacher {its}",
                f"give distill.initialize=alternate, which is {list(_alternate(own, its))} here",
            )
        taken[side] = layers
    return taken


def _alternate(own: int, its: int) -> tuple[int, ...]:
    """The first, the last, and between them the nearest to even distances."""
    steps = max(own - 1, 1)
    return tuple(1 + (2 * number * (its - 1) + steps) // (2 * steps) for number in range(own))


_NONE = "give distill.initialize=none"


# Learning from frozen teachers. Imports no torch.


_GIVE = "give distill.teacher=RUN, a run of lmtool or a published folder; or distill=none"


@component("distill", "standard", builder="lmtool.distillation.standard:Standard")
class StandardConfig(DistillConfig):
    """Frozen teachers and a student (Hinton, Vinyals and Dean 2015)."""

    name: Literal["standard"] = Field("standard", description="A frozen teacher and a student.")
    teacher: str | None = Field(
        None,
        min_length=1,
        description="The teacher: a run or a checkpoint of lmtool, a published folder, or hf://org/name@revision.",
    )
    teachers: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="Several in its place. Each teaches what it was trained for: of a mixture's members those whose "
        "names it knows. Of the same member they are averaged.",
    )
    teacher_weights: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        None, description="A number for each of the teachers, in an average. Null: all alike."
    )
    average: Literal["probabilities", "logits"] = Field(
        "probabilities", description="What is averaged of several teachers, each at the temperature."
    )
    predictions: str | None = Field(
        None,
        min_length=1,
        description="A file of a teacher's predictions in its place, for hard labels: what `lmtool predict output=` "
        "writes of the training rows.",
    )
    gold: float = Field(0.5, ge=0, description="Weight of the student's own loss, over the labels of the data.")
    terms: Annotated[dict[str, TermConfig], Several("distill/term")] = Field(
        {}, description="What is learned from the teacher: by name a section with its weight; null takes one out."
    )

    layers: Layers = Field(
        "uniform",
        description="Which layer learns from which of the teacher's: uniform, last, pkd_skip, pkd_last, or {1: 4, 2: "
        "8}, the teacher's layer by the student's; 0 stands for the embeddings.",
    )
    decoder_layers: Layers | None = Field(
        None, description="The same of the decoder of an encoder-decoder. Null: as layers."
    )
    initialize: Initialize = Field(
        "none",
        description="Layers of the teacher that the student's are copies of at the start, with the embeddings and the "
        "heads of the same names: none, alternate, or a list of them, counted from 1.",
    )
    targets: Literal["gold", "teacher", "both"] = Field(
        "gold",
        description="What a student that writes texts learns to write, as its own loss: the targets of the rows; what "
        "the teacher writes by task.generation in their place (Kim and Rush 2016); or both, each as a row.",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="Words of a vocabulary whose probabilities are learned, the teacher's most probable; the others "
        "count as one class together. Null: all.",
    )
    store: bool | str | None = Field(
        None,
        description="Where the teacher's outputs are kept, which one pass of it makes and every run with the same "
        "teacher and data reads: true (below cache_dir), or a folder. Null: the teacher runs beside the student.",
    )
    store_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="Number format of what is stored."
    )

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return self.teachers if self.teacher is None else (self.teacher,)

    @property
    def same_batches(self) -> bool:
        """A teacher whose outputs are stored may read the rows of a table by itself."""
        return self.compares and not self.store

    @property
    def of_rows(self) -> bool:
        return all(term.averages for term in self._weighted.values())

    @property
    def compares(self) -> bool:
        return super().compares and bool(self._weighted)

    @property
    def starts_from_teacher(self) -> bool:
        return self.initialize != "none"

    @property
    def teaches_heads(self) -> bool:
        return self.gold > 0 or any(term.teaches_heads for term in self._weighted.values())

    @property
    def compares_layers(self) -> bool:
        """Whether a term goes by the layer map."""
        return any(term.compares_layers for term in self.terms.values())

    def layer_map(self, student: ModelConfig, teacher: ModelConfig) -> LayerMap:
        """The teacher's layer by the student's. UserError where it does not fit their depths."""
        return layer_map(self.layers, self.decoder_layers, student, teacher)

    def misfit_of_teacher(self, student: ModelConfig, teacher: ModelConfig) -> Problem | None:
        try:
            layers = self.layer_map(student, teacher) if self.compares_layers else None
        except UserError as error:
            return Problem("distill.layers", error.message, error.hint)
        try:
            taken_layers(self.initialize, student, teacher)
        except UserError as error:
            return Problem("distill.initialize", error.message, error.hint)
        return next(filter(None, (term.misfit(student, teacher, layers) for term in self.terms.values())), None)

    def fractions(self) -> dict[str, float]:
        """The weight of each teacher in an average."""
        weights = self.teacher_weights or (1.0,) * len(self.checkpoints)
        return dict(zip(self.checkpoints, weights, strict=True))

    @property
    def _weighted(self) -> dict[str, TermConfig]:
        return {name: term for name, term in self.terms.items() if term.weight > 0}

    def untaught(self) -> Problem | None:
        if self.targets != "gold" and not self.checkpoints:
            message = f"distill.targets={self.targets}: a teacher writes them, and none is named"
            return Problem("distill.teacher", message, _GIVE, absent=True)
        if not self._weighted and self.targets == "gold":
            message = f"distill={self.name} has no term with a weight: nothing is learned from a teacher"
            return Problem("distill.terms", message, "give distill=soft, distill.terms.soft.weight=0.5 or distill=none")
        of_teachers = [name for name, term in self._weighted.items() if term.needs_teacher]
        if self.starts_from_teacher and not self.checkpoints:
            message = f"distill.initialize={self.initialize}: layers of a teacher, and none is named"
            return Problem("distill.teacher", message, _GIVE, absent=True)
        if self.predictions is not None:
            of_teachers = [name for name, term in self._weighted.items() if not term.of_labels]
        if not of_teachers or self.checkpoints:
            return None
        message = f"distill.terms.{of_teachers[0]} learns from a teacher, and none is named"
        return Problem("distill.teacher", message, _GIVE, absent=True)

    def misfit(self, model: Any, learned: Any) -> Problem | None:
        alone = [name for name, term in self._weighted.items() if not term.averages]
        if alone and len(self.checkpoints) > 1:
            message = f"distill.terms.{alone[0]} learns from one teacher, and distill.teachers has {len(self.teachers)}"
            return Problem("distill.teachers", message, "give one of them as distill.teacher=; soft and hard average")
        if self.starts_from_teacher and len(self.checkpoints) > 1:
            message = f"distill.initialize takes layers of one teacher, and distill.teachers has {len(self.teachers)}"
            return Problem("distill.initialize", message, "give distill.initialize=none")
        if self.average == "logits" and len(self.checkpoints) > 1 and (self.top_k is not None or self.store):
            cut = "distill.store" if self.store else f"distill.top_k={self.top_k}"
            message = f"distill.average=logits: {cut} keeps probabilities of words"
            return Problem("distill.average", message, "give distill.average=probabilities")
        return self._misfit_of_predictions(learned) or self._misfit_of_targets(learned) or self._misfit_of_store()

    def _misfit_of_predictions(self, learned: Any) -> Problem | None:
        """Whose labels are in a file."""
        given, key = f"distill.predictions={self.predictions}", "distill.predictions"
        if self.predictions is None:
            return None
        if self.checkpoints:
            message = (
                f"{given} and distill.teacher={self.checkpoints[0]}: the labels are those of the file, or the teacher's"
            )
            return Problem(key, message, "give one of the two")
        if len(learned.parts()) > 1 or not hasattr(learned, "label"):
            message = f"{given}: labels of the rows of one task; {learned.name} is none"
            return Problem(key, message, "give a teacher in its place: distill.teacher=RUN")
        if learned.writes_text:
            message = f"{given}: task={learned.name} learns texts, and these are its targets"
            return Problem(key, message, "give the file as the task's data (task.path=), or distill=sequence")
        return None

    def _misfit_of_targets(self, learned: Any) -> Problem | None:
        """Who writes texts, and who learns them."""
        given = f"distill.targets={self.targets}"
        writes = getattr(learned, "writes", False) or getattr(learned, "head", None) in ("text_to_text", "prompt")
        if self.targets == "gold":
            return None
        if not writes:
            message = f"{given}: a teacher writes texts for the rows of a task; {learned.name} learns none"
            return Problem("distill.targets", message, "give distill.targets=gold, or a task that writes: task=seq2seq")
        if not self.gold or len(self.checkpoints) > 1:
            given += f" and distill.gold={self.gold}" if not self.gold else f" with {len(self.teachers)} teachers"
            hint = "give distill.gold=1" if not self.gold else "give one of them as distill.teacher="
            return Problem("distill.targets", f"{given}: one teacher's texts are what the own loss is over", hint)
        return None

    def _misfit_of_store(self) -> Problem | None:
        """What is kept of a teacher, and what is learned from it."""
        given = f"distill.store={'true' if self.store is True else self.store}"
        live = [name for name, term in self._weighted.items() if not term.stored]
        if self.store and live:
            message = f"{given} keeps what a teacher predicts, and distill.terms.{live[0]} needs the teacher itself"
            return Problem("distill.store", message, f"give distill.store=null, or distill.terms.{live[0]}=null")
        if isinstance(self.store, str) and len(self.teachers) > 1:
            message = f"{given} is one folder, and each of the distill.teachers has its own"
            return Problem("distill.store", message, "give distill.store=true")
        return None

    @model_validator(mode="after")
    def _teachers_fit(self) -> StandardConfig:
        if self.teacher is not None and self.teachers:
            raise ValueError("teacher and teachers are both given: one teacher, or a list of them")
        if len(set(self.teachers)) < len(self.teachers):
            raise ValueError("teachers names one twice; give it a larger share with teacher_weights")
        if self.teacher_weights is not None and len(self.teacher_weights) != len(self.teachers):
            given, teachers = list(self.teacher_weights), len(self.teachers)
            raise ValueError(f"teacher_weights={given}: a number for each of the teachers, and there are {teachers}")
        return self


# Models that learn together, each from the others. Imports no torch.


_READ_ALIKE = ("architecture", "text_format", "vocab_size")


@component("distill", "codistillation", builder="lmtool.distillation.codistillation:Codistillation")
class CodistillationConfig(DistillConfig):
    """Several learners of the same data, each of which also learns what the others predict (Anil et al. 2018; Zhang et
    al. 2018, deep mutual learning)."""

    name: Literal["codistillation"] = Field("codistillation", description="Learners that learn from each other.")
    learners: int = Field(
        2, ge=2, description="How many learn: the run's model and its peers, each as in a run with the next seed."
    )
    model: Annotated[ModelConfig | None, Choice("model", optional=True)] = Field(
        None, description="The peers' model, from random weights: a section with its name. Null: the run's."
    )
    checkpoint: str | None = Field(
        None,
        min_length=1,
        description="The weights that the peers start from, and with them their model. Null: the run's checkpoint.",
    )
    weight: float = Field(1.0, ge=0, description="Weight of what the others predict, beside each learner's own loss.")
    burn_in_steps: int = Field(0, ge=0, description="Steps in which each learns alone.")
    refresh_steps: int | None = Field(
        None,
        ge=1,
        description="Steps between copies of the learners, whose predictions the others learn from. Null: the learners "
        "themselves, in each step.",
    )

    @property
    def same_batches(self) -> bool:
        return True

    def misfit(self, model: Any, learned: Any) -> Problem | None:
        if self.model is not None and self.checkpoint is not None:
            message = "distill.model is for peers with random weights, and distill.checkpoint names theirs"
            return Problem("distill.model", message, "leave one of them out")
        return None if self.model is None else reads_otherwise("distill.model", self.model, model)


def reads_otherwise(key: str, peer: ModelConfig, model: ModelConfig) -> Problem | None:
    """Why a peer does not read the batches of a model, if it does not. key: what names the peer."""
    for field in _READ_ALIKE:
        own, other = getattr(model, field), getattr(peer, field)
        if own != other:
            message = f"{key}: a peer reads the batches of the run's model, and its {field} is {other}, not {own}"
            hint = f"distill.model.{field}={own}" if field == "vocab_size" else f"distill.model.name={model.name}"
            return Problem(key, message, f"give {hint}")
    return None


# A model that learns from its own last layer. Imports no torch.


@component("distill", "self", builder="lmtool.distillation.self_distillation:SelfDistillation")
class SelfConfig(DistillConfig):
    """Exits behind some layers, each with heads of its own, learn what the last layer predicts (Zhang et al. 2019, "Be
    Your Own Teacher"); the model can answer at each of them."""

    name: Literal["self"] = Field("self", description="Exits learn from the last layer.")
    exits: Literal["all"] | tuple[int, ...] = Field(
        "all", description="Layers, counted from 1, behind which there is an exit: all below the last, or a list."
    )
    soft: float = Field(
        0.3, ge=0, le=1, description="Of an exit's loss the share of what the last layer predicts; the rest is its own."
    )
    temperature: float = Field(3.0, gt=0, description="What the logits of both are divided by.")
    states: float = Field(
        0.03, ge=0, description="Weight of the squared difference between an exit's states and the last ones."
    )

    def exits_in(self, model: Any) -> tuple[int, ...]:
        return tuple(range(1, model.num_layers)) if self.exits == "all" else tuple(sorted(self.exits))

    def misfit(self, model: Any, learned: Any) -> Problem | None:
        if not hasattr(learned, "writes_text"):
            return _problem(f"objective={learned.name} is none")
        if [*learned.parts()] != [learned]:
            return _problem(f"task={learned.name} is a mixture of several")
        if model.architecture == "encoder_decoder":
            return _problem(f"model={model.name} has two stacks, whose layers do not follow one another", "model=bert")
        if learned.writes_text:
            return _problem(f"task={learned.name} reads what a language model writes")
        if getattr(learned, "domain", None) is not None:
            return _problem(f"task={learned.name} has an auxiliary loss over two domains", "task.domain=null")
        return self._out_of_place(model)

    def _out_of_place(self, model: Any) -> Problem | None:
        if model.num_layers < 2:
            return _problem(f"model.num_layers={model.num_layers}: no layer is below the last", "model.num_layers=2")
        deepest, exits = model.num_layers - 1, self.exits_in(model)
        wrong = next((depth for depth in exits if not 1 <= depth <= deepest), None)
        if wrong is None and exits and len(set(exits)) == len(exits):
            return None
        reason = "names none" if not exits else f"names {wrong}" if wrong is not None else "names a layer twice"
        message = f"distill.exits={list(exits)} {reason}: exits are behind layers 1 to {deepest}, the last but one"
        return Problem("distill.exits", message, f"give distill.exits=[{max(1, deepest // 2)}], or all")


def _problem(reason: str, instead: str | None = None) -> Problem:
    message = f"distill=self puts exits behind the layers of a model of one task of labels: {reason}"
    return Problem("distill", message, "give distill=none" if instead is None else f"give {instead}, or distill=none")
