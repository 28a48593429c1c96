"""The text of a run, split by split: its token store, and how it was built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtool.data.configs import DataConfig
from lmtool.data.sources import OnStage, Source
from lmtool.data.split import Rows, SplitData
from lmtool.data.store import open_store
from lmtool.tokenizers.tokenizer import Tokenizer


def text_of(
    config: DataConfig,
    source: Source,
    split: str,
    tokenizer: Tokenizer,
    cache_dir: str,
    progress: OnStage | None,
    rows: Mapping[str, Rows],
) -> SplitData:
    """A split of the text that `config` names, tokenized. rows: labelled rows that are learned beside it."""
    return SplitData(split, open_store(source, split, tokenizer, cache_dir, progress), config.documents, rows)


def tokenized_facts(data: SplitData) -> dict[str, Any]:
    """How fast the store of a split was built, whenever that was: for the screens and the report."""
    facts = data.text.facts
    return {name: facts[name] for name in ("bytes", "seconds", "bytes_per_second", "tokens_per_second")}
