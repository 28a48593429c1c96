"""What a source of text offers, which documents are held out, and `data=mixture`: several sources as one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from lmtool import random_streams
from lmtool.config.tables import build
from lmtool.data.configs import DataConfig, MixtureTextConfig
from lmtool.errors import UserError

# Shape letters: D documents.


SPLITS = ("train", "validation")


class OnStage(Protocol):
    """Called from time to time during something long."""

    def __call__(self, stage: str, done: int, total: int, rate: str = "", /) -> None:
        """stage: what is done, in words. rate: how fast, in words; what says so has a bar on a terminal."""


PART = 1_000_000
"""Characters after which the rest of a document comes as a further part."""

# The held-out documents are the same for every seed, so that seeds share a store and their scores compare.
_SPLIT_SEED = 0
_BLOCK = 1 << 20  # documents that are drawn at a time


@runtime_checkable
class Source(Protocol):
    """Text in two splits, "train" and "validation". `fingerprint` is a hash of all that it holds."""

    fingerprint: str

    def parts(self, split: str) -> Iterator[tuple[str, bool]]:
        """The text of a split, always the same in the same order: a document of up to about `PART` characters by
        itself, a longer one in several parts, so that no more is ever held; and whether the document ends there."""

    def count(self, split: str) -> int:
        """How many documents there are."""

    def characters(self, split: str) -> int:
        """How many characters they have together."""

    def metadata(self) -> dict[str, object]:
        """What the screens and the report say about it; plain data."""


def open_source(
    config: DataConfig, cache_dir: str | Path, progress: OnStage | None = None, offline: bool = False
) -> Source:
    """Build what a configuration names. offline: what is not on this machine is an error that names it; no connection
    is opened. UserError as the source has it."""
    return build(config, cache_dir, progress, **({"offline": offline} if config.downloads else {}))


def documents(parts: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """The documents that parts make up, each complete."""
    pending: list[str] = []
    for text, ends in parts:
        pending.append(text)
        if ends:
            yield "".join(pending)
            pending = []


def in_parts(text: str) -> Iterator[tuple[str, bool]]:
    """A document as parts of at most `PART` characters; nothing where it is empty."""
    for start in range(0, len(text), PART):
        yield text[start : start + PART], start + PART >= len(text)


def held_out(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """(D,) bool: the documents held out for validation, of (D,) sizes; D is 2 or more.

    A seeded share of the documents. Where that is less than one, the document whose size is nearest to that share
    of the text, so that neither side is left with almost nothing.
    """
    count = len(sizes)
    chosen = np.zeros(count, dtype=bool)
    number = min(round(fraction * count), count - 1)
    if number >= 1:
        chosen[_sampled(count, number)] = True
    else:
        chosen[np.argmin(np.abs(np.asarray(sizes) - fraction * np.sum(sizes)))] = True
    return chosen


def _sampled(count: int, number: int) -> np.ndarray:
    """The `number` documents of `count` with the smallest draws. Draws are made a block at a time, and only those kept
    that can be among them."""
    draws, sampled = np.empty(0), np.empty(0, dtype=np.int64)
    for start in range(0, count, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, count))
        draws = np.concatenate([draws, random_streams.uniform(_SPLIT_SEED, "sample", 0, block, 1)[:, 0]])
        sampled = np.concatenate([sampled, block])
        retained = np.sort(np.argsort(draws, kind="stable")[:number])  # of equal draws the earlier document's
        draws, sampled = draws[retained], sampled[retained]
    return sampled


# What one document is cut at, the best first.
_BOUNDARIES = (re.compile(r"\n[^\S\n]*\n"), re.compile(r"\n"), re.compile(r"(?<=[.!?])\s"), re.compile(r"\s"))


def split_offset(read: Callable[[int, int], str], length: int, fraction: float) -> int:
    """The place at which one document of `length` characters becomes two: its last `fraction` is for validation, cut
    at a blank line, else the end of a line, of a sentence, or a word, whichever is found within a twentieth of the
    text; of a long one, within `PART` characters.

    read: the characters from one place to another. UserError where it has no border.
    """
    wanted, near = round(length * (1 - fraction)), max(length // 20, 20)
    start, end = (0, length) if near <= PART else (max(wanted - PART, 0), wanted + PART)
    text = read(start, end)
    wanted -= start
    for reach in (near, len(text)):
        for border in _BOUNDARIES:
            places = [match.start() for match in border.finditer(text, max(wanted - reach, 0), wanted + reach)]
            for place in sorted(places, key=lambda place: abs(place - wanted)):
                if text[:place].strip() and text[place:].strip():
                    return start + place
    raise UserError(
        "the text is one document of one word: nothing can be held out for validation",
        "use more text with data.path=, or other text with data.validation=",
    )


def splits_of(split: str) -> str:
    """The split's name, checked."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {SPLITS}")
    return split


# `data=mixture`: several texts, each read, held out and stored by itself.


@contextmanager
def _named(title: str, config: DataConfig) -> Iterator[None]:
    """Around opening a member: its errors name the keys by which it is reached."""
    try:
        yield
    except UserError as error:
        keys = re.compile(rf"\bdata\.(?=({'|'.join(type(config).model_fields)})\b)")
        texts = [
            None if text is None else keys.sub(f"data.with.{title}.", text) for text in (error.message, error.hint)
        ]
        raise UserError(str(texts[0]), texts[1]) from error


class MixtureSource:
    """All members, one after the other, where one text is wanted: a vocabulary is learned from all of it.

    members: by their titles. fractions: of the examples, adding up to 1; None: as much as there is of each. UserError
    where two of them are the same text, and as each member has it.
    """

    def __init__(
        self,
        config: MixtureTextConfig,
        cache_dir: str | Path,
        progress: OnStage | None = None,
        offline: bool = False,
    ):
        self.config, self.fractions = config, config.fractions()
        self.members: dict[str, Source] = {}
        for title, part in config.parts().items():
            with _named(title, part):
                self.members[title] = open_source(part, cache_dir, progress, offline)
        for (first, one), (second, other) in combinations(self.members.items(), 2):
            if one.fingerprint == other.fingerprint:
                raise UserError(
                    f"data.members: {first} and {second} are the same text",
                    "name it once, with a weight (data.weights=[2,1]); or give one of them other files",
                )
        parts = [f"{title} {member.fingerprint}" for title, member in self.members.items()]
        self.fingerprint = hashlib.sha256("\n".join(["mixture 1", *parts]).encode()).hexdigest()

    def parts(self, split: str) -> Iterator[tuple[str, bool]]:
        for member in self.members.values():
            yield from member.parts(split)

    def count(self, split: str) -> int:
        return sum(member.count(split) for member in self.members.values())

    def characters(self, split: str) -> int:
        return sum(member.characters(split) for member in self.members.values())

    def metadata(self) -> dict[str, object]:
        """Those of each member under its title."""
        return {
            "source": "mixture",
            "documents": self.count("train"),
            "validation_documents": self.count("validation"),
            "fingerprint": self.fingerprint,
            **{title: member.metadata() for title, member in self.members.items()},
        }
