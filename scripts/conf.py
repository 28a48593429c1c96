"""Write the fields of every base YAML in conf/ from the configuration classes.

    python scripts/conf.py          write the files, and list those that changed (`make conf`)
    python scripts/conf.py --check  list the files that would change; the exit status is 3 if there are any

A component's YAML begins with its purpose, the command that runs it and its defaults list, which are written by hand.
The fields of its class follow, each with its default and, as a comment, the summary of its description. A default keeps
the spelling of the file if the value is the same. In the YAML of a command, only the comments come from the class; the
values are written by hand. Presets and recipes are written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import yaml
from omegaconf import OmegaConf

from lmtool.commands.show import PRIMARY
from lmtool.config import groups, registry
from lmtool.config.base import Config, summary
from lmtool.config.messages import section_class
from lmtool.resolver.verbs import command_classes

WIDTH, COLUMN = 120, 27  # the maximum width of a line, and the maximum column at which aligned comments start
FIELD = re.compile(r"^(\s*)(- )?([A-Za-z_]\w*):(?: +(.*?))?(?:\s+#.*)?$")

Line = tuple[str, str]
"""A line without its comment, and the comment."""


def updated_text(path: Path, config: type[Config], values: dict[str, Any] | None) -> str:
    """Returns the new text of a YAML file.

    Args:
        path: the file
        config: the class whose fields it lists
        values: the defaults of the fields; None keeps the values of the file
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    spelling = dict(_spellings(lines[start:]))
    if values is None:
        values = {name: value for name, value in _load(path).items() if name != "defaults"}
    header = "\n".join(lines[:start]).rstrip()
    choices = list(_defaults_list(lines[start:], config))
    fields = list(_fields(config, values, spelling))
    blank = "" in lines[start - 1 : start]
    texts = [_align(block) for block in (choices, fields) if block]
    return header + ("\n\n" if blank else "\n") + "\n\n".join(texts) + "\n"


def _load(path: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[return-value]


def _spellings(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each field of a file, and the spelling of its value."""
    parents: list[tuple[int, str]] = []
    for line in lines:
        match = FIELD.match(line)
        if match is None or match[2]:
            continue
        parents = [parent for parent in parents if parent[0] < len(match[1])]
        yield ".".join([*(name for _, name in parents), match[3]]), match[4] or ""
        parents.append((len(match[1]), match[3]))


def _defaults_list(lines: list[str], config: type[Config]) -> Iterator[Line]:
    """Yields the defaults list as it stands in the file, with comments from the fields that its entries fill."""
    if not lines[0].startswith("defaults:"):
        return
    for line in filter(None, lines):
        text, _, comment = line.partition(" # ")
        if not line.startswith(("defaults:", "  ")):
            return
        match = FIELD.match(line)
        field = config.model_fields.get(match[3]) if match is not None else None
        yield text.rstrip(), comment.strip() if field is None else summary(field.description)


def _fields(
    config: type[Config], values: dict[str, Any], spelling: dict[str, str], path: str = "", indent: str = ""
) -> Iterator[Line]:
    """Yields the lines of the fields of a class, in the order of the file, with new fields last. config: the class.
    values: the values of its fields. spelling: the spelling of each value in the file, by dotted path. path: the dotted
    path of the section, with a final dot. indent: the indentation of the section."""
    order = [key.removeprefix(path) for key in spelling if key.startswith(path)]
    for name in sorted(values, key=lambda name: order.index(name) if name in order else len(order)):
        field = config.model_fields[name]
        value, nested_class = values[name], section_class(field)
        nested = isinstance(value, dict) and value and nested_class is not None and f"{path}{name}" in spelling
        text = spelling.get(f"{path}{name}", "")
        if not nested and (not text or OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"] != value):
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
        is_the_name = name in ("name", "kind") and get_origin(field.annotation) is Literal
        yield f"{indent}{name}:" + ("" if nested else f" {text}"), "" if is_the_name else summary(field.description)
        if nested:
            yield from _fields(nested_class, value, spelling, f"{path}{name}.", indent + "  ")


def _align(lines: list[Line]) -> str:
    """Joins lines with their comments, which start in the same column where possible, and wraps long comments."""
    column = min(max(len(text) for text, _ in lines) + 2, COLUMN)
    texts = []
    for text, comment in lines:
        start = max(column, len(text) + 2)
        rows = textwrap.wrap(comment, WIDTH - start - 2, break_long_words=False, break_on_hyphens=False)
        texts += [f"{text:<{start}}# {rows[0]}" if rows else text, *(f"{'':<{start}}# {row}" for row in rows[1:])]
    return "\n".join(texts)


def files() -> Iterator[tuple[Path, str]]:
    """Yields the YAML file of each component and each command, with the text that it should have."""
    for group in registry.groups():
        for entry in registry.entries(group):
            if entry.config.__module__.startswith("lmtool."):
                path = groups.yaml_file(entry.group, entry.name)
                assert path is not None, f"{entry.group}={entry.name} has no YAML"
                chosen = {name for item in _load(path).get("defaults", []) if isinstance(item, dict) for name in item}
                values: Any = OmegaConf.to_container(OmegaConf.create(registry.default_values(entry.config)))
                yield path, updated_text(path, entry.config, {k: v for k, v in values.items() if k not in chosen})
    for verb, config in command_classes().items():
        path = groups.conf_dir() / f"{PRIMARY[verb]}.yaml"
        yield path, updated_text(path, config, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="list the files that would change, and write nothing")
    check = parser.parse_args().check
    differing = [(path, text) for path, text in files() if path.read_text(encoding="utf-8") != text]
    for path, text in differing:
        print(path)
        if not check:
            path.write_text(text, encoding="utf-8")
    sys.exit(3 if differing and check else 0)


if __name__ == "__main__":
    main()
