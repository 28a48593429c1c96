"""The surroundings of a command: secrets in its environment, and files in its folder that Python could import.

Output and files are searched for a secret itself and for its JSON, YAML, HTML, Python and URL encodings.
"""

from __future__ import annotations

import html
import json
import os
import random
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import yaml

from tests.faults.harness import Answer, refused_or_done, require_sound, require_success, run_lmtool
from tests.faults.outcomes import Outcome, TrialFailed, Verdict, fault_prefix, kind, trial_rng
from tests.faults.stage import EVALUATE, FINETUNE, PREDICT, PRETRAIN, TEXT, copy, with_overrides

# --- secrets ----------------------------------------------------------------------------------------------------------

_VARIABLES = (
    "API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD",
    "PGPASSWORD", "GITHUB_TOKEN", "SERVICE_AUTH", "PROXY_AUTH", "X_BEARER", "DATABASE_URL", "REDIS_URL",
    "MY_CREDENTIALS", "npm_config__auth", "PRIVATE_KEY", "PASSPHRASE", "SMTP_PASS", "DB_PWD", "SESSION_COOKIE",
)  # fmt: skip
_LETTERS = string.ascii_letters + string.digits
_SPECIAL_CHARACTERS = (
    '"',
    "'",
    "\\",
    " ",
    "$",
    "%",
    "&",
    "<",
    "é",
    "\n",
    ":",
    "=",
    ",",
    "#",
    "{",
    "]",
    "\t",
    "\\n",
    "*",
    "漢",
)


def _secret(rng: random.Random, plain: bool = False) -> str:
    """Returns a secret of sixteen characters. Unless `plain`, it may contain characters that have a meaning in YAML,
    HTML, a URL or a shell."""
    letters = [rng.choice(_LETTERS) for _ in range(16)]
    for _ in range(0 if plain else rng.choice((0, 1, 3))):
        letters[rng.randrange(2, 14)] = rng.choice(_SPECIAL_CHARACTERS)
    return "".join(letters)


def encodings_of(secret: str) -> set[str]:
    """Returns the encodings in which a secret may appear."""
    dumped = yaml.safe_dump(secret, allow_unicode=True).split("\n...")[0].strip("'\"\n ")
    return {
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
        html.escape(secret),
        quote(secret),
        quote(secret, safe=""),
        secret.replace("'", "''"),
        secret.replace("'", "\\'"),
        *([dumped] if len(dumped) >= 8 else []),
    }


_COMMANDS: dict[str, Sequence[str]] = {
    "pretrain": PRETRAIN,
    "finetune": FINETUNE,
    "evaluate": (*EVALUATE, "output=out"),
    "predict": (*PREDICT, "output=out"),
    "screen": PREDICT,
    "export": ("export", "checkpoint=done/tuned", "output=out"),
    "import": ("import", "checkpoint=published", "output=out"),
    "tokenizer": ("tokenizer", "data=text", "data.path=text.txt", "cache_dir=cache", "output=out"),
    "plan": ("plan", *PRETRAIN[:-1]),
    "inspect": ("inspect", *PRETRAIN[:-1], "n=2", "tokens=2000", "output=out"),
    "config": (*PRETRAIN, "--cfg", "job"),
    "sweep": (*PRETRAIN[:-1], "name=swept", "-m", "seed=1,2"),
}
"""Command lines that write to `out`, `run`, `runs` or the screen."""


def _quoted(text: str) -> str:
    """Quotes a text as the value of an override."""
    escaped = text.replace("\\", "\\\\") if text.endswith("\\") else text
    return "'" + escaped.replace("'", "\\'") + "'"


def _possible_spots(command: str) -> list[str]:
    """Returns the positions at which a secret may be put into a command line (see `_insert_secret`). Positions that are
    to be chosen more often occur several times."""
    spots = ["path", "address", "address", "hub", "unknown", "wrong", "yaml", "nothing"]
    spots += ["text"] * 6 if command in ("predict", "screen") else []
    return spots + (["folder"] * 3 if command in ("pretrain", "tokenizer", "inspect", "plan", "sweep") else [])


def _insert_secret(spot: str, workdir: Path, command: str, secret: str, rng: random.Random) -> tuple[str, ...]:
    """Returns the command line of `_COMMANDS` with the secret at a position, and writes the files that it needs."""
    arguments = list(_COMMANDS[command])
    value, coded = _quoted(secret), quote(secret, safe="")
    if spot == "path":  # a folder that does not exist
        return with_overrides(arguments, f"cache_dir={_quoted(f'nowhere/{secret}')}", f"checkpoint={value}")
    if spot == "address":
        key = rng.choice(("data.path", "data.path", "task.path", "checkpoint", "cache_dir", "run_dir", "output"))
        host = rng.choice(("https://user:{}@host.invalid/x", "hf://user:{}@org/name", "s3://{}@bucket/x?a=b",
                              "https://host.invalid/x?token={}", "https://host.invalid/x?a=b&api_key={}"))  # fmt: skip
        return with_overrides(arguments, f"{key}='{host.format(coded)}'")
    if spot == "hub":
        return with_overrides(arguments, f"checkpoint='hf://user:{coded}@org/name'", "offline=true")
    if spot == "unknown":
        return (*arguments, f"{rng.choice(('api_key', 'optimizer.api_key', 'data.token'))}={value}")
    if spot == "wrong":
        return (*arguments, f"{rng.choice(('seed', 'device', 'optimizer.lr', 'optimizer.betas'))}={value}")
    if spot == "text":
        return with_overrides(arguments, f"text=the key is {secret} and more")
    if spot == "yaml":
        (workdir / "conf" / "experiment").mkdir(parents=True)
        content = {"patience": 3, "cache_dir": f"cache/{secret.replace('/', '')}"}
        (workdir / "conf/experiment/mine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
        return (*arguments, "--config-dir", "conf", "experiment=mine")
    if spot == "folder":
        folder = workdir / f"texts {secret}"
        folder.mkdir()
        (folder / "a.txt").write_text((workdir / "text.txt").read_text())
        return with_overrides(arguments, f"data.path={_quoted(folder.name)}")
    return tuple(arguments)


@kind("secrets", trials=72)
def secrets(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Puts a secret into the environment, an override, an address or a text. No output or file may contain it."""
    rng = trial_rng("secrets", seed)
    copy(stage, workdir, "text.txt", "rows", "cache", "done", "published", "runs")
    command = tuple(_COMMANDS)[seed % len(_COMMANDS)]
    spot = rng.choice(_possible_spots(command))
    name = rng.choice(_VARIABLES)
    secret = _secret(rng, plain=name.endswith("_URL") or spot == "address")
    value = f"postgres://user:{secret}@host:5432/base" if name.endswith("_URL") else secret
    # The secret in an address must be recognized by its position there, without help from the environment.
    environment = {} if spot in ("address", "hub") else {name: value}
    arguments = _insert_secret(spot, workdir, command, secret, rng)
    known = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file()}
    shape = f"{command}, {spot}, {environment or secret!r}"
    with fault_prefix(shape):
        answer = run_lmtool(workdir, *arguments, environment=environment)
        _search(workdir, answer, secret, known)
        if spot == "nothing":
            require_success(answer)
    return refused_or_done(answer, shape)


def _search(workdir: Path, answer: Answer, secret: str, known: dict[Path, int]) -> None:
    """Raises TrialFailed if printed text or a new or changed file contains the secret. known: the modification times of
    the files that existed before the command."""
    encodings = encodings_of(secret)
    for stream, text in (("standard output", answer.out), ("standard error", answer.err)):
        if printed := next((encoding for encoding in encodings if encoding in text), None):
            line = next(line for line in text.splitlines() if printed.splitlines()[0] in line)
            raise TrialFailed(Outcome.SECRET, f"{stream}: {line[:200]}")
    files = sorted(_files_containing(workdir, encodings, known))
    if files:
        raise TrialFailed(Outcome.SECRET, f"{len(files)} files: {', '.join(files[:6])}")


def _files_containing(workdir: Path, texts: set[str], known: dict[Path, int]) -> Iterator[str]:
    """Yields the new or changed files that contain one of the texts."""
    encoded = {text.encode() for text in texts}
    for path in workdir.rglob("*"):
        if path.is_file() and known.get(path) != path.stat().st_mtime_ns:
            content = path.read_bytes()
            if any(text in content for text in encoded):
                yield str(path.relative_to(workdir))


# --- environments -----------------------------------------------------------------------------------------------------

_NO_LOCKS = """import errno, fcntl
def flock(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
"""
_ENVIRONMENTS = {
    "closed standard output": 'exec "$@" >&-',
    "closed standard error": 'exec "$@" 2>&-',
    "closed standard streams": 'exec "$@" <&- >&- 2>&-',
    "a deleted working folder": 'mkdir gone; cd gone; rmdir ../gone; exec "$@"',
    "the figure backend of a notebook": 'export MPLBACKEND=module://missing_backend; exec "$@"',
    "a missing folder for temporary files": 'export TMPDIR="$PWD/missing"; exec "$@"',
    "no HOME": 'unset HOME; exec "$@"',
    "a narrow terminal that only knows ASCII": 'export COLUMNS=1 TERM=dumb LC_ALL=C PYTHONUTF8=0; exec "$@"',
    "twelve open files": 'ulimit -n 12; exec "$@"',
    "files of at most 8 kB": 'ulimit -f 8; exec "$@"',
    "a file system without locks": """
        export PYTHONPATH="$PWD/.site"
        "$@" & first=$!; "${@/run_dir=run/run_dir=other}" & second=$!
        wait $first || exit $?; wait $second""",
}
"""Shell scripts that run the command line "$@" in an unusual environment."""


@kind("environments", trials=len(_ENVIRONMENTS), quick_trials=3)
def environments(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Pretrains in an unusual environment. The run is complete, or the command is refused and leaves no run."""
    name, script = list(_ENVIRONMENTS.items())[seed]
    copy(stage, workdir, "text.txt")
    (workdir / ".site").mkdir()
    (workdir / ".site" / "sitecustomize.py").write_text(_NO_LOCKS)
    environment = {"PATH": os.environ["PATH"], "HOME": str(workdir / ".home")}
    command = ["bash", "-c", script, "bash", *_LAUNCHERS["the command"], *PRETRAIN, "offline=true"]
    with fault_prefix(name):
        done = subprocess.run(command, cwd=workdir, env=environment, capture_output=True, text=True, check=False)
        answer = require_sound(Answer(tuple(PRETRAIN), done.returncode, done.stdout, done.stderr))
        complete = all((workdir / "run" / file).is_file() for file in ("result.json", "report.html"))
        if answer.status == 0 and not complete:
            raise TrialFailed(Outcome.SILENT, "the run is not complete")
        if answer.status and (workdir / "run").exists():
            raise TrialFailed(Outcome.LEFTOVER, f"status {answer.status}, but it leaves a run")
    return refused_or_done(answer, name)


# --- modules ----------------------------------------------------------------------------------------------------------

# With -m, Python imports these modules before lmtool runs, from the working folder too unless -P is given.
_IMPORTED_AT_START = {
    "abc", "codecs", "collections", "contextlib", "copyreg", "enum", "functools", "importlib", "io", "keyword", "os",
    "operator", "re", "reprlib", "runpy", "site", "stat", "types", "typing", "warnings",
}  # fmt: skip
_RUN = ["pretrain", *TEXT, "max_steps=1", "offline=true"]
_SPAWNING_COMMANDS: dict[str, list[str]] = {
    "several processes": [*_RUN, "devices=2", "name=a"],
    "doctor": ["doctor", "offline=true", "cache_dir=cache", "device=cpu"],
    "joblib": [*_RUN, "name=a", "-m", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": [*_RUN, "name=a", "-m", "seed=1", "hydra/launcher=submitit_local"],
    "a tracker": [*_RUN, "name=a", "logger=tensorboard"],
    "parallel tokenization": [*with_overrides(_RUN, "data.path=long.txt"), "name=a"],
    "compiled": [*_RUN, "name=a", "compile=true"],
}
_PARALLEL_CHARACTERS = 8_000_000
"""Characters of text above which lmtool tokenizes in several processes."""
_LAUNCHERS = {"the command": [str(Path(sys.executable).with_name("lmtool"))], "-m": [sys.executable, "-m", "lmtool"]}


@kind("modules", trials=7, quick_trials=1)
def modules(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Puts files with the names of standard modules into the working folder. No process of lmtool may import them."""
    rng = trial_rng("modules", seed)
    name, start = list(_SPAWNING_COMMANDS)[seed % len(_SPAWNING_COMMANDS)], rng.choice(list(_LAUNCHERS))
    copy(stage, workdir, "text.txt", "cache")
    if name == "parallel tokenization":
        text = (workdir / "text.txt").read_text()
        (workdir / "long.txt").write_text(text * (_PARALLEL_CHARACTERS // len(text) + 1))
    _plant_modules(workdir, rng)
    with fault_prefix(f"{name}, started by {start}"):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"HOME": str(workdir / ".home"), "RAYON_NUM_THREADS": "2"}
        environment.pop("TOKENIZERS_PARALLELISM", None)
        command = [*_LAUNCHERS[start], *_SPAWNING_COMMANDS[name]]
        done = subprocess.run(command, cwd=workdir, env=environment, capture_output=True, text=True, check=False)
        if (workdir / "RAN").exists():
            raise TrialFailed(Outcome.EXECUTED, (workdir / "RAN").read_text()[:200])
        if done.returncode:
            raise TrialFailed(Outcome.DEAD_END, f"status {done.returncode}: {done.stderr[-300:]}")
    return Verdict(Outcome.DONE, f"{name}, started by {start}")


def _plant_modules(workdir: Path, rng: random.Random) -> None:
    """Writes modules with the names of standard modules, including `token` and `json`, that record that they were
    imported and raise ImportError."""
    names = sorted(sys.stdlib_module_names - set(sys.builtin_module_names) - _IMPORTED_AT_START)
    planted = {"json", "token", *rng.sample([name for name in names if not name.startswith("_")], 40)}
    for name in planted:
        (workdir / f"{name}.py").write_text(
            f"print({name!r}, file=open({str(workdir / 'RAN')!r}, 'a'))\nraise ImportError\n"
        )
