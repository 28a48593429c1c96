"""A slip in the name of a key, a group, an option, a command or a flag: refused, and the right name is the first one
that the hint offers."""

from __future__ import annotations

import random
import re
import string
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trials.commands import refused, shown, typed
from trials.outcomes import Failed, Kind, Outcome, Verdict, chance_of, planted

AIM = 0.99
_RIGHT = "the right name first"
_BASE = {
    "pretrain": ["pretrain", "model=bert_tiny"],
    "finetune": ["finetune", "model=bert_tiny", "task=sst2", "task.path=rows", "checkpoint=none"],
}
_SHORTEST = 4  # letters of a name that is misspelt: what `lr` was meant to be cannot be seen in `lx`


def slip(name: str, chance: random.Random) -> str:
    """The name with one letter dropped, doubled, added, replaced, or changed with its neighbour."""
    at = chance.randrange(len(name))
    other = chance.choice(string.ascii_lowercase)
    kind = chance.choice(("drop", "double", "add", "replace", "swap", "swap"))
    if kind == "drop":
        return name[:at] + name[at + 1 :]
    if kind == "double":
        return name[:at] + name[at] + name[at:]
    if kind == "add":
        return name[:at] + other + name[at:]
    if kind == "replace":
        return name[:at] + other + name[at + 1 :]
    at = min(at, len(name) - 2)
    return name[:at] + name[at + 1] + name[at] + name[at + 2 :]


@cache
def _keys(command: str) -> dict[str, Any]:
    """The dotted keys of a command's configuration, with their values."""
    from lmtool.cli import main as cli
    from lmtool.config import saved
    from lmtool.runs.identity import flatten

    config = cli.configuration(command, cli.parse(_BASE[command][1:]), running=False)
    data = flatten(saved.body(saved.save(config, command)))
    return {key: value for key, value in data.items() if not key.endswith((".name", ".kind")) and key != "plugins"}


@cache
def _options() -> dict[str, tuple[str, ...]]:
    from lmtool.config import groups

    wanted = ("model", "tokenizer", "data", "objective", "optimizer", "schedule", "experiment", "debug")
    return {group: groups.options(group) for group in wanted}


def _draw(chance: random.Random) -> tuple[list[str], str, str]:
    """A command line with a slip in it, the misspelt name, and the right one."""
    from lmtool.resolver.schema import verbs

    kind = chance.choices(("key", "option", "group", "command", "flag"), (60, 25, 8, 4, 3))[0]
    if kind == "command":
        right = chance.choice([name for name in verbs.VERBS if len(name) >= _SHORTEST and " " not in name])
        wrong = _misspelt(right, set(verbs.VERBS), chance)
        return [wrong, "model=bert_tiny"], wrong, right
    if kind == "flag":
        right = chance.choice(("--config", "--config-dir", "--multirun", "--plugin", "--debug"))
        wrong = "--" + _misspelt(right[2:], {"cfg", "help", "config"}, chance)
        return ["pretrain", "model=bert_tiny", f"{wrong}=x"], wrong, right
    if kind == "group":
        right = chance.choice([group for group in _options() if group != "data"])
        wrong = _misspelt(right, set(_options()), chance)
        option = chance.choice(_options()[right])
        return ["pretrain", f"{wrong}={option}", *([] if right == "model" else ["model=bert_tiny"])], wrong, right
    if kind == "option":
        group = chance.choice(("model", "model", "model", "objective", "experiment", "optimizer", "schedule"))
        names = [name for name in _options()[group] if len(name) >= _SHORTEST]
        option = chance.choice(names)
        wrong = _misspelt(option, set(_options()[group]), chance)
        return ["pretrain", f"{group}={wrong}"], f"{group}={wrong}", f"{group}={option}"
    command = chance.choice(tuple(_BASE))
    keys = _keys(command)
    key = chance.choice([key for key in keys if len(key.rpartition(".")[2]) >= _SHORTEST])
    parts = key.split(".")
    at = len(parts) - 1 if chance.random() < 0.75 else chance.randrange(len(parts))
    if len(parts[at]) < _SHORTEST:
        at = len(parts) - 1
    siblings = {other.split(".")[at] for other in keys if other.count(".") >= at}
    wrong = ".".join([*parts[:at], _misspelt(parts[at], siblings, chance), *parts[at + 1 :]])
    value = yaml.safe_dump(keys[key], default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
    return [*_BASE[command], f"{wrong}={value}"], wrong, key


def _misspelt(right: str, known: set[str], chance: random.Random) -> str:
    while True:
        wrong = slip(right, chance)
        if wrong not in known and wrong != right and wrong:
            return wrong


def _trial(stage: Path, place: Path, seed: int) -> Verdict:
    words, wrong, right = _draw(chance_of("typos", seed))
    with planted(f"{wrong} for {right}"):
        answer = typed(place, *words)
        if not refused(answer, wrong):
            raise Failed(Outcome.SILENT, f"{shown(words)}: accepted")
        offers = re.findall(r"^hint: .*?did you mean (?:lmtool )?(\S+?)[?,]?(?=\s|$)", answer.err, re.MULTILINE)
        first = offers[0] if offers else "nothing"
        name = first if "=" in right else first.partition("=")[0]
        verdict = _RIGHT if name == right and wrong in answer.err.splitlines()[0] else f"first {first}"
    return Verdict(Outcome.REFUSED, f"{wrong} for {right}: {verdict}")


def _summary(rows: list[dict[str, Any]]) -> tuple[str, bool]:
    right = sum(row["detail"].endswith(_RIGHT) for row in rows)
    share = right / max(1, len(rows))
    return f"the right name comes first in {right} of {len(rows)} ({share:.1%}; aim {AIM:.0%})", share >= AIM


KIND = Kind("typos", "slips in names", trials=300, draw=2, trial=_trial, summary=_summary)
