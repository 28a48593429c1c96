"""Finds and reads pretrained models in Hugging Face's format: local folders, and `hf://org/name@revision`, which is
downloaded into the hub's cache."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import builder_module, entries, lookup
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GENERATION, published_settings
from lmtool.models.published import HFConfig
from lmtool.runs.finding import ADAPTER, read_checkpoint
from lmtool.system.environment import is_reachable
from lmtool.system.files import read_json, user_path
from lmtool.system.secrets import masked
from lmtool.tokenizers.configs import TOKENIZER_FILES
from lmtool.weights.task_heads import NUM_CHOICES, head_of_class, label_names, refusal, task_of

if TYPE_CHECKING:
    from lmtool.models.family import HFFormat

# huggingface_hub takes half a second to import, so functions import it only where they need it.


class MissingFile(UserError):
    """A file is not in the hub's cache and cannot be downloaded, because the repository lacks it or there is no
    network."""


class NoNetwork(MissingFile):
    """A file is not in the hub's cache, and the hub cannot be asked for it."""


@dataclass(frozen=True)
class Address:
    """A repository on the hub ("org/name") at a revision: a branch, tag or commit. typed: the override that names the
    repository (`checkpoint=hf://org/name`), for error messages."""

    typed: str
    repository: str
    revision: str

    @classmethod
    def of(cls, key: str, text: str, hint: str) -> Address:
        """Parses an address. Raises UserError, which names `key`, if it is invalid."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        match = re.fullmatch(r"hf://((?:[\w.-]+/)?[\w.-]+)(?:@([\w./-]+))?", text)
        if match is None:
            raise UserError(f"{key}={text} is not an address of the form hf://org/name@revision", hint)
        try:
            validate_repo_id(match[1])
        except HFValidationError as problem:
            raise UserError(f"{key}={text} is not a valid repository name: {_short(problem)}", hint) from problem
        # The cache uses the revision as a path, so that "." and ".." would leave the cache.
        if match[2] is not None and not all(part.strip(".") for part in match[2].split("/")):
            raise UserError(f"{key}={text}: {match[2]} is not a branch, tag or commit", hint)
        return cls(f"{key}={text}", match[1], match[2] or "main")

    def file(self, name: str, offline: bool, revision: str | None = None) -> Path:
        """Returns the path of a file in the cache, after downloading it if necessary. revision: in place of the
        address's revision. Raises MissingFile if the file does not exist or cannot be downloaded, and UserError if the
        hub denies access."""
        import huggingface_hub
        from huggingface_hub import constants, errors

        revision = revision or self.revision
        cached = huggingface_hub.try_to_load_from_cache(self.repository, name, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        file = f"{self.typed}: {name} of {self.repository}@{revision}"
        key = self.typed.partition("=")[0]
        if cached is huggingface_hub._CACHED_NO_EXIST:  # the hub has said so of this commit
            raise MissingFile(f"{file} does not exist", "use a local folder")
        hint = f"run the command once with network access, not offline, or use a local folder: {key}=FOLDER"
        if offline or constants.HF_HUB_OFFLINE:
            raise NoNetwork(f"{file} is not in the hub's cache, and offline=true or HF_HUB_OFFLINE is set", hint)
        if not self._reachable:
            # Without a network, the library would retry for half a minute.
            raise NoNetwork(f"{file} is not in the hub's cache, and there is no network", hint)
        try:
            return Path(_download(self.repository, name, revision))
        except errors.LocalEntryNotFoundError as problem:
            # The hub does not answer, so nobody knows whether the file exists: it must not count as missing.
            raise UserError(f"{file} is not in the hub's cache, and the hub does not answer", hint) from problem
        except errors.EntryNotFoundError as problem:
            raise MissingFile(f"{file} does not exist", hint) from problem
        except errors.GatedRepoError as problem:
            raise UserError(
                f"{self.typed}: {self.repository} is gated: only accounts that accepted its terms may read it",
                f"open {constants.ENDPOINT}/{self.repository} to accept them, and set HF_TOKEN to your token",
            ) from problem
        except errors.RevisionNotFoundError as problem:
            raise UserError(
                f"{self.typed}: {self.repository} has no branch, tag or commit {revision}",
                f"write {key}=hf://{self.repository} for its branch main",
            ) from problem
        except errors.RepositoryNotFoundError as problem:
            raise UserError(
                f"{self.typed}: the hub has no repository {self.repository} that you may read",
                "check its name; for a private one, set the variable HF_TOKEN to your token",
            ) from problem
        except _transport_errors() + (errors.HfHubHTTPError, errors.HFValidationError, OSError) as problem:
            raise UserError(
                f"{self.typed}: {name}: {_short(problem)}",
                f"run the command again (complete files are kept), or use a local folder: {key}=FOLDER",
            ) from problem

    @cached_property
    def _reachable(self) -> bool:
        from huggingface_hub import constants

        return is_reachable(constants.ENDPOINT)


_ATTEMPTS = 4


def _download(repository: str, name: str, revision: str) -> str:
    """Retries after an error of the server; the library itself does so only for some requests."""
    from huggingface_hub import hf_hub_download

    for attempt in range(1, _ATTEMPTS):
        try:
            return hf_hub_download(repository, name, revision=revision)
        except _transport_errors() + (OSError,) as problem:
            if getattr(getattr(problem, "response", None), "status_code", 0) < 500:
                raise
            time.sleep(attempt)
    return hf_hub_download(repository, name, revision=revision)


def _transport_errors() -> Any:
    """The errors of the library with which huggingface_hub makes its requests."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__mro__ if base.__module__.startswith(("httpx", "requests")))


def _short(problem: Exception) -> str:
    return masked(" ".join(str(problem).split()))[:160]


CONFIG, SETTINGS = "config.json", "tokenizer_config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weight files, in order of preference."""
_USE_CHECKPOINT = "use a run of lmtool, a folder with config.json and model.safetensors, or hf://org/name@revision"
Decoded = TypeVar("Decoded")


def families() -> dict[str, str]:
    """Returns lmtool's name of each model family by the `model_type` in config.json. Families that use the `model_type`
    of another family are not included."""
    types = {entry.name: vars(entry.config).get("hf_model_type") for entry in entries("model")}
    return {model_type: name for name, model_type in types.items() if model_type is not None}


@dataclass(frozen=True)
class HFFolder:
    """A folder in Hugging Face's format. checkpoint: the value of `checkpoint=` that the user gave. config: the content
    of config.json. revision: the commit on the hub; None for a local folder."""

    checkpoint: str
    path: Path
    config: HFConfig
    revision: str | None = None

    def family(self) -> HFFormat:
        """Returns the format of the model family. Raises UserError if lmtool does not have the family."""
        model_type = self.config.get("model_type")
        name = families().get(model_type) if isinstance(model_type, str) else None
        entry = None if name is None else lookup("model", name)
        family: HFFormat | None = None if entry is None else vars(builder_module(entry)).get("HF_FORMAT")
        if family is None:
            known = ", ".join(sorted(families()))
            raise UserError(
                f"checkpoint={self.checkpoint}: config.json has model_type={model_type!r}; lmtool supports {known}",
                _USE_CHECKPOINT,
            )
        return family

    def model_section(self) -> JsonObject:
        """Returns the `model` section of an equivalent lmtool configuration, as plain JSON data. Raises UserError if
        lmtool does not support the variant."""
        family = self.family()
        return self._decode(lambda: family.from_hf_config(self.config))

    def _decode(self, read: Callable[[], Decoded]) -> Decoded:
        try:
            return read()
        except UserError as error:
            raise UserError(f"checkpoint={self.checkpoint}: {error.message}", error.hint) from error
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(
                f"checkpoint={self.checkpoint}: config.json cannot be read: {problem!r}", "copy the folder again"
            ) from problem

    def saved_config(self) -> JsonObject:
        """Returns the configuration of an equivalent lmtool checkpoint, as plain JSON data: the sections for model,
        tokenizer, generation settings, and the task of a finetuned model."""
        config = {"model": self.model_section(), "tokenizer": {"name": "folder", "path": str(self.path)}}
        settings = self.path / GENERATION
        # Older folders have the generation settings in config.json.
        generation = published_settings(read_object(settings) if settings.is_file() else self.config)
        config |= {"generation": generation} if generation else {}
        task = self._task() if head_of_class(self.config) is not None and self._unsupported_head() is None else None
        return config if task is None else {**config, "task": task}

    def classifier_config(self) -> JsonObject:
        """Returns `saved_config` for a finetuned model, with the defaults of transformers for texts: special tokens in
        texts are parsed, and texts are truncated to the tokenizer's length. Raises UserError if lmtool does not support
        the task."""
        self.require_supported_head()
        problem = self._decode(lambda: refusal(self.config))
        if problem is not None:
            raise UserError(
                f"checkpoint={self.checkpoint}: {problem}", "finetune the checkpoint on a task, with a new head"
            )
        config, settings = {**self.saved_config(), "task": self._task()}, read_settings(self.path)
        if config["task"]["kind"] == "multiple_choice" and NUM_CHOICES not in self.config:
            raise UserError(
                f"checkpoint={self.checkpoint}: config.json lacks the number of choices per row",
                f'add "{NUM_CHOICES}": 4 to config.json in a copy of the folder, for four choices',
            )
        entry = lookup("model", config["model"]["name"])
        assert entry is not None
        # A family without learned positions has no maximum length.
        longest = config["model"].get("max_positions", entry.config.model_fields["max_positions"].default)
        lengths = [length for length in (longest, tokenizer_length(settings)) if length is not None]
        return {
            **config,
            "tokenizer": {**config["tokenizer"], "parse_special_tokens": not settings.get("split_special_tokens")},
            "max_length": min(lengths),
        }

    def require_supported_head(self) -> None:
        """Raises UserError if the folder's class has a head that lmtool does not support."""
        unsupported = self._unsupported_head()
        if unsupported is not None:
            raise UserError(
                f"checkpoint={self.checkpoint}: config.json names {unsupported}",
                "finetune the checkpoint on a task: lmtool finetune loads the backbone and adds a new head",
            )

    def _unsupported_head(self) -> str | None:
        """The folder's class and the reason why lmtool does not support its head, as text."""
        names, reasons = self.config.get("architectures"), self.family().unsupported
        unsupported = [name for name in names if name in reasons] if isinstance(names, list) else []
        if not unsupported:
            return None
        return f"{unsupported[0]}, whose head lmtool does not support: {reasons[unsupported[0]]}"

    def label_names(self) -> list[str]:
        """Returns the names of the labels in the order of their ids."""
        return self._decode(lambda: label_names(self.config))

    def _task(self) -> JsonObject | None:
        return self._decode(lambda: task_of(self.config))


def saved_configuration(checkpoint: str, offline: bool) -> JsonObject:
    """Returns the configuration of a run, checkpoint or published folder, as it was saved or as its files imply. Raises
    UserError if it cannot be read."""
    published = hf_folder(checkpoint, offline)
    return read_checkpoint(checkpoint) if published is None else published.saved_config()


def hf_folder(checkpoint: str, offline: bool = False) -> HFFolder | None:
    """Returns the Hugging Face folder that `checkpoint=` names, after downloading config.json and the tokenizer files
    if necessary; None if `checkpoint=` names anything else, such as a run of lmtool. Raises UserError if the folder
    cannot be downloaded or read."""
    if "://" in checkpoint:
        return _from_hub(checkpoint, offline)
    path = user_path(checkpoint)
    if not (path / CONFIG).is_file() or (path / "manifest.json").is_file():
        return None
    if (path / ADAPTER).is_file() and not any((path / name).is_file() for name in WEIGHTS):
        return None
    for name in TOKENIZER_FILES:
        if os.path.lexists(path / name) and not (path / name).is_file():  # it would be ignored without an error
            raise UserError(f"checkpoint={checkpoint}: {path / name} is not a regular file", "copy the folder again")
    config = read_object(path / CONFIG)
    return None if isinstance(config.get("model"), dict) else HFFolder(checkpoint, path, HFConfig(config))


def weight_file(folder: HFFolder, offline: bool = False) -> Path:
    """Returns the path of the weight file, or of the index of several weight files, after downloading it if necessary.
    Raises UserError if there is none."""
    for name in WEIGHTS:
        try:
            path = fetch_file(folder, name, offline)
        except NoNetwork:
            if not offline:
                raise
        except MissingFile:
            continue
        else:
            assert path is not None
            return path
    raise UserError(
        f"checkpoint={folder.checkpoint}: {_location(folder, offline)} has no weights: none of {', '.join(WEIGHTS)}",
        _USE_CHECKPOINT if folder.revision is None or not offline else "run the command once without offline=true",
    )


def _location(folder: HFFolder, offline: bool) -> str:
    return "the hub's cache (offline=true)" if folder.revision is not None and offline else str(folder.path)


def fetch_file(folder: HFFolder, name: str, offline: bool, required: bool = True) -> Path | None:
    """Returns the path of a file in a folder or in one of its subfolders (SUBFOLDER/NAME), after downloading it if
    necessary; None if a file that is not `required` is missing. Raises UserError if the name refers to a file outside
    the folder, or if a required file is missing."""
    parts = name.split("/")
    if len(parts) > 2 or any(part in ("", ".", "..") or Path(part).name != part for part in parts):
        raise UserError(
            f"checkpoint={folder.checkpoint}: {name!r} is not a file in the folder", "copy the folder again"
        )
    path = folder.path / name
    if path.is_file():
        return path
    if folder.revision is not None:
        address = Address.of("checkpoint", folder.checkpoint, _USE_CHECKPOINT)
        try:
            return address.file(name, offline, folder.revision)
        except MissingFile:
            if required:
                raise
    if required:
        raise MissingFile(
            f"checkpoint={folder.checkpoint}: {_location(folder, offline)} lacks {name}", "copy the folder again"
        )
    return None


def tokenizer_folder(path: str, offline: bool = False) -> Path:
    """Returns the cached folder with the tokenizer files of `tokenizer.path=hf://...`. Raises UserError if the
    repository has none or they cannot be downloaded."""
    hint = "use a local folder with tokenizer.json, or hf://org/name@revision"
    address = Address.of("tokenizer.path", path, hint)
    folder: Path | None = None
    errors: list[MissingFile] = []
    for name in TOKENIZER_FILES:
        try:
            # The cache has one folder per commit; all files come from the commit of the first file.
            folder = address.file(name, offline, None if folder is None else folder.name).parent
        except MissingFile as problem:
            errors.append(problem)
    if folder is None:
        raise errors[0]
    return folder


def _from_hub(checkpoint: str, offline: bool) -> HFFolder:
    address = Address.of("checkpoint", checkpoint, _USE_CHECKPOINT)
    path = address.file(CONFIG, offline)
    # The cache has one folder per commit. Later reads use this commit even if the branch has moved in the meantime.
    commit = path.parent.name
    for name in (*TOKENIZER_FILES, GENERATION):
        with suppress(MissingFile):
            address.file(name, offline, commit)
    return HFFolder(checkpoint, path.parent, HFConfig(read_object(path)), commit)


def read_settings(folder: Path) -> JsonObject:
    """Reads the tokenizer_config.json of a folder; {} if the folder has none. Raises UserError if it is not a JSON
    object."""
    path = folder / SETTINGS
    return dict(read_object(path)) if path.is_file() else {}


def tokenizer_length(settings: JsonMapping) -> int | None:
    """Returns the maximum number of tokens that a tokenizer_config.json sets; None if there is no limit. transformers
    writes 10^30 for no limit, so very large numbers count as no limit."""
    length = settings.get("model_max_length")
    return int(length) if isinstance(length, int | float) and 1 <= length <= 10**9 else None


def read_object(path: Path) -> JsonObject:
    """Reads a JSON object from a published folder. Raises UserError if the file contains anything else."""
    data = read_json_file(path)
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a JSON object", "copy the folder again")
    return data


def read_json_file(path: Path) -> Any:
    """Reads a JSON file of a published folder. Raises UserError if the file is too large or not JSON."""
    return read_json(path, 10_000_000, "copy the folder again")
