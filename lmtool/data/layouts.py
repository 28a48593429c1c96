"""A text format (formats.py) beside what a tokenizer's own file puts around texts, which is what transformers reads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lmtool.data.assembly import Template, assemble
from lmtool.data.formats import text_format
from lmtool.tokenizers.tokenizer import Tokenizer

SEGMENT = "segment"
# One text, and a pair.
_TEXTS = (("a",), ("a", "b"))


def differing_layout(tokenizer: Tokenizer, format_name: str) -> str | None:
    """How the tokenizer's file lays out a text or a pair, and how the format does, as pieces, where the two differ."""
    for texts in _TEXTS:
        template = Template.of(text_format(format_name, tokenizer), len(texts))
        runs = [np.asarray(ids, dtype=np.int64) for ids in tokenizer.encode_batch(texts)]
        wanted = assemble(template, [(ids, np.array([len(ids)])) for ids in runs])
        ids, segments = tokenizer.laid_out(*texts)
        own, ours = " ".join(tokenizer.pieces(ids)), " ".join(tokenizer.pieces(wanted.tokens.tolist()))
        if ids != wanted.tokens.tolist():
            return f"{own!r}, and not {ours!r}"
        if SEGMENT in wanted.columns and segments != wanted.columns[SEGMENT].tolist():
            return f"{own!r} in the segments {segments}, and not {wanted.columns[SEGMENT].tolist()}"
    return None


def with_format(tokenizer: Tokenizer, format_name: str) -> Tokenizer:
    """The tokenizer, its file laying out texts and pairs as the format does."""
    if differing_layout(tokenizer, format_name) is None:
        return tokenizer
    templates = [Template.of(text_format(format_name, tokenizer), len(texts)) for texts in _TEXTS]
    special = {f"t{number}": int(number) for template in templates for piece in template.pieces for number in piece}
    single, pair = (list(_written(template)) for template in templates)
    return tokenizer.with_layout(single, pair, special)


def _written(template: Template) -> Iterator[str]:
    """A template as the tokenizers library writes one."""
    texts = len(template.pieces) - 1
    for number, piece in enumerate(template.pieces):
        columns = template.piece_columns.get(SEGMENT)
        segments = np.zeros(len(piece), dtype=np.int64) if columns is None else columns[number]
        yield from (f"t{token}:{segment}" for token, segment in zip(piece, segments, strict=True))
        if number < texts:
            yield f"${'AB'[number]}:{template.text_columns.get(SEGMENT, (0, 0))[number]}"
