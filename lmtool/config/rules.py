"""Rules that relate several keys of a command.

A rule lists the keys that it reads. It is called with their decoded values if all of them are valid:

    @rule(PretrainConfig, "model", "objective")
    def require_encoder(model, objective): yield Problem(...)

The rules are in the resolver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lmtool.config.base import Config, JsonObject
from lmtool.errors import Problem

Check = Callable[..., Iterable[Problem]]


@dataclass(frozen=True)
class Rule:
    """A check of a command's configuration. running: for real runs only, not for `lmtool plan`."""

    command: type[Config]
    needs: tuple[str, ...]
    check: Check
    running: bool = False


_RULES: dict[str, Rule] = {}


def rule(command: type[Config], *needs: str, running: bool = False) -> Callable[[Check], Check]:
    """Decorator that registers a check for a command's class and its subclasses. needs: the keys it is called with."""

    def register(check: Check) -> Check:
        _RULES[f"{command.__name__} {check.__module__}.{check.__qualname__}"] = Rule(command, needs, check, running)
        return check

    return register


def violations(command: type[Config], values: JsonObject, running: bool) -> Iterator[Problem]:
    """The problems of all rules whose keys have valid values."""
    for rule in list(_RULES.values()):
        applies = issubclass(command, rule.command) and (running or not rule.running)
        if applies and all(need in values for need in rule.needs):
            yield from rule.check(*(values[need] for need in rule.needs))
