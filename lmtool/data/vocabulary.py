"""A tokenizer trained on a source's training text, once for all runs that want the same one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from lmtool.config.tables import build
from lmtool.data.sources import Progress, Source
from lmtool.data.store import locked, rebuilding, writing
from lmtool.manifest import Damaged, Manifest, write_manifest
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.tokenizers.tokenizer import Tokenizer

VERSION = 2  # of how a vocabulary is trained: raise it when that changes


def trained_tokenizer(
    config: TokenizerConfig,
    source: Source,
    vocab_size: int,
    cache_dir: str | Path,
    progress: Progress | None = None,
) -> Tokenizer:
    """The tokenizer of `config` for the training split of `source`: read from the cache folder, else trained and kept.
    A damaged one is trained again and reported.

    UserError naming cache_dir where it cannot be written.
    """
    if not config.reads_text:
        return build(config, (), vocab_size)
    rules = config.model_dump(exclude={"parse_special_tokens"})  # read in encoding alone
    wanted = {"version": VERSION, "text": source.fingerprint, "config": rules, "vocab_size": vocab_size}
    key = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]
    root = Path(cache_dir).expanduser() / "tokenizers"
    folder = root / key
    with writing(cache_dir):
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f"{key}.lock"):
            if folder.exists():
                try:
                    Manifest.read(folder).verify()
                except Damaged as damage:
                    rebuilding(damage, progress)
                    shutil.rmtree(folder)
            if not folder.exists():
                draft = root / f".{key}.{os.getpid()}"
                shutil.rmtree(draft, ignore_errors=True)
                build(config, source.documents("train"), vocab_size).save(draft)
                write_manifest(draft, {"key": key})
                draft.rename(folder)
            return Tokenizer.load(folder, config.parse_special_tokens)
