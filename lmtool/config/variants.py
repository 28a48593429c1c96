"""Further configurations that a command's own one brings along (the phases of a run), checked like it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from lmtool.errors import Problem


@dataclass(frozen=True)
class Variant:
    """path: the key under which it stands. data: the whole configuration as plain data; None where there is none to
    check. problems: what is wrong with how it is written. keys: those that it may give, which are typed under its path.
    """

    path: str
    data: dict[str, Any] | None
    problems: tuple[Problem, ...] = ()
    keys: tuple[str, ...] = ()

    def placed(self, problem: Problem) -> Problem:
        """A problem of its configuration in the words of the command's, in which its keys stand under its path."""
        keys = "|".join(map(re.escape, sorted({problem.key, *self.keys}, key=len, reverse=True)))
        pattern = re.compile(rf"(?<![\w.\-/])(?<!lmtool show )({keys})(?=[=:.]|$)")

        def moved(text: str) -> str:
            text = re.sub(r"^unknown key ", f"unknown key {self.path}.", text)
            return pattern.sub(lambda match: f"{self.path}.{match[1]}", text)

        hint = None if problem.hint is None else moved(problem.hint)
        return replace(problem, key=f"{self.path}.{problem.key}", message=moved(problem.message), hint=hint, meant=())
