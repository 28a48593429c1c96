"""Command-line overrides, checked and rewritten before Hydra reads them.

Hydra refuses an unknown key on its own, before lmtool can report the other errors. Every override of a value is
therefore rewritten as a forced one (`++a.b=c`), and the decoder reports all unknown keys at once. Values with
characters outside Hydra's grammar (`data.path=café.txt`) are quoted. Overrides that select or remove a group's option,
and those of `hydra.*`, stay as they are.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString, Sweep
from hydra.errors import HydraException

from lmtool.config import groups, messages, registry, saved
from lmtool.config.base import JsonObject
from lmtool.errors import Problem, nearest

# The name of a model on the hub: org/name, or a name with a dash, since no option contains a dash.
_HUB_NAME = re.compile(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*|[A-Za-z]\w*(-\w+)+")
_OVERRIDE_HINT = "write KEY=VALUE, with quotes around a value of several words; `lmtool COMMAND --help` prints the keys"


@dataclass(frozen=True)
class AcceptedOverrides:
    """The groups, options and keys that a command accepts. groups: the options of every group, by name. primary: the
    groups in the command's primary YAML file, each with its default option."""

    groups: dict[str, tuple[str, ...]]
    primary: dict[str, str | None]
    several: frozenset[str] = frozenset()
    """Groups that accept a list of options in one run: GROUP=[ONE,TWO]."""
    keys: frozenset[str] = frozenset()
    """The command's top-level keys, except groups."""
    verbatim: Sequence[str] = ()
    """Keys whose values are taken literally, as text."""
    alternatives: Sequence[tuple[str, str]] = ()
    """Pairs of keys that exclude each other."""

    def has(self, key: str) -> bool:
        """Whether the command has a key; for `SECTION.KEY`, whether any component of the section has it."""
        section, _, name = key.partition(".")
        if not name:
            return section in self.keys or section in self.primary
        configs = [entry.config for entry in registry.entries(section)] if section in self.primary else []
        return any(name.partition(".")[0] in config.model_fields for config in configs)


def read_accepted(primary: Path, config_dirs: Sequence[Path], extra: dict[str, tuple[str, ...]]) -> AcceptedOverrides:
    """Reads the overrides that a primary YAML file accepts. extra: options of plugins, by group."""
    offered = groups.all_options(config_dirs)
    for name, options in extra.items():
        offered[name] = tuple(sorted({*offered.get(name, ()), *options}))
    content = saved.read_yaml(primary)
    defaults = content.get("defaults", [])
    primary_groups = {
        str(key).split()[-1]: name for item in defaults if isinstance(item, dict) for key, name in item.items()
    }
    return AcceptedOverrides(offered, primary_groups, registry.MULTI_SELECT_GROUPS, frozenset(content) - {"defaults"})


def not_an_override(text: str, accepted: AcceptedOverrides) -> Problem:
    """Returns the error for an argument without `=`. Its hint names the override that was probably meant: the argument
    may be an option without its group, a key without a value, a file, or a misspelled option or key."""
    message = f"{text} is not an override"
    if text.startswith("-"):
        return Problem(text, message, "type two dashes before a flag: `lmtool --help`")
    # `sweep` is not a section of a run.
    sections = [group for group in accepted.primary if group != "sweep"]
    words = [f"{group}={text}" for group in sections if text in accepted.groups.get(group, ())]
    words = words or [f"{text}=VALUE"] * accepted.has(text)
    if not words and (meaning := messages.meaning_elsewhere(text, None, accepted.has)) is not None:
        return Problem(text, message, meaning.hint, meaning.keys)
    if not words:
        group_of = {option: group for group in reversed(sections) for option in accepted.groups.get(group, ())}
        close = nearest(text, [*accepted.keys, *group_of])
        similar = [f"{group_of[close]}={close}" if close in group_of else f"{close}=VALUE"] if close else []
        paths = [word for word in _as_paths(text) if accepted.has(word.partition("=")[0])][:1]
        words = paths if paths and os.path.exists(text) else similar or paths
    hint = f"write {' or '.join(map(shlex.quote, words))}" if words else _OVERRIDE_HINT
    return Problem(text, message, hint, tuple(word.partition("=")[0] for word in words))


def _as_paths(text: str) -> Iterator[str]:
    """Yields the overrides that were probably meant by an argument that looks like a path or a hub model, most likely
    first."""
    exists, in_runs = os.path.exists(text), text.startswith("runs/")
    if not exists and not in_runs and not groups.is_path_only(text) and _HUB_NAME.fullmatch(text):
        yield f"checkpoint=hf://{text}"
    elif exists or groups.is_path_like(text):
        has_weights = any((Path(text) / name).exists() for name in ("checkpoints", "config.json"))
        is_checkpoint = in_runs or "://" in text or has_weights
        yield from (f"{key}={text}" for key in (("checkpoint",) if is_checkpoint else ("task", "data", "checkpoint")))


GRID = "hydra.sweeper.params"
"""The key that holds sweep values in YAML files, which is Hydra's own."""
LONGEST_KEY = 200
"""Maximum length of a key in bytes: Hydra uses it as a file name, which is limited to 255 bytes."""
# Outside quotes, Hydra's lexer rejects non-ASCII characters and these signs; quoting them does not change a value.
_UNKNOWN_TO_HYDRA = re.compile(r"[^\x00-\x7f]|[!#&;<>=^`~]")
# A text of a value, in quotes or without; in sections, a colon ends it.
_WORD = re.compile(r"""'[^']*'|"[^"]*"|[^\s\[\],'"](?:[^\[\],'"]*[^\s\[\],'"])?""")
_WORD_OF_SECTION = re.compile(r"""'[^']*'|"[^"]*"|[^\s\[\]{},:'"](?:[^\[\]{},:'"]*[^\s\[\]{},:'"])?""")
SWEEP_KEYS = ("hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper", "hydra.sweep")
"""Hydra keys that may be set on the command line together with -m."""
_IMPORTED = re.compile(
    r"\b(_target_|custom_search_space)\b|^\+*hydra\.(launcher|sweeper)\b.*\$\{(?!oc\.env:)", re.DOTALL
)


def imports_a_name(text: str) -> bool:
    """Whether Hydra would import a name in a key or an override: lmtool never does. An interpolation may hide one,
    except that of a variable of the environment."""
    return _IMPORTED.search(text) is not None


@dataclass
class CheckedOverrides:
    """Overrides in the form that Hydra needs.

    values: forced overrides of values. choices: overrides that select options of groups. verbatim: texts by key, which
    Hydra does not parse; they are set after composing. hydra: overrides of `hydra.*` for a sweep. problems: the errors
    of the overrides that cannot be used. sweeps: whether a key has several values.
    """

    values: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    verbatim: dict[str, str] = field(default_factory=dict)
    hydra: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    sweeps: bool = False

    @property
    def all(self) -> list[str]:
        """All overrides, groups first, because values are set on the selected options."""
        return [*self.choices, *self.values, *self.hydra]


def read(overrides: Sequence[str], accepted: AcceptedOverrides, *, multirun: bool = False) -> CheckedOverrides:
    """Checks and rewrites overrides. accepted: the overrides that the command accepts. multirun: whether -m is set."""
    checked = CheckedOverrides()
    values: dict[str, str] = {}
    for text in overrides:
        checked.problems += _read_override(text, accepted, multirun, values, checked)
    for first, second in accepted.alternatives:
        if {first, second} <= values.keys() and "null" not in (values[first], values[second]):
            message = f"{first}={values[first]} and {second}={values[second]} exclude each other"
            checked.problems.append(Problem(second, message, "keep one of them"))
    return checked


def _read_override(
    text: str, accepted: AcceptedOverrides, multirun: bool, values: dict[str, str], checked: CheckedOverrides
) -> Iterator[Problem]:
    """Adds an override to `checked`, and its value to `values`, or yields its problems."""
    sign, key = _key(text)
    value, section = text.partition("=")[2], key.partition(".")[0]
    if len(key.encode("utf-8", "replace")) > LONGEST_KEY:
        message = f"{key[:40]}...: the key has more than {LONGEST_KEY} bytes"
        yield Problem(key, message, "`lmtool show KEY` explains a key")
    elif "=" not in text and sign != "~":
        yield not_an_override(text, accepted)
    elif sign != "~" and key not in accepted.groups and values.setdefault(key, value) != value:
        message = f"{key}={values[key]} and {key}={value}: a key may be set only once"
        yield Problem(key, message, "keep one of them")
    elif key in accepted.verbatim:
        checked.verbatim[key] = value
    elif section in accepted.verbatim:
        yield Problem(key, f"{key}: {section}= is text here and has no keys", f"set {section}=TEXT")
    elif isinstance(override := _parse(OverridesParser.create(), text, key), Problem):
        yield override
    else:
        yield from _classify(override, sign, key, accepted, multirun, checked)


def key_of(text: str) -> str:
    """Returns the key of an override, the same in every spelling (`model/positions=`, `++model.positions=`)."""
    return _key(text)[1].partition("@")[0].replace("/", ".")


def _key(text: str) -> tuple[str, str]:
    key = text.partition("=")[0]
    bare = key.lstrip("+~")
    return key[: len(key) - len(bare)], bare


def _parse(parser: OverridesParser, text: str, key: str) -> Override | Problem:
    """Returns an override as Hydra reads it, or the problem of one that is not valid."""
    if not key.isascii() or not key.strip():
        hint = "write a key of ASCII letters, digits, _ and dots; `lmtool COMMAND --help` prints the keys"
        return Problem(key, f"{text}: {key} is not a key" if key.strip() else f"{text} has no key before =", hint)
    for form in (text, _quoted(text)):
        try:
            return parser.parse_override(form)
        except HydraException:
            continue
        except (RecursionError, ValueError) as error:
            # Hundreds of brackets, or a number of thousands of digits.
            fault = "is nested too deeply" if isinstance(error, RecursionError) else "is too long for a number"
            return Problem(key, f"{key}: the value {fault}", f"`lmtool show {key}` explains the key")
    value = text.partition("=")[2]
    quoted = f'{key}="{value}"' if '"' not in value else "{}='{}'".format(key, value.replace("'", "\\'"))
    quoted = f"'{quoted}'" if "'" not in quoted else '"' + quoted.replace('"', '\\"') + '"'
    message = f"{text}: the value has a character with a special meaning outside quotes"
    return Problem(key, message, f"quote it: {quoted}")


def _quoted(text: str) -> str:
    """Returns the override with those texts in its value quoted that have characters which Hydra accepts only in
    quotes."""
    key, _, value = text.partition("=")

    def quote(match: re.Match[str]) -> str:
        word = match[0]
        needed = word[0] not in "'\"" and _UNKNOWN_TO_HYDRA.search(word)
        return str(QuotedString(word, Quote.single).with_quotes()) if needed else word

    return f"{key}={(_WORD_OF_SECTION if '{' in value else _WORD).sub(quote, value)}"


def _classify(
    override: Override, sign: str, key: str, accepted: AcceptedOverrides, multirun: bool, checked: CheckedOverrides
) -> Iterator[Problem]:
    """Adds an override to `checked`, or yields its problems."""
    group, text = key.partition("@")[0], str(override.input_line)
    value, nested = text.partition("=")[2], key.replace(".", "/")
    parsed = override.value()
    values = parsed.list if isinstance(parsed, ChoiceSweep) else parsed
    if isinstance(parsed, Glob) or (isinstance(values, list) and any(isinstance(part, Glob) for part in values)):
        options = accepted.groups.get(nested, ()) if multirun and isinstance(parsed, Glob) else ()
        matching: list[str] = parsed.filter(list(options)) if options else []
        if not matching:
            fault = (
                f"matches no option of {key}" if multirun else "is a pattern of several options, but a run takes one"
            )
            runs = f"-m {shlex.quote(f'{key}={value}')} runs each option of a group that it matches; "
            hint = f"{'' if multirun else runs}use a pattern alone, or quote a text"
            yield Problem(key, f"{key}={value} {fault}", hint)
            return
        # A pattern is replaced by the options that it matches, in their order.
        group, value = nested, ",".join(matching)
        text = f"{group}={value}"
        override = OverridesParser.create().parse_override(text)
    names = _names(override)
    if "." in key and nested in accepted.groups and names and all(isinstance(name, str) for name in names):
        # A group within a section may also be written with a dot, like a value: model.positions=rotary.
        group, text = nested, f"{nested}={value}"
    if key.startswith(("hydra.", "hydra/")):
        is_used = multirun and key.startswith(SWEEP_KEYS) and not key.startswith(GRID)
        if is_used and not imports_a_name(text):
            checked.hydra.append(text)
        else:
            yield _hydra_problem(key, value, multirun)
    elif group in accepted.groups or "/" in group:
        yield from _choice(override, text, sign, group, accepted, multirun, checked)
    elif sign == "~":
        yield Problem(f"~{key}", f"~{key}: a value cannot be removed", f"set {key}=VALUE, or null if the key allows it")
    elif _sweeps_inside(override.value()):
        hint = f"write the values out; to sweep, write them without brackets: -m {key}=A,B"
        yield Problem(key, f"{key}={value}: a list or section cannot contain a sweep", hint)
    elif override.is_sweep_override() and not multirun:
        hint = f'-m sweeps over them; a list has brackets, a text quotes: [{value}] or "{value}"'
        yield Problem(key, f"{key}={value} has several values, but a run takes one", hint)
    else:
        checked.sweeps = checked.sweeps or override.is_sweep_override()
        checked.values.append(f"++{key}={value}")


def _sweeps_inside(value: object) -> bool:
    """Whether part of a list or section is itself a sweep (`[range(1,3)]`), which Hydra would silently treat as a
    value."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(part, Sweep) or _sweeps_inside(part) for part in parts)


def _hydra_problem(key: str, value: str, multirun: bool) -> Problem:
    if imports_a_name(f"{key}={value}"):
        reason = "lmtool never imports a name from a configuration"
    elif key.startswith(GRID):
        reason = f"this key is for sweep values in YAML; set the values of each key: -m {key[len(GRID) + 1 :]}=1,2"
    else:
        reason = f"lmtool uses only these keys of Hydra, with -m: {', '.join(SWEEP_KEYS)}"
    add = "add -m, or " if key.startswith(SWEEP_KEYS) and not multirun else ""
    folder = "; run_dir=FOLDER sets the folder of a run" if key.startswith(("hydra.run", "hydra.sweep.dir")) else ""
    return Problem(key, f"{key}={value}: {reason}", f"{add}omit it{folder}")


def _choice(
    override: Override,
    text: str,
    sign: str,
    group: str,
    accepted: AcceptedOverrides,
    multirun: bool,
    checked: CheckedOverrides,
) -> Iterator[Problem]:
    section, value = group.split("/")[0], text.partition("=")[2]
    if sign == "~":
        yield Problem(
            f"~{group}", f"~{group}: a section cannot be removed", f"`lmtool list {group}` prints its options"
        )
    elif group not in accepted.groups:
        close = nearest(group, accepted.groups)
        hint = f"did you mean {close}={value}?" if close else "`lmtool list` prints the groups"
        yield Problem(group, f"there is no group {group}", hint)
    elif section not in accepted.primary:
        offered = ", ".join(name for name in accepted.primary if accepted.groups.get(name))
        yield Problem(group, f"{text}: this command has no {section}", f"use one of its groups: {offered}")
    elif isinstance(override.value(), list) and group not in accepted.several:
        names = value.strip("[]")
        first = names.split(",")[0].strip()
        hint = f"choose one, {group}={first}, or run each: -m {group}={names.replace(' ', '')}"
        yield Problem(group, f"{text}: a run takes one {group}, not a list", hint)
    elif override.is_sweep_override() and not multirun:
        together = f"; for all in one run, {group}=[{value}]" if group in accepted.several else ""
        hint = f"add -m to run each: -m {text}{together}"
        yield Problem(group, f"{text} has several values, but a run takes one", hint)
    elif override.value() in (None, []):
        # In Hydra, removing the group is the way to select no option.
        if accepted.primary.get(group) is not None:
            checked.choices.append(f"~{group}")
    else:
        selected = _names(override)
        unknown = [name for name in selected if str(name) not in accepted.groups[group]]
        for name in unknown:
            yield messages.unknown_choice(group, group, str(name), accepted.groups[group])
        before = next((choice for choice in checked.choices if choice.partition("=")[0] == group), None)
        if before not in (None, text.lstrip("+")):
            values_text = f"{before.partition('=')[2]},{value}".replace("[", "").replace("]", "")
            together = f"for both, set {group}=[{values_text}]" if group in accepted.several else "keep one of them"
            hint = f"{together}; or run each: -m {group}={values_text}"
            yield Problem(group, f"{before} and {group}={value}: a run takes one {group}", hint)
        elif not unknown:
            checked.sweeps = checked.sweeps or override.is_sweep_override()
            checked.choices.append(text.lstrip("+"))


def _names(override: Override) -> list[Any]:
    """Returns the options that an override names: a single one, a list, or a sweep over plain values."""
    if not override.is_sweep_override():
        value = override.value()
        return list(value) if isinstance(value, list) else [value]
    if override.is_discrete_sweep():
        return [part.split("=", 1)[-1].strip("'\"") for part in override.sweep_string_iterator()]
    return []


def as_values(overrides: Sequence[str], accepted: AcceptedOverrides) -> tuple[JsonObject, list[Problem]]:
    """Returns the overrides of a saved configuration as nested plain values; overrides of groups are refused."""
    checked = read(overrides, accepted)
    problems = list(checked.problems)
    for text in checked.choices:
        group = text.partition("=")[0]
        hint = f"change its values ({group}.KEY=VALUE), or omit --config"
        problems.append(Problem(group, f"{text}: the file of --config sets {group}", hint))
    for text in checked.hydra:
        problems.append(Problem(text, f"{text}: a saved configuration is read without Hydra", "omit it"))
    parser, data = OverridesParser.create(), dict[str, Any](checked.verbatim)
    for text in checked.values:
        override = parser.parse_override(text)
        inside = data
        *above, last = override.key_or_group.split(".")
        for part in above:
            inside = inside.setdefault(part, {})
            if not isinstance(inside, dict):
                break
        if isinstance(inside, dict):
            inside[last] = _plain(override.value())
    return data, problems


def _plain(value: object) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
