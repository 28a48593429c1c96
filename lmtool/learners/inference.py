"""How a trained model reads rows, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmtool.training.precision import Precision


def no_warning(text: str) -> None:
    """Reports nothing."""


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""


# Of a forward on a CPU. Larger ones are no faster (BERT, 2 layers, width 256: 13.2 calls of 128 texts a second of CPU
# time at 8,192 tokens, 12.8 at 2,048), and the heap never settles on their buffers: 688 MB after 250 calls and growing,
# against 456 MB from the 90th call on.
CPU_TOKENS = 2048


@dataclass(frozen=True)
class Inference:
    """max_length: tokens of an example, at most. batch_tokens: of a forward, at most. warn: reports what a user should
    know. progress: is given how many parts of how many are done."""

    max_length: int
    batch_tokens: int
    precision: Precision
    warn: Callable[[str], None] = no_warning
    progress: Callable[[int, int], None] = no_progress

    @property
    def forward_tokens(self) -> int:
        """Tokens of a forward on this device."""
        return min(self.batch_tokens, CPU_TOKENS) if self.precision.device.type == "cpu" else self.batch_tokens


@dataclass(frozen=True)
class Answers:
    """What a trained model answers to rows. records: plain data, one a row. scores: of `labelled` rows, by metric; none
    where the rows have no labels."""

    records: Iterator[dict[str, Any]]
    scores: Mapping[str, float] = field(default_factory=dict)
    labelled: int = 0
