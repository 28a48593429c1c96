"""The text of a run, split by split: its token store, or that of each text of a mixture, and how it was built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtool.data.configs import DataConfig
from lmtool.data.mixture import MixtureSource
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
    stride: int | None = None,
) -> SplitData:
    """A split of the text that `config` names, tokenized. rows: labelled rows that are learned beside it. stride: as
    `SplitData` has it."""
    if isinstance(source, MixtureSource):
        parts, none = source.config.parts(), dict[str, Rows]()
        members = {
            title: text_of(parts[title], member, split, tokenizer, cache_dir, progress, none, stride)
            for title, member in source.members.items()
        }
        return SplitData(split, rows=rows, stride=stride, members=members, shares=source.shares)
    store = open_store(source, split, tokenizer, cache_dir, progress)
    return SplitData(split, store, config.documents, rows, stride)


def tokenized_facts(data: SplitData) -> dict[str, Any]:
    """How fast the store of a split was built, whenever that was: for the screens and the report."""
    if data.members:
        return {title: tokenized_facts(part) for title, part in data.members.items()}
    facts = data.text.facts
    return {name: facts[name] for name in ("bytes", "seconds", "bytes_per_second", "tokens_per_second")}
