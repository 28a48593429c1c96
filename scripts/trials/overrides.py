"""Values and forms of overrides that nobody should type: refused before anything is written, or used as they were
typed."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import yaml

from lmtool.errors import DIVERGED
from trials.commands import files_in, nothing_left, refused, typed
from trials.outcomes import Failed, Kind, Outcome, Verdict, chance_of, planted
from trials.stage import HERE, ROWS, TEXT, copy

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
"""All refused, whatever the command."""


_COMMANDS = {
    "pretrain": ["pretrain", *TEXT, "max_steps=1"],
    "finetune": ["finetune", *ROWS, "checkpoint=done/pre", "max_steps=1"],
    "evaluate": ["evaluate", "checkpoint=done/tuned", *HERE],
    "predict": ["predict", "checkpoint=done/tuned", *HERE, "text=hello"],
    "tokenizer": ["tokenizer", "data=text", "data.path=text.txt", "cache_dir=cache", "output=vocabulary",
                  "tokenizer=wordpiece", "tokenizer.vocab_size=300"],
    "export": ["export", "checkpoint=done/tuned", "output=exported"],
    "import": ["import", "checkpoint=published", "output=imported"],
}  # fmt: skip
"""Small command lines that work, and write into the folder they are typed in."""


def _keys(command: str, place: Path) -> tuple[str, ...]:
    from lmtool.cli import main as cli
    from lmtool.config import saved
    from lmtool.runs.identity import flatten

    with contextlib.chdir(place):
        config = cli.configuration(command, cli.parse(_COMMANDS[command][1:]), running=False)
    return tuple(key for key in flatten(saved.body(saved.save(config, command))) if key != "plugins")


def _with(words: list[str], key: str, value: str) -> list[str]:
    """The command line with one more override, in place of one of the same key."""
    return [*(word for word in words if word.partition("=")[0] != key), f"{key}={value}"]


def _trial(stage: Path, place: Path, seed: int) -> Verdict:
    chance = chance_of("overrides", seed)
    copy(stage, place, "text.txt", "rows", "cache", "done/pre", "done/tuned", "published")
    command = chance.choice(("pretrain", "pretrain", "finetune", *_COMMANDS))
    if chance.random() < 0.25:
        form = _FORMS[seed % len(_FORMS)]
        return _form(place, command, form)
    key = chance.choice(_keys(command, place))
    return _value(place, command, key, _mixed(chance))


def _mixed(chance: random.Random) -> str:
    value = chance.choice(_VALUES)
    return value if chance.random() < 0.85 else f"[{value},{chance.choice(_VALUES)}]"


def _form(place: Path, command: str, form: str) -> Verdict:
    before = files_in(place)
    words = [*_COMMANDS[command], *(form.split(" ") if " " in form.strip() else [form])]
    with planted(f"{command} {form!r}"[:200]):
        answer = typed(place, *words)
        if not refused(answer):
            raise Failed(Outcome.SILENT, "accepted")
        nothing_left(place, before, answer)
    return Verdict(Outcome.REFUSED, f"{command} {form!r}"[:200])


def _value(place: Path, command: str, key: str, value: str) -> Verdict:
    words = _with(_COMMANDS[command], key, value)
    shape = f"{command} {key}={value!r}"[:200]
    with planted(shape):
        before = files_in(place)
        answer = typed(place, *words, "--cfg", "job")
        nothing_left(place, before, answer)
        if refused(answer, key.split(".")[0], value.strip("[]") or "\0"):
            return Verdict(Outcome.REFUSED, shape)
        _as_typed(command, key, value, yaml.safe_load(answer.out))
        answer = typed(place, *words)
        if answer.status != DIVERGED:  # what diverges has trained: its run stays, with the batch
            nothing_left(place, before, answer)
        return Verdict(Outcome.REFUSED if answer.status else Outcome.DONE, f"{shape}: {answer.errors[:100]}")


def _as_typed(command: str, key: str, value: str, data: dict[str, Any]) -> None:
    """Raises Failed where the configuration holds another value than the one that was typed."""
    from lmtool.config.overrides import Offers, as_values
    from lmtool.resolver.schema.verbs import COMMANDS
    from lmtool.runs.identity import flatten

    if "${" in value or value == "???":
        return
    held: Any = data
    wanted: Any = value
    if key not in COMMANDS[command].verbatim:
        wanted = as_values([f"{key}={value}"], Offers({}, {}))[0]
    for part in key.split("."):
        held = held.get(part) if isinstance(held, dict) else None
        wanted = wanted.get(part) if isinstance(wanted, dict) else wanted
    same = held == wanted or (isinstance(wanted, str) and wanted in ("auto", "none"))
    same = same or (
        isinstance(held, dict) and isinstance(wanted, dict) and flatten(wanted).items() <= flatten(held).items()
    )
    if not same:
        raise Failed(Outcome.SILENT, f"the configuration holds {held!r}")


KIND = Kind("overrides", "values and forms that nobody should type", trials=300, draw=2, trial=_trial)
