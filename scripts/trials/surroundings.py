"""The surroundings of a command: secrets in its environment, and files in its folder that Python could import.

The search for secrets includes their JSON, YAML, HTML, Python and URL encodings.
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

from trials.harness import Answer, ended, require_success, typed
from trials.outcomes import Failed, Outcome, Verdict, chance_of, kind, planted
from trials.stage import EVALUATE, FINETUNE, PREDICT, PRETRAIN, TEXT, copy, replaced

# --- secrets ----------------------------------------------------------------------------------------------------------

_NAMES = (
    "API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD",
    "PGPASSWORD", "GITHUB_TOKEN", "SERVICE_AUTH", "PROXY_AUTH", "X_BEARER", "DATABASE_URL", "REDIS_URL",
    "MY_CREDENTIALS", "npm_config__auth", "PRIVATE_KEY", "PASSPHRASE", "SMTP_PASS", "DB_PWD", "SESSION_COOKIE",
)  # fmt: skip
_LETTERS = string.ascii_letters + string.digits
_ODD = ('"', "'", "\\", " ", "$", "%", "&", "<", "é", "\n", ":", "=", ",", "#", "{", "]", "\t", "\\n", "*", "漢")


def _secret(chance: random.Random, plain: bool = False) -> str:
    """Sixteen characters. Unless `plain`, some have a meaning in YAML, HTML, a URL or a shell."""
    letters = [chance.choice(_LETTERS) for _ in range(16)]
    for _ in range(0 if plain else chance.choice((0, 1, 3))):
        letters[chance.randrange(2, 14)] = chance.choice(_ODD)
    return "".join(letters)


def forms(secret: str) -> set[str]:
    """The encodings in which a secret may appear."""
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
"""Command lines that write to `out`, `run` and `runs`."""


def _quoted(text: str) -> str:
    """A quoted value of an override."""
    escaped = text.replace("\\", "\\\\") if text.endswith("\\") else text
    return "'" + escaped.replace("'", "\\'") + "'"


def _spots(command: str) -> list[str]:
    """The parts of a command line that may hold a secret, the likelier ones several times."""
    spots = ["path", "address", "address", "hub", "unknown", "wrong", "yaml", "nothing"]
    spots += ["text"] * 6 if command in ("predict", "screen") else []
    return spots + (["folder"] * 3 if command in ("pretrain", "tokenizer", "inspect", "plan", "sweep") else [])


def _with(spot: str, place: Path, command: str, secret: str, chance: random.Random) -> tuple[str, ...]:
    """The command line with the secret in `spot`."""
    words = list(_COMMANDS[command])
    value, coded = _quoted(secret), quote(secret, safe="")
    if spot == "path":  # a folder that does not exist
        return replaced(words, f"cache_dir={_quoted(f'nowhere/{secret}')}", f"checkpoint={value}")
    if spot == "address":
        key = chance.choice(("data.path", "data.path", "task.path", "checkpoint", "cache_dir", "run_dir", "output"))
        host = chance.choice(("https://user:{}@host.invalid/x", "hf://user:{}@org/name", "s3://{}@bucket/x?a=b",
                              "https://host.invalid/x?token={}", "https://host.invalid/x?a=b&api_key={}"))  # fmt: skip
        return replaced(words, f"{key}='{host.format(coded)}'")
    if spot == "hub":
        return replaced(words, f"checkpoint='hf://user:{coded}@org/name'", "offline=true")
    if spot == "unknown":
        return (*words, f"{chance.choice(('api_key', 'optimizer.api_key', 'data.token'))}={value}")
    if spot == "wrong":
        return (*words, f"{chance.choice(('seed', 'device', 'optimizer.lr', 'optimizer.betas'))}={value}")
    if spot == "text":
        return replaced(words, f"text=the key is {secret} and more")
    if spot == "yaml":
        (place / "conf" / "experiment").mkdir(parents=True)
        content = {"patience": 3, "cache_dir": f"cache/{secret.replace('/', '')}"}
        (place / "conf/experiment/mine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
        return (*words, "--config-dir", "conf", "experiment=mine")
    if spot == "folder":
        folder = place / f"texts {secret}"
        folder.mkdir()
        (folder / "a.txt").write_text((place / "text.txt").read_text())
        return replaced(words, f"data.path={_quoted(folder.name)}")
    return tuple(words)


@kind("secrets", trials=72)
def secrets(stage: Path, place: Path, seed: int) -> Verdict:
    """Puts a secret into the environment, an override, an address or a text: no output may contain it."""
    chance = chance_of("secrets", seed)
    copy(stage, place, "text.txt", "rows", "cache", "done", "published", "runs")
    command = tuple(_COMMANDS)[seed % len(_COMMANDS)]
    spot = chance.choice(_spots(command))
    name = chance.choice(_NAMES)
    secret = _secret(chance, plain=name.endswith("_URL") or spot == "address")
    value = f"postgres://user:{secret}@host:5432/base" if name.endswith("_URL") else secret
    # An address gives its secret away by its own form, whatever the environment holds.
    environment = {} if spot in ("address", "hub") else {name: value}
    words = _with(spot, place, command, secret, chance)
    known = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    shape = f"{command}, {spot}, {environment or secret!r}"
    with planted(shape):
        answer = typed(place, *words, environment=environment)
        _search(place, answer, secret, known)
        if spot == "nothing":
            require_success(answer)
    return ended(answer, shape)


def _search(place: Path, answer: Answer, secret: str, known: dict[Path, int]) -> None:
    """Raises Failed if printed text or a new file contains the secret."""
    wanted = forms(secret)
    for stream, text in (("standard output", answer.out), ("standard error", answer.err)):
        if seen := next((form for form in wanted if form in text), None):
            line = next(line for line in text.splitlines() if seen.splitlines()[0] in line)
            raise Failed(Outcome.SECRET, f"{stream}: {line[:200]}")
    files = sorted(_files(place, wanted, known))
    if files:
        raise Failed(Outcome.SECRET, f"{len(files)} files: {', '.join(files[:6])}")


def _files(place: Path, wanted: set[str], known: dict[Path, int]) -> Iterator[str]:
    raw = {form.encode() for form in wanted}
    for path in place.rglob("*"):
        if path.is_file() and known.get(path) != path.stat().st_mtime_ns:
            content = path.read_bytes()
            if any(form in content for form in raw):
                yield str(path.relative_to(place))


# --- modules ----------------------------------------------------------------------------------------------------------

# Python imports these for -m before lmtool runs: only -P excludes the working folder.
_BEFORE = {
    "abc", "codecs", "collections", "contextlib", "copyreg", "enum", "functools", "importlib", "io", "keyword", "os",
    "operator", "re", "reprlib", "runpy", "site", "stat", "types", "typing", "warnings",
}  # fmt: skip
_RUN = ["pretrain", *TEXT, "max_steps=1", "offline=true"]
_STARTED: dict[str, list[str]] = {
    "several processes": [*_RUN, "devices=2", "name=a"],
    "doctor": ["doctor", "offline=true", "cache_dir=cache", "device=cpu"],
    "joblib": [*_RUN, "name=a", "-m", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": [*_RUN, "name=a", "-m", "seed=1", "hydra/launcher=submitit_local"],
    "a tracker": [*_RUN, "name=a", "logger=tensorboard"],
    "processes that tokenize": [*replaced(_RUN, "data.path=long.txt"), "name=a"],
    "compiled": [*_RUN, "name=a", "compile=true"],
}
_WORTH = 8_000_000
"""Characters of text from which on several processes tokenize."""
_STARTS = {"the command": [str(Path(sys.executable).with_name("lmtool"))], "-m": [sys.executable, "-m", "lmtool"]}


@kind("modules", trials=7, draw=1)
def modules(stage: Path, place: Path, seed: int) -> Verdict:
    """Puts files named like Python's modules into the working folder: no process of lmtool may import them."""
    chance = chance_of("modules", seed)
    name, start = list(_STARTED)[seed % len(_STARTED)], chance.choice(list(_STARTS))
    copy(stage, place, "text.txt", "cache")
    if name == "processes that tokenize":
        text = (place / "text.txt").read_text()
        (place / "long.txt").write_text(text * (_WORTH // len(text) + 1))
    _plant_modules(place, chance)
    with planted(f"{name}, started by {start}"):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"HOME": str(place / ".home"), "RAYON_NUM_THREADS": "2"}
        environment.pop("TOKENIZERS_PARALLELISM", None)
        command = [*_STARTS[start], *_STARTED[name]]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        if (place / "RAN").exists():
            raise Failed(Outcome.EXECUTED, (place / "RAN").read_text()[:200])
        if done.returncode:
            raise Failed(Outcome.DEAD_END, f"status {done.returncode}: {done.stderr[-300:]}")
    return Verdict(Outcome.DONE, f"{name}, started by {start}")


def _plant_modules(place: Path, chance: random.Random) -> None:
    """Writes modules, `token` and `json` among them, that record their import and fail."""
    names = sorted(sys.stdlib_module_names - set(sys.builtin_module_names) - _BEFORE)
    planted = {"json", "token", *chance.sample([name for name in names if not name.startswith("_")], 40)}
    for name in planted:
        (place / f"{name}.py").write_text(
            f"print({name!r}, file=open({str(place / 'RAN')!r}, 'a'))\nraise ImportError\n"
        )
