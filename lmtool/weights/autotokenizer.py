"""What transformers' AutoTokenizer makes of texts, by the files of an exported folder alone.

Shape letters: B rows, L the longest of them in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from lmtool.weights.folders import read_settings


def tokenized(folder: Path, texts: Sequence[str], pairs: Sequence[str] | None = None) -> dict[str, Tensor]:
    """`AutoTokenizer.from_pretrained(folder)(texts, pairs, padding=True, truncation=True, return_tensors="pt")` of a
    folder that names a plain tokenizer class: (B, L) int64 tensors by the names in its `model_input_names`."""
    settings = read_settings(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    backend.enable_truncation(settings["model_max_length"])
    pad = settings.get("pad_token")
    backend.enable_padding(pad_id=backend.token_to_id(pad) if pad else 0, pad_token=pad or "")
    encoded = backend.encode_batch(list(texts) if pairs is None else list(zip(texts, pairs, strict=True)))
    columns = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
    return {
        name: torch.tensor([getattr(row, columns[name]) for row in encoded]) for name in settings["model_input_names"]
    }
