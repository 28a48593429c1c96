"""Odd things where a file or a folder is expected: pipes, sockets, devices, loops of links, folders, endless files."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from trials.scenes import EVALUATE, FINETUNE, PREDICT, PRETRAIN, Expected, Scene, replaced

_PUBLISHED = ["predict", "checkpoint=published", "device=cpu", "precision=fp32", "text=hello"]
_IMPORT = ["import", "checkpoint=published", "output=imported"]


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most about a hundred letters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def _loop(path: Path) -> None:
    path.symlink_to(f"{path.name}.again")
    path.with_name(f"{path.name}.again").symlink_to(path.name)


def _endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


NODES: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a loop of links": _loop,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "8 GB of nothing": _endless,
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 4) and None,
}
"""By name, each made at a path where nothing is."""

# Files that a command reads: where, what is typed, and what names them in an error.
_READ: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("text.txt", tuple(PRETRAIN), ("text.txt",)),
    ("held.txt", (*PRETRAIN, "data.validation=held.txt"), ("held.txt",)),
    ("texts/a.txt", replaced(PRETRAIN, "data.path=texts"), ("a.txt", "data.path")),
    ("rows/train.tsv", tuple(FINETUNE), ("train.tsv", "task.path")),
    ("rows/dev.tsv", tuple(FINETUNE), ("dev.tsv", "task.path")),
    ("rows/dev.tsv", tuple(EVALUATE), ("dev.tsv", "task.path")),
    ("rows", tuple(FINETUNE), ("rows",)),
    ("input.txt", (*PREDICT[:-1], "input=input.txt"), ("input.txt",)),
    ("input.tsv", (*PREDICT[:-1], "input=input.tsv"), ("input.tsv",)),
    ("saved.yaml", ("pretrain", "--config", "saved.yaml"), ("saved.yaml",)),
    ("conf/model/mine.yaml", ("pretrain", "--config-dir", "conf", "model=mine"), ("mine", "conf")),
    ("conf", ("pretrain", "--config-dir", "conf", "model=bert_tiny", "--cfg", "job"), ("conf",)),
    ("published/config.json", tuple(_PUBLISHED), ("config.json", "published")),
    ("published/config.json", tuple(_IMPORT), ("config.json", "published")),
    ("published/model.safetensors", tuple(_PUBLISHED), ("model.safetensors", "published")),
    ("published/model.safetensors", tuple(_IMPORT), ("model.safetensors", "published")),
    ("published/tokenizer.json", tuple(_PUBLISHED), ("tokenizer", "published")),
    ("published/tokenizer_config.json", tuple(_PUBLISHED), ("tokenizer_config.json", "published")),
    ("tokens/tokenizer.json", (*PRETRAIN, "tokenizer=folder", "tokenizer.path=tokens"), ("tokens",)),
    ("runs/tuned/config.yaml", ("resume", "runs/tuned"), ("config.yaml",)),
    ("runs/tuned/metrics.jsonl", ("resume", "runs/tuned"), ("metrics.jsonl",)),
]
# Files of a run that it can do without: a command may mend or skip what stands there, or refuse it by name.
_SPARE = [
    (f"runs/tuned/{name}", ("resume", "runs/tuned"), (name,))
    for name in ("log.txt", "environment.json", "facts.json", "LOCK", "result.json", "predictions.jsonl",
                 "report.html", "plots", "checkpoints/last", "checkpoints/best")
]  # fmt: skip
_SPARE += [
    (f"done/tuned/{name}", ("report", "done/tuned"), (name,))
    for name in ("config.yaml", "metrics.jsonl", "facts.json", "result.json", "predictions.jsonl", "report.html",
                 "plots", "environment.json", "samples.json")
]  # fmt: skip
_SPARE += [
    ("published/special_tokens_map.json", tuple(_PUBLISHED), ("special_tokens_map.json", "published")),
    ("runs/latest", replaced(PREDICT, "checkpoint=runs/latest"), ("latest",)),
    ("cache", tuple(PRETRAIN), ("cache",)),
    ("cache/stores", tuple(PRETRAIN), ("cache",)),
    ("cache/tokenizers", tuple(PRETRAIN), ("cache",)),
    ("runs", replaced(PRETRAIN, "run_dir=null", "name=mine"), ("runs",)),
    ("run", tuple(PRETRAIN), ("run",)),
    ("out", replaced(PREDICT, "output=out"), ("out",)),
    ("out", ("export", "checkpoint=done/tuned", "output=out"), ("out",)),
    ("out", ("import", "checkpoint=published", "output=out"), ("out",)),
    ("out", (*EVALUATE, "output=out"), ("out",)),
    ("out", ("tokenizer", "data=text", "data.path=text.txt", "cache_dir=cache", "output=out"), ("out",)),
    ("out", ("inspect", *PRETRAIN[:-2], "n=2", "tokens=2000", "output=out"), ("out",)),
    ("afile", replaced(PRETRAIN, "run_dir=afile/run"), ("afile",)),
]


def _scenes() -> Iterator[Scene]:
    for places, spare in ((_READ, False), (_SPARE, True)):
        for where, words, names in places:
            for name, make in NODES.items():

                def plant(
                    place: Path, chance: random.Random, where: str = where, make: Callable[[Path], None] = make
                ) -> None:
                    _clear(place / where)
                    make(place / where)

                # A folder where a folder is expected is none; bytes in a text file are told by their line.
                fits = name == "a folder" and Path(where).suffix == ""
                expected = Expected.EITHER if spare or fits else Expected.REFUSED
                yield Scene(f"{name} at {where}, {words[0]}", words, plant, names, expected)


SCENES = list(_scenes())
