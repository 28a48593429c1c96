"""`lmtool inspect attention`: the attention pattern of each head of a checkpoint on a text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import torch

from lmtool.config.saved import JsonObject
from lmtool.data.formats import text_format
from lmtool.errors import UserError
from lmtool.learners.representations.attention import Head, attention_of, heads_of
from lmtool.learners.representations.reading import max_length_of, text_format_of, tokenizer_of
from lmtool.reporting.console import Output
from lmtool.reporting.looks import print_heads, write_heads
from lmtool.resolver.schema.use import InspectAttentionConfig
from lmtool.training.precision import select_device, select_precision
from lmtool.types import Packed
from lmtool.weights.padded_model import load

MOST = 64
"""Maximum number of tokens that a page can show."""


def run(config: InspectAttentionConfig) -> list[JsonObject]:
    """Reads the text, prints the heads and writes the page. Returns the pattern of each head."""
    output, precision = Output(), select_precision(config.precision, select_device(config.device))
    loaded = load(config.checkpoint, str(precision.device), config.offline)
    tokenizer, backbone = tokenizer_of(loaded, config.checkpoint), loaded.model.parts.backbone
    ids, columns = text_format(text_format_of(loaded), tokenizer).join(tokenizer.encode(config.text))
    longest = min(MOST, max_length_of(loaded))
    if len(ids) > longest:
        raise UserError(f"text= has {len(ids)} tokens, and at most {longest} can be drawn", "use a sentence")
    tensors = {name: torch.from_numpy(np.asarray(column)) for name, column in columns.items()}
    inputs = Packed(torch.from_numpy(np.asarray(ids)), (len(ids),), tensors).to(precision.device)
    attention = attention_of(backbone.eval(), inputs, precision)
    special_L = np.isin(ids, sorted(tokenizer.special_ids))
    if special_L.all():
        raise UserError("text= has only special tokens", "use a sentence")
    heads, pieces = heads_of(attention.weights, special_L), tokenizer.readable(ids)
    pictures = [(head, attention.weights[head.layer - 1, head.number - 1]) for head in _clearest(heads)[: config.shown]]
    print_heads(output, heads, pieces, pictures)
    path = Path(config.output).expanduser()
    write_heads(path, config.checkpoint, heads, pieces, attention)
    output.line(f"page: {path}")
    return [{"layer": head.layer, "head": head.number, "mostly": head.pattern, **head.fractions} for head in heads]


def _clearest(heads: list[Head]) -> list[Head]:
    """The heads with a pattern: first the clearest head of each pattern, then the second clearest, and so on."""
    ranked = sorted((head for head in heads if head.pattern), key=lambda head: -head.fractions[head.pattern])
    before: Counter[str] = Counter()
    turns = {}
    for head in ranked:
        turns[head] = before[head.pattern]
        before[head.pattern] += 1
    return sorted(ranked, key=lambda head: turns[head])
