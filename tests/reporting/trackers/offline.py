"""Reads offline files of wandb: a log of protobuf records in blocks of 32 KiB, each piece with a header of its crc,
length and kind."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 32 * 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """The records of one file."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    place, whole = HEADER, b""
    while place + HEADER <= len(content):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + HEADER])
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        whole += content[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def files(run: Path) -> list[Path]:
    """wandb's files of a run folder, oldest first."""
    return sorted(run.glob("wandb/offline-run-*/*.wandb"))


def rows(run: Path) -> list[dict[str, Any]]:
    """The history rows of a run folder in wandb's files."""
    found = []
    for path in files(run):
        for record in records(path):
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                found.append({name: value for name, value in items.items() if name not in ("_runtime", "_timestamp")})
    return found


def summary(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path in files(run):
        for record in records(path):
            if record.WhichOneof("record_type") == "summary":
                values |= {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update
                }
    return values


def starts(run: Path) -> list[Any]:
    """The run record of each file."""
    return [record.run for path in files(run) for record in records(path) if record.WhichOneof("record_type") == "run"]
