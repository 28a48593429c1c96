"""Small sources, tokenizers and examples for the tests of lmtool.data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lmtool import random_streams
from lmtool.config.registry import build
from lmtool.data import sources
from lmtool.data.examples import Plan
from lmtool.data.sources import Source
from lmtool.tokenizers.configs import ByteBpeConfig, WordPieceConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Target

WORDS = "the a cat dog sat ran on under mat hill quickly slowly and then was not it he she they".split()  # noqa: SIM905


def sentence(random: np.random.Generator) -> str:
    return " ".join(random.choice(WORDS, size=random.integers(3, 12))).capitalize() + "."


def documents(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(sentence(random) for _ in range(random.integers(1, 6))) for _ in range(count)]


def texts(source: Source, split: str) -> Iterator[str]:
    """The complete documents of a source."""
    return sources.documents(source.parts(split))


def wordpiece() -> Tokenizer:
    return build(WordPieceConfig(), documents(50), 200)


def bytebpe() -> Tokenizer:
    return build(ByteBpeConfig(), documents(50), 400)


class ListSource:
    """A source of documents in memory."""

    def __init__(self, train: list[str], validation: list[str], fingerprint: str = "list"):
        self._splits = {"train": train, "validation": validation}
        self.fingerprint = fingerprint
        self.reads = 0

    def parts(self, split: str) -> Iterator[tuple[str, bool]]:
        self.reads += 1
        return ((text, True) for text in self._splits[split])

    def count(self, split: str) -> int:
        return len(self._splits[split])

    def characters(self, split: str) -> int:
        return sum(map(len, self._splits[split]))

    def metadata(self) -> dict[str, Any]:
        return {}


class DrawnExamples:
    """Examples of random lengths with random tokens keyed by example, so that any error in order is visible."""

    def __init__(self, count: int, seed: int = 0, longest: int = 20):
        self._seed = seed
        self._lengths = 1 + np.random.default_rng(seed).integers(0, longest, size=count)
        self.plans = 0

    def plan(self, epoch: int) -> Plan:
        self.plans += 1
        rows = np.empty(len(self._lengths), dtype=[("length", "i4")])
        rows["length"] = np.roll(self._lengths, epoch)
        return Plan(rows, rows["length"].astype(np.int64))

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        drawn = random_streams.bits(self._seed, "sample", epoch, examples, int(rows["length"].max())) % np.uint64(1000)
        tokens = np.concatenate([ids[:length] for ids, length in zip(drawn, rows["length"], strict=True)])
        count = len(examples)
        return Batch(
            Packed(torch.from_numpy(tokens.astype(np.int64)), tuple(rows["length"].tolist())),
            {"term": Target(torch.zeros(count, dtype=torch.int64))},
            torch.from_numpy(examples.copy()),
            torch.zeros(count, dtype=torch.int32),
        )

    def metadata(self) -> dict[str, Any]:
        return {"truncated_fraction": 0.25}
