"""Parses a command line into flags, which may be anywhere, and the words of the command. Imports the standard library
only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmtool.cli import suggestions
from lmtool.errors import UserError
from lmtool.resolver.schema.verbs import VERBS

FLAGS = ("--multirun", "--debug", "--help", "--version", "--config", "--config-dir", "--plugin", "--cfg")


@dataclass
class Arguments:
    """A command line after the verb."""

    rest: list[str] = field(default_factory=list)
    typed: list[str] = field(default_factory=list)
    multirun: bool = False
    config: Path | None = None
    config_dirs: list[Path] = field(default_factory=list)
    plugins: list[str] = field(default_factory=list)
    cfg: bool = False
    debug: bool = False
    help: bool = False
    version: bool = False

    def words(self, verb: str) -> list[str]:
        """The equivalent command line."""
        flags = ["--debug"] if self.debug else []
        flags += [] if self.config is None else [f"--config={self.config}"]
        flags += [f"--config-dir={folder}" for folder in self.config_dirs]
        flags += [f"--plugin={plugin}" for plugin in self.plugins]
        return [*flags, verb, *self.rest]


def parse(words: Sequence[str]) -> Arguments:
    """Separates flags, which may be anywhere, from the rest. UserError for an unknown flag."""
    arguments, left = Arguments(typed=list(words)), list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            arguments.rest.append(word)
        elif flag in ("-m", "--multirun"):
            arguments.multirun = True
        elif flag == "--debug":
            arguments.debug = True
        elif flag in ("-h", "--help"):
            arguments.help = True
        elif flag == "--version":
            arguments.version = True
        elif flag in ("--config", "--config-dir", "--plugin", "--cfg"):
            if not equals:
                if not left:
                    raise UserError(f"{flag}: its value is missing", "lmtool --help prints the flags")
                value = left.pop(0)
            _take(arguments, flag, value)
        else:
            follows = value if equals else next((word for word in left[:1] if "=" not in word), "")
            raise UserError(
                f"unknown flag {flag}; there are -m, {', '.join(FLAGS)}",
                suggestions.flag(flag, follows, next((word for word in words if word in VERBS), ""), FLAGS),
            )
    return arguments


def _take(arguments: Arguments, flag: str, value: str) -> None:
    if flag == "--config" and arguments.config is not None:
        raise UserError("--config is given twice", "use it once")
    if flag == "--config":
        arguments.config = Path(value)
    elif flag == "--config-dir":
        arguments.config_dirs.append(Path(value))
    elif flag == "--plugin":
        arguments.plugins.append(value)
    elif value == "job":
        arguments.cfg = True
    else:
        raise UserError(f"--cfg {value}: it prints the job's configuration", "--cfg job")
