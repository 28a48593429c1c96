"""A checkpoint on disk: written whole or not at all, verified on every load, no pickle.

    step_00001000/  model.safetensors      the learner's tensors; tied ones once
                    optimizer.safetensors  KIND.PARAMETER
                    state.json             step, cursor, budgets, best score: see progress.py
                    config.json            the resolved configuration
                    ...                    what the command adds (tokenizer files)
                    manifest.json          bytes and sha256 of each; written last

It is written to a temporary folder, every file is synced, then the manifest, then the folder is renamed. Neither
safetensors nor torch's format notices flipped bits in tensors, the manifest does.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lmtool.config.saved import checkpoint_folder
from lmtool.errors import UserError
from lmtool.training.files import sync_path, to_json, write_bytes

FORMAT = 1
MODEL, OPTIMIZER, STATE, CONFIG, MANIFEST = (
    "model.safetensors", "optimizer.safetensors", "state.json", "config.json", "manifest.json",
)  # fmt: skip
TEMPORARY, DELETED, BAD = ".tmp-", ".del-", "bad-"
_TIED = "tied"


class Damaged(Exception):
    """A checkpoint that does not verify: which file, and what is wrong with it."""

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path} {why}")
        self.path, self.why = path, why


# --- writing -------------------------------------------------------------------------------------------------------


def write_checkpoint(
    checkpoints: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    write_extras: Callable[[Path], None] | None = None,
) -> Path:
    """Write `step_...` into the folder `checkpoints` and return it. OSError where the disk refuses; nothing is left
    then. `write_extras` is called with the temporary folder and may put files into it."""
    final = checkpoints / f"step_{step:08d}"
    draft = checkpoints / f"{TEMPORARY}{final.name}-{os.getpid()}"
    try:
        draft.mkdir(parents=True)
        save_tensors(weights, draft / MODEL)
        save_tensors(optimizer, draft / OPTIMIZER)
        write_bytes(draft / STATE, to_json(state).encode())
        write_bytes(draft / CONFIG, to_json(config).encode())
        if write_extras is not None:
            write_extras(draft)
        write_manifest(draft, step)
        os.rename(draft, final)
        sync_path(checkpoints)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return final


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """One safetensors file. A tensor known under several names (tied weights) is stored under the first; the others
    stand in the header."""
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device))
        if tensor.numel() and same in first:
            tied[name] = first[same]
            continue
        first[same] = name
        storage = tensor.untyped_storage()
        own = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
        storages.add(storage.data_ptr())
        stored[name] = tensor.detach() if own else tensor.detach().clone(memory_format=torch.contiguous_format)
    metadata = {"format": "pt"} | ({_TIED: json.dumps(tied)} if tied else {})
    try:
        save_file(stored, path, metadata=metadata)
    except SafetensorError as error:
        raise _os_error(error, path) from error
    os.chmod(path, 0o666 & ~_umask())  # the library's files are readable by their owner alone
    sync_path(path)


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current


def _os_error(error: SafetensorError, path: Path) -> OSError:
    """The library tells the system's errors in words: `... (os error 28)`."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code) if number else str(error), str(path))


def write_manifest(folder: Path, step: int) -> None:
    """Hash what is in the folder, sync it, and write the manifest last."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listing = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
    }
    for path in files:
        sync_path(path)
    write_bytes(folder / MANIFEST, _manifest_bytes(step, listing))
    sync_path(folder)


def _manifest_bytes(step: int, listing: Mapping[str, Any]) -> bytes:
    """The manifest carries a hash of itself, so that a flipped bit in it is noticed too."""
    body = {"format": FORMAT, "step": step, "files": dict(listing)}
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return to_json({**body, "sha256": own}).encode()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- verifying -----------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """The listing of files. Damaged where the manifest is missing or not as it was written; UserError where a newer
    lmtool wrote it."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise Damaged(path, "is missing") from None
    try:
        manifest = json.loads(raw)
        if isinstance(manifest["format"], int) and manifest["format"] > FORMAT:
            raise UserError(
                f"{folder} was written by a newer lmtool (format {manifest['format']}, this one reads {FORMAT})",
                "pip install --upgrade lmtool",
            )
        whole = raw == _manifest_bytes(manifest["step"], manifest["files"])
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise Damaged(path, "is not as it was written")
    missing = {MODEL, STATE, CONFIG} - manifest["files"].keys()
    if missing:
        raise Damaged(path, f"lists no {sorted(missing)[0]}")
    return manifest["files"]


def verify(folder: Path, only: str | None = None, hashes: bool = True) -> None:
    """Hold every file (or one) against the manifest. Damaged, naming the file, where one differs. Without `hashes`
    presence and sizes alone: enough to choose a folder whose files are verified when they are read."""
    files = read_manifest(folder)
    for name, facts in files.items():
        if only is not None and name != only:
            continue
        path = folder / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise Damaged(path, "is missing") from None
        if size != facts["bytes"]:
            raise Damaged(path, f"is damaged: {size} bytes instead of {facts['bytes']}")
        if hashes and sha256(path) != facts["sha256"]:
            raise Damaged(path, "is damaged: its sha256 is not the manifest's")
    if only is not None and only not in files:
        raise Damaged(folder / only, "is not in the manifest")


def saved_steps(checkpoints: Path) -> list[Path]:
    """Folders named as checkpoints, newest first. They are not verified here."""
    if not checkpoints.is_dir():
        return []
    named = [path for path in checkpoints.iterdir() if re.fullmatch(r"step_\d{8,}", path.name) and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name[5:]), reverse=True)


def pointed(checkpoints: Path, pointer: str) -> Path | None:
    """The checkpoint that `last` or `best` names, or None."""
    try:
        name = (checkpoints / pointer).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None
    folder = checkpoints / name
    return folder if re.fullmatch(r"step_\d{8,}", name) and folder.is_dir() else None


# --- reading, for commands -----------------------------------------------------------------------------------------


def find(path: str | Path) -> Path:
    """The checkpoint folder a user means, as `saved.checkpoint_folder` has it. UserError, naming what is wrong and one
    that is whole, where a file is missing or cut; the contents are verified by what reads them."""
    folder = checkpoint_folder(path)
    try:
        verify(folder, hashes=False)
    except Damaged as damage:
        raise _refuse(damage, folder) from damage
    return folder


def _refuse(damage: Damaged, folder: Path) -> UserError:
    for other in saved_steps(folder.parent):
        if other != folder:
            try:
                verify(other)
            except Damaged:
                continue
            return UserError(str(damage), f"checkpoint={other} is whole")
    return UserError(str(damage), "copy it again from where it came, or give another checkpoint=")


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one verified file, on the CPU, tied ones under all their names. UserError where it is damaged."""
    path = folder / name
    try:
        verify(folder, only=name)
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 it is no dict
            tied = json.loads((file.metadata() or {}).get(_TIED, "{}"))
    except Damaged as damage:
        raise _refuse(damage, folder) from damage
    except SafetensorError as error:
        raise UserError(f"{path} is no safetensors file: {error}", "give another checkpoint=") from error
    return tensors | {alias: tensors[first] for alias, first in tied.items()}


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """Every tensor of the learner by name: `backbone.`, `heads.NAME.`, `objective.`."""
    return read_tensors(Path(folder), MODEL)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        verify(folder, only=name)
    except Damaged as damage:
        raise _refuse(damage, folder) from damage
    return json.loads((folder / name).read_text(encoding="utf-8"))


def read_state(folder: str | Path) -> dict[str, Any]:
    """state.json: step, epoch, tokens, seconds, total_steps, best_step, best_value, metrics, ..."""
    return _read_json(Path(folder), STATE)


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json: the resolved configuration, to be decoded by the same strict decoder as any other."""
    return _read_json(Path(folder), CONFIG)


def load_weights(learner: nn.Module, tensors: Mapping[str, Tensor], origin: str | Path) -> None:
    """Put all weights into the learner. UserError, naming the first three, where names or shapes differ."""
    own = learner.state_dict()
    wrong = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    wrong += [f"{name} is unknown" for name in tensors.keys() - own.keys()]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"{origin} is of another model: {'; '.join(sorted(wrong)[:3])}{more}",
            "go on with the configuration it was trained with, or give another name=",
        )
    learner.load_state_dict(dict(tensors))
