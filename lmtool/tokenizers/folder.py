"""A tokenizer that exists already, by its folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lmtool.config.saved import checkpoint_folder
from lmtool.tokenizers.configs import FolderConfig
from lmtool.tokenizers.published import has_tokenizer
from lmtool.tokenizers.tokenizer import Tokenizer


def load(config: FolderConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Load it; the text and the size asked for are not read. UserError where the folder holds no tokenizer."""
    folder = Path(config.path).expanduser()
    found = folder if has_tokenizer(folder) else checkpoint_folder(config.path, "tokenizer.path")
    return Tokenizer.load(found, config.parse_special_tokens)
