"""A tokenizer that exists already, by its folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lmtool.config.checkpoint import NoCheckpoint, find, is_checkpoint
from lmtool.errors import UserError
from lmtool.tokenizers.configs import FolderConfig
from lmtool.tokenizers.published import has_tokenizer
from lmtool.tokenizers.tokenizer import Tokenizer


def load(config: FolderConfig, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Load it; the text and the size asked for are not read. UserError where the folder holds no tokenizer."""
    folder = Path(config.path).expanduser()
    if has_tokenizer(folder) and not is_checkpoint(folder):
        return Tokenizer.load(folder, config.parse_special_tokens)
    try:
        return Tokenizer.load(find(config.path), config.parse_special_tokens)
    except NoCheckpoint as error:
        raise UserError(
            f"tokenizer.path={config.path}: {'no tokenizer in it' if folder.exists() else 'no such folder'}",
            "give a folder with tokenizer files (tokenizer.json, ...), or a run folder (runs/NAME)",
        ) from error
