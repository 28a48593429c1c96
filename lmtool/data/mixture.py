"""`data=mixture`: several texts, each read, held out and stored by itself."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

from lmtool.data.configs import DataConfig, MixtureTextConfig
from lmtool.data.sources import OnStage, Source, open_source
from lmtool.errors import UserError


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

    members: by their titles. shares: of the examples, adding up to 1; None: as much as there is of each. UserError
    where two of them are the same text, and as each member has it.
    """

    def __init__(
        self,
        config: MixtureTextConfig,
        cache_dir: str | Path,
        progress: OnStage | None = None,
        offline: bool = False,
    ):
        self.config, self.shares = config, config.shares()
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

    def facts(self) -> dict[str, Any]:
        """Those of each member under its title."""
        return {
            "source": "mixture",
            "documents": self.count("train"),
            "validation_documents": self.count("validation"),
            "fingerprint": self.fingerprint,
            **{title: member.facts() for title, member in self.members.items()},
        }
