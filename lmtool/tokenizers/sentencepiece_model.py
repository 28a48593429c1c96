"""Reads a SentencePiece model file, which is a protocol buffer.

Field numbers: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

UNIGRAM, BPE = 1, 2
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class PieceModel:
    """The content of a model file. pieces: (text, score, type) by id. kind: UNIGRAM or BPE. character_map: the
    precompiled map for normalization; may be empty."""

    pieces: list[tuple[str, float, int]]
    kind: int
    character_map: bytes


def read_model(content: bytes) -> PieceModel:
    """Parses a model file. Raises ValueError if the content is not a SentencePiece model."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(_as_bytes(value)))
            score = _as_float(piece[2]) if 2 in piece else 0.0
            pieces.append((_as_bytes(piece.get(1, b"")).decode("utf-8"), score, _as_integer(piece.get(3, 1))))
        elif number == 2:
            trainer = dict(_fields(_as_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_as_bytes(value)))
    if not pieces:
        raise ValueError("contains no pieces")
    return PieceModel(pieces, _as_integer(trainer.get(3, UNIGRAM)), _as_bytes(normalizer.get(2, b"")))


def merges_of(model: PieceModel) -> list[tuple[str, str]]:
    """Returns the merges of a BPE model in order. The file does not store merges: SentencePiece merges any two pieces
    that form a piece, by score and then from left to right."""
    scores = {piece: score for piece, score, type_ in model.pieces if type_ == NORMAL}
    ranked: list[tuple[float, int, str, str]] = []
    for order, (piece, score) in enumerate(scores.items()):
        splits = [length for length in range(1, len(piece)) if piece[:length] in scores and piece[length:] in scores]
        # If two overlapping pairs form the same piece, the left pair is merged first: "ab"+"a" in "ab"+"a"+"ba".
        splits.sort(key=lambda length: piece[length:] != piece[: len(piece) - length])
        ranked += [(-score, order, piece[:length], piece[length:]) for length in splits]
    ranked.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in ranked]


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (number, value) for each field of a message: integers as int, all other values as bytes."""
    offset = 0
    while offset < len(content):
        tag, offset = _varint(content, offset)
        kind = tag & 7
        if kind == _VARINT:
            value, offset = _varint(content, offset)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, offset = _varint(content, offset)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("not a protocol buffer")
        if offset + size > len(content):
            raise ValueError("the file is truncated")
        yield tag >> 3, content[offset : offset + size]
        offset += size


def _varint(content: bytes, offset: int) -> tuple[int, int]:
    """Returns the integer of variable length at an offset, and the offset of its end."""
    value = shift = 0
    while True:
        if offset >= len(content) or shift > 63:
            raise ValueError("the file is truncated")
        byte = content[offset]
        value |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return value, offset


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has a wrong type")
    return value


def _as_float(value: int | bytes) -> float:
    content = _as_bytes(value)
    if len(content) != 4:
        raise ValueError("a field has a wrong type")
    return float(struct.unpack("<f", content)[0])


def _as_integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has a wrong type")
    return value
