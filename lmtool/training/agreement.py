"""Whether the processes that train together are of one mind: the same code, configuration, data and checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

import lmtool
from lmtool.errors import UserError
from lmtool.runs import code
from lmtool.runs.identity import FREE_KEYS, flatten
from lmtool.training.group import Group

_SAME = "give all machines the same files and the same command"


def versions(plugins: tuple[str, ...] = ()) -> dict[str, str]:
    """What computes: lmtool's version and the hash of its files, and torch's version."""
    return {
        "lmtool version": lmtool.__version__,
        "lmtool code": code.fingerprint(plugins),
        "torch version": str(torch.__version__),
    }


def keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as plain data, by dotted key, without what may differ."""
    return {key: value for key, value in flatten(config).items() if key.split(".")[0] not in FREE_KEYS}


def require_same(group: Group, things: Mapping[str, Any]) -> None:
    """UserError, on all processes, where one has another value than rank 0: it names the first difference with both
    values. things: by what they are called, plain values."""
    if group.size == 1:
        return
    everyone = group.all({name: str(value) for name, value in things.items()})
    for rank, theirs in enumerate(everyone):
        for name, own, first in _differences(theirs, everyone[0]):
            raise UserError(
                f"rank {rank} has another {name} than rank 0: {_short(own)}, and {_short(first)} there", _SAME
            )


def _differences(own: Mapping[str, str], first: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in [*first, *(name for name in own if name not in first)]:
        values = own.get(name, "none"), first.get(name, "none")
        if values[0] != values[1]:
            yield name, *values


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."
