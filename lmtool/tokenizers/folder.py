"""A tokenizer that exists already, by its folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lmtool.config.saved import checkpoint_folder
from lmtool.errors import UserError
from lmtool.tokenizers.configs import FolderConfig
from lmtool.tokenizers.published import has_tokenizer
from lmtool.tokenizers.tokenizer import Tokenizer


def load(config: FolderConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Load it; the text and the size asked for are not read. UserError where the folder holds no tokenizer."""
    folder = Path(config.path).expanduser()
    try:
        found = folder if has_tokenizer(folder) else checkpoint_folder(config.path)
    except UserError as error:
        raise UserError(
            f"tokenizer.path={config.path}: {'no tokenizer in it' if folder.exists() else 'no such folder'}",
            "give a folder with tokenizer files (tokenizer.json, ...), or a run folder (runs/NAME)",
        ) from error
    return Tokenizer.load(found, config.parse_special_tokens)
