"""The document of the course, docs/course.md, which consists of topics.

A topic is a heading `## 3. Title {#id}`, followed by text, ```bash blocks of commands (the lines of a
```bash together block run two at a time, with one thread each), and directives, each an HTML comment on its own line:

    <!-- show PAGE.html [N-M] -->     figures and tables N to M (or all) of a page by lmtool
    <!-- output [first N|last N|until TEXT] -->
                                      the output of the previous bash block, or N of its lines, or the lines before
                                      the first that begins with TEXT
    <!-- claim TEXT | FOLDER KEY > FOLDER KEY -->
                                      a claim of a paper, as a comparison of two numbers; `<` instead of `>`, and a
                                      number on the right, are also possible

FOLDER is the folder of a run, a pattern that matches several runs (seeds), or a JSON file; KEY is a dotted key of
result.json in this folder, or of the JSON file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

from lmtool.errors import UserError


@dataclass(frozen=True)
class Prose:
    """Lines of Markdown."""

    text: str


@dataclass(frozen=True)
class Commands:
    """A bash block. first: the index of its first command among all commands of the topic. together: whether the
    commands may run in parallel."""

    lines: tuple[str, ...]
    first: int
    together: bool = False


@dataclass(frozen=True)
class Show:
    """Figures and tables `first` to `last` of a page, counted from 1. If `last` is None, all after `first` as well."""

    page: str
    first: int
    last: int | None


@dataclass(frozen=True)
class Printed:
    """The output of a block, or a part of it: the `first` or `last` lines, or the lines before the first line that
    begins with `until`. Progress lines at the start ("tokenizing train …") are always omitted."""

    block: Commands
    first: int | None = None
    last: int | None = None
    until: str | None = None

    def lines(self, text: str) -> list[str]:
        lines = list(dropwhile(lambda line: line.endswith(" …"), text.splitlines()))
        if self.until is not None:
            lines = list(takewhile(lambda line: not line.startswith(str(self.until)), lines))
            return lines[:-1] if lines and not lines[-1] else lines
        return lines[: self.first] if self.last is None else lines[-self.last :]


@dataclass(frozen=True)
class Value:
    """A number in the results of some runs."""

    folder: str
    key: str


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, with the comparison that supports it: the left number is above (`>`) or below (`<`) the right
    number."""

    text: str
    left: Value
    sign: str
    right: Value | float


Part = Prose | Commands | Show | Printed | Claim


@dataclass(frozen=True)
class Topic:
    """A section of the course."""

    number: int
    title: str
    id: str
    parts: tuple[Part, ...]

    @property
    def commands(self) -> tuple[str, ...]:
        return tuple(line for part in self.parts if isinstance(part, Commands) for line in part.lines)

    def steps(self, done: int) -> Iterator[tuple[str, ...]]:
        """The commands after the first `done`, in order; those that may run in parallel form one step."""
        for block in self.parts:
            if isinstance(block, Commands):
                lines = block.lines[max(done - block.first, 0) :]
                width = len(block.lines) if block.together else 1
                yield from (lines[at : at + width] for at in range(0, len(lines), width))

    @property
    def needed(self) -> set[str]:
        """The run folders that the commands read but do not write."""
        lines = [line for line in self.commands if line.startswith("lmtool ")]
        read = {folder for line in lines for folder in re.findall(r"\bruns/[\w-]+", line)}
        return read - {path for line in lines for path in written_paths(line)}


@dataclass(frozen=True)
class Course:
    title: str
    opening: str
    topics: tuple[Topic, ...]


def document() -> Path:
    """Returns the file of the course: inside the package (wheel) or next to it (checkout)."""
    package = Path(__file__).resolve().parents[1]
    packed = package / "course" / "course.md"
    return packed if packed.is_file() else package.parent / "docs" / "course.md"


_HEADING = re.compile(r"## (\d+)\. (.+?) \{#([\w-]+)\}")
_DIRECTIVE = re.compile(r"<!--\s*(\w+)\s*(.*?)\s*-->")


def read_course(text: str, name: str = "docs/course.md") -> Course:
    """Parses the text of a course. Raises UserError at an invalid line, with its number."""
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("## ")]
    topics: list[Topic] = []
    for head, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        heading = _HEADING.fullmatch(lines[head].strip())
        if heading is None:
            raise UserError(f"{name}:{head + 1}: {lines[head]} is not a heading of a topic", "write ## N. Title {#id}")
        number, title, identity = heading.groups()
        if any(topic.id == identity for topic in topics):
            raise UserError(
                f"{name}: two topics have the id {identity}", "use another id in one of them: ## N. Title {#id}"
            )
        topics.append(Topic(int(number), title, identity, tuple(_parts(lines, head + 1, end, name))))
    opening = lines[: heads[0]] if heads else lines
    return Course(opening[0].removeprefix("# "), "\n".join(opening[1:]).strip(), tuple(topics))


def _parts(lines: list[str], index: int, end: int, name: str) -> Iterator[Part]:
    prose: list[str] = []
    block: Commands | None = None
    while index < end:
        line, last = lines[index], index
        if line.startswith("```"):
            last = next((number for number in range(index + 1, end) if lines[number].startswith("```")), end)
            if last == end:
                raise UserError(f"{name}:{index + 1}: this block does not end", "add a line ``` below it")
        if line.startswith(("<!--", "```bash")):
            if any(prose):
                yield Prose("\n".join(prose).strip())
            prose = []
        if line.startswith("```bash"):
            first = 0 if block is None else block.first + len(block.lines)
            block = Commands(_commands(lines[index + 1 : last]), first, line.split() == ["```bash", "together"])
            yield block
        elif line.startswith("<!--"):
            yield _directive(line.strip(), block, f"{name}:{index + 1}")
        else:
            prose += lines[index : last + 1]
        index = last + 1
    if any(prose):
        yield Prose("\n".join(prose).strip())


def _commands(lines: list[str]) -> tuple[str, ...]:
    joined = re.sub(r"[ \t]*\\\n[ \t]*", " ", "\n".join(lines)).split("\n")
    return tuple(line.strip() for line in joined if line.strip() and not line.startswith("#"))


def _directive(line: str, block: Commands | None, position: str) -> Part:
    match = _DIRECTIVE.fullmatch(line)
    verb, words = match.groups() if match else ("", "")
    if verb == "show" and (match := re.fullmatch(r"(\S+\.html)(?: (\d+)(?:-(\d+))?)?", words)):
        page, first, last = match.groups()
        if first is None:
            return Show(page, 1, None)
        if 1 <= int(first) <= int(last or first):
            return Show(page, int(first), int(last or first))
    if verb == "output" and block and (match := re.fullmatch(r"(?:(first|last) (\d+)|until (.+))?", words)):
        which, count, until = match.groups()
        lines = int(count) if count else None
        return Printed(block, lines if which == "first" else None, lines if which == "last" else None, until)
    if verb == "claim":
        text, _, comparison = words.rpartition("|")
        match = re.fullmatch(r"(\S+) (\S+) ([<>]) (?:(\S+) (\S+)|(-?[\d.e-]+))", comparison.strip())
        if match is not None and text.strip():
            folder, key, sign, other, other_key, number = match.groups()
            right = Value(other, other_key) if other else float(number)
            return Claim(text.strip(), Value(folder, key), sign, right)
    after_no_block = " (output needs a bash block before it)" if verb == "output" and block is None else ""
    known = "show PAGE.html [N-M], output [first N|last N|until TEXT], or claim TEXT | FOLDER KEY > FOLDER KEY"
    raise UserError(f"{position}: {line} is not a valid directive{after_no_block}", f"use {known}")


def written_paths(command: str) -> set[str]:
    """Returns the files and run folders that a command writes."""
    words = shlex.split(command, comments=True)
    paths = {words[-1]} if words[0] in ("cp", "printf") else set()
    for word in words:
        key, _, value = word.partition("=")
        if key == "name":
            paths.add(f"runs/{value}")
        elif key in ("run_dir", "hydra.sweep.dir", "output", "report"):
            paths.add(value)
    return paths
