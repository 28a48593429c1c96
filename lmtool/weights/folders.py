"""Published weights: a local folder in Hugging Face's layout, or `hf://org/name@revision` through the hub's cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lmtool.config.checkpoint import ADAPTER
from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.config.tables import builder_module, entries, lookup
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GENERATION, published_settings
from lmtool.models.published import HFConfig
from lmtool.system.environment import answers
from lmtool.system.secrets import masked
from lmtool.weights.task_heads import NUM_CHOICES, head_of_class, label_names, refusal, task_of

# Files of a repository on the hub, through huggingface_hub's cache: `hf://org/name@revision`.
#
# Imports huggingface_hub where it is needed only: half a second.


class MissingFile(UserError):
    """A file is neither cached nor available: the repository lacks it, or there is no network."""


@dataclass(frozen=True)
class Address:
    """A repository at a revision. typed: the key and value that name it (`checkpoint=hf://org/name`), for errors."""

    typed: str
    repository: str
    revision: str

    @classmethod
    def of(cls, key: str, text: str, hint: str) -> Address:
        """Parse an address. UserError with the hint if it is invalid."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        match = re.fullmatch(r"hf://((?:[\w.-]+/)?[\w.-]+)(?:@([\w./-]+))?", text)
        if match is None:
            raise UserError(f"{key}={text}: no address that lmtool reads", hint)
        try:
            validate_repo_id(match[1])
        except HFValidationError as problem:
            raise UserError(f"{key}={text}: no name on the hub: {_short(problem)}", hint) from problem
        # A revision is a path in the cache.
        if match[2] is not None and not all(part.strip(".") for part in match[2].split("/")):
            raise UserError(f"{key}={text}: {match[2]} is no branch, tag or commit", hint)
        return cls(f"{key}={text}", match[1], match[2] or "main")

    def file(self, name: str, offline: bool, revision: str | None = None) -> Path:
        """A file in the cache, downloaded if necessary. offline: never connect. revision: another one. MissingFile if
        there is none, UserError if the hub refuses it."""
        import huggingface_hub
        from huggingface_hub import constants, errors

        revision = revision or self.revision
        cached = huggingface_hub.try_to_load_from_cache(self.repository, name, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        file = f"{self.typed}: {name} of {self.repository}@{revision}"
        again = "type the command once with a network and without offline=true, or give a local folder"
        if offline or constants.HF_HUB_OFFLINE:
            raise MissingFile(f"{file}: offline=true, and not in the hub's cache", again)
        if not self._reachable:
            # Without a network the library retries for half a minute.
            raise MissingFile(f"{file}: no network, and not in the hub's cache", again)
        try:
            return Path(huggingface_hub.hf_hub_download(self.repository, name, revision=revision))
        except errors.LocalEntryNotFoundError as problem:
            raise MissingFile(f"{file}: {_short(problem)}", again) from problem
        except errors.EntryNotFoundError as problem:
            raise MissingFile(f"{file}: no such file there", again) from problem
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as problem:
            raise UserError(
                f"{self.typed}: {name}: {_short(problem)}",
                "see that the name and the revision are right, or give a local folder",
            ) from problem

    @cached_property
    def _reachable(self) -> bool:
        from huggingface_hub import constants

        return answers(constants.ENDPOINT)


def _short(problem: Exception) -> str:
    return masked(" ".join(str(problem).split()))[:160]


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
    types = {entry.name: vars(entry.config).get("published_type") for entry in entries("model")}
    return {published: name for name, published in types.items() if published is not None}


@dataclass(frozen=True)
class HFFolder:
    """A folder and its config.json. checkpoint: as typed. revision: the commit on the hub, None for a local folder."""

    checkpoint: str
    path: Path
    config: HFConfig
    revision: str | None = None

    def family(self) -> Any:
        """The module of its model family. UserError for a family that lmtool does not have."""
        given = self.config.get("model_type")
        name = families().get(given) if isinstance(given, str) else None
        entry = None if name is None else lookup("model", name)
        module = None if entry is None else builder_module(entry)
        if not hasattr(module, "from_hf_config"):
            known = ", ".join(sorted(families()))
            raise UserError(
                f"checkpoint={self.checkpoint}: model_type={given!r} in its config.json; lmtool reads {known}", _GIVE
            )
        return module

    def model_section(self) -> JsonObject:
        """Its `model` section, ready for decoding. UserError for an unsupported variant."""
        family = self.family()
        return self._readable(lambda: dict(family.from_hf_config(self.config)))

    def _readable(self, read: Callable[[], Read]) -> Read:
        """Decode part of its config.json; UserError with the checkpoint's name if that fails."""
        try:
            return read()
        except UserError as error:
            raise UserError(f"checkpoint={self.checkpoint}: {error.message}", error.hint) from error
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(
                f"checkpoint={self.checkpoint}: its config.json cannot be read: {problem!r}", "copy it again"
            ) from problem

    def saved_config(self) -> JsonObject:
        """The configuration that our checkpoint would have: model, tokenizer, generation settings, and a classifier's
        task."""
        config = {"model": self.model_section(), "tokenizer": {"name": "folder", "path": str(self.path)}}
        generation = self._generation()
        config |= {"generation": generation} if generation else {}
        task = self._task() if head_of_class(self.config) is not None and self._unlike() is None else None
        return config if task is None else {**config, "task": task}

    def classifier_config(self) -> JsonObject:
        """`saved_config` of a classifier that reads texts as in transformers: special tokens in texts are parsed, and
        texts are truncated at the tokenizer's length. UserError if lmtool has no such task."""
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
        # A family without a position table has no longest text.
        longest = config["model"].get("max_positions", entry.config.model_fields["max_positions"].default)
        lengths = [longest, settings.get("model_max_length")]
        return {
            **config,
            "tokenizer": {**config["tokenizer"], "parse_special_tokens": not settings.get("split_special_tokens")},
            # An unlimited tokenizer has the length 10^30.
            "max_length": min(
                int(length) for length in lengths if isinstance(length, int | float) and 1 <= length <= 10**9
            ),
        }

    def require_read_head(self) -> None:
        """Raise UserError if its class has a head that lmtool does not support."""
        unlike = self._unlike()
        if unlike is not None:
            raise UserError(
                f"checkpoint={self.checkpoint}: its config.json names {unlike}",
                "finetune it on a task: lmtool finetune takes its backbone, and the head is new",
            )

    def _unlike(self) -> str | None:
        """Its class and why that head is unsupported, or None."""
        names, unlike = self.config.get("architectures"), self.family().HF_FORMAT.unlike
        known = [name for name in names if name in unlike] if isinstance(names, list) else []
        return f"{known[0]}, whose head lmtool does not read: {unlike[known[0]]}" if known else None

    def _generation(self) -> JsonObject:
        """Default generation settings as fields of `GenerationConfig`: from generation_config.json or, in old folders,
        config.json."""
        file = self.path / GENERATION
        return published_settings(read_object(self.checkpoint, file) if file.is_file() else self.config)

    def label_names(self) -> list[str]:
        """Its label names, in order."""
        return self._readable(lambda: label_names(self.config))

    def _task(self) -> JsonObject | None:
        return self._readable(lambda: task_of(self.config))


def hf_folder(checkpoint: str, offline: bool = False) -> HFFolder | None:
    """The published folder named by `checkpoint=`, with config.json and tokenizer available; None for anything else,
    such as a run of lmtool. UserError if it cannot be downloaded or read."""
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
    return None if isinstance(config.get("model"), dict) else HFFolder(checkpoint, path, HFConfig(config))


def weight_file(folder: HFFolder, offline: bool = False) -> Path:
    """The file with its weights, or the index of several, downloaded if necessary. UserError if there is none."""
    for name in WEIGHTS:
        path = fetched(folder, name, offline, required=False)
        if path is not None:
            return path
    raise UserError(
        f"checkpoint={folder.checkpoint}: {_missing(folder, offline)} holds no weights: none of {', '.join(WEIGHTS)}",
        _GIVE if folder.revision is None or not offline else "type the command once without offline=true",
    )


def _missing(folder: HFFolder, offline: bool) -> str:
    return "the hub's cache (offline=true)" if folder.revision is not None and offline else str(folder.path)


def fetched(folder: HFFolder, name: str, offline: bool, required: bool = True) -> Path | None:
    """A file of the folder, by its name or sub-folder and name. None if it does not exist and is not required."""
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
        except MissingFile:
            if required:
                raise
    if required:
        raise UserError(f"checkpoint={folder.checkpoint}: {_missing(folder, offline)} lacks {name}", "copy it again")
    return None


def tokenizer_folder(path: str, offline: bool = False) -> Path:
    """The cached folder with the tokenizer files of `tokenizer.path=hf://...`. UserError if there are none, or they
    cannot be downloaded."""
    give = "give a local folder with tokenizer.json, or hf://org/name@revision"
    address = Address.of("tokenizer.path", path, give)
    folder: Path | None = None
    absent: list[MissingFile] = []
    for name in TOKENIZER:
        try:
            # The cache has one folder per commit; all files come from the first one's.
            folder = address.file(name, offline, None if folder is None else folder.name).parent
        except MissingFile as problem:
            absent.append(problem)
    if folder is None:
        raise absent[0]
    return folder


def _from_hub(checkpoint: str, offline: bool) -> HFFolder:
    address = Address.of("checkpoint", checkpoint, _GIVE)
    path = address.file(CONFIG, offline)
    # The cache has one folder per commit: later reads use the same one, even if the branch moves.
    commit = path.parent.name
    for name in (*TOKENIZER, GENERATION):
        with suppress(MissingFile):
            address.file(name, offline, commit)
    return HFFolder(checkpoint, path.parent, HFConfig(read_object(checkpoint, path)), commit)


def read_settings(folder: Path) -> JsonObject:
    """The tokenizer_config.json of a folder; empty if there is none. UserError if it is not a JSON object."""
    path = folder / SETTINGS
    return dict(read_object(str(folder), path)) if path.is_file() else {}


def read_object(checkpoint: str, path: Path) -> JsonMapping:
    """A JSON file of a folder. UserError if it is not a JSON object."""
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
