"""What is learned, as configuration: the base of every objective, and mixtures. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lmtool.config.base import Config
from lmtool.config.members import reached
from lmtool.config.tables import Choice, build, component, names


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


class ObjectiveConfig(Config):
    """The base of every pretraining objective."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """The architectures it trains: encoder, decoder, encoder_decoder, bidirectional_lm."""
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
    makes_inputs: ClassVar[bool] = False
    """Whether its learner makes a part of what it reads itself, as it learns, so that no other model reads the same."""

    name: str = Field(description="Which objective.")

    @property
    def predicted_fraction(self) -> float:
        """Share of the tokens at which the vocabulary is computed, of an encoder-decoder those of its outputs."""
        return 1.0

    def learner(self, *arguments: Any) -> Any:
        """The learner of this objective: `arguments` are backbone, tokenizer and seed."""
        return build(self, *arguments)

    @property
    def title(self) -> str:
        """What it is called among the members of a mixture."""
        return self.name

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


@component("objective", "mixture", builder="lmtool.learners.mixture:Mixture")
class MixtureConfig(ObjectiveConfig):
    """Several objectives in one run, tasks among them, by weights, logged apart."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "encoder_decoder", "bidirectional_lm")
    """Its parts say more."""

    members_key: ClassVar[str] = "objective.members"
    repeats: ClassVar[bool] = False

    name: Literal["mixture"] = Field("mixture", description="A mixture of objectives.")
    members: tuple[str | dict[str, Any], ...] = Field(
        ("mlm", "span"),
        min_length=1,
        description="The objectives: names, or sections with a name and the keys that differ from its defaults. No "
        "name twice; tasks go by theirs: sst2, or {name: task, task: {kind: classification, name: reviews, path: "
        "FOLDER}}. objective.with.NAME.KEY= sets a key of one of them.",
    )
    weights: tuple[float, ...] | None = Field(
        None, description="One number per member: its share of the examples and of the loss. Null: equal."
    )

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        return reached(data)

    def parts(self) -> tuple[ObjectiveConfig, ...]:
        """The members."""
        choice = Choice("objective")
        members = (choice.validate({"name": member} if isinstance(member, str) else member) for member in self.members)
        return tuple(member for member in members if isinstance(member, ObjectiveConfig))

    def with_parts(self, parts: tuple[ObjectiveConfig, ...]) -> MixtureConfig:
        return self.model_copy(update={"members": tuple(part.model_dump(mode="json") for part in parts)})

    def of_parts(self, parts: Sequence[ObjectiveConfig]) -> MixtureConfig:
        own = dict(zip((part.title for part in self.parts()), self.weights or (), strict=False))
        weights = tuple(own[part.title] for part in parts) if own else None
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
    """What is wrong with a member that is not decoded, in words. known: the names there are."""
    if isinstance(error, PydanticCustomError):
        given = (error.context or {}).get("given")
        subject = "a section has no name, which is" if given is None else f"{given} is not"
        return f"{subject} one of {', '.join(known)}"
    problem = error.errors(include_url=False, include_input=False)[0]
    messages = {"extra_forbidden": "unknown key", "missing": "missing required value"}
    where, message = ".".join(map(str, problem["loc"])), messages.get(problem["type"], problem["msg"])
    message += " is not known" if problem["type"] == "choice_unknown" else ""
    return ": ".join(part for part in (where, message.removeprefix("Value error, ")) if part)
