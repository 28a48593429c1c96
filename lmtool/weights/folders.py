"""Where published weights lie: a local folder in Hugging Face's layout, or `hf://org/name@revision` in the hub's cache.

Imports no torch by itself: a command's configuration is decoded with it. Only the files named here are ever read, and
nothing in a folder is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lmtool.config.checkpoint import ADAPTER
from lmtool.config.tables import builder_module, entries, lookup, register
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GENERATION, published_settings
from lmtool.models.published import PublishedConfig
from lmtool.weights.hub import Absent, Address
from lmtool.weights.task_heads import NUM_CHOICES, head_of_class, label_names, refusal, task_of

CONFIG, SETTINGS = "config.json", "tokenizer_config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The files that hold weights, the preferred ones first."""
TOKENIZER = (
    "tokenizer.json", SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "spiece.model", "sentencepiece.model", "spm.model", "tokenizer.model", CONFIG,
)  # fmt: skip
"""The files that say what a tokenizer does; config.json may name its class."""
_GIVE = "give a run of lmtool, a folder with config.json and model.safetensors, or hf://org/name@revision"
_MOST_BYTES = 10_000_000
Read = TypeVar("Read")


def families() -> dict[str, str]:
    """Our model by the `model_type` of a config.json. A family that is built on another one has none of it."""
    register("lmtool.models")
    types = {entry.name: vars(entry.config).get("published_type") for entry in entries("model")}
    return {published: name for name, published in types.items() if published is not None}


@dataclass(frozen=True)
class PublishedFolder:
    """A folder and its config.json. checkpoint: what the user typed. revision: the commit on the hub, None locally."""

    checkpoint: str
    path: Path
    config: PublishedConfig
    revision: str | None = None

    def family(self) -> Any:
        """The module of its model family, with the maps. UserError for a family that lmtool does not have."""
        given = self.config.get("model_type")
        name = families().get(given) if isinstance(given, str) else None
        entry = None if name is None else lookup("model", name)
        module = None if entry is None else builder_module(entry)
        if not hasattr(module, "from_published_config"):
            known = ", ".join(sorted(families()))
            raise UserError(
                f"checkpoint={self.checkpoint}: model_type={given!r} in its config.json; lmtool reads {known}", _GIVE
            )
        return module

    def model_section(self) -> dict[str, Any]:
        """Its `model` section, as the decoder takes it. UserError where it is a variant that we do not compute."""
        family = self.family()
        return self._readable(lambda: dict(family.from_published_config(self.config)))

    def _readable(self, read: Callable[[], Read]) -> Read:
        """What is read of its config.json; UserError, naming the checkpoint, where it cannot be."""
        try:
            return read()
        except UserError as error:
            raise UserError(f"checkpoint={self.checkpoint}: {error.message}", error.hint) from error
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(
                f"checkpoint={self.checkpoint}: its config.json cannot be read: {problem!r}", "copy it again"
            ) from problem

    def saved_config(self) -> dict[str, Any]:
        """What a checkpoint of ours would have in its config.json: the model, the tokenizer in this folder, how it
        generates, and the task of a text classifier."""
        config = {"model": self.model_section(), "tokenizer": {"name": "folder", "path": str(self.path)}}
        generation = self._generation()
        config |= {"generation": generation} if generation else {}
        task = self._task() if head_of_class(self.config) is not None and self._unlike() is None else None
        return config if task is None else {**config, "task": task}

    def classifier_config(self) -> dict[str, Any]:
        """`saved_config` of a text classifier, which reads texts as in transformers: what looks like a special token
        is one, and no text is longer than its tokenizer says. UserError where it is of no task that lmtool has."""
        self.require_read_head()
        problem = self._readable(lambda: refusal(self.config))
        if problem is not None:
            raise UserError(f"checkpoint={self.checkpoint}: {problem}", "finetune it on a task: its head is new then")
        config, settings = {**self.saved_config(), "task": self._task()}, read_settings(self.path)
        if config["task"]["kind"] == "multiple_choice" and NUM_CHOICES not in self.config:
            raise UserError(
                f"checkpoint={self.checkpoint}: its config.json does not say how many choices a row has",
                f'write "{NUM_CHOICES}": 4 there, in a copy, if there are four',
            )
        entry = lookup("model", config["model"]["name"])
        assert entry is not None
        # A family without a table of positions names no longest text.
        longest = config["model"].get("max_positions", entry.config.model_fields["max_positions"].default)
        lengths = [longest, settings.get("model_max_length")]
        return {
            **config,
            "tokenizer": {**config["tokenizer"], "parse_special_tokens": not settings.get("split_special_tokens")},
            # A tokenizer without a limit of its own has one of 10^30.
            "max_length": min(
                int(length) for length in lengths if isinstance(length, int | float) and 1 <= length <= 10**9
            ),
        }

    def require_read_head(self) -> None:
        """UserError where its class has a head that lmtool does not read."""
        unlike = self._unlike()
        if unlike is not None:
            raise UserError(
                f"checkpoint={self.checkpoint}: its config.json names {unlike}",
                "finetune it on a task: lmtool finetune takes its backbone, and the head is new",
            )

    def _unlike(self) -> str | None:
        """Its class and why the head of that is not read; None where it is."""
        names, unlike = self.config.get("architectures"), self.family().PUBLISHED.unlike
        known = [name for name in names if name in unlike] if isinstance(names, list) else []
        return f"{known[0]}, whose head lmtool does not read: {unlike[known[0]]}" if known else None

    def _generation(self) -> dict[str, Any]:
        """How it generates by default, in the fields of `GenerationConfig`: its own file says so, or of old its
        config.json."""
        file = self.path / GENERATION
        return published_settings(read_object(self.checkpoint, file) if file.is_file() else self.config)

    def label_names(self) -> list[str]:
        """The names of its labels, in their order."""
        return self._readable(lambda: label_names(self.config))

    def _task(self) -> dict[str, Any] | None:
        return self._readable(lambda: task_of(self.config))


def published_folder(checkpoint: str, offline: bool = False) -> PublishedFolder | None:
    """The published folder that a `checkpoint=` names, with its config.json and tokenizer at hand; None where it names
    something else, such as a run of lmtool. UserError where it cannot be had or read."""
    if "://" in checkpoint:
        return _from_hub(checkpoint, offline)
    path = Path(checkpoint).expanduser()
    if not (path / CONFIG).is_file() or (path / "manifest.json").is_file():
        return None
    if (path / ADAPTER).is_file() and not any((path / name).is_file() for name in WEIGHTS):
        return None
    for name in TOKENIZER:
        if os.path.lexists(path / name) and not (path / name).is_file():  # it would be read as if there were none
            raise UserError(f"checkpoint={checkpoint}: {path / name} is no regular file", "copy the folder again")
    config = read_object(checkpoint, path / CONFIG)
    return None if isinstance(config.get("model"), dict) else PublishedFolder(checkpoint, path, PublishedConfig(config))


def weight_file(folder: PublishedFolder, offline: bool = False) -> Path:
    """The file with its weights, or the index of several; fetched where it is on the hub. UserError where there is
    none."""
    for name in WEIGHTS:
        path = fetched(folder, name, offline, required=False)
        if path is not None:
            return path
    raise UserError(
        f"checkpoint={folder.checkpoint}: {_missing(folder, offline)} holds no weights: none of {', '.join(WEIGHTS)}",
        _GIVE if folder.revision is None or not offline else "type the command once without offline=true",
    )


def _missing(folder: PublishedFolder, offline: bool) -> str:
    return "the hub's cache (offline=true)" if folder.revision is not None and offline else str(folder.path)


def fetched(folder: PublishedFolder, name: str, offline: bool, required: bool = True) -> Path | None:
    """A file of the folder, by its plain name or that of a sub-folder and its own. None where it is not there and not
    required."""
    parts = name.split("/")
    if len(parts) > 2 or any(part in ("", ".", "..") or Path(part).name != part for part in parts):
        raise UserError(f"checkpoint={folder.checkpoint}: {name!r} is no file name in its folder", "copy it again")
    path = folder.path / name
    if path.is_file():
        return path
    if folder.revision is not None:
        address = Address.of("checkpoint", folder.checkpoint, _GIVE)
        try:
            return address.file(name, offline, folder.revision)
        except Absent:
            if required:
                raise
    if required:
        raise UserError(f"checkpoint={folder.checkpoint}: {_missing(folder, offline)} lacks {name}", "copy it again")
    return None


def tokenizer_folder(path: str, offline: bool = False) -> Path:
    """The folder in the hub's cache with the tokenizer files of a `tokenizer.path=hf://...`. UserError where there are
    none, or none can be had."""
    give = "give a local folder with tokenizer.json, or hf://org/name@revision"
    address = Address.of("tokenizer.path", path, give)
    folder: Path | None = None
    absent: list[Absent] = []
    for name in TOKENIZER:
        try:
            # The cache keeps a folder for each commit: all files are of the first one's.
            folder = address.file(name, offline, None if folder is None else folder.name).parent
        except Absent as problem:
            absent.append(problem)
    if folder is None:
        raise absent[0]
    return folder


def _from_hub(checkpoint: str, offline: bool) -> PublishedFolder:
    address = Address.of("checkpoint", checkpoint, _GIVE)
    path = address.file(CONFIG, offline)
    # The cache keeps a folder for each commit: what is read later is of the same one, whatever happens to a branch.
    commit = path.parent.name
    for name in (*TOKENIZER, GENERATION):
        with suppress(Absent):
            address.file(name, offline, commit)
    return PublishedFolder(checkpoint, path.parent, PublishedConfig(read_object(checkpoint, path)), commit)


def read_settings(folder: Path) -> dict[str, Any]:
    """The tokenizer_config.json of a folder; empty where there is none. UserError where it is no JSON object."""
    path = folder / SETTINGS
    return dict(read_object(str(folder), path)) if path.is_file() else {}


def read_object(checkpoint: str, path: Path) -> Mapping[str, Any]:
    """A JSON file of a folder. UserError where it holds no JSON object."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(
                f"checkpoint={checkpoint}: {path} has more than {_MOST_BYTES} bytes", "copy the folder again"
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}", "copy the folder again") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: {error}", "copy the folder again") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: it holds no JSON object", "copy the folder again")
    return data
