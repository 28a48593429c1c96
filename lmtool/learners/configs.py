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
    """What a mixture is made of. title: what it is called in it."""

    @property
    def title(self) -> str: ...

    def learner(self, *arguments: Any) -> Any: ...


class Mixed(Protocol):
    """The configuration of a mixture. members_key: where its members are typed. repeats: whether an epoch has as many
    examples as all members together, so that some come several times, or ends where one of them would."""

    members_key: ClassVar[str]
    repeats: ClassVar[bool]

    def parts(self) -> tuple[Member, ...]: ...

    def fractions(self) -> tuple[float, ...]: ...


# What is learned may need of a model's text, its vocabulary, and the processes of a run.


SEGMENTS: Offer[ModelConfig] = Offer(
    "model",
    lambda model: model.segment_types > 1 and (model.text_format not in FORMATS or FORMATS[model.text_format].segments),
    "does not",
)
_OTHERWISE = "or parallel=ddp, with which each process holds all weights"
WHOLE_WEIGHTS: Offer[str] = Offer(
    "parallel", lambda parallel: parallel != "fsdp", lambda parallel: f"parallel={parallel} cuts them", _OTHERWISE
)
FORWARDS_OF_ONE_PROCESS: Offer[str] = Offer(
    "parallel",
    lambda parallel: parallel != "fsdp",
    lambda parallel: f"parallel={parallel} runs all processes in step",
    _OTHERWISE,
)


def special_token(*roles: str) -> Offer[frozenset[str]]:
    """One of these roles, among those of a vocabulary's special tokens."""
    return Offer(
        "roles",
        lambda known: bool(known & set(roles)),
        lambda known: f"has no {' or '.join(roles)} token",
        wording="{lacking}, which {reason}",
    )


class LearnedConfig(Component):
    """The base of objectives and tasks: what is learned, and what tuning and distillation may ask of it."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """The architectures it trains: encoder, decoder, encoder_decoder, bidirectional_lm."""
    of_rows_with_labels: ClassVar[bool] = False
    """Whether it is learned from the labels of rows: a task."""
    has_classes: ClassVar[bool] = False
    """Whether it has a field `labels`, the names of its classes."""

    @property
    def title(self) -> str:
        """What it is called among the members of a mixture."""
        return self.name

    @property
    def typed_kind(self) -> str:
        """What kind of task or objective it is, as it is typed."""
        return self.typed

    def parts(self) -> tuple[LearnedConfig, ...]:
        """What it is made of: itself."""
        return (self,)

    @property
    def makes_inputs(self) -> bool:
        """Whether its learner makes a part of what it reads itself, as it learns, so that no other model reads the
        same."""
        return False

    @property
    def of_rows(self) -> bool:
        """Whether it predicts rows as wholes, however their texts are cut into tokens."""
        return False

    @property
    def writes_text(self) -> bool:
        """Whether its answers are a language model's: what its head writes, or says of words."""
        return False

    @property
    def learns_texts(self) -> bool:
        """Whether what it learns to answer are texts."""
        return self.writes_text

    @property
    def adapts(self) -> str | None:
        """The auxiliary loss over texts of another domain."""
        return None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of its classes; None where it has none, or they are not known yet."""
        return None

    @property
    def language_model_weight(self) -> float:
        """Weight of a language model's loss beside its own."""
        return 0.0

    def states_read(self, model: ModelConfig) -> Side:
        """The side of a batch whose hidden states its head reads; in an encoder-decoder the decoder's reads the same
        text."""
        return "outputs" if model.architecture == "encoder_decoder" else "inputs"


# What tuning and distillation may need of what is learned.


A_TASK: Offer[LearnedConfig] = Offer("learned", lambda learned: learned.of_rows_with_labels, "is no task")
ONE_TASK: Offer[LearnedConfig] = Offer(
    "learned",
    lambda learned: learned.of_rows_with_labels and [*learned.parts()] == [learned],
    lambda learned: (
        f"{learned.typed} is a mixture of several" if len(learned.parts()) > 1 else f"{learned.name} is none"
    ),
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
NO_TEXTS: Offer[LearnedConfig] = Offer(
    "learned", lambda learned: not learned.writes_text, "learns what a language model writes"
)
TEXTS: Offer[LearnedConfig] = Offer(
    "learned",
    lambda learned: learned.of_rows_with_labels and learned.learns_texts,
    lambda learned: f"{learned.name} learns none",
)


class ObjectiveConfig(LearnedConfig):
    """The base of every pretraining objective."""

    group: ClassVar[str] = "objective"
    contextual: ClassVar[bool] = True
    """Whether it trains models whose hidden states depend on the tokens around; False: those of which none does."""
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ()
    """The special tokens it needs of the vocabulary, beside those of the model's text format; of a group, one."""
    query_stream: ClassVar[bool] = False
    """Whether it predicts by a stream that does not see the tokens, which few families have."""
    prefixes: ClassVar[bool] = False
    """Whether a decoder's texts have a part that all of them sees."""
    reads_lanes: ClassVar[bool] = False
    """Whether it reads joined text in lanes (data/loader.py) on a model that carries state."""
    phase_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that may differ between the phases of a run: they shape examples, and no parameter and no loss."""

    name: str = Field(description="Which objective.")

    @property
    def reuses_nothing(self) -> bool:
        """Whether a model's memory is of the tokens that it reuses, and it reuses none."""
        return False

    @property
    def steps_without_model(self) -> int:
        """Steps in which it learns alone, before the model learns."""
        return 0

    @property
    def pairs_of_segments(self) -> str | None:
        """Which loss over pairs of segments it has."""
        return None

    def needs(self) -> Iterator[Requirement]:
        typed = f"objective={self.name} trains"
        yield Requirement(architecture(*self.architectures), "objective", f"{typed} {kinds(self.architectures)}")
        if self.contextual:
            yield Requirement(CONTEXT, "objective", f"{typed} models that read context")
        else:
            yield Requirement(SINGLE_TOKENS, "objective", f"{typed} vectors of single tokens")
        if self.prefixes:
            typed_prefix = f"objective={self.name} lets the first tokens of a text see each other"
            yield Requirement(PREFIXES, "objective", typed_prefix)
        if self.query_stream:
            yield Requirement(QUERY_STREAM, "objective", f"{typed} a model with a query stream")
        if self.pairs_of_segments is not None:
            reason = f"objective.pairs={self.pairs_of_segments} needs a model that tells two segments apart by a table"
            yield Requirement(SEGMENTS, "objective.pairs", reason, "set objective.pairs=none")
        for role in self.roles:
            group = (role,) if isinstance(role, str) else role
            yield Requirement(special_token(*group), "objective", f"objective={self.name} needs")

    @property
    def predicted_fraction(self) -> float:
        """Share of the tokens at which the vocabulary is computed, of an encoder-decoder those of its outputs."""
        return 1.0

    def learner(self, *arguments: Any) -> Any:
        """The learner of this objective: `arguments` are backbone, tokenizer and seed."""
        return build(self, *arguments)

    def parts(self) -> tuple[ObjectiveConfig, ...]:
        """The objectives it is made of: itself."""
        return (self,)

    def with_parts(self, parts: tuple[ObjectiveConfig, ...]) -> ObjectiveConfig:
        """The same of other parts, in their order."""
        return parts[0]

    def of_parts(self, parts: Sequence[ObjectiveConfig]) -> ObjectiveConfig:
        """The same of some of its parts alone, which may have other forms."""
        return parts[0]

    @property
    def places(self) -> dict[str, float]:
        """Share of the tokens that a part of the learner runs at, by its name (`heads.lm`), for the plan of a run. Of
        what is not named, heads with a vocabulary run at `predicted_fraction`, all others once an example."""
        return {}


def one_forward(key: str, members: Sequence[str]) -> Iterator[Requirement]:
    """A batch of a mixture runs the model once for each member that is in it: that differs from process to process."""
    if len(members) > 1:
        reason = f"{key} mixes {', '.join(members)}, of which a batch has some"
        yield Requirement(FORWARDS_OF_ONE_PROCESS, key, reason, f"give one {key}")


@component("objective", "mixture", builder="lmtool.learners.mixture:Mixture")
class MixtureConfig(ObjectiveConfig):
    """Several objectives in one run, tasks among them, by weights, logged apart."""

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
        """Its members say more."""
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
        return sum(share * part.predicted_fraction for share, part in zip(self.fractions(), self.parts(), strict=True))

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
            raise ValueError(f"members=[{written}]: each objective once, tasks by their names, and no mixture")
        if self.weights is not None and (len(self.weights) != len(titles) or min(self.weights) <= 0):
            raise ValueError(f"weights={list(self.weights)}: a number above 0 for each of the {len(titles)} members")
        return self


def member_problem(error: ValidationError | PydanticCustomError, known: Sequence[str]) -> str:
    """Describes why a member is invalid. known: the valid names."""
    if isinstance(error, PydanticCustomError):
        given = (error.context or {}).get("given")
        subject = "a section has no name, which is" if given is None else f"{given} is not"
        return f"{subject} one of {', '.join(known)}"
    problem = error.errors(include_url=False, include_input=False)[0]
    messages = {"extra_forbidden": "unknown key", "missing": "missing required value"}
    where, message = ".".join(map(str, problem["loc"])), messages.get(problem["type"], problem["msg"])
    message += " is not known" if problem["type"] == "choice_unknown" else ""
    return ": ".join(part for part in (where, message.removeprefix("Value error, ")) if part)
