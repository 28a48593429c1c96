"""Finds and reads checkpoints. Commands read checkpoints only through this module.

runs/NAME/checkpoints/step_00001000/  model.safetensors  optimizer.safetensors  state.json  config.json  data.json
                                      tokenizer files  manifest.json
runs/NAME/checkpoints/{best,last}     the name of a checkpoint, small text files

A file is verified against the manifest when it is read, and refused if it does not match. runs/checkpoints.py writes
checkpoints and reads their tensors. Imports no torch, because decoding a configuration reads checkpoints.
"""

from __future__ import annotations

import glob
import json
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lmtool.config import saved
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.errors import UserError, nearest
from lmtool.runs.files import write_errors
from lmtool.runs.identity import SUBMITTED, finished_result
from lmtool.system.files import MANIFEST, RUNS, Damaged, Manifest, replace_bytes, user_path
from lmtool.system.terminal import listing

MODEL, OPTIMIZER, CARRIED, STATE, CONFIG, DATA = (
    "model.safetensors", "optimizer.safetensors", "carried.safetensors", "state.json", "config.json", "data.json",
)  # fmt: skip
AT = "at_"
"""Start of the names of files that name the checkpoints of `checkpoint_at`: at_10M."""
ALL_KEPT = "*"
_STEP = re.compile(r"step_(\d{8,})")
ADAPTER = "adapter_config.json"
"""The file that identifies a PEFT adapter folder."""
SWEEP = "sweep.json"
"""The file of a sweep's folder that lists its jobs."""
_RUN_MARKS = ("checkpoints", "config.yaml", "job.json", SUBMITTED)
"""Files of which a run, or a job of a sweep, has at least one."""
_ACCEPTED = (
    "use a run (runs/NAME) or one of its checkpoints, a folder with config.json and model.safetensors, or "
    "hf://org/name@revision"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*(\.[\w-]+)*(/[A-Za-z0-9][\w.-]*)?")
_LONGEST_NAME = 255  # bytes of a file's name
_COPY = "copy it again from its source, or use another checkpoint"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class NoCheckpoint(UserError):
    """A path at which there is no checkpoint, neither intact nor damaged."""


# --- verifying -----------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint. Raises Damaged if it is missing, changed, or belongs to another step than
    the folder's name says."""
    manifest = Manifest.read(folder)
    missing = {MODEL, STATE, CONFIG} - manifest.files.keys()
    if missing:
        raise Damaged(folder / MANIFEST, f"does not list {sorted(missing)[0]}")
    match, step = _STEP.fullmatch(folder.name), manifest.metadata.get("step")
    if match is not None and int(match[1]) != step:
        raise Damaged(folder / MANIFEST, f"says step {step}, but its folder is called {folder.name}")
    return manifest


def verify(folder: Path, only: str | None = None, hashes: bool = True) -> None:
    """Compares the files of a checkpoint, or `only` one of them, with its manifest: see `Manifest.verify`."""
    read_manifest(folder).verify(None if only is None else [only], hashes)


def refusal(damage: Damaged) -> UserError:
    """Returns the error for a damaged checkpoint; its hint names an intact one of the same run."""
    folder = next((parent for parent in damage.path.parents if _STEP.fullmatch(parent.name)), None)
    return UserError(damage.message, _COPY if folder is None else _intact_hint(folder.parent, folder))


def _intact_hint(checkpoints: Path, damaged: Path | None = None) -> str:
    for folder in saved_steps(checkpoints):
        if folder != damaged and is_intact(folder):
            return f"use {folder}, which is intact"
    return _COPY


def is_intact(folder: Path) -> bool:
    """Whether a checkpoint verifies."""
    try:
        verify(folder)
    except Damaged:
        return False
    return True


def removable_optimizers(checkpoints: Path, kept: str, keep: object, keep_every: int | None) -> dict[Path, int]:
    """Returns the checkpoints of a finished run whose optimizer's state is not needed, with its bytes. kept: which
    states to keep: "last", "all" or "none". keep, keep_every: the run's settings; checkpoints that they keep for good
    may be branched from."""
    removable = {}
    for number, folder in enumerate(saved_steps(checkpoints)):
        path, step = folder / OPTIMIZER, step_of(folder)
        permanent = keep == "all" or (keep_every is not None and step % keep_every == 0)
        if path.is_file() and (kept == "none" or (kept == "last" and number > 0 and not permanent)):
            removable[folder] = path.stat().st_size
    return removable


def remove_optimizer(folder: Path) -> None:
    """Removes the optimizer's state from a checkpoint, from which no run can resume or branch then. Raises Damaged if
    its manifest is damaged."""
    manifest = read_manifest(folder)
    with write_errors(folder):
        files = {name: entry for name, entry in manifest.files.items() if name != OPTIMIZER}
        replace_bytes(folder / MANIFEST, replace(manifest, files=files).encode())
        (folder / OPTIMIZER).unlink()


def require_optimizer(folder: Path) -> None:
    """Raises UserError if the optimizer's state was removed from a checkpoint."""
    if OPTIMIZER not in read_manifest(folder).files:
        raise UserError(
            f"{folder} has no optimizer state (keep_optimizer= or lmtool runs prune removed it), so no run can resume "
            "or branch from it",
            f"set checkpoint={folder} to start a new run from its weights; keep_optimizer=all keeps the state",
        )


# --- finding -------------------------------------------------------------------------------------------------------


def step_of(folder: Path) -> int:
    """Returns the step in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step_"))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is an lmtool checkpoint, damaged or not."""
    return (folder / MANIFEST).is_file() or (_STEP.fullmatch(folder.name) is not None and folder.is_dir())


def saved_steps(checkpoints: Path) -> list[Path]:
    """Returns the folders that are named like checkpoints, newest first. They are not verified."""
    if not checkpoints.is_dir():
        return []
    folders = [path for path in checkpoints.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def of_step(checkpoints: Path, step: int | None) -> Path | None:
    """Returns the checkpoint of a step, or None."""
    return next((folder for folder in saved_steps(checkpoints) if step_of(folder) == step), None)


def checkpoint_of_pointer(checkpoints: Path, pointer: str) -> Path | None:
    """Returns the checkpoint that `last` or `best` names, or None."""
    try:
        return _read_pointer(checkpoints / pointer)
    except UserError:
        return None


def _read_pointer(pointer: Path) -> Path:
    name = ""
    if pointer.is_file():  # reading a FIFO would block
        with suppress(OSError, UnicodeDecodeError), pointer.open(encoding="utf-8") as file:
            name = file.read(300).strip()  # a name is shorter; a damaged file may be large
    if not _STEP.fullmatch(name):
        raise UserError(f"{pointer} does not name a checkpoint", _intact_hint(pointer.parent))
    if not (pointer.parent / name).is_dir():
        raise UserError(f"{pointer} names {name}, which does not exist", _intact_hint(pointer.parent))
    return pointer.parent / name


def kept_checkpoints(run: str | Path) -> dict[Path, list[str]]:
    """Returns the checkpoints that `checkpoint_at=` keeps in a run, in the order of their steps, each with the names of
    its amounts. Raises UserError if there are none, or if one was deleted."""
    checkpoints = run_folder(run) / "checkpoints"
    steps = saved_steps(checkpoints)
    if not steps:
        raise NoCheckpoint(f"checkpoint={run}@{ALL_KEPT}: no checkpoint in {checkpoints}", _ACCEPTED)
    kept: dict[Path, list[str]] = {}
    for name, step in sorted(read_state(steps[0]).get("kept", {}).items(), key=lambda item: item[1]):
        folder = of_step(checkpoints, step)
        if folder is None:
            raise UserError(f"{run}: the checkpoint of {name}, step {step}, does not exist", _intact_hint(checkpoints))
        kept.setdefault(folder, []).append(name)
    if not kept:
        raise UserError(
            f"checkpoint={run}@{ALL_KEPT}: {run_folder(run)} has no checkpoints at amounts of text",
            "train with checkpoint_at=[1M,2M,5M], or name one checkpoint: RUN@STEP",
        )
    return kept


def run_of_all_kept(path: str) -> str | None:
    """Returns RUN of RUN@*, which means all checkpoints of `checkpoint_at=`; None for another path."""
    run, at, place = path.rpartition("@")
    return run if at and place == ALL_KEPT else None


def names_several(path: str) -> bool:
    """Whether a path names several runs: the folder of a sweep, or a pattern (runs/gpt_*, runs/gpt_*@10M)."""
    if "://" in path or os.path.lexists(user_path(path)):
        return (user_path(path) / SWEEP).is_file()
    return glob.has_magic(path.partition("@")[0])


def runs_named(path: str) -> tuple[list[str], list[str]]:
    """Returns the finished runs of a sweep or a pattern (`names_several`), and those left out because they have not
    finished; for another path, the path alone. Raises NoCheckpoint if no run has finished."""
    if not names_several(path):
        return [path], []
    pattern, at, place = path.partition("@")
    if (user_path(path) / SWEEP).is_file():
        pattern, at, place = os.path.join(glob.escape(path), "*"), "", ""
    runs, unfinished = list[str](), list[str]()
    for name in sorted(glob.glob(str(user_path(pattern)))):
        folder = Path(name)
        if folder.is_symlink() or not folder.is_dir():  # runs/latest
            continue
        if any((folder / mark).exists() for mark in _RUN_MARKS):
            (unfinished if finished_result(folder) is None else runs).append(f"{name}{at}{place}")
        elif is_checkpoint(folder) or (folder / CONFIG).is_file():
            runs.append(name)
    if not runs:
        others = f"; not finished: {listing(unfinished, 3)}" if unfinished else ""
        raise NoCheckpoint(f"checkpoint={path}: no finished run has this name{others}", _ACCEPTED)
    return runs, unfinished


def _checkpoint_at(path: str, run: str, place: str) -> Path:
    """Returns the checkpoint of RUN@PLACE: a step, last, best, an amount of `checkpoint_at=`, or the newest of all
    those amounts for RUN@*."""
    checkpoints = run_folder(run) / "checkpoints"
    steps = saved_steps(checkpoints)
    if not steps:
        raise NoCheckpoint(f"checkpoint={path}: no checkpoint in {checkpoints}", _hint_for(run_folder(run), run))
    if place in ("last", "best"):
        return steps[0] if place == "last" else best_of(checkpoints)
    if place == ALL_KEPT:
        return list(kept_checkpoints(run))[-1]
    kept = read_state(steps[0]).get("kept", {})
    step = int(place) if place.isdecimal() else kept.get(place)
    folder = of_step(checkpoints, step)
    if folder is None:
        names = [*kept, *(str(step_of(step)) for step in reversed(steps))]
        raise NoCheckpoint(
            f"checkpoint={path}: {run} has no checkpoint {place!r}; it has {', '.join(names[:20])}",
            f"use {run}@{nearest(place, names) or names[-1]}",
        )
    return folder


def run_folder(path: str | Path) -> Path:
    """Returns the run folder that the user means: the target of `runs/latest`, otherwise the path itself, which may not
    exist."""
    folder = user_path(path)
    if folder.name != "latest":
        return folder
    if folder.is_symlink():
        target = Path(os.readlink(folder))
        return (
            folder.parent / target
            if target.name == str(target) and len(os.fsencode(target)) <= _LONGEST_NAME
            else folder
        )
    if not os.path.isfile(folder):
        return folder
    # On a disk without links, and in older versions, `latest` is a small file with the name.
    with folder.open(encoding="utf-8", errors="replace") as file:
        name = Path(file.read(_LONGEST_NAME + 2).strip() or "-").name
    if len(os.fsencode(name)) > _LONGEST_NAME:
        raise NoCheckpoint(
            f"{folder} does not contain the name of a run: its text has more than {_LONGEST_NAME} bytes",
            _ACCEPTED,
        )
    return folder.parent / name


def own_folder(config: JsonMapping) -> Path | None:
    """Returns the folder that a configuration sets for its run, or None."""
    if config.get("run_dir"):
        return user_path(str(config["run_dir"]))
    return RUNS / str(config["name"]) if config.get("name") else None


def started_config(config: JsonMapping) -> JsonObject:
    """Returns the configuration with which the run in the folder of `config` was started; empty if there is no run."""
    folder = own_folder(config)
    if folder is None or not (folder / "config.yaml").is_file():
        return {}
    return saved.read(folder / "config.yaml")


def checkpoint_folder(path: str | Path) -> Path:
    """Returns the checkpoint that the user means: a checkpoint, `checkpoints/best` or `last`, a run (its best
    checkpoint, or its newest before the first evaluation), `runs/latest`, or RUN@STEP, RUN@last, RUN@best and
    RUN@AMOUNT (of `checkpoint_at=`). The contents are verified when they are
    read. Raises NoCheckpoint if no checkpoint exists there. Raises UserError if that checkpoint does not exist; another
    one is never used instead."""
    folder = run_folder(path)
    run, _, place = str(path).rpartition("@")
    if run and not os.path.lexists(folder) and run_folder(run).is_dir():
        return _checkpoint_at(str(path), run, place)
    if folder.name in ("best", "last") and os.path.lexists(folder) and saved_steps(folder.parent):
        return best_of(folder.parent) if folder.name == "best" else saved_steps(folder.parent)[0]
    if not folder.exists():
        raise NoCheckpoint(f"checkpoint={path}: no such folder", _hint_for(folder, str(path)))
    if not folder.is_dir():
        pickled = "; pickled weights can run code when they are read" if folder.suffix in _PICKLED else ""
        hint = f"for word vectors as text, run lmtool import checkpoint={path} output=FOLDER and use that folder"
        raise NoCheckpoint(
            f"checkpoint={path} is a file; lmtool reads checkpoint folders{pickled}",
            _ACCEPTED if pickled else hint,
        )
    if is_checkpoint(folder):
        return folder
    checkpoints = folder if folder.name == "checkpoints" else folder / "checkpoints"
    if (folder / ADAPTER).is_file():
        hint = f"lmtool import checkpoint={path} output=FOLDER, then use that folder"
        raise NoCheckpoint(f"checkpoint={path} is a PEFT adapter without the weights of its base model", hint)
    if not saved_steps(checkpoints):
        if (folder / SWEEP).is_file():
            raise NoCheckpoint(f"checkpoint={path} is a sweep, not a run", "use one of its jobs: a folder in it")
        raise NoCheckpoint(
            f"checkpoint={path}: the folder contains neither an lmtool checkpoint nor a config.json of transformers",
            _ACCEPTED,
        )
    return best_of(checkpoints)


def _hint_for(folder: Path, name: str) -> str:
    if (close := _nearest_folder(folder)) is not None:
        return f"did you mean {close}?"
    if _HUB_NAME.fullmatch(name) and not name.startswith(f"{RUNS}/"):
        return f"a run is runs/NAME; a model of the hub is checkpoint=hf://{name}"
    return _ACCEPTED


def _nearest_folder(path: Path) -> Path | None:
    with suppress(OSError):
        siblings = [folder.name for folder in path.parent.iterdir() if folder.is_dir()] if path.parent.is_dir() else []
        close = nearest(path.name, siblings)
        if close is not None and close != path.name:
            return path.parent / close
        if (RUNS / path).is_dir():
            return RUNS / path
    return None


def no_run(folder: Path) -> UserError:
    """Returns the error for a folder that contains no run."""
    if (folder / SWEEP).is_file():
        return UserError(f"{folder} is a sweep, not a run", "repeat its command: that runs the unfinished jobs")
    above = folder.parent.parent if folder.parent.name == "checkpoints" else None
    close = above or _nearest_folder(folder)
    hint = f"`lmtool runs{'' if folder.parent in (RUNS, Path()) else f' {folder.parent}'}` prints the existing runs"
    return UserError(f"{folder} is not a run", f"did you mean {close}?" if close else hint)


def best_of(checkpoints: Path) -> Path:
    """Returns the best checkpoint of a run according to the state of its newest one, or the newest one before the first
    evaluation.

    The pointer file `best` is for people: a kill or a flipped bit can leave it at another checkpoint. It is used only
    if the newest checkpoint is damaged, or if the best one was deleted and another has become the best.
    """
    newest = saved_steps(checkpoints)[0]
    try:
        step = _read_object(newest, STATE).get("best_step")
    except Damaged as damage:
        if (checkpoints / "best").is_file():
            return _read_pointer(checkpoints / "best")
        raise refusal(damage) from damage
    if step is None:
        return newest
    best = of_step(checkpoints, step)
    if best is not None:
        return best
    if (checkpoints / "best").is_file():
        return _read_pointer(checkpoints / "best")
    raise UserError(f"the best checkpoint of {checkpoints}, step {step}, does not exist", _intact_hint(checkpoints))


def find(path: str | Path) -> Path:
    """Returns the complete checkpoint at `checkpoint_folder(path)`. Raises UserError, naming the problem and an intact
    checkpoint, if a file is missing or truncated; contents are verified when they are read."""
    folder = checkpoint_folder(path)
    try:
        verify(folder, hashes=False)
    except Damaged as damage:
        raise refusal(damage) from damage
    return folder


# --- reading -------------------------------------------------------------------------------------------------------


def read_json(folder: Path, name: str) -> JsonObject:
    """Returns a verified JSON file of a checkpoint. Raises UserError if it is damaged or contains no JSON object."""
    try:
        return _read_object(folder, name)
    except Damaged as damage:
        raise refusal(damage) from damage


def _read_object(folder: Path, name: str) -> JsonObject:
    try:
        content = json.loads(read_manifest(folder).read_bytes(name))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise Damaged(folder / name, "does not contain a JSON object")
    return content


def read_state(folder: str | Path) -> JsonObject:
    """Reads state.json: step, epoch, tokens, seconds, total_steps, best_step, best_value, metrics, ... Raises UserError
    if its step is not an integer, or not the one of the folder's name."""
    state, path = read_json(Path(folder), STATE), Path(folder) / STATE
    step, match = state.get("step"), _STEP.fullmatch(Path(folder).name)
    if type(step) is not int or step < 0:
        raise UserError(f"{path}: step={step!r} is not a whole number from 0 on", _COPY)
    if match is not None and int(match[1]) != step:
        raise UserError(f"{path}: step={step}, but its folder is called {Path(folder).name}", _COPY)
    return state


def read_config(folder: str | Path) -> JsonObject:
    """Reads config.json: the resolved configuration, to be decoded by the same strict decoder as any other. Models have
    all keys on which their outputs depend (`saved.with_earlier_model`)."""
    return saved.with_earlier_model(read_json(Path(folder), CONFIG))


def read_checkpoint(path: str) -> JsonObject:
    """Returns the saved configuration of the checkpoint that `checkpoint=` names."""
    if "://" in path:
        raise UserError(f"checkpoint={path}: this command reads only runs on this machine", _ACCEPTED)
    folder = find(path)
    data = saved.require_version(read_config(folder), folder / CONFIG)
    if not isinstance(data.get("model"), dict):
        raise UserError(f"checkpoint={path}: its config.json was not written by lmtool", _ACCEPTED)
    return data
