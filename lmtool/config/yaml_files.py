"""YAML from outside, read with limits: a few hundred bytes of aliases can stand for gigabytes.

Every YAML file that a user names goes through here: `--config`, `--config-dir`, the config.yaml of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from lmtool.errors import UserError

MAX_BYTES = 1_000_000
MAX_DEPTH = 50
MAX_NODES = 20_000
"""Keys and values at most, each alias counted as all that it stands for. A configuration has about a hundred."""

# libyaml's parser where PyYAML was built with it: a hundred times faster, and without recursion as the other one.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


_PLAIN = "a configuration is plain YAML in UTF-8: keys, values and lists, as `lmtool show model=bert` prints them"


class TooMuch(yaml.MarkedYAMLError):
    """A document beyond the limits. `problem` says which, `problem_mark` where."""

    def __init__(self, problem: str, mark: Any):
        super().__init__(problem=problem, problem_mark=mark)


def load(text: str, loader: Any = _LOADER) -> Any:
    """A document as plain data. loader: a safe one. yaml.YAMLError where it is no plain YAML, or beyond the limits
    (TooMuch)."""
    check(text)
    loading = loader(text)
    try:
        return loading.get_single_data()
    except ValueError as error:  # a date of month 13, a number of thousands of digits
        raise yaml.MarkedYAMLError(problem=str(error)) from error
    finally:
        loading.dispose()


def read(path: Path, hint: str | None = None, parse: Callable[[str], Any] = load) -> Any:
    """The document in a file. OSError where it cannot be read, UserError with the hint where it is no such document."""
    try:
        return parse(read_text(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8", hint or _PLAIN) from error
    except yaml.YAMLError as error:
        raise refusal(error, str(path), hint) from error


def read_text(path: Path) -> str:
    """The text of a file, as far as it is allowed to go: what is longer is refused by `check`."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    return content.decode("utf-8", "ignore" if len(content) > MAX_BYTES else "strict")


def refusal(error: yaml.YAMLError, name: str, hint: str | None = None) -> UserError:
    """The error of a file of this name, with the line."""
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}" if mark is not None else name
    if isinstance(error, TooMuch):
        hint = "a configuration has about a hundred keys and values: see what this file is, and leave it out"
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not plain YAML"
    return UserError(f"{where}: {problem}", hint or _PLAIN)


def check(text: str) -> None:
    """Raise TooMuch for a document beyond the limits, before anything is made of it."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        mark = yaml.Mark("<file>", 0, 0, 0, "", 0)
        raise TooMuch(f"more than {MAX_BYTES} bytes, which no configuration has", mark)
    sizes: dict[str, int] = {}
    # The anchor of each open collection, and the nodes in it so far; the outermost entry is the document.
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=_LOADER):
        nodes = 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > MAX_DEPTH + 1:
                raise TooMuch(f"nested more than {MAX_DEPTH} deep", event.start_mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, nodes = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = nodes
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise TooMuch(f"the alias *{event.anchor} names nothing that ends before it", event.start_mark)
            nodes = sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            nodes = 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        anchor, before = open_nodes[-1]
        open_nodes[-1] = (anchor, before + nodes)
        if before + nodes > MAX_NODES:
            problem = f"more than {MAX_NODES} keys and values, aliases counted as what they stand for"
            raise TooMuch(problem, event.start_mark)
