"""The files of what a `checkpoint=` names, fetched where they are on the hub and not yet here; no tensor is read."""

from __future__ import annotations

from pathlib import Path

from lmtool.config.checkpoint import find
from lmtool.weights.bases import saved_base
from lmtool.weights.folders import TOKENIZER, fetched, published_folder, weight_file
from lmtool.weights.reading import shards_of_index
from lmtool.weights.sentence_encoders import Dense, dense_file, sentence_encoder


def is_remote(checkpoint: str) -> bool:
    """Whether it, or the base of what was tuned, is on the hub. UserError where it cannot be read."""
    if "://" in checkpoint:
        return True
    if published_folder(checkpoint, offline=True) is not None:
        return False
    base = saved_base(find(checkpoint))
    address = None if base is None else base.address()
    return address is not None and is_remote(address)


def files_of(checkpoint: str, offline: bool) -> list[Path]:
    """What a run reads of a checkpoint; of a tuned one its base's too. offline: no connection is opened. UserError
    where a file cannot be had."""
    published = published_folder(checkpoint, offline)
    if published is None:
        folder = find(checkpoint)
        base = saved_base(folder)
        address = None if base is None else base.address()
        own = [path for path in folder.iterdir() if path.is_file()]
        return own if address is None else [*own, *files_of(address, offline)]
    files = [weight_file(published, offline)]
    if files[0].name.endswith(".index.json"):
        shards = sorted(set(shards_of_index(files[0]).values()))
        files += [path for name in shards if (path := fetched(published, name, offline)) is not None]
    encoder = sentence_encoder(published, offline)
    behind = () if encoder is None else encoder.behind
    files += [dense_file(published, module, offline) for module in behind if isinstance(module, Dense)]
    return [*files, *(path for name in TOKENIZER if (path := published.path / name).is_file())]
