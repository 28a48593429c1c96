"""A tokenizer that exists already, by its folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lmtool.config.saved import checkpoint_folder
from lmtool.tokenizers.configs import FolderConfig
from lmtool.tokenizers.tokenizer import Tokenizer


def load(config: FolderConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Load it; the text and the size asked for are not read. UserError where the folder holds no tokenizer."""
    folder = Path(config.path).expanduser()
    return Tokenizer.load(folder if (folder / "tokenizer.json").is_file() else checkpoint_folder(config.path))
