"""Compatibility of components: requirements, offers, and the errors of unmet requirements.

Base configuration classes declare typed fields (`has_biases`, `architectures`, `writes_text`). An `Offer` tests such a
field and words the error for a component without it. `needs()` of a component yields a `Requirement` for each offer
that it depends on. `resolver/matcher.py` matches them for a command. Imports no torch.
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

    section: the section of the component (model, task, parallel, ...). holds: whether a component has the property.
    lacking: the end of the sentence about a component without it, "model=gpt ..."; or a function that returns the
    complete sentence. alternative: an override within the section that also helps. wording: template of the message.
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
    """An offer that a value of a component depends on.

    key: the key of the value. reason: the value, and why it needs the offer. instead: the nearest legal overrides, or a
    function of the other component that returns them; None: the matcher searches for one.
    """

    offer: Offer[Any]
    key: str
    reason: str
    instead: str | Callable[[Any], str] | None = None

    def problem(self, other: object) -> Problem:
        """The problem with a component that lacks the offer."""
        instead = self.instead(other) if callable(self.instead) else self.instead
        hint = None if instead is None else ", ".join(filter(None, (instead, self.offer.alternative)))
        return Problem(self.key, self.offer.message(self.reason, other), hint)


class Component(Config):
    """A section that is matched with others. group: its key on the command line."""

    group: ClassVar[str] = ""

    if TYPE_CHECKING:
        name: str

    @property
    def typed(self) -> str:
        """The override that selects it: "model=bert"."""
        return f"{self.group}={self.name}"

    def needs(self) -> Iterable[Requirement]:
        """Its requirements of other sections, the most fundamental first."""
        return ()

    def conflicts(self) -> Iterable[Problem]:
        """Problems within the section itself: values that contradict each other or have no effect."""
        return ()


def unmet(component: Component, **others: object) -> Iterator[tuple[Requirement, Any]]:
    """The requirements that other components do not meet, each with that component. others: components by section;
    None if it is not known yet."""
    for need in component.needs():
        other = others.get(need.offer.section)
        if other is not None and not need.offer.holds(other):
            yield need, other


def refusals(component: Component, **others: object) -> Iterator[Problem]:
    """The problems within a component, and with other components."""
    yield from component.conflicts()
    yield from (need.problem(other) for need, other in unmet(component, **others))


def refusal(component: Component, **others: object) -> Problem | None:
    """The first problem, or None."""
    return next(refusals(component, **others), None)
