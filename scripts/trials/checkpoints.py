"""Every file of a checkpoint damaged in every way, and every command that reads one.

A command may fall back on another checkpoint and say so, or refuse and name the file; a run that has an older
checkpoint resumes from it. What was not damaged is the oracle: what each command makes of each checkpoint of the run.
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

from trials.harness import Answer, Failed, Outcome, Verdict, chance_of, in_fork, kind, planted, shown, sound, typed
from trials.stage import HERE, ROWS, RUNS, copy, once, result_of

FILES = (
    "model.safetensors", "optimizer.safetensors", "state.json", "config.json", "manifest.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "last", "best",
)  # fmt: skip
COMMANDS = ("resume", "predict", "evaluate", "export", "finetune", "load")
_UNREAD = ("optimizer.safetensors", "state.json", "last", "best")
"""Files that commands other than resume need not read. Where the result is right, they need not speak of them."""
_PROMPTS = "the lovely [MASK] saw the dark bird near the road.\nthe kind queen saw the sad [MASK].\n"


# --- damage ---------------------------------------------------------------------------------------------------------


def _truncated(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.choice((len(content) // 2, len(content) - 1, chance.randrange(len(content))))])


def _flipped(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _zeroed(path: Path, chance: random.Random) -> None:
    """A page of 4096 bytes, as a disk loses it; of a smaller file, half of it."""
    content = bytearray(path.read_bytes())
    page = min(4096, max(1, len(content) // 2))
    pages = [at for at in range(0, len(content) - page + 1, page) if any(content[at : at + page])]
    at = chance.choice(pages)
    content[at : at + page] = bytes(page)
    path.write_bytes(content)


def _edited(path: Path, chance: random.Random) -> None:
    """One letter of one text becomes another, which no parser notices; of tensors, two bytes change places."""
    content = bytearray(path.read_bytes())
    letters = [at for at, byte in enumerate(content) if chr(byte).isalpha()]
    if path.suffix == ".safetensors" or not letters:
        letters = [at for at in range(len(content) // 2, len(content) - 1) if content[at] != content[at + 1]] or [0]
        at = chance.choice(letters)
        content[at], content[at + 1 :][:1] = content[at + 1 :][0], content[at : at + 1]
    else:
        at = chance.choice(letters)
        content[at] = ord("x" if content[at] != ord("x") else "y")
    path.write_bytes(content)


WAYS: dict[str, Callable[[Path, random.Random], object]] = {
    "deleted": lambda path, chance: path.unlink(),
    "truncated": _truncated,
    "a bit flipped": _flipped,
    "a page zeroed": _zeroed,
    "emptied": lambda path, chance: path.write_bytes(b""),
    "edited": _edited,
    "a folder instead": lambda path, chance: (path.unlink(), path.mkdir()),
    "a dangling link instead": lambda path, chance: (path.unlink(), path.symlink_to("nowhere")),
    "a pipe instead": lambda path, chance: (path.unlink(), os.mkfifo(path)),
}

# --- commands, and what they make of a checkpoint -------------------------------------------------------------------


def _predict(place: Path, checkpoint: str) -> Answer:
    (place / "prompts.txt").write_text(_PROMPTS)
    return typed(place, "predict", f"checkpoint={checkpoint}", *HERE, "input=prompts.txt", "output=out/predictions")


def _evaluate(place: Path, checkpoint: str) -> Answer:
    answer = typed(place, "evaluate", f"checkpoint={checkpoint}", *HERE, "output=out/predictions")
    # The heading names the checkpoint, which differs; the numbers are the result.
    numbers = re.findall(r"^ *(\w+) +(\d\S*)", answer.out, re.MULTILINE)
    (place / "out" / "numbers").write_text(json.dumps(numbers))
    return answer


def _export(place: Path, checkpoint: str) -> Answer:
    answer = typed(place, "export", f"checkpoint={checkpoint}", "output=out/exported")
    (place / "out" / "exported" / "README.md").unlink(missing_ok=True)  # names the checkpoint
    return answer


def _finetune(place: Path, checkpoint: str) -> Answer:
    answer = typed(place, "finetune", f"checkpoint={checkpoint}", *ROWS, "max_steps=1", "run_dir=tuned_from_it")
    if answer.status == 0:
        (place / "out" / "result").write_text(result_of(place / "tuned_from_it"))
    return answer


def _load(place: Path, checkpoint: str) -> Answer:
    """`lmtool.load` in Python: logits of a few ids, and what the tokenizer makes of a text."""

    def work() -> int:
        import torch

        import lmtool
        from lmtool.errors import LmtoolError

        try:
            loaded = lmtool.load(checkpoint)
        except LmtoolError as error:
            from lmtool import cli

            cli.tell(error)
            return error.exit_status
        with torch.no_grad():
            logits = loaded.model(torch.arange(10, 20)[None]).logits
        assert logits is not None and loaded.tokenizer is not None
        digest = hashlib.sha256(logits.numpy().tobytes())
        digest.update(loaded.tokenizer.encode(_PROMPTS).tobytes())
        Path("out/loaded").write_text(digest.hexdigest())
        return 0

    return sound(in_fork(place, ("lmtool.load", checkpoint), work))


_USE = {"predict": _predict, "evaluate": _evaluate, "export": _export, "finetune": _finetune, "load": _load}


def _used(command: str, place: Path, checkpoint: str) -> tuple[Answer, str]:
    """What a command answers, and a hash of what it makes."""
    out = place / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    answer = _USE[command](place, checkpoint)
    digest = hashlib.sha256()
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(out)).encode() + path.read_bytes())
    return answer, digest.hexdigest()


def _expected(folder: Path, stage: Path, run: str, command: str) -> None:
    """What the command makes of each checkpoint of an undamaged run."""
    copy(stage, folder, "text.txt", "rows", "cache", f"runs/{run}", f"done/{run}", "done/pre")
    results = {}
    for checkpoint in sorted((folder / "runs" / run / "checkpoints").glob("step_*")):
        answer, results[checkpoint.name] = _used(command, folder, str(checkpoint.relative_to(folder)))
        if answer.status:
            raise RuntimeError(f"{shown(answer.words)}: {answer.said}")
        shutil.rmtree(folder / "tuned_from_it", ignore_errors=True)
    (folder / "results.json").write_text(json.dumps(results))


# --- the trial ------------------------------------------------------------------------------------------------------


CELLS = list(itertools.product(COMMANDS, FILES, WAYS))
"""Every command, file and way, in an order that mixes them."""
random.Random(0).shuffle(CELLS)


@kind("checkpoints", trials=len(CELLS))
def checkpoints(stage: Path, place: Path, seed: int) -> Verdict:
    """A damaged file, and a command that reads it."""
    chance = chance_of("checkpoints", seed)
    command, name, way = CELLS[seed % len(CELLS)]
    run = RUNS[(seed + seed // len(CELLS)) % len(RUNS)]
    copy(stage, place, "text.txt", "rows", "cache", f"runs/{run}", "done/pre")
    folder = place / "runs" / run / "checkpoints"
    chosen = (folder / ("last" if command == "resume" else "best")).read_text().strip()
    path = folder / name if name in ("last", "best") else folder / chosen / name
    WAYS[way](path, chance)
    with planted(f"{run}, {command}: {path.relative_to(folder)} {way}"):
        if command == "resume":
            outcome, detail = _resumed(stage, place, run, path)
        else:
            outcome, detail = _read(stage, place, run, command, chosen, path)
    return Verdict(outcome, f"{run}, {command}: {path.relative_to(folder)} {way}: {detail}")


def _resumed(stage: Path, place: Path, run: str, path: Path) -> tuple[Outcome, str]:
    """There is an older checkpoint, so the run must come to its end."""
    answer = typed(place, "resume", f"runs/{run}")
    if answer.status:
        raise Failed(Outcome.DEAD_END, f"does not resume from an older checkpoint: {answer.errors[:300]}")
    if path.is_dir():  # for people alone: lmtool goes by the steps
        path.rmdir()
        shutil.copy(stage / "done" / run / "checkpoints" / path.name, path)
    if result_of(place / "runs" / run) != result_of(stage / "done" / run):
        raise Failed(Outcome.SILENT, "the resumed run ends otherwise than an undisturbed one")
    log = (place / "runs" / run / "log.txt").read_text()
    if path.name in ("last", "best") or path.name in log:
        return Outcome.RECOVERED, "the same rows and weights"
    raise Failed(Outcome.SILENT, f"resumed without a word about {path.name}")


def _read(stage: Path, place: Path, run: str, command: str, chosen: str, path: Path) -> tuple[Outcome, str]:
    before = stage / "checkpoints" / f"{run}-{command}"
    once(before, lambda folder: _expected(folder, stage, run, command))
    results = json.loads((before / "results.json").read_text())
    answer, result = _used(command, place, f"runs/{run}")
    pointer = path.name in ("last", "best")
    named = path.name in answer.said and (pointer or chosen in answer.said)
    if answer.status:
        if not named:
            raise Failed(Outcome.UNCLEAR, f"the error does not name the file: {answer.err[:300]}")
        _follow(place, command, answer, results)
        return Outcome.REFUSED, answer.errors[:120]
    if result == results[chosen]:
        if named or path.name in _UNREAD:
            return Outcome.DONE, "its result is right"
        raise Failed(Outcome.SILENT, f"uses {path.name} without a word")
    if result in results.values() and named:
        return Outcome.FELL_BACK, next(name for name, known in results.items() if known == result)
    raise Failed(Outcome.SILENT, f"another result{' without a word' if not named else ''}: {answer.said[-300:]}")


def _follow(place: Path, command: str, answer: Answer, results: dict[str, str]) -> None:
    """A hint that names another checkpoint is typed, and must work."""
    other = re.search(r"^hint: give (\S+/(step_\d+)), which is intact", answer.err, re.MULTILINE)
    if other is None:
        return
    again, result = _used(command, place, other[1])
    if again.status or result != results[other[2]]:
        raise Failed(Outcome.DEAD_END, f"its hint, {other[1]}, does not work: {again.errors[:200]}")
