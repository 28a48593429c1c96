"""`task=FILE`: a file or a folder of the user's in the place of a task's name, put into the overrides that it stands
for. Imports no torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from lmtool.config.groups import options
from lmtool.data.files import collected
from lmtool.errors import UserError
from lmtool.system.terminal import say
from lmtool.tasks.guessing import TABLES, guess, is_path


def named(words: Sequence[str]) -> list[str]:
    """Files and folders that are typed without a key, as labelled rows or as text, by what they are called."""
    return [
        word if "=" in word else f"{'task' if Path(word).suffix.lower() in TABLES else 'data'}={word}" for word in words
    ]


def spelled_out(verb: str, typed: Sequence[str], config_dirs: Sequence[Path] = ()) -> list[str]:
    """The overrides with `task=FILE` in its full form, which is printed too; as they are where none was typed.
    config_dirs: with tasks of the user's own. UserError where the file does not say what it is for."""
    values = {word.partition("=")[0]: word.partition("=")[2] for word in typed}
    file = values.get("task", "")
    if not is_path(file, options("task", config_dirs)):
        return list(typed)
    if "task.path" in values:
        raise UserError(
            f"task={file} and task.path={values['task.path']}: both name data",
            f"give task=NAME task.path={values['task.path']}, or task={file} alone",
        )
    full = [f"task.path={file}"]  # all that changes where a checkpoint has a task
    if verb != "evaluate":
        given = {key.removeprefix("task."): value for key, value in values.items() if key.startswith("task.")}
        # What `check` reads may have rows that fail: it lists them.
        with collected() if verb == "check" else nullcontext():
            full = guess(file, given).words(file)
        full = [word for word in full if word.startswith("task=") or word.partition("=")[0] not in values]
    return in_full(typed, "task", file, full)


def in_full(typed: Sequence[str], key: str, file: str, full: Sequence[str]) -> list[str]:
    """The overrides with `key=file` in the form `full`, which is printed with the section's other keys."""
    own = [word for word in typed if word.startswith(f"{key}.")]
    say(f"{key}={file} is read as: {shlex.join([*full, *own])}", sys.stderr)
    place = list(typed).index(f"{key}={file}")
    return [*typed[:place], *full, *typed[place + 1 :]]
