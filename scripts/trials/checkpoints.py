"""Damages every file of a checkpoint in every way, and runs every command that reads one.

A command may fall back on another checkpoint and report it, or be refused with the name of the file; a run resumes from
an older checkpoint. The reference is the result of the same command on each undamaged checkpoint of the run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from trials.harness import Answer, in_fork, require_success, shown, sound, typed
from trials.outcomes import Failed, Outcome, Verdict, chance_of, kind, planted
from trials.stage import HERE, ROWS, RUNS, copy, once, require_same_result, result_of

FILES = (
    "model.safetensors", "optimizer.safetensors", "state.json", "config.json", "manifest.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "last", "best",
)  # fmt: skip
_UNREAD = ("optimizer.safetensors", "state.json", "last", "best")
"""Files that only resume must read: other commands need not report their damage if the result is right."""
_PROMPTS = "the lovely [MASK] saw the dark bird near the road.\nthe kind queen saw the sad [MASK].\n"
Damage = Callable[[Path, random.Random], object]


def _bytes(change: Callable[[bytearray, random.Random], object]) -> Damage:
    """A damage to the content."""

    def damage(path: Path, chance: random.Random) -> None:
        content = bytearray(path.read_bytes())
        change(content, chance)
        path.write_bytes(content)

    return damage


def _truncate(content: bytearray, chance: random.Random) -> None:
    del content[chance.choice((len(content) // 2, len(content) - 1, chance.randrange(len(content)))) :]


def _flip(content: bytearray, chance: random.Random) -> None:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def _zero(content: bytearray, chance: random.Random) -> None:
    """Zeros a page of 4096 bytes, as a failing disk does, or half of a smaller file."""
    page = min(4096, max(1, len(content) // 2))
    at = chance.choice([at for at in range(0, len(content) - page + 1, page) if any(content[at : at + page])])
    content[at : at + page] = bytes(page)


def _edit(content: bytearray, chance: random.Random) -> None:
    """Replaces a letter, which no parser notices; in a file of tensors, copies a byte to its neighbor."""
    letters = [at for at, byte in enumerate(content) if chr(byte).isalpha()]
    if b"data_offsets" in content[:1000] or not letters:
        at = chance.choice([at for at in range(len(content) // 2, len(content) - 1) if content[at] != content[at + 1]])
        content[at] = content[at + 1]
    else:
        at = chance.choice(letters)
        content[at] = ord("x" if content[at] != ord("x") else "y")


WAYS: dict[str, Damage] = {
    "deleted": lambda path, chance: path.unlink(),
    "truncated": _bytes(_truncate),
    "a bit flipped": _bytes(_flip),
    "a page zeroed": _bytes(_zero),
    "emptied": lambda path, chance: path.write_bytes(b""),
    "edited": _bytes(_edit),
    "a folder instead": lambda path, chance: (path.unlink(), path.mkdir()),
    "a dangling link instead": lambda path, chance: (path.unlink(), path.symlink_to("nowhere")),
    "a pipe instead": lambda path, chance: (path.unlink(), os.mkfifo(path)),
}
_COMMANDS = {
    "predict": ["predict", *HERE, "input=prompts.txt", "output=out/predictions"],
    "evaluate": ["evaluate", *HERE, "output=out/predictions"],
    "export": ["export", "output=out/exported"],
    "finetune": ["finetune", *ROWS, "max_steps=1", "run_dir=tuned_from_it"],
}
CELLS = list(itertools.product(("resume", *_COMMANDS, "load"), FILES, WAYS))
"""Every command, file and damage, shuffled."""
random.Random(0).shuffle(CELLS)


def _load(checkpoint: str) -> int:
    """Calls `lmtool.load`, and writes the logits of a few ids and the encoding of a text."""
    import torch

    import lmtool
    from lmtool.cli.main import failed
    from lmtool.errors import LmtoolError

    try:
        loaded = lmtool.load(checkpoint)
    except LmtoolError as error:
        return failed(error, False)
    with torch.no_grad():
        logits = loaded.model(torch.arange(10, 20)[None]).logits
    assert logits is not None and loaded.tokenizer is not None
    Path("out/loaded").write_bytes(logits.numpy().tobytes() + loaded.tokenizer.encode(_PROMPTS).tobytes())
    return 0


def _used(command: str, place: Path, checkpoint: str) -> tuple[Answer, str]:
    """The answer of a command, and a hash of its result."""
    out = place / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (place / "prompts.txt").write_text(_PROMPTS)
    if command == "load":
        answer = sound(in_fork(place, ("lmtool.load", checkpoint), lambda: _load(checkpoint)))
    else:
        answer = typed(place, *_COMMANDS[command], f"checkpoint={checkpoint}")
    if command == "evaluate" and not answer.status:  # the heading names the checkpoint: only the numbers count
        numbers = re.findall(r"^ *(\w+) +(\d\S*)", answer.out, re.MULTILINE)
        if not numbers:
            raise Failed(Outcome.BROKEN, f"no scores in what evaluate prints: {answer.out[-200:]}")
        (out / "numbers").write_text(json.dumps(numbers))
    elif command == "finetune" and answer.status == 0:
        (out / "result").write_text(result_of(place / "tuned_from_it"))
    (out / "exported" / "README.md").unlink(missing_ok=True)  # names the checkpoint
    digest = hashlib.sha256()
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(out)).encode() + path.read_bytes())
    return answer, digest.hexdigest()


def _expected(folder: Path, stage: Path, run: str, command: str) -> None:
    """Writes the result of the command for each checkpoint of an undamaged run."""
    copy(stage, folder, "text.txt", "rows", "cache", f"runs/{run}", f"done/{run}", "done/pre")
    results = {}
    for checkpoint in sorted((folder / "runs" / run / "checkpoints").glob("step_*")):
        answer, results[checkpoint.name] = _used(command, folder, str(checkpoint.relative_to(folder)))
        if answer.status:
            raise RuntimeError(f"{shown(answer.words)}: {answer.said}")
        shutil.rmtree(folder / "tuned_from_it", ignore_errors=True)
    (folder / "results.json").write_text(json.dumps(results))


@kind("checkpoints", trials=len(CELLS))
def checkpoints(stage: Path, place: Path, seed: int) -> Verdict:
    """Damages a file, and runs a command that reads it."""
    command, name, way = CELLS[seed % len(CELLS)]
    run = RUNS[(seed + seed // len(CELLS)) % len(RUNS)]
    copy(stage, place, "text.txt", "rows", "cache", f"runs/{run}", "done/pre")
    folder = place / "runs" / run / "checkpoints"
    chosen = (folder / ("last" if command == "resume" else "best")).read_text().strip()
    path = folder / name if name in ("last", "best") else folder / chosen / name
    WAYS[way](path, chance_of("checkpoints", seed))
    fault = f"{run}, {command}: {path.relative_to(folder)} {way}"
    with planted(fault):
        if command == "resume":
            outcome, detail = _resumed(stage, place, run, path)
        else:
            outcome, detail = _read(stage, place, run, command, chosen, path)
    return Verdict(outcome, f"{fault}: {detail}")


def _resumed(stage: Path, place: Path, run: str, path: Path) -> tuple[Outcome, str]:
    """Resumes the run, which must reach its end from an older checkpoint."""
    answer = typed(place, "resume", f"runs/{run}")
    require_success(answer, "does not resume from an older checkpoint: ")
    if path.is_dir():  # lmtool reads the numbers of the steps; `last` and `best` are for people
        path.rmdir()
        shutil.copy(stage / "done" / run / "checkpoints" / path.name, path)
    require_same_result(place / "runs" / run, stage / "done" / run)
    if path.name in ("last", "best") or path.name in (place / "runs" / run / "log.txt").read_text():
        return Outcome.RECOVERED, "the same rows and weights"
    raise Failed(Outcome.SILENT, f"resumed without a message about {path.name}")


def _read(stage: Path, place: Path, run: str, command: str, chosen: str, path: Path) -> tuple[Outcome, str]:
    before = stage / "checkpoints" / f"{run}-{command}"
    once(before, lambda folder: _expected(folder, stage, run, command))
    results = json.loads((before / "results.json").read_text())
    answer, result = _used(command, place, f"runs/{run}")
    named = path.name in answer.said and (path.name in ("last", "best") or chosen in answer.said)
    if answer.status:
        if not named:
            raise Failed(Outcome.UNCLEAR, f"the error does not name the file: {answer.err[:300]}")
        other = re.search(r"^hint: use (\S+/(step_\d+)), which is intact", answer.err, re.MULTILINE)
        # Only `last` and `best` have no folder whose neighbor could be named.
        if other is None and path.parent.name == chosen:
            raise Failed(Outcome.DEAD_END, f"does not name an intact checkpoint: {answer.err[:300]}")
        if other is not None:  # the hint must work
            again, result = _used(command, place, other[1])
            if again.status or result != results[other[2]]:
                raise Failed(Outcome.DEAD_END, f"its hint, {other[1]}, does not work: {again.errors[:200]}")
        return Outcome.REFUSED, answer.errors[:120]
    if result == results[chosen]:
        if named or path.name in _UNREAD:
            return Outcome.DONE, "its result is right"
        raise Failed(Outcome.SILENT, f"uses {path.name} without a message")
    if result in results.values() and named:
        return Outcome.FELL_BACK, next(name for name, known in results.items() if known == result)
    raise Failed(Outcome.SILENT, f"another result{' without a message' if not named else ''}: {answer.said[-300:]}")
