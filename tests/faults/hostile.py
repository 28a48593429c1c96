"""Untrusted folders: alias bombs and class paths in configurations, names with terminal codes or `..`, pipes, devices
and endless files as input, and links at paths to which a run, a report or a sweep writes."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.faults import weights
from tests.faults.outcomes import Verdict, kind
from tests.faults.scenes import EITHER, ESCAPES, LEGAL, REFUSED, Scene, plant_factory, play
from tests.faults.stage import EVALUATE, FINETUNE, PREDICT, PRETRAIN, TEXT, with_overrides
from tests.faults.weights import IMPORT, PUBLISHED

# --- configurations ---------------------------------------------------------------------------------------------------

_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
_TAG = '!!python/object/apply:os.system ["touch RAN"]'
CONTENTS = {
    "an alias bomb": _BOMB,
    "an alias bomb of mappings": "a0: &a0 {x: y}\n"
    + "".join(f"a{n}: &a{n} {{{', '.join(f'k{m}: *a{n - 1}' for m in range(10))}}}\n" for n in range(1, 10)),
    "a self-referencing alias": "a: &a [*a]\nseed: 1\n",
    "endless merge keys": "a: &a\n  <<: *a\n",
    "depth": "a: " + "[" * 20_000 + "]" * 20_000,
    "depth by indentation": "".join(" " * n + "a:\n" for n in range(900)),
    "a megabyte of keys": "".join(f"k{n}: {n}\n" for n in range(60_000)),
    "ten megabytes": "# " + "x" * 10_000_000,
    "a Python tag": f"seed: {_TAG}\n",
    "a Python tag at the top": _TAG,
    "a class path": "_target_: os.system\ncommand: touch RAN\nseed: 1\n",
    "a class path in the optimizer": "optimizer: {_target_: os.system, command: touch RAN, name: adamw}\n",
    "a launcher": "hydra: {launcher: {_target_: os.system, command: touch RAN}}\n",
    "a search path": "hydra: {searchpath: ['pkg://os', 'file:///']}\n",
    "an environment variable": "seed: ${oc.env:SOME_TOKEN}\n",
    "a self-referencing interpolation": "seed: ${seed}\n",
    "a resolver": "seed: ${eval:'1+1'}\n",
    "a date": "seed: 2020-01-01\n",
    "two documents": "seed: 1\n---\nseed: 2\n",
    "a repeated key": "seed: 1\nseed: 2\n",
    "a tab": "seed:\t1\n\tx: 2\n",
    "terminal codes in a key": f"{json.dumps(ESCAPES)}: 1\n",
    "raw terminal codes": f"name: {ESCAPES}\n",
    "a number as key": "1: 2\n",
    "a null key": "~: 2\n",
    "a list": "- 1\n- 2\n",
    "a string": "hello\n",
    "binary": "!!binary |\n  AAAA\n",
    "a set": "seed: !!set {a, b}\n",
    "an unknown version": "version: 99\nseed: 1\n",
    "a plugin": "plugins: [evil]\n",
    "defaults that climb": "defaults: [../../../../../../etc/passwd]\n",
}


@plant_factory
def _append_config(workdir: Path, name: str, content: str) -> None:
    """Appends to a configuration file, and adds a Python module that a plugin entry of the configuration can name."""
    (workdir / name).parent.mkdir(parents=True, exist_ok=True)
    with (workdir / name).open("a") as file:
        file.write(content)
    (workdir / "evil.py").write_text("open('RAN', 'w')\n")


def _config_scenes() -> Iterator[Scene]:
    for name, content in CONTENTS.items():
        saved, resumed = _append_config("saved.yaml", content), _append_config("runs/tuned/config.yaml", content)
        group = _append_config("conf/model/mine.yaml", "# @package _global_\n" + content)
        group_words = ("pretrain", "--config-dir", "conf", "model=mine", "max_steps=1", "run_dir=run")
        yield Scene(f"{name} in --config", ("pretrain", "--config", "saved.yaml"), saved)
        yield Scene(f"{name} in --config-dir", group_words, group)
        yield Scene(f"{name} in --config-dir, -m", (*group_words[:-1], "-m", "seed=1,2"), group)
        yield Scene(f"{name} in the config.yaml of a run", ("resume", "runs/tuned"), resumed)


@plant_factory
def _conf_folder(workdir: Path, make: Callable[[Path], object]) -> None:
    _append_config("conf/model/mine.yaml", "defaults: [bert_tiny, _self_]\n")(workdir)
    make(workdir / "conf" / "model")


def _yamls(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).write_text("num_layers: 1\n")


SCENES = list(_config_scenes())
SCENES += [
    Scene(f"{name} next to a user's YAML", ("pretrain", "--config-dir", "conf", "model=mine", "--cfg", "job"),
          _conf_folder(make), expected=LEGAL)
    for name, make in {
        "a loop of links": lambda folder: (folder / "up").symlink_to(".."),
        "two thousand files": lambda folder: _yamls(folder, [f"m{number}.yaml" for number in range(2000)]),
        "a name with terminal codes": lambda folder: _yamls(folder, ["\x1b[31mred.yaml"]),
        "a name that is not UTF-8": lambda folder: _yamls(folder, ["m\udcff.yaml"]),
    }.items()
]  # fmt: skip

# --- data -------------------------------------------------------------------------------------------------------------


def _nothing(workdir: Path) -> None:
    """Plants no file: the fault is in the arguments."""


@plant_factory
def _text_file(workdir: Path, name: str, folder: str = "texts") -> None:
    (workdir / folder).mkdir(exist_ok=True)
    (workdir / folder / name).write_text((workdir / "text.txt").read_text())


@plant_factory
def _replace_rows(workdir: Path, header: str, *rows: str, name: str = "train.tsv") -> None:
    (workdir / "rows" / name).write_text("\n".join([header, *rows, ""]))


def _deep_folder(workdir: Path) -> None:
    folder = workdir / "texts" / "/".join(["d"] * 500)
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text((workdir / "text.txt").read_text())


def _linked_folder(workdir: Path) -> None:
    _text_file("a.txt")(workdir)
    (workdir / "texts" / "again").symlink_to(".")


@plant_factory
def _write_pointer(workdir: Path, name: str, content: str) -> None:
    (workdir / name).unlink(missing_ok=True)  # runs/latest is a link to the newest run
    (workdir / name).write_text(content)


_FILES = {
    "terminal codes": f"{ESCAPES}.txt", "a line feed": "a\nerror: b.txt", "invalid UTF-8": "a\udcff.txt",
    "a leading dash": "-rf.txt", "a star": "*.txt", "spaces": " a b .txt", "only dots": "....txt",
}  # fmt: skip
_FOLDER = with_overrides(PRETRAIN, "data.path=texts")
SCENES += [
    Scene(f"a text file named with {name}", _FOLDER, _text_file(file), expected=LEGAL) for name, file in _FILES.items()
]
SCENES += [
    Scene(f"an error in a text file named with {name}", _FOLDER,
          lambda workdir, file=file: (_text_file(file)(workdir),
                                            (workdir / "texts" / file).write_bytes(b"a\0b"))[0], ("NUL",))
    for name, file in _FILES.items()
]  # fmt: skip
_ESCAPED = ESCAPES.replace("\t", "")
_NEW_LABELS = with_overrides(
    FINETUNE, "task=custom", "task.kind=classification", "task.text=[sentence]", "task.label=label"
)
_labels = _replace_rows("sentence\tlabel", *(f"text {n}\t{_ESCAPED}{n % 2}" for n in range(40)))
_GOOD = [f"a good text {number}\t{number % 2}" for number in range(20)]
SCENES += [
    Scene("a folder that links to itself", _FOLDER, _linked_folder, expected=LEGAL),
    Scene("a folder 500 levels deep", _FOLDER, _deep_folder, expected=LEGAL),
    Scene("terminal codes in a column name", FINETUNE, _replace_rows(f"{_ESCAPED}\tlabel", *_GOOD), ("sentence",)),
    Scene("terminal codes in a label", EVALUATE, _replace_rows("sentence\tlabel", f"a\t{_ESCAPED}", name="dev.tsv"),
          ("dev.tsv:2",)),
    Scene("terminal codes in a text", (*EVALUATE, "output=out"),
          _replace_rows("sentence\tlabel", f"{_ESCAPED}\t1", "b\t0", name="dev.tsv"), expected=LEGAL),
    Scene("terminal codes in new labels", _NEW_LABELS, _labels, expected=EITHER),
    Scene("inspect of terminal codes in labels",
          ("inspect", *with_overrides(_NEW_LABELS, "run_dir=null"), "n=2", "tokens=1000"),
          lambda workdir: (_labels(workdir), (workdir / "rows" / "dev.tsv").unlink())[0], expected=EITHER),
    Scene("terminal codes in a typed text", (*PREDICT[:-1], f"text={_ESCAPED}"), _nothing, expected=LEGAL),
    Scene("terminal codes in a key", (*PRETRAIN, f"{_ESCAPED}=1"), _nothing),
    Scene("terminal codes in a value", (*PRETRAIN, f"optimizer.lr={_ESCAPED}"), _nothing),
    Scene("terminal codes in a path", with_overrides(PRETRAIN, f"data.path='{_ESCAPED}'"), _nothing, ("data.path",)),
    Scene("terminal codes in a flag", (*PRETRAIN, f"--{_ESCAPED}"), _nothing),
    Scene("terminal codes as a command", (_ESCAPED,), _nothing),
    Scene("terminal codes in a checkpoint's name", with_overrides(PREDICT, f"checkpoint='{_ESCAPED}'"), _nothing,
          ("checkpoint",)),
    Scene("a file of another folder as dev", (*FINETUNE, "task.files={../../precious/file: dev}"), _nothing,
          expected=EITHER),
]  # fmt: skip
SCENES += [
    Scene(f"name={name!r}", with_overrides(PRETRAIN, "run_dir=null", f"name='{name}'"), _nothing, ("name",))
    for name in (
        "../precious", "..", ".", "/tmp/x", "a/b", "a\\b", ".hidden", "-rf", "latest", "x" * 101, "a\nb", "a b", "ä"
    )
]  # fmt: skip
SCENES += [
    Scene(f"checkpoint={address}", with_overrides(PREDICT, f"checkpoint='{address}'", "offline=true"), _nothing,
          ("checkpoint",))
    for address in (
        "hf://../x", "hf://a/..", "hf://a/../../b", "hf://org/name@../../x", "hf://org/name/more", "hf://-org/name",
        "hf://org/.name", "hf://org/name.git", "hf://org--x/name", "hf://org/name@", "hf://" + "x" * 300, "hf://",
        "hf://user:pass@org/name", "http://localhost:1/x", "file:///etc", "hf://org/na me", "hf://ORG%2f..%2fx",
        "s3://x/y",
    )
]  # fmt: skip
SCENES += [
    Scene(f"runs/latest holds {content[:30]!r}", with_overrides(PREDICT, "checkpoint=runs/latest"),
          _write_pointer("runs/latest", content), ("latest", "checkpoint", "runs"))
    for content in ("../../precious", "..", "", "/etc", "nowhere", "\0", "x" * 100_000, ESCAPES)
]  # fmt: skip
SCENES += [
    Scene(f"best holds {content[:30]!r}", PREDICT,
          _write_pointer("done/tuned/checkpoints/best", content), ("best", "checkpoint"), expected=EITHER)
    for content in ("../../../precious", "..", "/etc", "step_99999999", "\0", "x" * 100_000, ESCAPES)
]  # fmt: skip

# --- pipes, sockets, devices, endless files ---------------------------------------------------------------------------


@plant_factory
def _replace_by_node(workdir: Path, where: str, make: Callable[[Path], object]) -> None:
    path = workdir / where
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most about a hundred characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def _loop(path: Path) -> None:
    path.symlink_to(f"{path.name}.again")
    path.with_name(f"{path.name}.again").symlink_to(path.name)


def _endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


def _write(content: str, path: Path) -> None:
    path.write_text(content)


NODES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a loop of links": _loop,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "8 GB of nothing": _endless,
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 4),
}
"""Functions that create a node at a path at which nothing exists."""
VALUES = {
    "an empty file": "",
    "a number": "1",
    "a list": "[1]",
    "an integer of 5,000 digits": f'{{"vocab_size": {"9" * 5000}}}',
}
"""Contents of a file in JSON or YAML that lmtool expects to hold a mapping of usual values."""

# Files that a command needs: path, command line, and names of which the error must contain one.
_REQUIRED_FILES: list[tuple[str, Sequence[str], tuple[str, ...]]] = [
    ("text.txt", PRETRAIN, ("text.txt",)),
    ("held.txt", (*PRETRAIN, "data.validation=held.txt"), ("held.txt",)),
    ("texts/a.txt", with_overrides(PRETRAIN, "data.path=texts"), ("a.txt", "data.path")),
    ("rows/train.tsv", FINETUNE, ("train.tsv", "task.path")),
    ("rows/dev.tsv", FINETUNE, ("dev.tsv", "task.path")),
    ("rows/dev.tsv", EVALUATE, ("dev.tsv", "task.path")),
    ("rows", FINETUNE, ("rows",)),
    ("input.txt", (*PREDICT[:-1], "input=input.txt"), ("input.txt",)),
    ("input.tsv", (*PREDICT[:-1], "input=input.tsv"), ("input.tsv",)),
    ("saved.yaml", ("pretrain", "--config", "saved.yaml"), ("saved.yaml",)),
    ("conf/model/mine.yaml", ("pretrain", "--config-dir", "conf", "model=mine"), ("mine", "conf")),
    ("conf", ("pretrain", "--config-dir", "conf", "model=bert_tiny", "--cfg", "job"), ("conf",)),
    ("published/config.json", PUBLISHED, ("config.json", "published")),
    ("published/config.json", IMPORT, ("config.json", "published")),
    ("published/model.safetensors", PUBLISHED, ("model.safetensors", "published")),
    ("published/model.safetensors", IMPORT, ("model.safetensors", "published")),
    ("published/tokenizer.json", PUBLISHED, ("tokenizer", "published")),
    ("published/tokenizer_config.json", PUBLISHED, ("tokenizer_config.json", "published")),
    ("tokens/tokenizer.json", (*PRETRAIN, "tokenizer=folder", "tokenizer.path=tokens"), ("tokens",)),
    ("runs/tuned/config.yaml", ("resume", "runs/tuned"), ("config.yaml",)),
    ("runs/tuned/metrics.jsonl", ("resume", "runs/tuned"), ("metrics.jsonl",)),
]
# Files that a command does not need: it may replace or skip them, or be refused with an error that names them.
_OPTIONAL_FILES = [
    (f"runs/tuned/{name}", ("resume", "runs/tuned"), (name,))
    for name in ("log.txt", "environment.json", "facts.json", "LOCK", "result.json", "predictions.jsonl",
                 "report.html", "plots", "checkpoints/last", "checkpoints/best")
]  # fmt: skip
_OPTIONAL_FILES += [
    (f"done/tuned/{name}", ("report", "done/tuned"), (name,))
    for name in ("config.yaml", "metrics.jsonl", "facts.json", "result.json", "predictions.jsonl", "report.html",
                 "plots", "environment.json", "samples.json")
]  # fmt: skip
_OPTIONAL_FILES += [
    ("done/tuned/config.yaml", PREDICT, ("config.yaml",)),
    ("published/special_tokens_map.json", PUBLISHED, ("special_tokens_map.json", "published")),
    ("runs/latest", with_overrides(PREDICT, "checkpoint=runs/latest"), ("latest",)),
    ("cache", PRETRAIN, ("cache",)),
    ("cache/stores", PRETRAIN, ("cache",)),
    ("cache/tokenizers", PRETRAIN, ("cache",)),
    ("runs", with_overrides(PRETRAIN, "run_dir=null", "name=mine"), ("runs",)),
    ("run", PRETRAIN, ("run",)),
    ("out", with_overrides(PREDICT, "output=out"), ("out",)),
    ("out", ("export", "checkpoint=done/tuned", "output=out"), ("out",)),
    ("out", ("import", "checkpoint=published", "output=out"), ("out",)),
    ("out", (*EVALUATE, "output=out"), ("out",)),
    ("out", ("tokenizer", "data=text", "data.path=text.txt", "cache_dir=cache", "output=out"), ("out",)),
    ("out", ("inspect", *PRETRAIN[:-2], "n=2", "tokens=2000", "output=out"), ("out",)),
    ("afile", with_overrides(PRETRAIN, "run_dir=afile/run"), ("afile",)),
]


def _node_scenes() -> Iterator[Scene]:
    for entries, optional in ((_REQUIRED_FILES, False), (_OPTIONAL_FILES, True)):
        for where, arguments, names in entries:
            for name, make in NODES.items():
                # An empty folder is legal where the command expects a folder.
                legal = name == "a folder" and Path(where).suffix == ""
                expected = EITHER if optional or legal else REFUSED
                yield Scene(
                    f"{name} at {where}, {arguments[0]}", arguments, _replace_by_node(where, make), names, expected
                )


SCENES += _node_scenes()
SCENES += [
    Scene(
        f"{name} at {where}, {arguments[0]}", arguments, _replace_by_node(where, partial(_write, value)), names, EITHER
    )
    for where, arguments, names in (*_REQUIRED_FILES, *_OPTIONAL_FILES)
    if where.endswith((".json", ".yaml"))
    for name, value in VALUES.items()
]

# --- links ------------------------------------------------------------------------------------------------------------

_SWEEP = ("pretrain", *TEXT, "max_steps=1", "name=s", "-m", "seed=1,2")
# Command lines with the folder to which they write, and the names of the files and of the folders in it.
_OUTPUTS: list[tuple[tuple[str, ...], str, tuple[str, ...], tuple[str, ...]]] = [
    (
        ("resume", "runs/tuned"),
        "runs/tuned",
        ("LOCK", "log.txt", "metrics.jsonl", "environment.json", "facts.json", "result.json", "predictions.jsonl",
         "report.html", "checkpoints/last", "checkpoints/best", "plots/loss.png", "plots/curves.png"),
        ("checkpoints", "plots", "wandb", "tensorboard"),
    ),
    (("report", "done/tuned"), "done/tuned", ("report.html", "plots/loss.png"), ("plots",)),
    ((*EVALUATE, "report=out"), "out", ("evaluation.json", "predictions.jsonl", "plots/dev_confusion.png"), ("plots",)),
    (_SWEEP, "runs/s", ("submission.json", "plan.json", "sweep.html", "sweep.csv"), ("0_seed-1",)),
]  # fmt: skip


@plant_factory
def _link(workdir: Path, path: str, hard: bool, to_folder: bool) -> None:
    target, link = workdir.parent / "precious" / ("" if to_folder else "file"), workdir / path
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        link.rename(f"{link}.moved")
    link.unlink(missing_ok=True)
    if hard:
        os.link(target, link)
    else:
        link.symlink_to(target)


def _link_scenes() -> Iterator[Scene]:
    for arguments, folder, files, folders in _OUTPUTS:
        to_files = [(name, hard, False) for name in files for hard in (False, True)]
        for name, hard, to_folder in [*to_files, *((name, False, True) for name in folders)]:
            path = f"{folder}/{name}"
            about = f"a {'hard ' if hard else ''}link at {path}, {arguments[0]}"
            # A folder that the command line names is refused as a whole, with its first entry.
            named = name.partition("/")[0] if folder == "out" else name
            yield Scene(about, arguments, _link(path, hard, to_folder), (named,), EITHER)


LINKS = list(_link_scenes())


@kind("hostile", trials=400)
def hostile(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Plants untrusted files and folders."""
    scenes = [*SCENES, *weights.SCENES]
    random.Random(0).shuffle(scenes)
    return play(scenes[seed % len(scenes)], stage, workdir)


@kind("links", trials=len(LINKS))
def links(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Plants links to files of the user at paths that a command chooses itself; the files must not change. Paths in the
    command line may be links, so they are not tested here."""
    return play(LINKS[seed % len(LINKS)], stage, workdir)
