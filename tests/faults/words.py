"""Wrong arguments: misspelled names, unusual values of overrides, and arguments that are not valid overrides."""

from __future__ import annotations

import contextlib
import random
import re
import string
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.faults.harness import command_line, is_refusal, refused_or_done, require_refusal, run_lmtool
from tests.faults.outcomes import Outcome, Row, TrialFailed, Verdict, fault_prefix, kind, trial_rng
from tests.faults.stage import EVALUATE, PREDICT, ROWS, TEXT, VOCABULARY, copy, with_overrides

# --- names ------------------------------------------------------------------------------------------------------------

TARGET_FRACTION = 0.99
_RIGHT_FIRST = "the right name first"
# For each command, a command line to which a misspelled key is added.
_BASE = {
    "pretrain": ["pretrain", "model=bert_tiny"],
    "finetune": ["finetune", "model=bert_tiny", "task=sst2", "task.path=rows", "checkpoint=none"],
}
_MIN_LETTERS = 4  # letters of the names that are misspelled: nobody could tell that `lx` was meant to be `lr`


def introduce_typo(name: str, rng: random.Random) -> str:
    """Drops, doubles, adds or replaces one letter of a name, or swaps two neighboring letters."""
    at = rng.randrange(len(name))
    other = rng.choice(string.ascii_lowercase)
    kind = rng.choice(("drop", "double", "add", "replace", "swap", "swap"))
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
def _keys(command: str, *arguments: str) -> dict[str, Any]:
    """Returns the dotted keys of the configuration of a command line, with their values."""
    from lmtool.cli import main as cli
    from lmtool.config import saved
    from lmtool.runs.identity import flatten

    config = cli.configuration(command, cli.parse(arguments), running=False)
    return {key: value for key, value in flatten(saved.body(saved.save(config, command))).items() if key != "plugins"}


@cache
def _options() -> dict[str, tuple[str, ...]]:
    from lmtool.config import groups

    names = ("model", "tokenizer", "data", "objective", "optimizer", "schedule", "experiment", "debug")
    return {group: groups.options(group) for group in names}


def _random_typo(rng: random.Random) -> tuple[list[str], str, str]:
    """Returns a command line with a misspelled name, the misspelled name, and the correct name."""
    from lmtool.resolver.verbs import VERBS

    kind = rng.choices(("key", "option", "group", "command", "flag"), (60, 25, 8, 4, 3))[0]
    if kind == "command":
        right = rng.choice([name for name in VERBS if len(name) >= _MIN_LETTERS and " " not in name])
        wrong = _misspelled(right, set(VERBS), rng)
        return [wrong, "model=bert_tiny"], wrong, right
    if kind == "flag":
        right = rng.choice(("--config", "--config-dir", "--multirun", "--plugin", "--debug"))
        wrong = "--" + _misspelled(right[2:], {"cfg", "help", "config"}, rng)
        return ["pretrain", "model=bert_tiny", f"{wrong}=x"], wrong, right
    if kind == "group":
        right = rng.choice([group for group in _options() if group != "data"])
        wrong = _misspelled(right, set(_options()), rng)
        option = rng.choice(_options()[right])
        return ["pretrain", f"{wrong}={option}", *([] if right == "model" else ["model=bert_tiny"])], wrong, right
    if kind == "option":
        group = rng.choice(("model", "model", "model", "objective", "experiment", "optimizer", "schedule"))
        names = [name for name in _options()[group] if len(name) >= _MIN_LETTERS]
        option = rng.choice(names)
        wrong = _misspelled(option, set(_options()[group]), rng)
        return ["pretrain", f"{group}={wrong}"], f"{group}={wrong}", f"{group}={option}"
    command = rng.choice(tuple(_BASE))
    keys = {key: value for key, value in _keys(*_BASE[command]).items() if not key.endswith((".name", ".kind"))}
    keys = {
        key: value for key, value in keys.items() if ".words." not in key
    }  # the keys below `words` are the classes of the task
    key = rng.choice([key for key in keys if len(key.rpartition(".")[2]) >= _MIN_LETTERS])
    parts = key.split(".")
    at = len(parts) - 1 if rng.random() < 0.75 else rng.randrange(len(parts))
    if len(parts[at]) < _MIN_LETTERS:
        at = len(parts) - 1
    siblings = {other.split(".")[at] for other in keys if other.count(".") >= at}
    wrong = ".".join([*parts[:at], _misspelled(parts[at], siblings, rng), *parts[at + 1 :]])
    value = yaml.safe_dump(keys[key], default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
    return [*_BASE[command], f"{wrong}={value}"], wrong, key


def _misspelled(right: str, known: set[str], rng: random.Random) -> str:
    """Misspells a name. The result is not one of the known names."""
    while True:
        wrong = introduce_typo(right, rng)
        if wrong not in known and wrong != right and wrong:
            return wrong


def _summary(rows: list[Row]) -> tuple[str, bool]:
    """Returns a line with the fraction of trials whose hint suggested the right name first, and whether it reaches
    TARGET_FRACTION."""
    right = sum(row["detail"].endswith(_RIGHT_FIRST) for row in rows)
    fraction = right / max(1, len(rows))
    return (
        f"the right name comes first in {right} of {len(rows)} ({fraction:.1%}; aim {TARGET_FRACTION:.0%})",
        fraction >= TARGET_FRACTION,
    )


@kind("typos", trials=300, summary=_summary)
def typos(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Misspells a name. The command must be refused, and the hint should suggest the correct name first."""
    arguments, wrong, right = _random_typo(trial_rng("typos", seed))
    with fault_prefix(f"{wrong} for {right}"):
        answer = run_lmtool(workdir, *arguments)
        require_refusal(answer, wrong, accepted=f"{command_line(arguments)}: accepted")
        suggestions = re.findall(r"^hint: .*?did you mean (?:lmtool )?(\S+?)[?,]?(?=\s|$)", answer.err, re.MULTILINE)
        first = suggestions[0].strip("'") if suggestions else "nothing"  # arguments that a shell would split are quoted
        name = first if "=" in right else first.partition("=")[0]
        verdict = _RIGHT_FIRST if name == right and wrong in answer.err.splitlines()[0] else f"first {first}"
    return Verdict(Outcome.REFUSED, f"{wrong} for {right}: {verdict}")


# --- values and forms -------------------------------------------------------------------------------------------------

_UNUSUAL_VALUES = (
    "", "''", "[]", "{}", "[1", "{a", "'", '"', "nan", "inf", "-inf", "-1", "0", "-0.0", "0.5", "1e400", "1e-400",
    "9" * 30, "1000000000", "2147483647", "2147483648", "9223372036854775807", "1e3", "true", "null", "???", "auto",
    "none",
    "${seed}", "${oc.env:HOME}", "${oc.env:NOWHERE}", "${hydra:job.name}", "${", "${nope}", "a,b", "1,2", "range(1,3)",
    "choice(1,2)", "glob(*)", "[[[[1]]]]", "{a: {b: {c: 1}}}", "{_target_: os.system}", "\udcff", "é", "\u202e",
    "\x1b[31m",
    "x" * 5000, "../..", "/", "/dev/null", "/proc/self/mem", ".", "~", "-", "--help", "a b", "a=b", "a:b", "[nan]",
    "[null]", "[true]", "[-1]", "['']", "0x10", "0o17", "1_000", "010", "yes", "No", "None", "1.0", "'3'", "\t", "\n",
)  # fmt: skip
_INVALID_FORMS = (
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
"""Arguments that every command must refuse."""


_COMMANDS = {
    "pretrain": ["pretrain", *TEXT, "max_steps=1"],
    "finetune": ["finetune", *ROWS, "checkpoint=done/pre", "max_steps=1"],
    "evaluate": EVALUATE,
    "predict": PREDICT,
    "tokenizer": VOCABULARY,
    "export": ["export", "checkpoint=done/tuned", "output=exported"],
    "import": ["import", "checkpoint=published", "output=imported"],
}  # fmt: skip
"""Small valid command lines that write to the working folder."""


@kind("overrides", trials=300)
def overrides(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Adds an override. It must be refused before any file is written, or take effect with exactly this value."""
    rng = trial_rng("overrides", seed)
    copy(stage, workdir, "text.txt", "rows", "cache", "done/pre", "done/tuned", "published")
    command = rng.choice(("pretrain", "pretrain", "finetune", *_COMMANDS))
    if rng.random() < 0.25:
        return _check_form(workdir, command, _INVALID_FORMS[seed % len(_INVALID_FORMS)])
    with contextlib.chdir(workdir):
        key = rng.choice(list(_keys(*_COMMANDS[command])))
    value = rng.choice(_UNUSUAL_VALUES)
    return _check_value(
        workdir, command, key, value if rng.random() < 0.85 else f"[{value},{rng.choice(_UNUSUAL_VALUES)}]"
    )


def _check_form(workdir: Path, command: str, form: str) -> Verdict:
    """Adds an argument that must be refused. A form with spaces stands for several arguments."""
    arguments = [*_COMMANDS[command], *(form.split(" ") if " " in form.strip() else [form])]
    with fault_prefix(f"{command} {form!r}"[:200]):
        require_refusal(run_lmtool(workdir, *arguments, clean=True), accepted="accepted")
    return Verdict(Outcome.REFUSED, f"{command} {form!r}"[:200])


def _check_value(workdir: Path, command: str, key: str, value: str) -> Verdict:
    """Adds an override, first with --cfg job to compare the configuration with the value, then to run the command."""
    arguments = with_overrides(_COMMANDS[command], f"{key}={value}")
    shape = f"{command} {key}={value!r}"[:200]
    with fault_prefix(shape):
        answer = run_lmtool(workdir, *arguments, "--cfg", "job", clean=True)
        if is_refusal(answer, key.split(".")[0], value.strip("[]") or "\0"):
            return Verdict(Outcome.REFUSED, shape)
        _require_exact_value(command, key, value, yaml.safe_load(answer.out))
        return refused_or_done(run_lmtool(workdir, *arguments, clean=True), shape)


def _require_exact_value(command: str, key: str, value: str, data: dict[str, Any]) -> None:
    """Raises TrialFailed if the configuration does not contain the value of the override. command: the command. key:
    the key of the override. value: the value of the override, as text. data: the configuration that the command
    printed."""
    from lmtool.config.compose import AcceptedOverrides, as_values
    from lmtool.resolver.verbs import command_classes
    from lmtool.runs.identity import flatten

    if "${" in value or value == "???":
        return
    actual: Any = data
    expected: Any = value
    if key not in command_classes()[command].verbatim:
        expected = as_values([f"{key}={value}"], AcceptedOverrides({}, {}))[0]
    for part in key.split("."):
        actual = actual.get(part) if isinstance(actual, dict) else None
        expected = expected.get(part) if isinstance(expected, dict) else expected
    same = actual == expected or (isinstance(expected, str) and expected in ("auto", "none"))
    same = same or (
        isinstance(actual, dict) and isinstance(expected, dict) and flatten(expected).items() <= flatten(actual).items()
    )
    if not same:
        raise TrialFailed(Outcome.SILENT, f"the configuration contains {actual!r}")
