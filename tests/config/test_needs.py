"""A need that nothing offers is refused in words, and where it is known, with what to type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from lmtool.config.needs import Component, Offer, Requirement, refusal, refusals, unmet
from lmtool.errors import Problem


class Engine(Component):
    name: str = "diesel"
    power: int = 90

    group: ClassVar[str] = "engine"


WHEELS: Offer[Engine] = Offer("engine", lambda engine: engine.power > 100, "is weak", "or walk")


class Car(Component):
    name: Literal["car"] = "car"
    doors: int = 4

    def needs(self) -> Iterator[Requirement]:
        yield Requirement(
            WHEELS, "car.doors", f"car.doors={self.doors} are heavy", lambda engine: f"give {engine.power + 11}"
        )

    def conflicts(self) -> Iterator[Problem]:
        if self.doors < 0:
            yield Problem("car.doors", "fewer doors than none")


def test_what_lacks_an_offer_is_refused_with_the_nearest_override():
    problem = refusal(Car(), engine=Engine())
    assert problem == Problem("car.doors", "car.doors=4 are heavy; engine=diesel is weak", "give 101, or walk")
    assert refusal(Car(), engine=Engine(power=101)) is None


def test_what_is_not_known_yet_refuses_nothing():
    assert list(unmet(Car(), engine=None)) == [] and list(unmet(Car(), tires=Engine())) == []


def test_conflicts_come_with_what_is_lacking():
    assert [problem.message for problem in refusals(Car(doors=-1), engine=Engine())] == [
        "fewer doors than none",
        "car.doors=-1 are heavy; engine=diesel is weak",
    ]
