"""Checkpoints on disk: written atomically, verified on every load, no pickle.

    step_00001000/  model.safetensors      the learner's tensors, tied ones once; without the base of a tuned run
                    optimizer.safetensors  KIND.PARAMETER
                    carried.safetensors    state carried from batch to batch, if any
                    state.json             step, cursor, budgets, best score: see progress.py
                    config.json            the resolved configuration
                    ...                    files of the command (tokenizer files, data.json, ...)
                    manifest.json          bytes and sha256 of each; written last: see system/files.py

Its files are written to a temporary folder and synced, then the manifest, then the folder is renamed.
config/checkpoint.py finds checkpoints and verifies them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lmtool.config.checkpoint import (
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
from lmtool.errors import CheckFailed, UserError, cannot_write
from lmtool.runs.files import to_json
from lmtool.system.files import Damaged, sync_path, write_bytes, write_manifest

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_cut(tensor: Tensor) -> bool:
    """Whether the tensor is sharded: each process has some rows."""
    return hasattr(tensor, "full_tensor")  # importing DTensor takes most of a second, and few runs have any


def complete(tensor: Tensor) -> Tensor:
    """The complete tensor, on its device. All processes must call this for a sharded tensor."""
    return cast("DTensor", tensor.detach()).full_tensor() if is_cut(tensor) else tensor


def gathered(tensors: Mapping[str, Tensor], keeps: bool) -> dict[str, Tensor]:
    """Gathers tensors; sharded ones end on the host. All processes must call this; it returns {} unless `keeps`. A
    tensor with several names stays shared. At most one gathered tensor is on the device at a time."""
    by_id: dict[int, Tensor | None] = {}
    for tensor in tensors.values():
        if id(tensor) not in by_id:
            full = complete(tensor)
            by_id[id(tensor)] = None if not keeps else full.cpu() if is_cut(tensor) else full
    gathered_tensors = {name: by_id[id(tensor)] for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in gathered_tensors.items() if tensor is not None}


def cut_like(value: Tensor, like: Tensor) -> Tensor:
    """This process's rows of a complete tensor, sharded like `like`; the complete tensor if that is not sharded."""
    if not is_cut(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded = cast("DTensor", like)
    # Every process has the complete tensor: nothing is sent.
    return distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)


TEMPORARY, DELETED, BAD = ".tmp-", ".del-", "bad-"
_TIED = "tied"


@contextmanager
def _draft_of(final: Path) -> Iterator[Path]:
    """Yields a new temporary folder, renamed to `final` when the block ends, and deleted if it raises an error."""
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
    """Writes a checkpoint atomically and returns its folder.

    Args:
        checkpoints: the folder in which `step_...` is created.
        step: the number of the step.
        weights: the learner's tensors.
        optimizer: the optimizer's tensors.
        state: for state.json.
        config: for config.json.
        write_files: adds files to the temporary folder.
        carried: state that the model carries from batch to batch.

    Raises:
        OSError: writing failed; nothing is left behind.
    """
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
    """Copies a checkpoint to another folder of checkpoints, under the same name.

    Args:
        source: the checkpoint.
        checkpoints: the other folder.
        replaced: contents of files that differ in the copy.

    Raises:
        Damaged: the source differs from its manifest.
        OSError: writing failed; nothing is left behind.
    """
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
        written = read_manifest(draft).files
        for name in copied:  # `write_manifest` has hashed the copies
            if written[name] != manifest.files[name]:
                raise Damaged(source / name, "is damaged: its sha256 is not the manifest's")
    return final


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file. A tensor with several names (tied weights) is stored under the first; the others are
    in the header."""
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device))
        if tensor.numel() and same in first:
            tied[name] = first[same]
            continue
        first[same] = name
        storage = tensor.untyped_storage()
        compact = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
        storages.add(storage.data_ptr())
        stored[name] = tensor.detach() if compact else tensor.detach().clone(memory_format=torch.contiguous_format)
    metadata = {"format": "pt"} | ({_TIED: json.dumps(tied)} if tied else {})
    try:
        save_file(stored, path, metadata=metadata)
        if tied:
            _sort_metadata(path)
    except SafetensorError as error:
        raise _os_error(error, path) from error
    os.chmod(path, 0o666 & ~_umask())  # the library makes files readable only by their owner
    sync_path(path)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a header, whose order the library randomizes, so that equal tensors give equal files."""
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
    """The library reports system errors as text: `... (os error 28)`."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code) if number else str(error), str(path))


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of a verified file, on the CPU, tied ones under all names. UserError if it is damaged."""
    path = folder / name
    try:
        verify(folder, only=name)
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 not a dict
            tied = json.loads((file.metadata() or {}).get(_TIED, "{}"))
    except Damaged as damage:
        raise refusal(damage) from damage
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {error}", "set another checkpoint=") from error
    return tensors | {alias: tensors[first] for alias, first in tied.items()}


def tensor_names(folder: Path) -> set[str]:
    """The names of the tensors that a checkpoint holds, without reading them. UserError as in `read_tensors`."""
    path = folder / MODEL
    try:
        with safe_open(path, framework="pt") as file:
            return {*file.keys(), *json.loads((file.metadata() or {}).get(_TIED, "{}"))}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a safetensors file: {error}", "set another checkpoint=") from error


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name: `backbone.`, `heads.NAME.`, `objective.`. For a tuned run, those of the base
    are missing, see weights/reading.py."""
    return read_tensors(Path(folder), MODEL)


def mismatches(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """How tensors differ from those of a model: missing names, extra names, different shapes."""
    return [
        *(f"{name} is missing" for name in expected if name not in tensors),
        *(f"{name} is not in the model" for name in tensors if name not in expected),
        *(
            f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in tensors and tensors[name].shape != tensor.shape
        ),
    ]


def load_weights(
    learner: nn.Module, tensors: Mapping[str, Tensor], origin: str | Path, excluded: Collection[str] = ()
) -> None:
    """Loads all weights into the learner.

    Args:
        learner: the model.
        tensors: by name.
        origin: the checkpoint, for messages.
        excluded: names of unchanged tensors, which the run's checkpoints do not contain.

    Raises:
        UserError: names or shapes differ; the message has the first three.
    """
    current = {name: tensor for name, tensor in learner.state_dict().items() if name not in excluded}
    differences = mismatches(current, tensors)
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"{origin} does not fit the model: {'; '.join(sorted(differences)[:3])}{more}",
            "resume with the configuration it was trained with, or set another name=",
        )
    cut = {name: cut_like(tensor, current[name]) for name, tensor in tensors.items()}
    learner.load_state_dict(cut, strict=not excluded)


# The checkpoint that a run resumes from: the latest intact one. Damaged ones are set aside and reported.
#
# It is selected once, before anything is read, so that tokenizer, counters, weights and optimizer come from the same
# checkpoint.


def resume_point(checkpoints: Path, report: Callable[[str], None]) -> Path | None:
    """The latest intact checkpoint of a run, or None without checkpoints. Later damaged ones, and a damaged best one,
    are renamed. Raises CheckFailed if none of the checkpoints is intact; none is renamed."""
    damages: dict[Path, Damaged] = {}
    for folder in saved_steps(checkpoints):
        try:
            verify(folder)
        except Damaged as damage:
            damages[folder] = damage
            continue
        for damaged, problem in damages.items():
            aside = _set_aside(damaged)
            report(f"{problem}; set aside as {aside.name}, the run resumes from {folder.name}")
        _check_best(folder, report)
        return folder
    if damages:
        raise CheckFailed(
            f"none of the {len(damages)} checkpoints in {checkpoints} is intact; {next(iter(damages.values()))}",
            f"copy them again from their source, or start over: rm -r {checkpoints}",
        )
    return None


def _check_best(newest: Path, report: Callable[[str], None]) -> None:
    """Verifies the best checkpoint now, since it is read only at the end of the run."""
    best = of_step(newest.parent, read_state(newest).get("best_step"))
    if best is None or best == newest:
        return
    try:
        verify(best)
    except Damaged as damage:
        report(f"{damage}; it was the best checkpoint, set aside as {_set_aside(best).name}")


def _set_aside(folder: Path) -> Path:
    number, aside = 1, folder.with_name(f"{BAD}{folder.name}")
    while aside.exists():
        number, aside = number + 1, folder.with_name(f"{BAD}{folder.name}-{number + 1}")
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return aside
