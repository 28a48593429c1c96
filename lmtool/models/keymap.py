"""Renaming between our tensors and a published checkpoint's: a table of pairs, read in both directions."""

from __future__ import annotations

import re


class KeyMap:
    """Pairs (ours, published) of module paths; `*` stands for a layer's number on both sides. What follows the path
    (`.weight`, `.bias`) stays."""

    def __init__(self, pairs: tuple[tuple[str, str], ...]):
        self._to = [(_pattern(ours), published) for ours, published in pairs]
        self._from = [(_pattern(published), ours) for ours, published in pairs]

    def to_published(self, name: str) -> str | None:
        """The published name of ours, or None."""
        return _rename(name, self._to)

    def from_published(self, name: str) -> str | None:
        """Our name of a published one, or None."""
        return _rename(name, self._from)


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.escape(path).replace(r"\*", r"(\d+)") + r"(\.[a-z_]+|)")


def _rename(name: str, table: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, path in table:
        match = pattern.fullmatch(name)
        if match:
            *layer, suffix = match.groups()
            return (path.replace("*", layer[0]) if layer else path) + suffix
    return None
