"""Parses a command line into flags, which may be anywhere, and the arguments of the command. Also suggests lmtool's
equivalents of commands and flags of other tools.

Imports no third-party package, except to explain an unknown flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmtool.config import aliases, groups
from lmtool.config.nearest import nearest
from lmtool.errors import UserError
from lmtool.resolver.schema.verbs import VERBS
from lmtool.system.files import user_path

FLAGS = ("--multirun", "--debug", "--help", "--version", "--config", "--config-dir", "--plugin", "--cfg")

_SWITCHES = {
    "-m": "multirun", "--multirun": "multirun", "--debug": "debug", "-h": "help", "--help": "help",
    "--version": "version",
}  # fmt: skip


@dataclass
class Arguments:
    """A parsed command line. rest: all arguments that are not flags. typed: all arguments. cfg: whether to print the
    configuration (--cfg job)."""

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
        """Returns the arguments of a command line that runs `verb` with the same flags, except --multirun and --cfg."""
        flags = ["--debug"] if self.debug else []
        flags += [] if self.config is None else [f"--config={self.config}"]
        flags += [f"--config-dir={folder}" for folder in self.config_dirs]
        flags += [f"--plugin={plugin}" for plugin in self.plugins]
        return [*flags, verb, *self.rest]


def parse(words: Sequence[str]) -> Arguments:
    """Separates the flags from the other arguments. Raises UserError for an unknown flag."""
    arguments, unread = Arguments(typed=list(words)), list(words)
    while unread:
        word = unread.pop(0)
        flag, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            arguments.rest.append(word)
        elif flag in _SWITCHES:
            setattr(arguments, _SWITCHES[flag], True)
        elif flag in ("--config", "--config-dir", "--plugin", "--cfg"):
            if not equals:
                if not unread:
                    raise UserError(f"{flag} needs a value", "lmtool --help prints the flags")
                value = unread.pop(0)
            _set_flag(arguments, flag, value)
        else:
            if not equals and unread and "=" not in unread[0]:
                value = unread[0]
            raise UserError(
                f"unknown flag {flag}; the flags are -m, -h, {', '.join(FLAGS)}",
                _flag_hint(flag, value, next((word for word in words if word in VERBS), "")),
            )
    return arguments


def _set_flag(arguments: Arguments, flag: str, value: str) -> None:
    if flag == "--config" and arguments.config is not None:
        raise UserError("--config is set twice", "use --config once")
    if flag == "--config":
        arguments.config = user_path(value)
    elif flag == "--config-dir":
        arguments.config_dirs.append(user_path(value))
    elif flag == "--plugin":
        arguments.plugins.append(value)
    elif value == "job":
        arguments.cfg = True
    else:
        raise UserError(f"--cfg {value}: the only value is job, which prints the configuration", "use --cfg job")


_COMMANDS = {
    "train": ("pretrain", "finetune"), "fit": ("pretrain", "finetune"), "run": ("pretrain", "finetune"),
    "tune": ("finetune",), "sft": ("finetune",), "eval": ("evaluate",), "test": ("evaluate",),
    "validate": ("evaluate",), "score": ("evaluate",), "infer": ("predict", "generate"),
    "inference": ("predict", "generate"), "classify": ("predict",), "chat": ("generate",), "encode": ("embed",),
    "convert": ("export", "import"), "save": ("export",), "download": ("fetch",), "prepare": ("check", "tokenizer"),
    "tokenize": ("tokenizer",), "config": ("show",), "info": ("doctor",), "ls": ("runs",), "history": ("runs",),
    "version": ("--version",),
}  # fmt: skip


def command_hint(word: str) -> str:
    """Returns the hint for an unknown command."""
    if equivalents := _COMMANDS.get(word.lower()):
        return f"did you mean {' or '.join(f'lmtool {name}' for name in equivalents)}?"
    all_groups = groups.all_groups()
    group = groups.singular(word, all_groups)
    if group in all_groups:
        return f"did you mean lmtool list {group}?"
    close = nearest(word, tuple(VERBS))
    return f"did you mean lmtool {close}?" if close else "write a command first; lmtool --help lists them"


def _flag_hint(flag: str, value: str, verb: str) -> str:
    """Returns the hint for an unknown flag. value: the typed value, after `=` or as the next argument; "" without one.
    verb: the typed command, such as "pretrain"; "" without one."""
    if flag in aliases.FLAGS:
        return aliases.FLAGS[flag].replace("{}", value or "NAME")
    key = flag.lstrip("-").replace("-", "_")
    # Imported here because importing the configuration classes is slow.
    from lmtool.config import problems
    from lmtool.resolver.schema.verbs import COMMANDS

    command = COMMANDS.get(verb, COMMANDS["finetune"])
    if key in problems.known_keys(command, {}):
        return f"a key has no dashes: write {key}={value or 'VALUE'}"
    meaning = problems.meant_by(key, value or None, command, {})
    if meaning.of_another_tool:
        return meaning.hint
    close = nearest(flag, FLAGS)
    if close:
        return f"did you mean {close}?"
    return meaning.hint or "`lmtool --help` prints the flags, `lmtool COMMAND --help` the keys"
