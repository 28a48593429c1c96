"""What is learned, as configuration: the base of every objective, and mixtures. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lmtool.config.base import Config
from lmtool.config.tables import Choice, build, component, names


class ObjectiveConfig(Config):
    """The base of every pretraining objective."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """The architectures it trains: encoder, decoder, encoder_decoder."""
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ()
    """The special tokens it needs of the vocabulary, beside those of the model's text format; of a group, one."""
    prefixes: ClassVar[bool] = False
    """Whether a decoder's texts have a part that all of them sees."""

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

    @property
    def places(self) -> dict[str, float]:
        """Share of the tokens that a part of the learner runs at, by its name (`heads.lm`), for the plan of a run. Of
        what is not named, heads with a vocabulary run at `predicted_fraction`, all others once an example."""
        return {}


@component("objective", "mixture", builder="lmtool.learners.mixture:Mixture")
class MixtureConfig(ObjectiveConfig):
    """Several objectives in one run, tasks among them, by weights, logged apart."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "encoder_decoder")
    """Its parts say more."""

    name: Literal["mixture"] = Field("mixture", description="A mixture of objectives.")
    members: tuple[str | dict[str, Any], ...] = Field(
        ("mlm", "span"),
        min_length=1,
        description="The objectives: names, or sections with a name and the keys that differ from its defaults. No "
        "name twice; tasks go by theirs: {name: task, task: {kind: classification, name: reviews, path: FOLDER}}.",
    )
    weights: tuple[float, ...] | None = Field(
        None, description="A number for each member: its share of the examples and of the loss. Null: all alike."
    )

    def parts(self) -> tuple[ObjectiveConfig, ...]:
        """The members."""
        choice = Choice("objective")
        members = (choice.validate({"name": member} if isinstance(member, str) else member) for member in self.members)
        return tuple(member for member in members if isinstance(member, ObjectiveConfig))

    def with_parts(self, parts: tuple[ObjectiveConfig, ...]) -> MixtureConfig:
        return self.model_copy(update={"members": tuple(part.model_dump(mode="json") for part in parts)})

    def shares(self) -> tuple[float, ...]:
        """The weights, adding up to 1."""
        weights = (1.0,) * len(self.members) if self.weights is None else self.weights
        return tuple(weight / sum(weights) for weight in weights)

    @property
    def predicted_fraction(self) -> float:
        return sum(share * part.predicted_fraction for share, part in zip(self.shares(), self.parts(), strict=True))

    @property
    def places(self) -> dict[str, float]:
        members = [(share, part.places) for share, part in zip(self.shares(), self.parts(), strict=True)]
        names = {name for _, places in members for name in places}
        return {name: sum(share * places.get(name, 0.0) for share, places in members) for name in sorted(names)}

    @model_validator(mode="after")
    def _members_fit(self) -> MixtureConfig:
        try:
            members = self.parts()
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            messages = {"extra_forbidden": "unknown key", "missing": "missing required value"}
            where, message = ".".join(map(str, problem["loc"])), messages.get(problem["type"], problem["msg"])
            message += " is not known" if problem["type"] == "choice_unknown" else ""
            raise ValueError(f"members: {where}: {message}") from error
        except PydanticCustomError as error:
            given = (error.context or {}).get("given")
            subject = "a section has no name, which is" if given is None else f"{given} is not"
            raise ValueError(f"members: {subject} one of {', '.join(names('objective'))}") from error
        titles = [member.title for member in members]
        if len(set(titles)) < len(titles) or any(isinstance(member, MixtureConfig) for member in members):
            written = ", ".join(titles)
            raise ValueError(f"members=[{written}]: each objective once, tasks by their names, and no mixture")
        if self.weights is not None and (len(self.weights) != len(titles) or min(self.weights) <= 0):
            raise ValueError(f"weights={list(self.weights)}: a number above 0 for each of the {len(titles)} members")
        return self
