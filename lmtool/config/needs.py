"""Compatibility of components: which properties a component requires of others, and the errors if they are missing.

Base configuration classes declare properties as typed fields (`has_biases`, `architectures`, `writes_text`). An `Offer`
tests such a property and formulates the error for a component without it. `needs()` of a component yields a
`Requirement` for each property that it requires of another section. `resolver/matcher.py` compares the requirements
with the components that a command was given. Imports no torch.
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
    """A property that a component may have.

    section: the section of the component (model, task, parallel, ...). holds: tests whether a component has the
    property. lacking: the predicate of a sentence about a component without it, such as "has no biases" after
    "model=t5"; or a function that returns the whole sentence. alternative: an override of the same section that also
    solves the problem. wording: the template of the message.
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
    """A property that a component requires of another section.

    offer: the property. key: the key whose value requires it. reason: the first half of the message: the value, and why
    it requires the property. hint: the nearest legal overrides, or a function of the other component that
    returns it; None: the matcher searches for the nearest override.
    """

    offer: Offer[Any]
    key: str
    reason: str
    hint: str | Callable[[Any], str] | None = None

    def problem(self, other: object) -> Problem:
        """Returns the error for a component without the property."""
        override = self.hint(other) if callable(self.hint) else self.hint
        hint = None if override is None else ", ".join(filter(None, (override, self.offer.alternative)))
        return Problem(self.key, self.offer.message(self.reason, other), hint)


class Component(Config):
    """A section whose requirements are compared with the other sections. group: its key on the command line."""

    group: ClassVar[str] = ""

    if TYPE_CHECKING:
        name: str

    @property
    def typed(self) -> str:
        """The override that selects this component, such as "model=bert"."""
        return f"{self.group}={self.name}"

    def needs(self) -> Iterable[Requirement]:
        """Returns the requirements of other sections, the most fundamental first."""
        return ()

    def conflicts(self) -> Iterable[Problem]:
        """Returns the errors within the section: values that contradict each other or have no effect."""
        return ()


def unmet(component: Component, **others: object) -> Iterator[tuple[Requirement, Any]]:
    """Yields the unmet requirements of a component, each with the component that does not meet it. others: components
    by section; a requirement of a missing section or of None is skipped."""
    for need in component.needs():
        other = others.get(need.offer.section)
        if other is not None and not need.offer.holds(other):
            yield need, other


def refusals(component: Component, **others: object) -> Iterator[Problem]:
    """Yields the errors within a component, then those of its unmet requirements."""
    yield from component.conflicts()
    yield from (need.problem(other) for need, other in unmet(component, **others))


def refusal(component: Component, **others: object) -> Problem | None:
    """Returns the first of `refusals`, or None."""
    return next(refusals(component, **others), None)
