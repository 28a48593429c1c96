"""Rules across sections: what no single section can know.

A rule names the keys it reads and is called with their decoded values, once all of these are sound:

    @rule(PretrainConfig, "model", "objective")
    def objective_fits_model(model, objective): yield Problem(...)

The rules themselves stand with the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lmtool.config.base import Config
from lmtool.errors import Problem

Check = Callable[..., Iterable[Problem]]


@dataclass(frozen=True)
class Rule:
    """A check of a command's configuration. `running`: only where the run happens here and now, not for a plan."""

    command: type[Config]
    needs: tuple[str, ...]
    check: Check
    running: bool = False


_RULES: dict[str, Rule] = {}


def rule(command: type[Config], *needs: str, running: bool = False) -> Callable[[Check], Check]:
    """Decorator: enter a check for a command's class and its subclasses. `needs` are the keys it is called with."""

    def enter(check: Check) -> Check:
        _RULES[f"{command.__name__} {check.__module__}.{check.__qualname__}"] = Rule(command, needs, check, running)
        return check

    return enter


def broken(command: type[Config], sound: dict[str, Any], running: bool) -> Iterator[Problem]:
    """The problems of all rules whose keys are among the sound values."""
    for rule in list(_RULES.values()):
        applies = issubclass(command, rule.command) and (running or not rule.running)
        if applies and all(need in sound for need in rule.needs):
            yield from rule.check(*(sound[need] for need in rule.needs))
