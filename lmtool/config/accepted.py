"""The overrides that a command accepts, and the error for an argument that is not an override. Imports no Hydra."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.config import aliases, groups, saved, tables
from lmtool.config.nearest import nearest
from lmtool.errors import Problem

# The name of a model on the hub: org/name, or a name with a dash, since no option contains a dash.
_HUB_NAME = re.compile(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*|[A-Za-z]\w*(-\w+)+")
_HINT = "write KEY=VALUE, with quotes around a value of several words; `lmtool COMMAND --help` prints the keys"


@dataclass(frozen=True)
class AcceptedOverrides:
    """The groups, options and keys that a command accepts. groups: the options of every group, by name. primary: the
    groups in the command's primary YAML file, each with its default option."""

    groups: dict[str, tuple[str, ...]]
    primary: dict[str, str | None]
    several: frozenset[str] = frozenset()
    """Groups that accept a list of options in one run: GROUP=[ONE,TWO]."""
    keys: frozenset[str] = frozenset()
    """The command's top-level keys, except groups."""
    takes: Callable[[str, Any], bool] = lambda key, value: True
    """Whether a key probably accepts a value. Used only for hints: the decoder makes the decision."""
    verbatim: Sequence[str] = ()
    """Keys whose values are taken literally, as text."""
    alternatives: Sequence[tuple[str, str]] = ()
    """Pairs of keys that exclude each other."""

    def has(self, key: str) -> bool:
        """Whether the command has a key; for `SECTION.KEY`, whether any component of the section has it."""
        section, _, name = key.partition(".")
        if not name:
            return section in self.keys or section in self.primary
        configs = [entry.config for entry in tables.entries(section)] if section in self.primary else []
        return any(name.partition(".")[0] in config.model_fields for config in configs)


def read_accepted(primary: Path, config_dirs: Sequence[Path], extra: dict[str, tuple[str, ...]]) -> AcceptedOverrides:
    """Reads the overrides that a primary YAML file accepts. extra: options of plugins, by group."""
    offered = groups.all_options(config_dirs)
    for name, options in extra.items():
        offered[name] = tuple(sorted({*offered.get(name, ()), *options}))
    content = saved.read_yaml(primary)
    defaults = content.get("defaults", [])
    primary_groups = {
        str(key).split()[-1]: name for item in defaults if isinstance(item, dict) for key, name in item.items()
    }
    return AcceptedOverrides(offered, primary_groups, tables.SEVERAL, frozenset(content) - {"defaults"})


def not_an_override(text: str, accepted: AcceptedOverrides) -> Problem:
    """Returns the error for an argument without `=`. Its hint names the override that was probably meant: the argument
    may be an option without its group, a key without a value, a file, or a misspelled option or key."""
    message = f"{text} is not an override"
    if text.startswith("-"):
        return Problem(text, message, "type two dashes before a flag: `lmtool --help`")
    # `sweep` is not a section of a run.
    sections = [group for group in accepted.primary if group != "sweep"]
    words = [f"{group}={text}" for group in sections if text in accepted.groups.get(group, ())]
    if not words and accepted.has(text):
        words = [f"{text}=VALUE"]
    if not words and (meaning := aliases.meaning(text, None, accepted.has)) is not None:
        return Problem(text, message, meaning.hint, tuple(key for key, _ in meaning.pairs))
    paths = [word for word in _as_paths(text) if accepted.has(word.partition("=")[0])][:1]
    if not words and os.path.exists(text):
        words = paths
    if not words:
        group_of = {option: group for group in reversed(sections) for option in accepted.groups.get(group, ())}
        close = nearest(text, [*accepted.keys, *group_of])
        words = [f"{group_of[close]}={close}" if close in group_of else f"{close}=VALUE"] if close else []
    if not words and text.partition(".")[0] not in accepted.primary:
        words = paths
    hint = f"write {' or '.join(map(shlex.quote, words))}" if words else _HINT
    return Problem(text, message, hint, tuple(word.partition("=")[0] for word in words))


def _as_paths(text: str) -> Iterator[str]:
    """Yields the overrides that were probably meant by an argument that looks like a path or a hub model, most likely
    first."""
    exists, in_runs = os.path.exists(text), text.startswith("runs/")
    if not exists and not in_runs and not groups.is_path_only(text) and _HUB_NAME.fullmatch(text):
        yield f"checkpoint=hf://{text}"
    elif exists or groups.is_path_like(text):
        has_weights = [os.path.exists(os.path.join(text, name)) for name in ("checkpoints", "config.json")]
        is_checkpoint = in_runs or any(has_weights) or "://" in text
        yield from (f"{key}={text}" for key in (("checkpoint",) if is_checkpoint else ("task", "data", "checkpoint")))
