"""A scene: what lies in a folder, and what is typed there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trials.stage import HERE, ROWS, TEXT

ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b31m"
"""Codes that a terminal obeys: a title, a cleared screen, a colour, the one-byte form."""

PRETRAIN = ["pretrain", *TEXT, "max_steps=1", "run_dir=run"]
FINETUNE = ["finetune", *ROWS, "checkpoint=none", "model=bert_tiny", "max_steps=1", "run_dir=run"]
PREDICT = ["predict", "checkpoint=done/tuned", *HERE, "text=hello"]
EVALUATE = ["evaluate", "checkpoint=done/tuned", *HERE]


class Expected(Enum):
    """How the command should take it."""

    REFUSED = "refused"
    LEGAL = "legal"
    EITHER = "either"  # as long as nothing else happens


@dataclass(frozen=True)
class Scene:
    """plant: makes it in the trial's folder. names: what an error must name, one of them."""

    about: str
    words: tuple[str, ...]
    plant: Callable[[Path, random.Random], None]
    names: tuple[str, ...] = ()
    expected: Expected = Expected.REFUSED


def replaced(words: list[str], *others: str) -> tuple[str, ...]:
    """A command line with some overrides in place of those of the same key."""
    keys = {other.partition("=")[0] for other in others}
    return (*(word for word in words if word.partition("=")[0] not in keys), *others)
