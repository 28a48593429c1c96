"""Wrong arguments: misspelled names, and odd values and forms of overrides."""

from __future__ import annotations

import contextlib
import random
import re
import string
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trials.harness import ended, refused, require_refusal, shown, typed
from trials.outcomes import Failed, Outcome, Row, Verdict, chance_of, kind, planted
from trials.stage import EVALUATE, PREDICT, ROWS, TEXT, VOCABULARY, copy, replaced

# --- names ------------------------------------------------------------------------------------------------------------

AIM = 0.99
_RIGHT = "the right name first"
_BASE = {
    "pretrain": ["pretrain", "model=bert_tiny"],
    "finetune": ["finetune", "model=bert_tiny", "task=sst2", "task.path=rows", "checkpoint=none"],
}
_SHORTEST = 4  # letters of a misspelled name: `lx` does not reveal that `lr` was meant


def slip(name: str, chance: random.Random) -> str:
    """The name with one letter dropped, doubled, added, replaced or swapped with its neighbor."""
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
def _keys(command: str, *words: str) -> dict[str, Any]:
    """The dotted keys of the configuration of a command line, with their values."""
    from lmtool.cli import main as cli
    from lmtool.config import saved
    from lmtool.runs.identity import flatten

    config = cli.configuration(command, cli.parse(words), running=False)
    return {key: value for key, value in flatten(saved.body(saved.save(config, command))).items() if key != "plugins"}


@cache
def _options() -> dict[str, tuple[str, ...]]:
    from lmtool.config import groups

    wanted = ("model", "tokenizer", "data", "objective", "optimizer", "schedule", "experiment", "debug")
    return {group: groups.options(group) for group in wanted}


def _draw(chance: random.Random) -> tuple[list[str], str, str]:
    """A command line with a misspelled name, that name, and the correct one."""
    from lmtool.resolver.schema.verbs import VERBS

    kind = chance.choices(("key", "option", "group", "command", "flag"), (60, 25, 8, 4, 3))[0]
    if kind == "command":
        right = chance.choice([name for name in VERBS if len(name) >= _SHORTEST and " " not in name])
        wrong = _misspelled(right, set(VERBS), chance)
        return [wrong, "model=bert_tiny"], wrong, right
    if kind == "flag":
        right = chance.choice(("--config", "--config-dir", "--multirun", "--plugin", "--debug"))
        wrong = "--" + _misspelled(right[2:], {"cfg", "help", "config"}, chance)
        return ["pretrain", "model=bert_tiny", f"{wrong}=x"], wrong, right
    if kind == "group":
        right = chance.choice([group for group in _options() if group != "data"])
        wrong = _misspelled(right, set(_options()), chance)
        option = chance.choice(_options()[right])
        return ["pretrain", f"{wrong}={option}", *([] if right == "model" else ["model=bert_tiny"])], wrong, right
    if kind == "option":
        group = chance.choice(("model", "model", "model", "objective", "experiment", "optimizer", "schedule"))
        names = [name for name in _options()[group] if len(name) >= _SHORTEST]
        option = chance.choice(names)
        wrong = _misspelled(option, set(_options()[group]), chance)
        return ["pretrain", f"{group}={wrong}"], f"{group}={wrong}", f"{group}={option}"
    command = chance.choice(tuple(_BASE))
    keys = {key: value for key, value in _keys(*_BASE[command]).items() if not key.endswith((".name", ".kind"))}
    keys = {key: value for key, value in keys.items() if ".words." not in key}  # maps the task's own classes, not keys
    key = chance.choice([key for key in keys if len(key.rpartition(".")[2]) >= _SHORTEST])
    parts = key.split(".")
    at = len(parts) - 1 if chance.random() < 0.75 else chance.randrange(len(parts))
    if len(parts[at]) < _SHORTEST:
        at = len(parts) - 1
    siblings = {other.split(".")[at] for other in keys if other.count(".") >= at}
    wrong = ".".join([*parts[:at], _misspelled(parts[at], siblings, chance), *parts[at + 1 :]])
    value = yaml.safe_dump(keys[key], default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
    return [*_BASE[command], f"{wrong}={value}"], wrong, key


def _misspelled(right: str, known: set[str], chance: random.Random) -> str:
    while True:
        wrong = slip(right, chance)
        if wrong not in known and wrong != right and wrong:
            return wrong


def _summary(rows: list[Row]) -> tuple[str, bool]:
    right = sum(row["detail"].endswith(_RIGHT) for row in rows)
    share = right / max(1, len(rows))
    return f"the right name comes first in {right} of {len(rows)} ({share:.1%}; aim {AIM:.0%})", share >= AIM


@kind("typos", trials=300, summary=_summary)
def typos(stage: Path, place: Path, seed: int) -> Verdict:
    """Misspells a name: refused, and the hint should suggest the correct name first."""
    words, wrong, right = _draw(chance_of("typos", seed))
    with planted(f"{wrong} for {right}"):
        answer = typed(place, *words)
        require_refusal(answer, wrong, accepted=f"{shown(words)}: accepted")
        accepted = re.findall(r"^hint: .*?did you mean (?:lmtool )?(\S+?)[?,]?(?=\s|$)", answer.err, re.MULTILINE)
        first = accepted[0].strip("'") if accepted else "nothing"  # arguments that a shell would split are quoted
        name = first if "=" in right else first.partition("=")[0]
        verdict = _RIGHT if name == right and wrong in answer.err.splitlines()[0] else f"first {first}"
    return Verdict(Outcome.REFUSED, f"{wrong} for {right}: {verdict}")


# --- values and forms -------------------------------------------------------------------------------------------------

_VALUES = (
    "", "''", "[]", "{}", "[1", "{a", "'", '"', "nan", "inf", "-inf", "-1", "0", "-0.0", "0.5", "1e400", "1e-400",
    "9" * 30, "1000000000", "2147483647", "2147483648", "9223372036854775807", "1e3", "true", "null", "???", "auto",
    "none",
    "${seed}", "${oc.env:HOME}", "${oc.env:NOWHERE}", "${hydra:job.name}", "${", "${nope}", "a,b", "1,2", "range(1,3)",
    "choice(1,2)", "glob(*)", "[[[[1]]]]", "{a: {b: {c: 1}}}", "{_target_: os.system}", "\udcff", "é", "\u202e",
    "\x1b[31m",
    "x" * 5000, "../..", "/", "/dev/null", "/proc/self/mem", ".", "~", "-", "--help", "a b", "a=b", "a:b", "[nan]",
    "[null]", "[true]", "[-1]", "['']", "0x10", "0o17", "1_000", "010", "yes", "No", "None", "1.0", "'3'", "\t", "\n",
)  # fmt: skip
_FORMS = (
    "=3", "seed", "seed==3", "++", "~", "~model", "~optimizer.lr", "+", "model=bert_tiny,gpt_tiny", "model=[bert_tiny]",
    "model={name: bert}", "optimizer.lr.deeper=1", "model.name=gpt", "model/positions=[rotary]", "model/nope=learned",
    "hydra.foo=1", "hydra.run.dir=elsewhere", "hydra/launcher=nope", "hydra.job.chdir=true", "data@here=text",
    "seed@x=1",
    "optimizer..lr=1", ".lr=1", "lr.=1", "a" * 5000 + "=1", "a.b.c.d.e.f=1", "_target_=os.system", "model._target_=x",
    "defaults=[]", "version=2", "command=pretrain", "plugins=[os]", "--nope", "--cfg=all", "--config", "--config=nope",
    "--config-dir=nope", "--plugin=nope", "-x", "stray", "", " ", "é=1", "mod\udcffel=1", "seed=1 seed=2", "\x1b[31m=1",
    "experiment=nope", "experiment=../pretrain", "model=../model/bert_tiny", "model=", "model='bert_tiny",
    "debug=[short]",
    "schedule.warmup_steps=5 schedule.warmup_fraction=0.5", "task.validation=[nope]",
)  # fmt: skip
"""Refused by every command."""


_COMMANDS = {
    "pretrain": ["pretrain", *TEXT, "max_steps=1"],
    "finetune": ["finetune", *ROWS, "checkpoint=done/pre", "max_steps=1"],
    "evaluate": EVALUATE,
    "predict": PREDICT,
    "tokenizer": VOCABULARY,
    "export": ["export", "checkpoint=done/tuned", "output=exported"],
    "import": ["import", "checkpoint=published", "output=imported"],
}  # fmt: skip
"""Small command lines that work, and write to the working folder."""


@kind("overrides", trials=300)
def overrides(stage: Path, place: Path, seed: int) -> Verdict:
    """An override is refused before any file is written, or used exactly as typed."""
    chance = chance_of("overrides", seed)
    copy(stage, place, "text.txt", "rows", "cache", "done/pre", "done/tuned", "published")
    command = chance.choice(("pretrain", "pretrain", "finetune", *_COMMANDS))
    if chance.random() < 0.25:
        return _form(place, command, _FORMS[seed % len(_FORMS)])
    with contextlib.chdir(place):
        key = chance.choice(list(_keys(*_COMMANDS[command])))
    value = chance.choice(_VALUES)
    return _value(place, command, key, value if chance.random() < 0.85 else f"[{value},{chance.choice(_VALUES)}]")


def _form(place: Path, command: str, form: str) -> Verdict:
    words = [*_COMMANDS[command], *(form.split(" ") if " " in form.strip() else [form])]
    with planted(f"{command} {form!r}"[:200]):
        require_refusal(typed(place, *words, clean=True), accepted="accepted")
    return Verdict(Outcome.REFUSED, f"{command} {form!r}"[:200])


def _value(place: Path, command: str, key: str, value: str) -> Verdict:
    words = replaced(_COMMANDS[command], f"{key}={value}")
    shape = f"{command} {key}={value!r}"[:200]
    with planted(shape):
        answer = typed(place, *words, "--cfg", "job", clean=True)
        if refused(answer, key.split(".")[0], value.strip("[]") or "\0"):
            return Verdict(Outcome.REFUSED, shape)
        _as_typed(command, key, value, yaml.safe_load(answer.out))
        return ended(typed(place, *words, clean=True), shape)


def _as_typed(command: str, key: str, value: str, data: dict[str, Any]) -> None:
    """Raises Failed if the configuration differs from the typed value."""
    from lmtool.config.overrides import AcceptedOverrides, as_values
    from lmtool.resolver.schema.verbs import COMMANDS
    from lmtool.runs.identity import flatten

    if "${" in value or value == "???":
        return
    held: Any = data
    wanted: Any = value
    if key not in COMMANDS[command].verbatim:
        wanted = as_values([f"{key}={value}"], AcceptedOverrides({}, {}))[0]
    for part in key.split("."):
        held = held.get(part) if isinstance(held, dict) else None
        wanted = wanted.get(part) if isinstance(wanted, dict) else wanted
    same = held == wanted or (isinstance(wanted, str) and wanted in ("auto", "none"))
    same = same or (
        isinstance(held, dict) and isinstance(wanted, dict) and flatten(wanted).items() <= flatten(held).items()
    )
    if not same:
        raise Failed(Outcome.SILENT, f"the configuration holds {held!r}")
