"""`lmtool list`: the groups, or the options of a group, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmtool.config import groups, plugins, tables
from lmtool.config.nearest import nearest
from lmtool.errors import UserError
from lmtool.system.terminal import say


def main(arguments: Sequence[str], config_dirs: Sequence[Path] = ()) -> int:
    """Prints the groups, or the options of the named ones. UserError for an unknown group."""
    added = plugins.nodes(config_dirs)
    known = sorted({*groups.all_groups(config_dirs), *(group for group, _ in added)})
    requested = [groups.singular(argument, known) for argument in arguments]
    for group in requested:
        if group not in known:
            close = nearest(group, known)
            raise UserError(
                f"there is no group {group}; there are {', '.join(known)}",
                f"did you mean lmtool list {close}?" if close else "lmtool list",
            )
    if not arguments:
        for group in known:
            _line(group, ", ".join(_options(group, config_dirs)), max(map(len, known)))
        say("\n`lmtool list GROUP` prints one line per option; `lmtool show GROUP=NAME` prints its YAML.")
    for group in requested:
        options = _options(group, config_dirs)
        for name in options:
            _line(name, about(group, name, config_dirs), max(map(len, options)))
    return 0


def _options(group: str, config_dirs: Sequence[Path]) -> list[str]:
    added = [name for of, name in plugins.nodes(config_dirs) if of == group]
    return sorted({*groups.options(group, config_dirs), *added})


def about(group: str, name: str, config_dirs: Sequence[Path] = ()) -> str:
    """A line about an option: the first comment of its YAML, or the first line of its class's docstring."""
    path = groups.yaml_file(group, name, config_dirs)
    if path is not None:
        return groups.purpose(path)
    entry = tables.lookup(group, name)
    text = (entry.config.__doc__ or "") if entry else ""
    return text.strip().split("\n")[0]


def _line(name: str, text: str, width: int) -> None:
    say(f"  {name:<{width}}  {text}".rstrip())
