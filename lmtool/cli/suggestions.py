"""Hints for commands and flags of other tools. Keys are in config/aliases.py. Imports the standard library only, unless
a flag must be explained."""

from __future__ import annotations

from lmtool.config import aliases, groups
from lmtool.config.nearest import nearest

_COMMANDS = {
    "train": ("pretrain", "finetune"),
    "fit": ("pretrain", "finetune"),
    "run": ("pretrain", "finetune"),
    "tune": ("finetune",),
    "sft": ("finetune",),
    "eval": ("evaluate",),
    "test": ("evaluate",),
    "validate": ("evaluate",),
    "score": ("evaluate",),
    "infer": ("predict", "generate"),
    "inference": ("predict", "generate"),
    "classify": ("predict",),
    "chat": ("generate",),
    "encode": ("embed",),
    "convert": ("export", "import"),
    "save": ("export",),
    "download": ("fetch",),
    "prepare": ("check", "tokenizer"),
    "tokenize": ("tokenizer",),
    "config": ("show",),
    "info": ("doctor",),
    "ls": ("runs",),
    "history": ("runs",),
    "version": ("--version",),
}


def command(word: str, known: tuple[str, ...]) -> str:
    """The hint for an unknown command."""
    if meant := _COMMANDS.get(word.lower()):
        return f"did you mean {' or '.join(f'lmtool {name}' for name in meant)}?"
    if (group := groups.singular(word, of_conf := groups.all_groups())) in of_conf:
        return f"did you mean lmtool list {group}?"
    close = nearest(word, known)
    return f"did you mean lmtool {close}?" if close else "a command comes first: lmtool --help"


def flag(word: str, value: str, verb: str, known: tuple[str, ...]) -> str:
    """The hint for an unknown flag.

    Args:
        word: the flag.
        value: its value, after `=` or as the next word; "" without one.
        verb: the typed command; "" without one.
        known: the existing flags.
    """
    if word in aliases.FLAGS:
        return aliases.FLAGS[word].replace("{}", value or "NAME")
    key = word.lstrip("-").replace("-", "_")
    # What keys a command has is known to its class.
    from lmtool.config import problems
    from lmtool.resolver.schema.verbs import COMMANDS

    command = COMMANDS.get(verb, COMMANDS["finetune"])
    if key in problems.known_keys(command, {}):
        return f"a key has no dashes: write {key}={value or 'VALUE'}"
    meaning = problems.meant_by(key, value or None, command, {})
    if meaning.of_another_tool:
        return meaning.hint
    close = nearest(word, known)
    if close:
        return f"did you mean {close}?"
    return meaning.hint or "`lmtool --help` prints the flags, `lmtool COMMAND --help` the keys"
