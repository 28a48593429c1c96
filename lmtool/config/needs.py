"""What a component needs of what stands beside it, what that offers, and the refusal where the two differ.

A base configuration class declares typed fields (`has_biases`, `architectures`, `writes_text`). An `Offer` says which
of them is meant, and what is said of a component without it; `needs()` of a component yields a `Requirement` for each
that it has. `resolver/matcher.py` matches them for a command. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from lmtool.config.base import Config
from lmtool.errors import Problem

Other = TypeVar("Other")


@dataclass(frozen=True)
class Offer(Generic[Other]):
    """Something that a component may have.

    section: where such a component stands: model, task, parallel, ... holds: whether one has it. lacking: what is said
    of one that has not, behind its name; as a function of it, with its name. alternative: what else may be typed, in
    its own section. wording: the message.
    """

    section: str
    holds: Callable[[Other], bool]
    lacking: str | Callable[[Other], str]
    alternative: str = ""
    wording: str = "{reason}; {lacking}"

    def message(self, reason: str, other: Any) -> str:
        lacking = self.lacking(other) if callable(self.lacking) else f"{other.typed} {self.lacking}"
        return self.wording.format(reason=reason, lacking=lacking)


@dataclass(frozen=True)
class Requirement:
    """An offer that a value of a component needs.

    key: where the value is typed. reason: the value, and why it needs the offer. instead: the nearest legal overrides,
    of what lacks the offer where they depend on it; None: the matcher looks for one.
    """

    offer: Offer[Any]
    key: str
    reason: str
    instead: str | Callable[[Any], str] | None = None

    def problem(self, other: Any) -> Problem:
        """The refusal of a component that lacks the offer."""
        instead = self.instead(other) if callable(self.instead) else self.instead
        hint = None if instead is None else ", ".join(filter(None, (instead, self.offer.alternative)))
        return Problem(self.key, self.offer.message(self.reason, other), hint)


class Component(Config):
    """A section that is matched with others. group: the key under which it is typed."""

    group: ClassVar[str] = ""

    if TYPE_CHECKING:
        name: str

    @property
    def typed(self) -> str:
        """As it is typed."""
        return f"{self.group}={self.name}"

    def needs(self) -> Iterable[Requirement]:
        """What it needs of other sections, the most fundamental first."""
        return ()

    def conflicts(self) -> Iterable[Problem]:
        """Values of its own that do not go together, or mean nothing, whatever stands beside it."""
        return ()


def unmet(component: Component, **others: Any) -> Iterator[tuple[Requirement, Any]]:
    """The needs of a component that others lack, with the other that lacks each. others: by section; None: one that is
    not known yet."""
    for need in component.needs():
        other = others.get(need.offer.section)
        if other is not None and not need.offer.holds(other):
            yield need, other


def refusals(component: Component, **others: Any) -> Iterator[Problem]:
    """Its conflicts, and why it does not go with others."""
    yield from component.conflicts()
    yield from (need.problem(other) for need, other in unmet(component, **others))


def refusal(component: Component, **others: Any) -> Problem | None:
    """The first of them; None where all goes together."""
    return next(refusals(component, **others), None)
