"""Configurations of objectives and tasks: their base classes, and mixtures. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lmtool.config.members import with_member_values
from lmtool.config.needs import Component, Offer, Requirement
from lmtool.config.tables import Choice, build, component, names
from lmtool.data.configs import FORMATS
from lmtool.models.configs import CONTEXT, PREFIXES, QUERY_STREAM, SINGLE_TOKENS, ModelConfig, architecture, kinds
from lmtool.nn.configs import Side


class Member(Protocol):
    """A member of a mixture. title: its name there."""

    @property
    def title(self) -> str: ...

    def learner(self, *arguments: Any) -> Any: ...


class Mixed(Protocol):
    """The configuration of a mixture. members_key: the key of its members. repeats: whether an epoch has as many
    examples as all members together, so that some are repeated; otherwise it ends before any example would be."""

    members_key: ClassVar[str]
    repeats: ClassVar[bool]

    def parts(self) -> tuple[Member, ...]: ...

    def fractions(self) -> tuple[float, ...]: ...


# --- offers that objectives and tasks depend on -------------------------------------------------------------------

SEGMENTS: Offer[ModelConfig] = Offer(
    "model",
    lambda model: model.segment_types > 1 and (model.text_format not in FORMATS or FORMATS[model.text_format].segments),
    "does not",
)
_OTHERWISE = "or parallel=ddp, where each process holds all weights"
WHOLE_WEIGHTS: Offer[str] = Offer(
    "parallel", lambda parallel: parallel != "fsdp", lambda parallel: f"parallel={parallel} shards them", _OTHERWISE
)
FORWARDS_OF_ONE_PROCESS: Offer[str] = Offer(
    "parallel",
    lambda parallel: parallel != "fsdp",
    lambda parallel: f"parallel={parallel} needs the same forwards in all processes",
    _OTHERWISE,
)


def special_token(*roles: str) -> Offer[frozenset[str]]:
    """A special token of the vocabulary with one of these roles."""
    return Offer(
        "roles",
        lambda known: bool(known & set(roles)),
        lambda known: f"has no {' or '.join(roles)} token",
        wording="{lacking}, which {reason}",
    )


class LearnedConfig(Component):
    """The base of objectives and tasks, with the properties that tuning and distillation depend on."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """The architectures that it trains: encoder, decoder, encoder_decoder, bidirectional_lm."""
    of_rows_with_labels: ClassVar[bool] = False
    """Whether it is a task, learned from labeled rows."""
    has_classes: ClassVar[bool] = False
    """Whether it has a field `labels` with the names of its classes."""

    @property
    def title(self) -> str:
        """Its name among the members of a mixture."""
        return self.name

    @property
    def typed_kind(self) -> str:
        """The override that selects this kind of task or objective."""
        return self.typed

    def parts(self) -> tuple[LearnedConfig, ...]:
        """The members of a mixture; otherwise only itself."""
        return (self,)

    @property
    def makes_inputs(self) -> bool:
        """Whether its learner generates part of its inputs, so that no other model reads the same inputs."""
        return False

    @property
    def of_rows(self) -> bool:
        """Whether it predicts rows, independently of their tokenization."""
        return False

    @property
    def writes_text(self) -> bool:
        """Whether it predicts with a language-model head: generated text, or the probabilities of words."""
        return False

    @property
    def learns_texts(self) -> bool:
        """Whether its targets are texts."""
        return self.writes_text

    @property
    def adapts(self) -> str | None:
        """The auxiliary loss for domain adaptation, or None."""
        return None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of its classes; None if it has none, or they are not known yet."""
        return None

    @property
    def language_model_weight(self) -> float:
        """Weight of an auxiliary language-model loss."""
        return 0.0

    def states_read(self, model: ModelConfig) -> Side:
        """The side of a batch whose hidden states its head reads."""
        return "outputs" if model.architecture == "encoder_decoder" else "inputs"


# --- offers of objectives and tasks -------------------------------------------------------------------------------

A_TASK: Offer[LearnedConfig] = Offer("learned", lambda learned: learned.of_rows_with_labels, "is not a task")
ONE_TASK: Offer[LearnedConfig] = Offer(
    "learned",
    lambda learned: learned.of_rows_with_labels and [*learned.parts()] == [learned],
    lambda learned: f"{learned.typed} is a mixture" if len(learned.parts()) > 1 else f"{learned.name} is not a task",
)
ONE_DOMAIN: Offer[LearnedConfig] = Offer(
    "learned", lambda learned: learned.adapts is None, "has a loss over two domains"
)
LABELS: Offer[LearnedConfig] = Offer(
    "task",
    lambda task: task.has_classes,
    lambda task: f"{task.typed_kind} has no labels",
    wording="{reason}: {lacking}",
)
NO_TEXTS: Offer[LearnedConfig] = Offer("learned", lambda learned: not learned.writes_text, "trains a language model")
TEXTS: Offer[LearnedConfig] = Offer(
    "learned",
    lambda learned: learned.of_rows_with_labels and learned.learns_texts,
    lambda learned: f"{learned.name} has none",
)


class ObjectiveConfig(LearnedConfig):
    """The base of every pretraining objective."""

    group: ClassVar[str] = "objective"
    contextual: ClassVar[bool] = True
    """Whether it trains models with contextual hidden states; False: models of single tokens."""
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ()
    """The special tokens that it needs in addition to those of the model's text format; one token of each tuple."""
    query_stream: ClassVar[bool] = False
    """Whether it predicts with a query stream, which does not read the predicted tokens (XLNet)."""
    prefixes: ClassVar[bool] = False
    """Whether a decoder's texts have a prefix with bidirectional attention."""
    reads_lanes: ClassVar[bool] = False
    """Whether it reads joined text as parallel streams (data/loader.py) if the model carries state."""
    phase_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that may differ between phases: they change examples, but neither parameters nor losses."""

    name: str = Field(description="name of the objective")

    @property
    def reuses_nothing(self) -> bool:
        """Whether it reuses no tokens, although a model's memory consists of reused tokens."""
        return False

    @property
    def steps_without_model(self) -> int:
        """Steps before the model is trained, in which only the objective's networks are."""
        return 0

    @property
    def pairs_of_segments(self) -> str | None:
        """The name of its loss over pairs of segments, or None."""
        return None

    def needs(self) -> Iterator[Requirement]:
        typed = f"objective={self.name} trains"
        yield Requirement(architecture(*self.architectures), "objective", f"{typed} {kinds(self.architectures)}")
        if self.contextual:
            yield Requirement(CONTEXT, "objective", f"{typed} models that read context")
        else:
            yield Requirement(SINGLE_TOKENS, "objective", f"{typed} vectors of single tokens")
        if self.prefixes:
            reason = f"objective={self.name} needs bidirectional attention between the first tokens of a text"
            yield Requirement(PREFIXES, "objective", reason)
        if self.query_stream:
            yield Requirement(QUERY_STREAM, "objective", f"{typed} a model with a query stream")
        if self.pairs_of_segments is not None:
            reason = f"objective.pairs={self.pairs_of_segments} needs a model with segment embeddings"
            yield Requirement(SEGMENTS, "objective.pairs", reason, "set objective.pairs=none")
        for role in self.roles:
            group = (role,) if isinstance(role, str) else role
            yield Requirement(special_token(*group), "objective", f"objective={self.name} needs")

    @property
    def predicted_fraction(self) -> float:
        """Fraction of the tokens (in an encoder-decoder, of the outputs) for which logits are computed."""
        return 1.0

    def learner(self, *arguments: Any) -> Any:
        """Build the learner. arguments: backbone, tokenizer, seed."""
        return build(self, *arguments)

    def parts(self) -> tuple[ObjectiveConfig, ...]:
        """The members of a mixture; otherwise only itself."""
        return (self,)

    def with_parts(self, parts: tuple[ObjectiveConfig, ...]) -> ObjectiveConfig:
        """A copy with other parts, in the same order."""
        return parts[0]

    def of_parts(self, parts: Sequence[ObjectiveConfig]) -> ObjectiveConfig:
        """A copy with only some of its parts, which may be modified."""
        return parts[0]

    @property
    def places(self) -> dict[str, float]:
        """Fraction of the tokens at which a part of the learner (`heads.lm`) runs, for the plan of a run. Unnamed heads
        with a vocabulary run at `predicted_fraction`, other unnamed heads once per example."""
        return {}


def one_forward(key: str, members: Sequence[str]) -> Iterator[Requirement]:
    """The requirement of a mixture: the number of forwards per batch differs between processes, because it is the
    number of members in the batch."""
    if len(members) > 1:
        reason = f"{key} mixes {', '.join(members)}, and the number of forwards depends on the batch"
        yield Requirement(FORWARDS_OF_ONE_PROCESS, key, reason, f"set one {key}")


@component("objective", "mixture", builder="lmtool.learners.mixture:Mixture")
class MixtureConfig(ObjectiveConfig):
    """A weighted mixture of objectives and tasks, each logged separately."""

    members_key: ClassVar[str] = "objective.members"
    repeats: ClassVar[bool] = False

    name: Literal["mixture"] = Field("mixture", description="A mixture of objectives.")
    members: tuple[str | dict[str, Any], ...] = Field(
        ("mlm", "span"),
        min_length=1,
        description="names, or sections: [{name: mlm, whole_word: true}, span]; tasks by name, [mlm, sst2], or as in "
        "objective=task; objective.with.NAME.KEY=VALUE sets a key of one member. Each name occurs once; tasks are "
        "listed by their own name: sst2, or {name: task, task: {kind: classification, name: reviews, path: FOLDER}}",
    )
    weights: tuple[float, ...] | None = Field(
        None, description="one number per member: its share of the examples and of the loss; null: equal weights"
    )

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        return with_member_values(data)

    def needs(self) -> Iterator[Requirement]:
        """The requirement of a mixture; the matcher asks its members for theirs."""
        yield from one_forward("objective", [part.title for part in self.parts()])

    def parts(self) -> tuple[ObjectiveConfig, ...]:
        """The members."""
        choice = Choice("objective")
        members = (choice.validate({"name": member} if isinstance(member, str) else member) for member in self.members)
        return tuple(member for member in members if isinstance(member, ObjectiveConfig))

    def with_parts(self, parts: tuple[ObjectiveConfig, ...]) -> MixtureConfig:
        return self.model_copy(update={"members": tuple(part.model_dump(mode="json") for part in parts)})

    def of_parts(self, parts: Sequence[ObjectiveConfig]) -> MixtureConfig:
        by_title = dict(zip((part.title for part in self.parts()), self.weights or (), strict=False))
        weights = tuple(by_title[part.title] for part in parts) if by_title else None
        return self.with_parts(tuple(parts)).model_copy(update={"weights": weights})

    def fractions(self) -> tuple[float, ...]:
        """The weights, adding up to 1."""
        weights = (1.0,) * len(self.members) if self.weights is None else self.weights
        return tuple(weight / sum(weights) for weight in weights)

    @property
    def predicted_fraction(self) -> float:
        return sum(
            fraction * part.predicted_fraction for fraction, part in zip(self.fractions(), self.parts(), strict=True)
        )

    @property
    def places(self) -> dict[str, float]:
        members = [(share, part.places) for share, part in zip(self.fractions(), self.parts(), strict=True)]
        names = {name for _, places in members for name in places}
        return {name: sum(share * places.get(name, 0.0) for share, places in members) for name in sorted(names)}

    @model_validator(mode="after")
    def _members_fit(self) -> MixtureConfig:
        try:
            members = self.parts()
        except (ValidationError, PydanticCustomError) as error:
            raise ValueError(f"members: {member_problem(error, names('objective'))}") from error
        titles = [member.title for member in members]
        if len(set(titles)) < len(titles) or any(isinstance(member, MixtureConfig) for member in members):
            written = ", ".join(titles)
            raise ValueError(f"members=[{written}]: name each objective once, tasks by their own names, and no mixture")
        if self.weights is not None and (len(self.weights) != len(titles) or min(self.weights) <= 0):
            raise ValueError(f"weights={list(self.weights)}: a number above 0 for each of the {len(titles)} members")
        return self


def member_problem(error: ValidationError | PydanticCustomError, known: Sequence[str]) -> str:
    """Describes why a member is invalid. known: the valid names."""
    if isinstance(error, PydanticCustomError):
        name = (error.context or {}).get("given")
        valid = f"one of {', '.join(known)}"
        return f"a section has no name, {valid}" if name is None else f"{name} is not {valid}"
    problem = error.errors(include_url=False, include_input=False)[0]
    messages = {"extra_forbidden": "unknown key", "missing": "missing required value"}
    where, message = ".".join(map(str, problem["loc"])), messages.get(problem["type"], problem["msg"])
    message += " is not known" if problem["type"] == "choice_unknown" else ""
    return ": ".join(part for part in (where, message.removeprefix("Value error, ")) if part)
