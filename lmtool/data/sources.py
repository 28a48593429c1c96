"""Sources of text, the documents held out for validation, and `data=mixture`: several sources as one.

Shape letters: D documents.
"""

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
from lmtool.config.registry import build
from lmtool.data.configs import DataConfig, MixtureTextConfig
from lmtool.errors import UserError

SPLITS = ("train", "validation")


class OnStage(Protocol):
    """Called repeatedly during a long operation."""

    def __call__(self, stage: str, done: int, total: int, rate: str = "", /) -> None:
        """Reports progress. stage: description of the operation. rate: its speed; if given, a terminal shows a bar."""


PART = 1_000_000
"""Characters after which a document is divided: the rest comes in further parts."""

# The held-out documents do not depend on the run's seed, so that runs share a store and their scores are comparable.
_SPLIT_SEED = 0
_BLOCK = 1 << 20  # documents sampled at a time


@runtime_checkable
class Source(Protocol):
    """Text in two splits, "train" and "validation". `fingerprint` is a hash of all text."""

    fingerprint: str

    def parts(self, split: str) -> Iterator[tuple[str, bool]]:
        """Yields (text, ends) for the documents of a split, in a fixed order. A document of more than about `PART`
        characters comes in several parts, so that only one part is in memory; `ends` is true for its last part."""

    def count(self, split: str) -> int:
        """Returns the number of documents."""

    def characters(self, split: str) -> int:
        """Returns the number of characters."""

    def metadata(self) -> dict[str, object]:
        """Returns plain data for the screens and the report."""


def open_source(
    config: DataConfig, cache_dir: str | Path, progress: OnStage | None = None, offline: bool = False
) -> Source:
    """Builds the source of a configuration. offline: open no connection; missing data are a UserError."""
    return build(config, cache_dir, progress, **({"offline": offline} if config.downloads else {}))


def documents(parts: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """Yields the complete documents of `Source.parts`."""
    pending: list[str] = []
    for text, ends in parts:
        pending.append(text)
        if ends:
            yield "".join(pending)
            pending = []


def in_parts(text: str) -> Iterator[tuple[str, bool]]:
    """Yields a document in parts of at most `PART` characters; none if it is empty."""
    for start in range(0, len(text), PART):
        yield text[start : start + PART], start + PART >= len(text)


def held_out(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Returns (D,) bool: the documents held out for validation: a seeded sample, or if the fraction is less than one
    document, the document whose size is nearest to that fraction of the text. sizes: (D,) characters; D is at least
    2."""
    count = len(sizes)
    selected = np.zeros(count, dtype=bool)
    number = min(round(fraction * count), count - 1)
    if number >= 1:
        selected[_sample_documents(count, number)] = True
    else:
        selected[np.argmin(np.abs(np.asarray(sizes) - fraction * np.sum(sizes)))] = True
    return selected


def _sample_documents(count: int, number: int) -> np.ndarray:
    """The documents with the smallest random values, which are generated in blocks."""
    values, sampled = np.empty(0), np.empty(0, dtype=np.int64)
    for start in range(0, count, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, count))
        values = np.concatenate([values, random_streams.uniform(_SPLIT_SEED, "sample", 0, block, 1)[:, 0]])
        sampled = np.concatenate([sampled, block])
        retained = np.sort(np.argsort(values, kind="stable")[:number])  # the earlier one of equal values
        values, sampled = values[retained], sampled[retained]
    return sampled


# Boundaries at which a document may be split, the best first: paragraph, line, sentence, word.
_BOUNDARIES = (re.compile(r"\n[^\S\n]*\n"), re.compile(r"\n"), re.compile(r"(?<=[.!?])\s"), re.compile(r"\s"))


def split_offset(read_text: Callable[[int, int], str], length: int, fraction: float) -> int:
    """Returns the position at which the only document, of `length` characters, is split so that about its last
    `fraction` is for validation: the nearest of the best kind of boundary within a twentieth of the text, at most
    `PART` characters away. read_text: returns the characters from one position to another. Raises UserError if the
    document is a single word."""
    target, near = round(length * (1 - fraction)), max(length // 20, 20)
    start, end = (0, length) if near <= PART else (max(target - PART, 0), target + PART)
    text = read_text(start, end)
    target -= start
    for reach in (near, len(text)):
        for boundary in _BOUNDARIES:
            offsets = [match.start() for match in boundary.finditer(text, max(target - reach, 0), target + reach)]
            for offset in sorted(offsets, key=lambda offset: abs(offset - target)):
                if text[:offset].strip() and text[offset:].strip():
                    return start + offset
    raise UserError(
        "the text is one document of one word, so nothing can be held out for validation",
        "set data.path= to more text, or data.validation= to other text",
    )


def splits_of(split: str) -> str:
    """Returns the split's name. Raises ValueError if it is not a split."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {SPLITS}")
    return split


@contextmanager
def _with_mixture_keys(title: str, config: DataConfig) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        keys, prefix = re.compile(rf"\bdata\.(?=({'|'.join(type(config).model_fields)})\b)"), f"data.with.{title}."
        hint = None if error.hint is None else keys.sub(prefix, error.hint)
        raise UserError(keys.sub(prefix, error.message), hint) from error


class MixtureSource:
    """`data=mixture`: several texts, each with its own validation split and store. Read as one source, to train a
    vocabulary, it yields the members in order.

    members: sources by title. fractions: the fraction of the examples that each member provides; None: in proportion to
    the members' sizes. Raises UserError if two members are the same text.
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
        for title, part in config.member_configs().items():
            with _with_mixture_keys(title, part):
                self.members[title] = open_source(part, cache_dir, progress, offline)
        for (first, source), (second, other) in combinations(self.members.items(), 2):
            if source.fingerprint == other.fingerprint:
                raise UserError(
                    f"data.members: {first} and {second} are the same text",
                    "name it once, with a weight (data.weights=[2,1]); or use other files for one of them",
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
        return {
            "source": "mixture",
            "documents": self.count("train"),
            "validation_documents": self.count("validation"),
            "fingerprint": self.fingerprint,
            **{title: member.metadata() for title, member in self.members.items()},
        }
