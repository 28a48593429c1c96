"""Damages each file of a checkpoint in each way, and runs each command that reads checkpoints.

A command may use another checkpoint and report that, or be refused with an error that names the damaged file. A run
must resume from an older checkpoint. Results are compared with those of the same command on the undamaged checkpoints.
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

from tests.faults.harness import Answer, command_line, require_sound, require_success, run_in_fork, run_lmtool
from tests.faults.outcomes import Outcome, TrialFailed, Verdict, fault_prefix, kind, trial_rng
from tests.faults.stage import HERE, ROWS, RUNS, build_once, copy, require_same_result, result_hash

FILES = (
    "model.safetensors", "optimizer.safetensors", "state.json", "config.json", "manifest.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "last", "best",
)  # fmt: skip
_RESUME_ONLY = ("optimizer.safetensors", "state.json", "last", "best")
"""Files that only `resume` needs. Other commands need not report their damage if the result is correct."""
_PROMPTS = "the lovely [MASK] saw the dark bird near the road.\nthe kind queen saw the sad [MASK].\n"
Damage = Callable[[Path, random.Random], object]


def _bytes(change: Callable[[bytearray, random.Random], object]) -> Damage:
    """Turns a function that edits bytes in place into a damage of a file."""

    def damage(path: Path, rng: random.Random) -> None:
        content = bytearray(path.read_bytes())
        change(content, rng)
        path.write_bytes(content)

    return damage


def _truncate(content: bytearray, rng: random.Random) -> None:
    del content[rng.choice((len(content) // 2, len(content) - 1, rng.randrange(len(content)))) :]


def _flip(content: bytearray, rng: random.Random) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _zero(content: bytearray, rng: random.Random) -> None:
    """Overwrites a page of 4096 bytes with zeros, as a failing disk does, or half of a smaller file."""
    page = min(4096, max(1, len(content) // 2))
    at = rng.choice([at for at in range(0, len(content) - page + 1, page) if any(content[at : at + page])])
    content[at : at + page] = bytes(page)


def _edit(content: bytearray, rng: random.Random) -> None:
    """Replaces a letter, so that the file can still be parsed; in a file of tensors, copies a byte to the next byte."""
    letters = [at for at, byte in enumerate(content) if chr(byte).isalpha()]
    if b"data_offsets" in content[:1000] or not letters:
        at = rng.choice([at for at in range(len(content) // 2, len(content) - 1) if content[at] != content[at + 1]])
        content[at] = content[at + 1]
    else:
        at = rng.choice(letters)
        content[at] = ord("x" if content[at] != ord("x") else "y")


DAMAGES: dict[str, Damage] = {
    "deleted": lambda path, rng: path.unlink(),
    "truncated": _bytes(_truncate),
    "a bit flipped": _bytes(_flip),
    "a page zeroed": _bytes(_zero),
    "emptied": lambda path, rng: path.write_bytes(b""),
    "edited": _bytes(_edit),
    "a folder instead": lambda path, rng: (path.unlink(), path.mkdir()),
    "a dangling link instead": lambda path, rng: (path.unlink(), path.symlink_to("nowhere")),
    "a pipe instead": lambda path, rng: (path.unlink(), os.mkfifo(path)),
}
_COMMANDS = {
    "predict": ["predict", *HERE, "input=prompts.txt", "output=out/predictions"],
    "evaluate": ["evaluate", *HERE],
    "export": ["export", "output=out/exported"],
    "finetune": ["finetune", *ROWS, "max_steps=1", "run_dir=tuned_from_it"],
}
CELLS = list(itertools.product(("resume", *_COMMANDS, "load"), FILES, DAMAGES))
"""All combinations of a command, a file and a damage, in random order."""
random.Random(0).shuffle(CELLS)


def _load(checkpoint: str) -> int:
    """Calls `lmtool.load`, and writes the logits of a few token ids and the ids of a text to out/loaded. Returns an
    exit status."""
    import torch

    import lmtool
    from lmtool.cli.main import report_error
    from lmtool.errors import LmtoolError

    try:
        loaded = lmtool.load(checkpoint)
    except LmtoolError as error:
        return report_error(error, False)
    with torch.no_grad():
        logits = loaded.model(torch.arange(10, 20)[None]).logits
    assert logits is not None and loaded.tokenizer is not None
    Path("out/loaded").write_bytes(logits.numpy().tobytes() + loaded.tokenizer.encode(_PROMPTS).tobytes())
    return 0


def _run_and_hash(command: str, workdir: Path, checkpoint: str) -> tuple[Answer, str]:
    """Runs a command on a checkpoint. Returns its answer and a hash of its result."""
    out = workdir / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (workdir / "prompts.txt").write_text(_PROMPTS)
    if command == "load":
        answer = require_sound(run_in_fork(workdir, ("lmtool.load", checkpoint), lambda: _load(checkpoint)))
    else:
        predictions = ["output=out/predictions"] if command == "evaluate" and "tuned" in checkpoint else []
        answer = run_lmtool(workdir, *_COMMANDS[command], *predictions, f"checkpoint={checkpoint}")
    if command == "evaluate" and not answer.status:  # only the numbers, since the heading names the checkpoint
        numbers = re.findall(r"^ *(\w+) +(\d\S*)", answer.out, re.MULTILINE)
        if not numbers:
            raise TrialFailed(Outcome.BROKEN, f"evaluate prints no scores: {answer.out[-200:]}")
        (out / "numbers").write_text(json.dumps(numbers))
    elif command == "finetune" and answer.status == 0:
        (out / "result").write_text(result_hash(workdir / "tuned_from_it"))
    (out / "exported" / "README.md").unlink(missing_ok=True)  # names the checkpoint
    digest = hashlib.sha256()
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(out)).encode() + path.read_bytes())
    return answer, digest.hexdigest()


def _write_references(folder: Path, stage: Path, run: str, command: str) -> None:
    """Runs the command on each checkpoint of an undamaged run, and writes the results to results.json."""
    copy(stage, folder, "text.txt", "rows", "cache", f"runs/{run}", f"done/{run}", "done/pre")
    results = {}
    for checkpoint in sorted((folder / "runs" / run / "checkpoints").glob("step_*")):
        answer, results[checkpoint.name] = _run_and_hash(command, folder, str(checkpoint.relative_to(folder)))
        if answer.status:
            raise RuntimeError(f"{command_line(answer.arguments)}: {answer.output}")
        shutil.rmtree(folder / "tuned_from_it", ignore_errors=True)
    (folder / "results.json").write_text(json.dumps(results))


@kind("checkpoints", trials=len(CELLS))
def checkpoints(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Damages a file of a checkpoint, and runs a command that reads the checkpoint."""
    command, name, way = CELLS[seed % len(CELLS)]
    run = RUNS[(seed + seed // len(CELLS)) % len(RUNS)]
    copy(stage, workdir, "text.txt", "rows", "cache", f"runs/{run}", "done/pre")
    folder = workdir / "runs" / run / "checkpoints"
    step = (folder / ("last" if command == "resume" else "best")).read_text().strip()
    path = folder / name if name in ("last", "best") else folder / step / name
    DAMAGES[way](path, trial_rng("checkpoints", seed))
    fault = f"{run}, {command}: {path.relative_to(folder)} {way}"
    with fault_prefix(fault):
        if command == "resume":
            outcome, detail = _check_resume(stage, workdir, run, path)
        else:
            outcome, detail = _check_reading(stage, workdir, run, command, step, path)
    return Verdict(outcome, f"{fault}: {detail}")


def _check_resume(stage: Path, workdir: Path, run: str, path: Path) -> tuple[Outcome, str]:
    """Resumes the run from an older checkpoint, which must reach the result of the undisturbed run."""
    answer = run_lmtool(workdir, "resume", f"runs/{run}")
    require_success(answer, "does not resume from an older checkpoint: ")
    if path.is_dir():  # `resume` finds checkpoints by the numbers of their folders; `last` and `best` are for people
        path.rmdir()
        shutil.copy(stage / "done" / run / "checkpoints" / path.name, path)
    require_same_result(workdir / "runs" / run, stage / "done" / run)
    if path.name in ("last", "best") or path.name in (workdir / "runs" / run / "log.txt").read_text():
        return Outcome.RECOVERED, "the same rows and weights"
    raise TrialFailed(Outcome.SILENT, f"resumed without a message about {path.name}")


def _check_reading(stage: Path, workdir: Path, run: str, command: str, step: str, path: Path) -> tuple[Outcome, str]:
    """Runs a command on the damaged checkpoint `step`, and compares the result with those of the undamaged ones."""
    references = stage / "checkpoints" / f"{run}-{command}"
    build_once(references, lambda folder: _write_references(folder, stage, run, command))
    results = json.loads((references / "results.json").read_text())
    answer, result = _run_and_hash(command, workdir, f"runs/{run}")
    named = path.name in answer.output and (path.name in ("last", "best") or step in answer.output)
    if answer.status:
        if not named:
            raise TrialFailed(Outcome.UNCLEAR, f"the error does not name the file: {answer.err[:300]}")
        other = re.search(r"^hint: use (\S+/(step_\d+)), which is intact", answer.err, re.MULTILINE)
        # The hint must name an intact checkpoint, unless the damaged file is `last` or `best`, outside any checkpoint.
        if other is None and path.parent.name == step:
            raise TrialFailed(Outcome.DEAD_END, f"does not name an intact checkpoint: {answer.err[:300]}")
        if other is not None:  # the hint must work
            second, result = _run_and_hash(command, workdir, other[1])
            if second.status or result != results[other[2]]:
                raise TrialFailed(Outcome.DEAD_END, f"the hint {other[1]} does not work: {second.errors[:200]}")
        return Outcome.REFUSED, answer.errors[:120]
    if result == results[step]:
        if named or path.name in _RESUME_ONLY:
            return Outcome.DONE, "the result is correct"
        raise TrialFailed(Outcome.SILENT, f"uses {path.name} without a message")
    if result in results.values() and named:
        return Outcome.FELL_BACK, next(name for name, known in results.items() if known == result)
    raise TrialFailed(
        Outcome.SILENT, f"another result{' without a message' if not named else ''}: {answer.output[-300:]}"
    )
