"""The errors a user can cause, and the ways a run can end.

An error names the value, its key or file, the allowed values and the remedy. `cli` prints it as one line `error: ...`
and one line `hint: ...`, without a traceback, and exits with `exit_status`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The exit statuses.
DONE = 0
FAULT = 1
USER_ERROR = 2
CHECK_FAILED = 3
DIVERGED = 4
REQUEUE = 75
INTERRUPTED = 130
TERMINATED = 143


class LmtoolError(Exception):
    """An expected end of a command. `message` is one line; `hint` says what to type or change."""

    exit_status = FAULT

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint


class UserError(LmtoolError):
    """An error that the user can fix: exit 2. It names the key or file:line, the value and the allowed values."""

    exit_status = USER_ERROR


@dataclass(frozen=True)
class Problem:
    """One error in a configuration: the dotted key, what is wrong with it, and what to do.

    likely_keys: the keys that an unknown key probably stands for. absent: a required key has no value.
    """

    key: str
    message: str
    hint: str | None = None
    likely_keys: tuple[str, ...] = ()
    absent: bool = False


# The hints for system errors that the user can fix. {action} is the start of the
# remedy: "put run_dir=" gives "put run_dir= on another disk".
_SYSTEM_HINTS = {
    errno.ENOSPC: "free some space, or {action} on another disk",
    errno.EDQUOT: "free some of your quota, or {action} on another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or {action} on another disk",
    errno.EROFS: "{action} on a disk that can be written",
    errno.EACCES: "{action} in a folder you may read and write",
    errno.EPERM: "{action} in a folder you may read and write",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EIO: "{action} on another disk: this one reports an error",
    errno.ENOTDIR: "{action} in another folder: a part of this path is a file",
    errno.EISDIR: "{action} in another folder: a folder here has the name of this file",
    errno.ELOOP: "remove the link (lmtool does not write through it), or {action} in another folder",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the limit on open files, or end other programs",
    errno.EAGAIN: "raise the limit on processes (ulimit -u), or end other programs",
    errno.ENOMEM: "end other programs, or use a smaller model or batch",
}


def cannot_write(path: Path, error: OSError, key: str = "run_dir") -> UserError:
    """Returns the error for a failed write. key: the key that sets the folder."""
    return UserError(f"cannot write {path}: {_reason(error)}", write_hint(error, key))


def write_hint(error: OSError, key: str) -> str:
    """Returns the hint for a failed write in the folder that a key sets."""
    return _SYSTEM_HINTS.get(error.errno or 0, "{action} in another folder").format(action=f"put {key}=")


@contextmanager
def system_errors() -> Iterator[None]:
    """Converts OSErrors that the user can fix (a full disk, a folder without read permission) into UserErrors. Callers
    that know which key to change raise their own."""
    try:
        yield
    except OSError as error:
        if "temporary directory" in str(error.strerror):  # the error of the module tempfile
            raise UserError("no folder for temporary files can be written", "export TMPDIR=FOLDER") from error
        hint = _SYSTEM_HINTS.get(error.errno or 0)
        if hint is None:
            raise
        prefix = f"{error.filename}: " if error.filename is not None else ""
        raise UserError(f"{prefix}{_reason(error)}", hint.format(action="work")) from error


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "a link is in its place"
    return (os.strerror(error.errno) if error.errno else str(error)).lower()


class ConfigError(UserError):
    """All errors of a configuration together."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.message, first.hint)

    def in_file(self, origin: str, hint: str) -> ConfigError:
        """Returns the same errors, for a configuration that was read from a file. origin: the file. hint: what to do
        about the file; an error about plugins keeps its own hint, because plugins are typed on the command line."""
        return ConfigError(
            [
                Problem(problem.key, f"{origin}: {problem.message}", problem.hint if problem.key == "plugins" else hint)
                for problem in self.problems
            ]
        )


_NO_MEMORY = ("not enough memory", "can't allocate memory", "std::bad_alloc")
# oneDNN, when it cannot allocate the code or the scratch space of a product. Without a kernel for the shapes it says
# "could not create a primitive descriptor ..." instead.
_NO_KERNEL = "could not create a primitive"


def out_of_memory(error: BaseException) -> LmtoolError | None:
    """Returns the error for an exception that means out of memory, on a device or the host; None for other
    exceptions."""
    text = str(error)
    known_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not known_type and not any(reason in text for reason in _NO_MEMORY) and text != _NO_KERNEL:
        return None
    first = text.splitlines()[0] if text else type(error).__name__
    return LmtoolError(
        f"out of memory: {first}",
        "set a smaller micro_batch_tokens= (results stay the same), gradient_checkpointing=true or a smaller "
        "max_length=; `lmtool plan` shows what the memory is for",
    )


_NO_THREAD = ("can't start new thread", "ThreadPoolBuildError")


def out_of_threads(error: BaseException) -> LmtoolError | None:
    """Returns the error for an exception that means that no further thread may start; None for other exceptions."""
    if not any(reason in str(error) for reason in _NO_THREAD):
        return None
    return LmtoolError("no further thread or process can be started", _SYSTEM_HINTS[errno.EAGAIN])


class CheckFailed(LmtoolError):
    """A failed check, such as a converted checkpoint that differs when it is read back: exit 3."""

    exit_status = CHECK_FAILED


class Diverged(LmtoolError):
    """A loss that is not finite or exploded: exit 4. The batch is saved in the run folder."""

    exit_status = DIVERGED


class NotFinite(Diverged):
    """Model output that is not finite, in evaluation or use. batch: the `types.Batch` of the forward pass, if known."""

    def __init__(self, quantity: str, batch: Any = None):
        super().__init__(
            f"the model's {quantity} are not finite",
            "use an earlier checkpoint of its run (checkpoint=RUN/checkpoints/step_N), or train with a lower "
            "optimizer.lr",
        )
        self.quantity, self.batch = quantity, batch


class Stopped(LmtoolError):
    """Stopped from outside with a checkpoint saved: 75 (requeue me), 130 (SIGINT) or 143 (SIGTERM)."""

    def __init__(self, message: str, exit_status: int, hint: str | None = None):
        super().__init__(message, hint)
        self.exit_status = exit_status


LONGEST = 200
"""Maximum letters of a word that is compared, because the time grows with the product of both lengths."""


def distance(a: str, b: str) -> int:
    """Returns the edit distance: insertions, deletions, substitutions and swaps of two adjacent letters (Damerau
    1964)."""
    above: list[int] = []  # the row before the previous one
    previous = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
        above, previous = previous, row
    return previous[-1]


def _max_distance(word: str) -> int:
    return min(max(1, len(word) // 3), len(word) - 1)


def _differ_too_much(word: str, other: str) -> bool:
    """Whether two names differ too much after the parts that they share: `bert_base` and `bert_cased`."""
    parts, other_parts = word.split("_"), other.split("_")
    while len(parts) > 1 and len(other_parts) > 1 and parts[0] == other_parts[0]:
        parts, other_parts = parts[1:], other_parts[1:]
    return distance("_".join(parts), "_".join(other_parts)) > _max_distance("_".join(parts))


def nearest(word: str, known: Iterable[object]) -> str | None:
    """Returns the known name that is most similar to `word`, or None if none is similar enough."""
    if len(word) > LONGEST:
        return None
    lower = word.lower()
    # Ties are broken in favor of the same letters: `adawm` is adamw.
    ranked = sorted(
        (distance(lower, name.lower()), sorted(lower) != sorted(name.lower()), name) for name in map(str, known)
    )
    if ranked and ranked[0][0] <= _max_distance(word) and not _differ_too_much(lower, ranked[0][2].lower()):
        return ranked[0][2]
    extensions = [
        name for *_, name in ranked if len(word) > 2 and (name.startswith(word) or word.startswith(name + "_"))
    ]
    return extensions[0] if extensions else None


def nearest_keys(key: str, known: Sequence[str]) -> list[str]:
    """Returns at most three dotted keys that are most similar to a misspelled one, best first.

    The last part decides (`lr` finds `optimizer.lr`). A different section costs half an edit if it is a typo itself,
    one edit if it is missing or another word.
    """
    if len(key) > LONGEST:
        return []
    parent, _, last = key.rpartition(".")
    scored = []
    for candidate in known:
        above, _, name = candidate.rpartition(".")
        edits = distance(last.lower(), name.lower())
        # In the same section a larger distance is allowed; in another one only a single edit.
        if edits <= (_max_distance(last) if above == parent else min(1, _max_distance(last))):
            section_edits = 0.0 if above == parent else min(1.0, distance(parent, above) / 2)
            scored.append((edits + section_edits, candidate))
    scored.sort()
    return [candidate for score, candidate in scored if score == scored[0][0]][:3] or _by_rare_part(last.lower(), known)


def _by_rare_part(word: str, known: Sequence[str]) -> list[str]:
    """The keys with the rarest part of the word: `num_epochs` finds `max_epochs`. Empty if more than three keys have
    it."""
    keys_by_part: dict[str, list[str]] = {}
    for key in known:
        for part in {*key.rpartition(".")[2].split("_")} & {*word.split("_")}:
            keys_by_part.setdefault(part, []).append(key)
    fewest = min(keys_by_part.values(), key=len, default=[])
    return fewest if len(fewest) <= 3 else []
