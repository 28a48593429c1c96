"""Interpolations (`${data.path}`) of a composed configuration, held to a limit before any is resolved: forty keys that
each name the one before twice stand for a million million values.

What a value stands for is counted from the texts alone, each reference as all that it leads to. A reference whose name
is put together from other references may lead to any key below its fixed part, and counts as all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lmtool.errors import UserError

_Path = tuple[str, ...]

MAX_SIZE = 1_000_000
"""Characters that a value may stand for at most, a reference counted as one more."""

_REFERENCE = re.compile(r"\$\{([^${}]*)(\$?)")  # a name or resolver's call, and whether another follows in it


def check(data: dict[str, Any]) -> None:
    """UserError, naming the key, where a value of a composed configuration, its interpolations unresolved, stands for
    more than MAX_SIZE characters."""
    sizes = _Sizes({path: value for path, value in _leaves(data, ()) if isinstance(value, str)})
    for path in sizes.texts:
        if sizes.of(path) > MAX_SIZE:
            hint = "an interpolation names another key: see what these are made of, and leave them out"
            raise UserError(f"{'.'.join(path)}: interpolations that stand for more than {MAX_SIZE} characters", hint)


def _leaves(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    for name, item in items or ():
        yield from _leaves(item, (*path, str(name)))


class _Sizes:
    """Characters that each key stands for. texts: the values that are text, by path."""

    def __init__(self, texts: dict[_Path, str]):
        self.texts = texts
        self._known: dict[_Path, int] = {}
        self._open: set[_Path] = set()

    def of(self, path: _Path) -> int:
        """A circle counts as nothing here: it has no value, and resolving it is refused."""
        if path in self._open:
            return 0
        if path not in self._known:
            self._open.add(path)
            size = len(self.texts[path])
            for call, continued in _REFERENCE.findall(self.texts[path]):
                if size <= MAX_SIZE:
                    size += 1 + self._of_reference(path, call, bool(continued))
            self._open.remove(path)
            self._known[path] = size
        return self._known[path]

    def _of_reference(self, path: _Path, call: str, continued: bool) -> int:
        """Of a name, or of all arguments of a resolver: each may be a name."""
        _, colon, arguments = call.partition(":")
        size = 0
        for name in arguments.split(",") if colon else [call]:
            name = name.strip(" '\"\\")
            dots = len(name) - len(name.lstrip("."))
            parts = tuple(part for part in re.split(r"[.\[\]]+", name) if part)
            target = (path[:-dots] if dots else ()) + (parts[:-1] if continued else parts)
            below = [self.of(other) for other in self.texts if other[: len(target)] == target]
            size += max(below, default=0) if continued else sum(below)
        return size
