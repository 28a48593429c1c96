"""Configurations of strangers: bombs, class paths, Python tags, links out of their folder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from trials.scenes import ESCAPES, Scene

_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
_TAG = '!!python/object/apply:os.system ["touch RAN"]'
CONTENTS = {
    "an alias bomb": _BOMB,
    "an alias bomb of mappings": "a0: &a0 {x: y}\n"
    + "".join(f"a{n}: &a{n} {{{', '.join(f'k{m}: *a{n - 1}' for m in range(10))}}}\n" for n in range(1, 10)),
    "an alias of itself": "a: &a [*a]\nseed: 1\n",
    "merge keys without end": "a: &a\n  <<: *a\n",
    "depth": "a: " + "[" * 20_000 + "]" * 20_000,
    "depth by indent": "".join(" " * n + "a:\n" for n in range(900)),
    "a megabyte of keys": "".join(f"k{n}: {n}\n" for n in range(60_000)),
    "ten megabytes": "# " + "x" * 10_000_000,
    "a tag of Python": f"seed: {_TAG}\n",
    "a tag of Python at the top": _TAG,
    "a class path": "_target_: os.system\ncommand: touch RAN\nseed: 1\n",
    "a class path in the optimizer": "optimizer: {_target_: os.system, command: touch RAN, name: adamw}\n",
    "a launcher": "hydra: {launcher: {_target_: os.system, command: touch RAN}}\n",
    "a search path": "hydra: {searchpath: ['pkg://os', 'file:///']}\n",
    "an environment variable": "seed: ${oc.env:SOME_TOKEN}\n",
    "an interpolation of itself": "seed: ${seed}\n",
    "a resolver": "seed: ${eval:'1+1'}\n",
    "a date": "seed: 2020-01-01\n",
    "two documents": "seed: 1\n---\nseed: 2\n",
    "a key twice": "seed: 1\nseed: 2\n",
    "a tab": "seed:\t1\n\tx: 2\n",
    "terminal codes in a key": f"{json.dumps(ESCAPES)}: 1\n",
    "terminal codes, raw": f"name: {ESCAPES}\n",
    "a number as key": "1: 2\n",
    "a null key": "~: 2\n",
    "a list": "- 1\n- 2\n",
    "a text": "hello\n",
    "binary": "!!binary |\n  AAAA\n",
    "a set": "seed: !!set {a, b}\n",
    "another version": "version: 99\nseed: 1\n",
    "a plugin": "plugins: [evil]\n",
    "defaults that climb": "defaults: [../../../../../../etc/passwd]\n",
}
_LEGAL = ("a date",)


def _scenes() -> Iterator[Scene]:
    for name, content in CONTENTS.items():

        def saved(place: Path, chance: random.Random, content: str = content) -> None:
            (place / "saved.yaml").write_text(content)
            (place / "evil.py").write_text("open('RAN', 'w')\n")

        def group(place: Path, chance: random.Random, content: str = content) -> None:
            (place / "conf" / "model").mkdir(parents=True)
            (place / "conf" / "model" / "mine.yaml").write_text("# @package _global_\n" + content)
            (place / "evil.py").write_text("open('RAN', 'w')\n")

        def resumed(place: Path, chance: random.Random, content: str = content) -> None:
            path = place / "runs" / "tuned" / "config.yaml"
            path.write_text(path.read_text() + content)

        group_words = ("pretrain", "--config-dir", "conf", "model=mine", "max_steps=1", "run_dir=run")
        yield Scene(f"{name} in --config", ("pretrain", "--config", "saved.yaml"), saved, ("saved.yaml", ":", " "))
        yield Scene(f"{name} in --config-dir", group_words, group, ("mine", "conf", ":", " "))
        yield Scene(f"{name} in --config-dir, -m", (*group_words[:-1], "-m", "seed=1,2"), group, (" ",))
        yield Scene(f"{name} in the config.yaml of a run", ("resume", "runs/tuned"), resumed, ("config.yaml", ":", " "))


def _odd_folder(make: Callable[[Path], None]) -> Callable[[Path, random.Random], None]:
    def plant(place: Path, chance: random.Random) -> None:
        folder = place / "conf" / "model"
        folder.mkdir(parents=True)
        (folder / "mine.yaml").write_text("defaults: [bert_tiny, _self_]\n")
        make(folder)

    return plant


def _yaml(path: Path) -> None:
    path.write_text("num_layers: 1\n")


def _link_up(folder: Path) -> None:
    (folder / "up").symlink_to("..")


def _many(folder: Path) -> None:
    for number in range(2000):
        _yaml(folder / f"m{number}.yaml")


SCENES = list(_scenes())
SCENES += [
    Scene(f"{name} beside an own YAML", ("pretrain", "--config-dir", "conf", "model=mine", "--cfg", "job"),
          _odd_folder(make), legal=True)
    for name, make in {
        "a loop of links": _link_up,
        "two thousand files": _many,
        "a name with terminal codes": lambda folder: _yaml(folder / "\x1b[31mred.yaml"),
        "a name that is not UTF-8": lambda folder: _yaml(folder / "m\udcff.yaml"),
    }.items()
]  # fmt: skip
