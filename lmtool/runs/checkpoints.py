"""Checkpoints on disk: written atomically, verified on every load, no pickle.

    step_00001000/  model.safetensors      the learner's tensors, tied tensors once; without a tuned run's base model
                    optimizer.safetensors  the optimizer's tensors, named KIND.PARAMETER
                    carried.safetensors    the state that the model carries from batch to batch, if any
                    state.json             step, the loader's cursor, budgets, best score: see training/progress.py
                    config.json            the resolved configuration
                    ...                    files of the command (tokenizer files, data.json, ...)
                    manifest.json          size and sha256 of each file; written last: see system/files.py

The files are written to a temporary folder and synced, then the manifest is written, then the folder is renamed.
runs/finding.py finds and verifies checkpoints.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lmtool.errors import CheckFailed, UserError
from lmtool.runs.files import to_json, write_errors
from lmtool.runs.finding import (
    CARRIED,
    CONFIG,
    MODEL,
    OPTIMIZER,
    STATE,
    of_step,
    read_manifest,
    read_state,
    refusal,
    saved_steps,
    verify,
)
from lmtool.system.files import Damaged, parse_json, sync_path, write_bytes, write_manifest

TEMPORARY, DELETED, BAD = ".tmp-", ".del-", "bad-"
_TIED = "tied"


@contextmanager
def _draft_of(final: Path) -> Iterator[Path]:
    draft = final.with_name(f"{TEMPORARY}{final.name}-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        yield draft
        os.rename(draft, final)
        sync_path(final.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def write_checkpoint(
    checkpoints: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, object],
    config: Mapping[str, object],
    write_files: Callable[[Path], None] | None = None,
    carried: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes the checkpoint of a number of optimizer steps atomically and returns its folder. weights, optimizer:
    tensors by name. write_files: adds further files to the folder that it receives. carried: the state that the model
    carries from batch to batch. Raises OSError if writing fails; nothing is left behind."""
    final = checkpoints / f"step_{step:08d}"
    with _draft_of(final) as draft:
        save_tensors(weights, draft / MODEL)
        save_tensors(optimizer, draft / OPTIMIZER)
        if carried:
            save_tensors(carried, draft / CARRIED)
        write_bytes(draft / STATE, to_json(state).encode())
        write_bytes(draft / CONFIG, to_json(config).encode())
        if write_files is not None:
            write_files(draft)
        write_manifest(draft, {"step": step})
    return final


def copy_checkpoint(source: Path, checkpoints: Path, replaced: Mapping[str, bytes]) -> Path:
    """Copies a checkpoint to another run's folder of checkpoints, under the same name, and returns the copy. replaced:
    the contents of files that differ in the copy, by name. Raises Damaged if a file of the source differs from its
    manifest, OSError if writing fails; nothing is left behind."""
    manifest = read_manifest(source)
    manifest.verify(hashes=False)
    copied = [name for name in manifest.files if name not in replaced]
    final = checkpoints / source.name
    with _draft_of(final) as draft:
        for name in copied:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(source / name, draft / name)
            except FileNotFoundError as error:
                raise Damaged(source / name, "is missing") from error
        for name, content in replaced.items():
            write_bytes(draft / name, content)
        write_manifest(draft, manifest.metadata)
        files = read_manifest(draft).files
        for name in copied:  # `write_manifest` has hashed the copies
            if files[name] != manifest.files[name]:
                raise Damaged(source / name, "is damaged: its sha256 differs from the manifest")
    return final


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file. A tensor with several names (tied weights) is stored under the first; the header maps
    the other names to the first."""
    unique: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device))
        if tensor.numel() and identity in first:
            tied[name] = first[identity]
            continue
        first[identity] = name
        storage = tensor.untyped_storage()
        compact = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
        storages.add(storage.data_ptr())
        unique[name] = tensor.detach() if compact else tensor.detach().clone(memory_format=torch.contiguous_format)
    metadata = {"format": "pt"} | ({_TIED: json.dumps(tied)} if tied else {})
    try:
        save_file(unique, path, metadata=metadata)
        if tied:
            _sort_metadata(path)
    except SafetensorError as error:
        raise _os_error(error, path) from error
    os.chmod(path, 0o666 & ~_umask())  # the library makes files readable only by their owner
    sync_path(path)


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata of the header. The library's order is random, but equal tensors must give equal files."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(content) == size:
            file.seek(8)
            file.write(content)


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current


def _os_error(error: SafetensorError, path: Path) -> OSError:
    """Returns the OSError that the library reports as text: `... (os error 28)`."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code) if number else str(error), str(path))


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Reads a file of tensors to the CPU after verifying it, tied tensors under all their names. Raises UserError if
    the file is damaged."""
    path = folder / name
    try:
        verify(folder, only=name)
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 not a dict
            tied = parse_json((file.metadata() or {}).get(_TIED, "{}"), path, "set another checkpoint=")
    except Damaged as damage:
        raise refusal(damage) from damage
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {error}", "set another checkpoint=") from error
    return tensors | {alias: tensors[first] for alias, first in tied.items()}


def tensor_names(folder: Path) -> set[str]:
    """Returns the names of a checkpoint's tensors without reading or verifying them. Raises UserError if the file
    cannot be opened."""
    path = folder / MODEL
    try:
        with safe_open(path, framework="pt") as file:
            tied = parse_json((file.metadata() or {}).get(_TIED, "{}"), path, "set another checkpoint=")
            return {*file.keys(), *tied}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a safetensors file: {error}", "set another checkpoint=") from error


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """Reads the tensors of a checkpoint; their names begin with `backbone.`, `heads.NAME.` or `objective.`. A tuned
    run's checkpoint lacks the weights of its base model, see weights/reading.py."""
    return read_tensors(Path(folder), MODEL)


def mismatches(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Describes how tensors differ from a model's: missing names, extra names, different shapes."""
    return [
        *(f"{name} is missing" for name in expected if name not in tensors),
        *(f"{name} is not in the model" for name in tensors if name not in expected),
        *(
            f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in tensors and tensors[name].shape != tensor.shape
        ),
    ]


# The resume point is selected once, before anything is read, so that tokenizer, counters, weights and optimizer come
# from the same checkpoint.


def resume_point(checkpoints: Path, report: Callable[[str], None]) -> Path | None:
    """Returns the latest intact checkpoint of a run, or None if the run has no checkpoints. Renames and reports damaged
    checkpoints after it, and a damaged best checkpoint. Raises CheckFailed, and renames nothing, if no checkpoint is
    intact."""
    damages: dict[Path, Damaged] = {}
    for folder in saved_steps(checkpoints):
        try:
            verify(folder)
        except Damaged as damage:
            damages[folder] = damage
            continue
        for damaged, problem in damages.items():
            report(f"{problem}; set aside as {_set_aside(damaged).name}, the run resumes from {folder.name}")
        _check_best(folder, report)
        return folder
    if damages:
        subject = "the only checkpoint" if len(damages) == 1 else f"none of the {len(damages)} checkpoints"
        predicate = "is not intact" if len(damages) == 1 else "is intact"
        raise CheckFailed(
            f"{subject} in {checkpoints} {predicate}; {next(iter(damages.values()))}",
            f"copy {'it' if len(damages) == 1 else 'them'} again from the source, or start over: rm -r {checkpoints}",
        )
    return None


def _check_best(latest: Path, report: Callable[[str], None]) -> None:
    """Verifies the best checkpoint now, since it is read only at the end of the run."""
    best = of_step(latest.parent, read_state(latest).get("best_step"))
    if best is None or best == latest:
        return
    try:
        verify(best)
    except Damaged as damage:
        report(f"{damage}; it was the best checkpoint, set aside as {_set_aside(best).name}")


def _set_aside(folder: Path) -> Path:
    number, aside = 1, folder.with_name(f"{BAD}{folder.name}")
    while aside.exists():
        number, aside = number + 1, folder.with_name(f"{BAD}{folder.name}-{number + 1}")
    with write_errors(folder):
        os.rename(folder, aside)
    return aside
