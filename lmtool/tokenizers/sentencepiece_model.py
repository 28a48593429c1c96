"""Read a SentencePiece model file, a protocol buffer.

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
    """The content of a model file. pieces: (text, score, type) by id. kind: UNIGRAM or BPE. unknown: id of the unknown
    piece. characters: the precompiled normalization map; may be empty."""

    pieces: list[tuple[str, float, int]]
    kind: int
    unknown: int
    byte_fallback: bool
    characters: bytes


def read_model(content: bytes) -> PieceModel:
    """Parse a model file. ValueError if the content is not a SentencePiece model."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            score = struct.unpack("<f", _bytes(piece[2]))[0] if 2 in piece else 0.0
            pieces.append((_bytes(piece.get(1, b"")).decode("utf-8"), score, _number(piece.get(3, 1))))
        elif number == 2:
            trainer = dict(_fields(_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_bytes(value)))
    if not pieces:
        raise ValueError("contains no pieces")
    return PieceModel(
        pieces,
        _number(trainer.get(3, UNIGRAM)),
        _number(trainer.get(40, 0)),
        bool(_number(trainer.get(35, 0))),
        _bytes(normalizer.get(2, b"")),
    )


def merges_of(model: PieceModel) -> list[tuple[str, str]]:
    """The merges of a BPE model in order. The file does not store them: SentencePiece merges any two pieces that form a
    piece, by score and then from left to right."""
    scores = {piece: score for piece, score, type_ in model.pieces if type_ == NORMAL}
    ranked: list[tuple[float, int, str, str]] = []
    for order, (piece, score) in enumerate(scores.items()):
        cuts = [at for at in range(1, len(piece)) if piece[:at] in scores and piece[at:] in scores]
        # If two overlapping pairs form the same piece, the left one is first: "ab"+"a" in "ab"+"a"+"ba".
        cuts.sort(key=lambda at: piece[at:] != piece[: len(piece) - at])
        ranked += [(-score, order, piece[:at], piece[at:]) for at in cuts]
    ranked.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in ranked]


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message: integers as int, all others as bytes."""
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(content, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(content, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("not a protocol buffer")
        if at + size > len(content):
            raise ValueError("the file is truncated")
        yield tag >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(content) or shift > 63:
            raise ValueError("the file is truncated")
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has a wrong type")
    return value


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has a wrong type")
    return value
