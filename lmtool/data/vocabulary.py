"""A tokenizer trained on a run's text, or on a sample of a large one."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from lmtool.config.registry import build
from lmtool.data.sources import OnStage, Source, documents
from lmtool.data.store import cached_folder
from lmtool.system.files import Manifest, draft_path, publish, user_path, write_manifest
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.tokenizers.texts import sample
from lmtool.tokenizers.tokenizer import Tokenizer

VERSION = 2  # increase it if training changes


def trained_tokenizer(
    config: TokenizerConfig,
    source: Source,
    vocab_size: int,
    cache_dir: str | Path,
    progress: OnStage | None = None,
) -> Tokenizer:
    """Returns the tokenizer, of at most `vocab_size` entries, trained on the training split of a source; it is stored
    in the cache folder. progress: receives messages: that only a sample of the text is used, or that a saved tokenizer
    is damaged. Raises UserError if cache_dir cannot be written."""
    if not config.reads_text:
        return build(config, (), vocab_size)
    characters = source.characters("train")
    sampled = _is_sampled(config, characters, progress)
    rules = config.model_dump(exclude={"parse_special_tokens"})  # this key changes only encoding
    identity = {"version": VERSION, "text": source.fingerprint, "config": rules, "vocab_size": vocab_size}
    identity |= {"sample": config.most_characters} if sampled else {}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    folder = user_path(cache_dir) / "tokenizers" / key

    def load() -> Tokenizer:
        Manifest.read(folder).verify()
        return Tokenizer.load(folder, config.parse_special_tokens)

    def train(holds_lock: bool) -> None:
        draft, parts = draft_path(folder), source.parts("train")
        # A sample contains parts of documents, so their parts are not joined.
        texts = (text for text, _ in parts) if sampled else documents(parts)
        _train(config, texts, characters, vocab_size).save(draft)
        write_manifest(draft, {"key": key})
        publish(draft, folder)

    return cached_folder(folder, cache_dir, load, train, progress)


def tokenizer_of_rows(
    config: TokenizerConfig, columns: Sequence[Sequence[str]], vocab_size: int, progress: OnStage | None = None
) -> Tokenizer:
    """Trains the tokenizer on the texts of a table, column by column."""
    characters = sum(len(text) for column in columns for text in column)
    _is_sampled(config, characters, progress)  # reports that the text is too long
    return _train(config, (text for column in columns for text in column), characters, vocab_size)


def _is_sampled(config: TokenizerConfig, characters: int, progress: OnStage | None) -> bool:
    """Whether the text is too long to train the vocabulary on all of it, which is reported."""
    most = config.most_characters
    if progress is not None and config.reads_text and characters > most:
        sizes = f"{most / 1e6:.0f} of {characters / 1e6:,.0f} million characters"
        progress(f"the vocabulary is trained on a sample, {sizes}", 0, 1)
    return characters > most


def _train(config: TokenizerConfig, texts: Iterable[str], characters: int, vocab_size: int) -> Tokenizer:
    tokenizer: Tokenizer = build(config, sample(texts, characters, config.most_characters), vocab_size)
    # Make the C library free the memory of training: 300 MB after 30 million characters.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return tokenizer
