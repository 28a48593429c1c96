"""A tokenizer trained on a run's text, or on a sample of a large one."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from lmtool.config.tables import build
from lmtool.data.sources import OnStage, Source, documents
from lmtool.data.store import locked, rebuilding, writing
from lmtool.system.files import Damaged, Manifest, draft_of, write_manifest
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.tokenizers.texts import sample
from lmtool.tokenizers.tokenizer import Tokenizer

VERSION = 2  # of how a vocabulary is trained: raise it when that changes


def trained_tokenizer(
    config: TokenizerConfig,
    source: Source,
    vocab_size: int,
    cache_dir: str | Path,
    progress: OnStage | None = None,
) -> Tokenizer:
    """The tokenizer of `config` for the training split of `source`: read from the cache folder, else trained and kept.
    A damaged one is trained again and reported.

    UserError naming cache_dir where it cannot be written.
    """
    if not config.reads_text:
        return build(config, (), vocab_size)
    characters = source.characters("train")
    sampled = _sampled(config, characters, progress)
    rules = config.model_dump(exclude={"parse_special_tokens"})  # read in encoding alone
    identity = {"version": VERSION, "text": source.fingerprint, "config": rules, "vocab_size": vocab_size}
    identity |= {"sample": config.most_characters} if sampled else {}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    root = Path(cache_dir).expanduser() / "tokenizers"
    folder = root / key
    if folder.exists():  # what is there and intact needs no writing: the cache may be read-only
        with contextlib.suppress(Damaged):
            Manifest.read(folder).verify()
            return Tokenizer.load(folder, config.parse_special_tokens)
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
                draft = draft_of(folder)
                parts = source.parts("train")
                # A sample takes documents apart; all of the text is learned as it stands.
                texts = (text for text, _ in parts) if sampled else documents(parts)
                _train(config, texts, characters, vocab_size).save(draft)
                write_manifest(draft, {"key": key})
                draft.rename(folder)
            return Tokenizer.load(folder, config.parse_special_tokens)


def tokenizer_of_rows(
    config: TokenizerConfig, columns: Sequence[Sequence[str]], vocab_size: int, progress: OnStage | None = None
) -> Tokenizer:
    """The tokenizer of `config` for the texts of a table, column by column."""
    characters = sum(len(text) for column in columns for text in column)
    _sampled(config, characters, progress)
    return _train(config, (text for column in columns for text in column), characters, vocab_size)


def _sampled(config: TokenizerConfig, characters: int, progress: OnStage | None) -> bool:
    """Whether the text is too much to learn a vocabulary from all of it; says so."""
    most = config.most_characters
    if progress is not None and config.reads_text and characters > most:
        share = f"{most / 1e6:.0f} of {characters / 1e6:,.0f} million characters"
        progress(f"the vocabulary is that of a sample, {share}", 0, 1)
    return characters > most


def _train(config: TokenizerConfig, texts: Iterable[str], characters: int, vocab_size: int) -> Tokenizer:
    tokenizer: Tokenizer = build(config, sample(texts, characters, config.most_characters), vocab_size)
    # What learning took stays with the C library, 300 MB after 30 million characters, unless it is asked to return it.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return tokenizer
