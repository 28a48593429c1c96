"""The base classes of the configurations of objectives and tasks, and that of mixtures. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lmtool.config.base import Component
from lmtool.config.decode import with_member_values
from lmtool.config.registry import Choice, build, component, names
from lmtool.data.configs import FORMATS
from lmtool.errors import Problem
from lmtool.models.configs import ModelConfig, describe_architectures
from lmtool.nn.configs import Side


class Member(Protocol):
    """The interface of a mixture's member, an objective or a task. title: the name of the member in the mixture."""

    @property
    def title(self) -> str: ...

    def learner(self, *arguments: Any) -> Any: ...


class Mixed(Protocol):
    """The interface of a mixture's configuration. members_key: the key that lists the members, for messages. repeats:
    whether an epoch has as many examples as all members together, so that some examples are repeated. Otherwise an
    epoch ends before any example would be repeated."""

    members_key: ClassVar[str]
    repeats: ClassVar[bool]

    def member_configs(self) -> tuple[Member, ...]: ...

    @property
    def annealed(self) -> bool:
        """Whether the fractions differ between epochs."""

    def fractions(self, epoch: int = 0) -> tuple[float, ...]: ...


_DDP = "or parallel=ddp, where each process holds all weights"


def needs_whole_weights(key: str, reason: str, hint: str) -> Problem:
    """Returns the problem of a setting that needs all weights of the model in every process, with parallel=fsdp."""
    return Problem(key, f"{reason}; parallel=fsdp shards them", f"{hint}, {_DDP}")


def needs_uneven_forwards(key: str, reason: str, hint: str) -> Problem:
    """Returns the problem of a setting with which the number of forwards differs between processes, with
    parallel=fsdp."""
    return Problem(key, f"{reason}; parallel=fsdp needs the same forwards in all processes", f"{hint}, {_DDP}")


def has_segments(model: ModelConfig) -> bool:
    """Whether the two texts of a pair have different segment embeddings."""
    return model.segment_types > 1 and (model.text_format not in FORMATS or FORMATS[model.text_format].segments)


def missing_token(roles: Iterable[str | tuple[str, ...]], known: Collection[str]) -> str | None:
    """Returns which special token a vocabulary lacks, in words, or None. roles: the required tokens (mask, sep, ...);
    of a tuple, one is enough. known: the special tokens of the vocabulary."""
    for role in roles:
        alternatives = (role,) if isinstance(role, str) else role
        if not set(alternatives) & set(known):
            return f"{' or '.join(alternatives)} token"
    return None


class LearnedConfig(Component):
    """The base class of the configurations of objectives and tasks: their properties that other components require."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """The architectures of the models that can be trained: encoder, decoder, encoder_decoder, bidirectional_lm."""
    example_model: ClassVar[str] = "bert"
    """A model that can be trained, for hints."""
    reads_labeled_rows: ClassVar[bool] = False
    """Whether this is a task, which is learned from rows with labels."""
    reads_text: ClassVar[bool] = True
    """Whether the examples are made from one text of data=."""
    query_stream: ClassVar[bool] = False
    """Whether predictions come from a second stream of hidden states, which does not read the predicted tokens (the
    query stream of XLNet)."""
    supports_stride: ClassVar[bool] = False
    """Whether text can be scored in overlapping windows, see `SplitData.stride`."""
    has_classes: ClassVar[bool] = False
    """Whether there is a field `labels` with the names of classes."""

    @property
    def title(self) -> str:
        """The name of this objective or task as a member of a mixture."""
        return self.name

    @property
    def kind_setting(self) -> str:
        """The override that selects this kind of task or objective."""
        return self.typed

    def member_configs(self) -> tuple[LearnedConfig, ...]:
        """Returns the members of a mixture; any other objective or task returns only itself."""
        return (self,)

    @property
    def makes_inputs(self) -> bool:
        """Whether the model generates part of its own inputs, so that no other model reads the same inputs."""
        return False

    @property
    def reads_trees(self) -> bool:
        """Whether each text has a dependency tree."""
        return False

    @property
    def predicts_rows(self) -> bool:
        """Whether there is one prediction per row, which does not depend on how the row is tokenized."""
        return False

    @property
    def writes_text(self) -> bool:
        """Whether predictions come from a language-model head, as generated text or as the probabilities of words."""
        return False

    @property
    def learns_texts(self) -> bool:
        """Whether the targets are texts."""
        return self.writes_text

    def extra_training_targets(self, model: ModelConfig) -> str:
        """Returns a description of the targets that count in training but not in evaluation; "" if there are none."""
        return ""

    @property
    def domain_adaptation(self) -> str | None:
        """The name of the auxiliary loss for domain adaptation, or None."""
        return None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes; None if there are no classes, or if their names are not known yet."""
        return None

    @property
    def language_model_weight(self) -> float:
        """The weight of an auxiliary language-model loss; 0 for none."""
        return 0.0

    def states_read(self, model: ModelConfig) -> Side:
        """Returns the side of a batch (inputs or outputs) whose hidden states the head reads."""
        return "outputs" if model.architecture == "encoder_decoder" else "inputs"

    @property
    def model_hint(self) -> str:
        """What to do if a model cannot be trained."""
        return f"set model={self.example_model}"

    def conflicts(self, section: str) -> Iterator[Problem]:
        """Yields the problems of values that contradict each other or have no effect. section: the key of this
        configuration: objective or task, or in a mixture task.with.NAME."""
        return iter(())

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        """Yields the reasons why this objective or task cannot train a model, the most fundamental first. section: see
        `conflicts`."""
        if model.architecture not in self.architectures:
            expected, actual = map(describe_architectures, (self.architectures, [model.architecture]))
            group = section.partition(".")[0]
            yield Problem(group, f"{self.typed} trains {expected}; model={model.name} is {actual}", self.model_hint)

    def conflicts_with_fsdp(self) -> Iterator[Problem]:
        """Yields the reasons why weights cannot be sharded (parallel=fsdp)."""
        return iter(())

    @property
    def rewrites_texts(self) -> bool:
        """Whether the model writes the text that it has just read, so that it gives no other text a probability; of a
        mixture, whether its first member does, which writes."""
        return False

    def first_conflict(self, model: ModelConfig) -> Problem | None:
        """Returns the first problem of this objective or task, or of its use with a model, or None."""
        problems = chain(self.conflicts(self.group), self.conflicts_with_model(model, self.group))
        return next(problems, None)


class ObjectiveConfig(LearnedConfig):
    """The base class of the configurations of pretraining objectives."""

    group: ClassVar[str] = "objective"
    contextual: ClassVar[bool] = True
    """Whether the model must compute contextual hidden states; otherwise it must be a model of single tokens, such as
    word vectors."""
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ()
    """The roles of special tokens that the tokenizer must have, in addition to the tokens of the model's text format.
    Of a tuple of roles, one is enough."""
    prefixes: ClassVar[bool] = False
    """Whether texts have a prefix, in which a decoder's attention is bidirectional."""
    reads_lanes: ClassVar[bool] = False
    """Whether a model that carries state from batch to batch reads joined text in lanes: contiguous streams that are
    read in parallel (`data/loader.py`)."""
    counts_one_text: ClassVar[bool] = False
    """Whether the examples are statistics of a whole text, so that those of several texts would contradict each
    other."""
    phase_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that may differ between the phases of a run. They change the examples, but neither the parameters nor
    the losses."""

    name: str = Field(description="name of the objective")

    @property
    def reuses_nothing(self) -> bool:
        """Whether a model's memory would remain empty, because the objective reuses no tokens of the previous
        example."""
        return False

    @property
    def steps_without_model(self) -> int:
        """The number of steps at the beginning that train only additional networks of the objective, and not the
        model."""
        return 0

    @property
    def pairs_of_segments(self) -> str | None:
        """The value of the field `pairs`, if the examples are pairs of segments; otherwise None."""
        return None

    @property
    def model_hint(self) -> str:
        return f"set model={self.example_model} or objective=auto"

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, section)
        subject, actual = f"objective={self.name}", f"model={model.name}"
        if self.contextual and not model.contextual:
            message = f"{subject} trains models that read context; {actual} reads each word by itself"
            yield Problem("objective", message, self.model_hint)
        if model.contextual and not self.contextual:
            message = f"{subject} trains vectors of single tokens; {actual} reads their context"
            yield Problem("objective", message, self.model_hint)
        if self.prefixes and not model.reads_prefixes:
            message = f"{subject} needs bidirectional attention between the first tokens of a text"
            yield Problem("objective", f"{message}; {actual} reads tokens in turn", self.model_hint)
        if self.query_stream and not model.query_stream:
            message = f"{subject} trains a model with a query stream; {actual} has no query stream"
            yield Problem("objective", message, self.model_hint)
        if self.pairs_of_segments is not None and not has_segments(model):
            message = f"{section}.pairs={self.pairs_of_segments} needs a model with segment embeddings"
            yield Problem("objective.pairs", f"{message}; {actual} has none", f"set {section}.pairs=none")

    @property
    def predicted_fraction(self) -> float:
        """The fraction of the tokens for which logits are computed; for an encoder-decoder, of all tokens of both
        sides."""
        return 1.0

    def learner(self, *arguments: Any) -> Any:
        """Builds the learner. arguments: the backbone, the tokenizer and the seed."""
        return build(self, *arguments)

    def member_configs(self) -> tuple[ObjectiveConfig, ...]:
        """Returns the members of a mixture; any other objective returns only itself."""
        return (self,)

    def replace_members(self, members: tuple[ObjectiveConfig, ...]) -> ObjectiveConfig:
        """Returns a copy with new configurations of its members. members: one for each member, in the same order."""
        return members[0]

    def select_members(self, members: Sequence[ObjectiveConfig]) -> ObjectiveConfig:
        """Returns a copy that has only some of its members. members: these members, possibly modified."""
        return members[0]

    @property
    def token_fractions(self) -> dict[str, float]:
        """The fraction of the tokens that a submodule of the learner, such as `heads.lm`, processes; `lmtool plan` uses
        it.

        Heads that are not listed process `predicted_fraction` of the tokens if they predict tokens of the vocabulary,
        otherwise one position per example.
        """
        return {}


def mixture_conflicts_with_fsdp(key: str, members: Sequence[str]) -> Iterator[Problem]:
    """Yields the problem of a mixture with parallel=fsdp: a batch needs a forward for each member with examples in it,
    so their number differs between processes. key: the key that selects the mixture. members: their names."""
    if len(members) > 1:
        reason = f"{key} mixes {', '.join(members)}, and the number of forwards depends on the batch"
        yield needs_uneven_forwards(key, reason, f"set one {key}")


@component("objective", "mixture", builder="lmtool.learners.mixture:Mixture")
class MixtureConfig(ObjectiveConfig):
    """A weighted mixture of objectives and tasks, each logged separately."""

    members_key: ClassVar[str] = "objective.members"
    repeats: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False

    name: Literal["mixture"] = Field("mixture", description="A mixture of objectives.")
    members: tuple[str | dict[str, Any], ...] = Field(
        ("mlm", "span"),
        min_length=1,
        description="names, or sections with a name and further keys: [{name: mlm, whole_word: true}, span]. Tasks are "
        "listed by their own name, [mlm, sst2], or as a section: {name: task, task: {kind: classification, name: "
        "reviews, path: FOLDER}}. Each name occurs once. objective.with.NAME.KEY=VALUE sets a key of one member",
    )
    weights: tuple[float, ...] | None = Field(
        None, description="one weight per member, for both its examples and its loss; null: equal weights"
    )

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        return with_member_values(data)

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        return iter(())  # only members have conflicts

    def conflicts_with_fsdp(self) -> Iterator[Problem]:
        yield from mixture_conflicts_with_fsdp("objective", [member.title for member in self.member_configs()])

    def member_configs(self) -> tuple[ObjectiveConfig, ...]:
        """Returns the configurations of the members."""
        choice = Choice("objective")
        members = (choice.validate({"name": member} if isinstance(member, str) else member) for member in self.members)
        return tuple(member for member in members if isinstance(member, ObjectiveConfig))

    def replace_members(self, members: tuple[ObjectiveConfig, ...]) -> MixtureConfig:
        return self.model_copy(update={"members": tuple(member.model_dump(mode="json") for member in members)})

    def select_members(self, members: Sequence[ObjectiveConfig]) -> MixtureConfig:
        by_title = dict(zip((member.title for member in self.member_configs()), self.weights or (), strict=False))
        weights = tuple(by_title[member.title] for member in members) if by_title else None
        return self.replace_members(tuple(members)).model_copy(update={"weights": weights})

    @property
    def annealed(self) -> bool:
        return False

    def fractions(self, epoch: int = 0) -> tuple[float, ...]:
        """Returns the weights of the members, scaled so that their sum is 1, in every epoch."""
        weights = (1.0,) * len(self.members) if self.weights is None else self.weights
        return tuple(weight / sum(weights) for weight in weights)

    @property
    def predicted_fraction(self) -> float:
        return sum(
            fraction * member.predicted_fraction
            for fraction, member in zip(self.fractions(), self.member_configs(), strict=True)
        )

    @property
    def token_fractions(self) -> dict[str, float]:
        weighted_fractions = [
            (weight, member.token_fractions)
            for weight, member in zip(self.fractions(), self.member_configs(), strict=True)
        ]
        names = {name for _, fractions in weighted_fractions for name in fractions}
        return {
            name: sum(weight * fractions.get(name, 0.0) for weight, fractions in weighted_fractions)
            for name in sorted(names)
        }

    @model_validator(mode="after")
    def _members_fit(self) -> MixtureConfig:
        try:
            members = self.member_configs()
        except (ValidationError, PydanticCustomError) as error:
            raise ValueError(f"members: {member_problem(error, names('objective'))}") from error
        titles = [member.title for member in members]
        if len(set(titles)) < len(titles) or any(isinstance(member, MixtureConfig) for member in members):
            title_list = ", ".join(titles)
            raise ValueError(
                f"members=[{title_list}] repeats a name or has a mixture: name each objective once, "
                "and tasks by their own names"
            )
        if self.weights is not None and (len(self.weights) != len(titles) or min(self.weights) <= 0):
            raise ValueError(
                f"weights={list(self.weights)} must have one number above 0 for each member: {', '.join(titles)}"
            )
        return self


def member_problem(error: ValidationError | PydanticCustomError, known: Sequence[str]) -> str:
    """Returns a text that says why a member is invalid. error: the error that validation raised. known: the valid names
    of members."""
    if isinstance(error, PydanticCustomError):
        name = (error.context or {}).get("given")
        valid = f"one of {', '.join(known)}"
        return f"a section has no name, which must be {valid}" if name is None else f"{name} is not {valid}"
    problem = error.errors(include_url=False, include_input=False)[0]
    messages = {"extra_forbidden": "unknown key", "missing": "missing required value"}
    path, message = ".".join(map(str, problem["loc"])), messages.get(problem["type"], problem["msg"])
    message += " is not known" if problem["type"] == "choice_unknown" else ""
    return ": ".join(part for part in (path, message.removeprefix("Value error, ")) if part)
