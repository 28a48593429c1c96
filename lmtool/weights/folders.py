"""Where published weights lie: a local folder in Hugging Face's layout, or `hf://org/name@revision` in the hub's cache.

Imports no torch by itself: a command's configuration is decoded with it. Only the files named here are ever read, and
nothing in a folder is executed.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from lmtool.config.tables import builder_module, lookup
from lmtool.errors import UserError
from lmtool.models.published import PublishedConfig

SCHEME = "hf://"
CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The files that hold weights, the preferred ones first."""
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "spiece.model", "sentencepiece.model", "spm.model", "tokenizer.model",
)  # fmt: skip
FAMILIES = {
    "bert": "bert",
    "roberta": "roberta",
    "distilbert": "distilbert",
    "albert": "albert",
    "electra": "electra",
    "gpt2": "gpt",
    "openai-gpt": "gpt1",
    "t5": "t5",
    "bart": "bart",
    "marian": "transformer",
}
"""Our model by the `model_type` of a config.json."""
_GIVE = "give a run of lmtool, a folder with config.json and model.safetensors, or hf://org/name@revision"
_MOST_BYTES = 10_000_000
_PATIENCE_SECONDS = 5.0


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
        name = FAMILIES.get(given) if isinstance(given, str) else None
        entry = None if name is None else lookup("model", name)
        module = None if entry is None else builder_module(entry)
        if not hasattr(module, "from_published_config"):
            known = ", ".join(sorted(FAMILIES))
            raise UserError(
                f"checkpoint={self.checkpoint}: model_type={given!r} in its config.json; lmtool reads {known}", _GIVE
            )
        return module

    def model_section(self) -> dict[str, Any]:
        """Its `model` section, as the decoder takes it. UserError where it is a variant that we do not compute."""
        family = self.family()
        try:
            return dict(family.from_published_config(self.config))
        except UserError as error:
            raise UserError(f"checkpoint={self.checkpoint}: {error.message}", error.hint) from error
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(
                f"checkpoint={self.checkpoint}: its config.json cannot be read: {problem!r}", "copy it again"
            ) from problem

    def saved_config(self) -> dict[str, Any]:
        """What a checkpoint of ours would have in its config.json: the model, and the tokenizer in this folder."""
        return {"model": self.model_section(), "tokenizer": {"name": "folder", "path": str(self.path)}}


def published_folder(checkpoint: str, offline: bool = False) -> PublishedFolder | None:
    """The published folder that a `checkpoint=` names, with its config.json and tokenizer at hand; None where it names
    something else, such as a run of lmtool. UserError where it cannot be had or read."""
    if "://" in checkpoint:
        return _from_hub(checkpoint, offline)
    path = Path(checkpoint).expanduser()
    if not (path / CONFIG).is_file() or (path / "manifest.json").is_file():
        return None
    config = _read_config(checkpoint, path / CONFIG)
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
    """A file of the folder, by its plain name. None where it is not there and not required."""
    if Path(name).name != name:
        raise UserError(f"checkpoint={folder.checkpoint}: {name!r} is no file name in its folder", "copy it again")
    path = folder.path / name
    if path.is_file():
        return path
    if folder.revision is not None:
        organization_name = _parsed(folder.checkpoint)[0]
        found = _download(folder.checkpoint, organization_name, name, folder.revision, offline, required)
        if found is not None:
            return found
    if required:
        raise UserError(f"checkpoint={folder.checkpoint}: {_missing(folder, offline)} lacks {name}", "copy it again")
    return None


def _parsed(checkpoint: str) -> tuple[str, str]:
    """The repository and the revision of a `hf://` address."""
    match = re.fullmatch(r"hf://((?:[\w.-]+/)?[\w.-]+)(?:@([\w./-]+))?", checkpoint)
    if match is None:
        raise UserError(f"checkpoint={checkpoint}: no address that lmtool reads", _GIVE)
    return match[1], match[2] or "main"


def _from_hub(checkpoint: str, offline: bool) -> PublishedFolder:
    repository, revision = _parsed(checkpoint)
    path = _download(checkpoint, repository, CONFIG, revision, offline, required=True)
    assert path is not None
    # The cache keeps a folder for each commit: what is read later is of the same one, whatever happens to a branch.
    commit = path.parent.name
    for name in TOKENIZER:
        _download(checkpoint, repository, name, commit, offline, required=False)
    return PublishedFolder(checkpoint, path.parent, PublishedConfig(_read_config(checkpoint, path)), commit)


def _download(checkpoint: str, repository: str, name: str, revision: str, offline: bool, required: bool) -> Path | None:
    import huggingface_hub  # half a second to import, and needed for the hub only
    from huggingface_hub import constants, errors

    cached = huggingface_hub.try_to_load_from_cache(repository, name, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    offline = offline or constants.HF_HUB_OFFLINE
    reason = "offline=true, and not in the hub's cache"
    if not offline and not _reachable(constants.ENDPOINT):
        # Without a network the library retries for half a minute.
        offline, reason = True, "no network, and not in the hub's cache"
    if not offline:
        try:
            return Path(huggingface_hub.hf_hub_download(repository, name, revision=revision))
        except errors.LocalEntryNotFoundError as problem:
            reason = " ".join(str(problem).split())[:160]
        except errors.EntryNotFoundError:
            reason = "no such file there"
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as problem:
            raise UserError(
                f"checkpoint={checkpoint}: {name}: {' '.join(str(problem).split())[:160]}",
                "see that the name and the revision are right, or give a local folder",
            ) from problem
    if not required:
        return None
    raise UserError(
        f"checkpoint={checkpoint}: {name} of {repository}@{revision}: {reason}",
        "type the command once with a network and without offline=true, or give a local folder",
    )


def _reachable(endpoint: str) -> bool:
    """Whether the hub answers a connection within seconds; taken for granted behind a proxy."""
    if getproxies().get("https"):
        return True
    host = urlsplit(endpoint)
    try:
        socket.create_connection((host.hostname, host.port or 443), timeout=_PATIENCE_SECONDS).close()
    except OSError:
        return False
    return True


def _read_config(checkpoint: str, path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"checkpoint={checkpoint}: {path} has more than {_MOST_BYTES} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}", "copy the folder again") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: {error}", "copy the folder again") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: it holds no JSON object", "copy the folder again")
    return data
