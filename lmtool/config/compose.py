"""Composition with Hydra: overrides of the command line are checked and rewritten; a primary file, its groups and the
overrides become plain data.

Hydra refuses an unknown key on its own, before lmtool can report the other errors. Every override of a value is
therefore rewritten as a forced one (`++a.b=c`), and the decoder reports all unknown keys at once. Values with
characters outside Hydra's grammar (`data.path=café.txt`) are quoted. Overrides that select or remove a group's option,
and those of `hydra.*`, stay as they are. The Compose API creates no folder and does not touch logging; exceptions of
Hydra are converted into UserError.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import hydra.conf
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal import defaults_list as lists
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.conf import RuntimeConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString, Sweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf, StringNode, open_dict
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from lmtool.config import groups, messages, registry, saved
from lmtool.config.base import JsonObject
from lmtool.config.registry import MULTI_SELECT_GROUPS, entries
from lmtool.errors import Problem, UserError, nearest

# --- overrides -----------------------------------------------------------------------------------------------------

# The name of a model on the hub: org/name, or a name with a dash, since no option contains a dash.
_HUB_NAME = re.compile(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*|[A-Za-z]\w*(-\w+)+")
_OVERRIDE_HINT = "write KEY=VALUE, with quotes around a value of several words; `lmtool COMMAND --help` prints the keys"


@dataclass(frozen=True)
class AcceptedOverrides:
    """The groups, options and keys that a command accepts. groups: the options of every group, by name. primary: the
    groups in the command's primary YAML file, each with its default option."""

    groups: dict[str, tuple[str, ...]]
    primary: dict[str, str | None]
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
        components = entries(section) if section in self.primary else ()
        return any(name.partition(".")[0] in entry.config.model_fields for entry in components)


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


def read_overrides(
    overrides: Sequence[str], accepted: AcceptedOverrides, *, multirun: bool = False
) -> CheckedOverrides:
    """Checks and rewrites overrides. accepted: the overrides that the command accepts. multirun: whether -m is set."""
    reader = _OverrideReader(accepted, multirun)
    checked, values = reader.checked, reader.values
    for text in overrides:
        checked.problems += reader.read(text)
    for first, second in accepted.alternatives:
        if {first, second} <= values.keys() and "null" not in (values[first], values[second]):
            message = f"{first}={values[first]} and {second}={values[second]} exclude each other"
            checked.problems.append(Problem(second, message, "keep one of them"))
    return checked


class _OverrideReader:
    """Checks overrides one after the other. values: the typed value of each key that is not a group."""

    def __init__(self, accepted: AcceptedOverrides, multirun: bool):
        self.accepted, self.multirun = accepted, multirun
        self.checked, self.values = CheckedOverrides(), dict[str, str]()
        self.parser = OverridesParser.create()

    def read(self, text: str) -> Iterator[Problem]:
        """Adds an override to `checked`, and its value to `values`, or yields its problems."""
        accepted, values = self.accepted, self.values
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
            self.checked.verbatim[key] = value
        elif section in accepted.verbatim:
            yield Problem(key, f"{key}: {section}= is text here and has no keys", f"set {section}=TEXT")
        elif isinstance(override := _parse(self.parser, text, key), Problem):
            yield override
        else:
            yield from self._classify(override, sign, key)

    def _classify(self, override: Override, sign: str, key: str) -> Iterator[Problem]:
        accepted, multirun, checked = self.accepted, self.multirun, self.checked
        group, text = key.partition("@")[0], str(override.input_line)
        value, nested = text.partition("=")[2], key.replace(".", "/")
        parsed = override.value()
        values = parsed.list if isinstance(parsed, ChoiceSweep) else parsed
        if isinstance(parsed, Glob) or (isinstance(values, list) and any(isinstance(part, Glob) for part in values)):
            options = accepted.groups.get(nested, ()) if multirun and isinstance(parsed, Glob) else ()
            matching: list[str] = parsed.filter(list(options)) if options else []
            if not matching:
                fault = (
                    f"matches no option of {key}"
                    if multirun
                    else "is a pattern of several options, but a run takes one"
                )
                runs = f"-m {shlex.quote(f'{key}={value}')} runs each option of a group that it matches; "
                hint = f"{'' if multirun else runs}use a pattern alone, or quote a text"
                yield Problem(key, f"{key}={value} {fault}", hint)
                return
            # A pattern is replaced by the options that it matches, in their order.
            group, value = nested, ",".join(matching)
            text = f"{group}={value}"
            override = self.parser.parse_override(text)
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
            yield from self._choose(override, text, sign, group)
        elif sign == "~":
            yield Problem(
                f"~{key}", f"~{key}: a value cannot be removed", f"set {key}=VALUE, or null if the key allows it"
            )
        elif _sweeps_inside(override.value()):
            hint = f"write the values out; to sweep, write them without brackets: -m {key}=A,B"
            yield Problem(key, f"{key}={value}: a list or section cannot contain a sweep", hint)
        elif override.is_sweep_override() and not multirun:
            hint = f'-m sweeps over them; a list has brackets, a text quotes: [{value}] or "{value}"'
            yield Problem(key, f"{key}={value} has several values, but a run takes one", hint)
        else:
            checked.sweeps = checked.sweeps or override.is_sweep_override()
            checked.values.append(f"++{key}={value}")

    def _choose(self, override: Override, text: str, sign: str, group: str) -> Iterator[Problem]:
        accepted, checked = self.accepted, self.checked
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
            hint = "name the labeled rows: task=FILE" if section == "data" else f"use one of its groups: {offered}"
            yield Problem(group, f"{text}: this command has no {section}", hint)
        elif isinstance(override.value(), list) and group not in MULTI_SELECT_GROUPS:
            names = value.strip("[]")
            first = names.split(",")[0].strip()
            hint = f"choose one, {group}={first}, or run each: -m {group}={names.replace(' ', '')}"
            yield Problem(group, f"{text}: a run takes one {group}, not a list", hint)
        elif override.is_sweep_override() and not self.multirun:
            together = f"; for all in one run, {group}=[{value}]" if group in MULTI_SELECT_GROUPS else ""
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
                together = (
                    f"for both, set {group}=[{values_text}]" if group in MULTI_SELECT_GROUPS else "keep one of them"
                )
                hint = f"{together}; or run each: -m {group}={values_text}"
                yield Problem(group, f"{before} and {group}={value}: a run takes one {group}", hint)
            elif not unknown:
                checked.sweeps = checked.sweeps or override.is_sweep_override()
                checked.choices.append(text.lstrip("+"))


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
    checked = read_overrides(overrides, accepted)
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
            inside[last] = override.value()
    return data, problems


# --- composition ---------------------------------------------------------------------------------------------------

scan_plugins = Plugins._scan_all_plugins
"""Finds the plugins of Hydra in modules. Hydra itself finds only its own; the module of another is scanned when its
launcher or sweeper is used, because importing all of them is slow."""
Plugins._scan_all_plugins = staticmethod(lambda modules: scan_plugins(modules[:1]))  # type: ignore[method-assign]


class LimitedFiles(FileConfigSource):
    """A folder of YAML whose files are checked before Hydra uses them."""

    @staticmethod
    def scheme() -> str:
        return "limited"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        text, data = saved.read_yaml(path, parse=_parse_yaml)
        if not isinstance(data, dict | None):
            raise UserError(f"{path} contains no keys and values", "write one KEY: VALUE a line, as in conf/")
        if self.provider != "hydra":
            _refuse_unused_keys(path, data or {})
        return ConfigResult(
            config=OmegaConf.create(data or {}),
            path=source_path(self.path),
            provider=self.provider,
            header=self._get_header_dict(text[:512]),
        )


def _refuse_unused_keys(path: Path, data: JsonObject) -> None:
    """Raises UserError if a YAML sets keys of Hydra itself other than sweep values, or names a class to import."""
    choices = [group for item in data.get("defaults") or () if isinstance(item, dict) for group in item]
    for key in [*_dotted_keys(data), *(str(group).split()[-1].lstrip("/") for group in choices)]:
        if (re.match("hydra(?![^./])", key) and not f"{key}.".startswith(f"{GRID}.")) or imports_a_name(key):
            advice = f", and type it on the command line: -m {key}=VALUE" if key.startswith(SWEEP_KEYS) else ""
            message = f"{path}: {key} cannot be set in YAML; the only key of Hydra that can is {GRID}"
            raise UserError(message, f"remove it from the file{advice}")


def _dotted_keys(value: object) -> Iterator[str]:
    """Yields the keys of a section at any depth, also those in lists."""
    for part in value if isinstance(value, list) else ():
        yield from _dotted_keys(part)
    for key, inside in value.items() if isinstance(value, dict) else ():
        yield from [f"{key}.{name}" for name in _dotted_keys(inside)] or [str(key)]


Plugins.instance().register(LimitedFiles)

_choices_so_far = lists._create_interpolation_map


def _choices_if_interpolated(overrides: Any, defaults_list: list[Any], self_added: bool) -> DictConfig:
    """Returns the options selected so far, which interpolations in a defaults list refer to; empty if there are no
    interpolations."""
    if any(item.is_interpolation() for item in defaults_list if not item.is_self()):
        return _choices_so_far(overrides, defaults_list, self_added)
    return OmegaConf.create()


lists._create_interpolation_map = _choices_if_interpolated


def source_path(folder: Path | str) -> str:
    """Returns the name of a folder in Hydra's search path."""
    return f"{LimitedFiles.scheme()}://{folder}"


def use_limited_files(loader: ConfigLoader, conf: Path) -> None:
    """Makes a loader of Hydra read lmtool's YAML in `conf`, and Hydra's own, through LimitedFiles."""
    assert isinstance(loader, ConfigLoaderImpl)
    folders = {"main": conf, "hydra": Path(hydra.conf.__file__).parent}
    search_path = loader.get_search_path()
    for element in search_path.get_path():
        if element.provider in folders:
            element.path = source_path(folders[element.provider])
    loader.repository.initialize_sources(search_path)


# The loader of OmegaConf decides which texts are numbers, and refuses duplicate keys.
_OMEGACONF = get_yaml_loader()
_YAML_LOADER = type(
    "Loader",
    (yaml.CSafeLoader, _OMEGACONF) if yaml.__with_libyaml__ else (_OMEGACONF,),
    {"yaml_constructors": yaml.SafeLoader.yaml_constructors},
)


@lru_cache(maxsize=1000)
def _parse_yaml(text: str) -> tuple[str, Any]:
    """Returns a document as plain data. Shared by all callers, because OmegaConf.create copies."""
    return text, saved.load(text, _YAML_LOADER)


MAX_REFERENCES = 1_000
MAX_SIZE = 1_000_000
"""Limits for the interpolations of a configuration: references, and the characters of all their values."""


class _TooManyInterpolations(InterpolationResolutionError):
    """The interpolations of a configuration exceed the limits. Its text is a key with one of them."""


@contextmanager
def _limited_interpolations() -> Iterator[None]:
    """Counts what OmegaConf resolves in the `with` block. Raises _TooManyInterpolations beyond the limits."""
    resolve, references, characters = Container.resolve_parse_tree, 0, 0

    def resolve_within_limits(self: Container, parse_tree: Any, node: Any, memo: Any = None, key: Any = None) -> Any:
        nonlocal references, characters
        value = resolve(self, parse_tree, node, memo, key)
        references += 1
        characters += len(str(value)) if isinstance(value, str | StringNode) else 0
        if references > MAX_REFERENCES or characters > MAX_SIZE:
            raise _TooManyInterpolations(self._get_full_key(key))
        return value

    Container.resolve_parse_tree = resolve_within_limits  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


WHOLE_RUN = "# @package _global_"
FIRST_LINE = f"add {WHOLE_RUN} as its first line"


def accepted_overrides(primary: str, config_dirs: Sequence[Path] = ()) -> AcceptedOverrides:
    """Returns the groups, options and keys that a primary file can be composed with, including components of plugins.

    Plugins' components reach Hydra here, as nodes of its ConfigStore. Raises UserError if a plugin's node has the name
    of a shipped YAML.
    """
    offered, store = groups.all_options(config_dirs), ConfigStore.instance()
    for (group, name), (entry, data) in registry.plugin_nodes(config_dirs).items():
        package = f"{group}.{name}" if group in MULTI_SELECT_GROUPS else None
        store.store(group=group, name=name, node=data, package=package, provider=entry.config.__module__)
    for group, names in _stored_nodes(store.repo).items():
        if clash := sorted(set(names) & set(offered.get(group, ()))):
            message = f"a plugin registers {group}={clash[0]}, but lmtool has a YAML of that name"
            raise UserError(message, "rename it in the plugin")
        offered[group] = tuple(sorted({*offered.get(group, ()), *names}))
    content = saved.read_yaml(groups.conf_dir() / f"{primary}.yaml")
    defaults = content.get("defaults", [])
    primary_groups = {
        str(key).split()[-1]: name for item in defaults if isinstance(item, dict) for key, name in item.items()
    }
    return AcceptedOverrides(offered, primary_groups, frozenset(content) - {"defaults"})


def _stored_nodes(repo: JsonObject, above: str = "") -> dict[str, tuple[str, ...]]:
    options: dict[str, tuple[str, ...]] = {}
    for name, nodes in repo.items():
        group = f"{above}/{name}" if above else name
        if isinstance(nodes, dict) and group not in ("hydra", "_dummy_empty_config_"):
            names = tuple(key.removesuffix(".yaml") for key, node in nodes.items() if not isinstance(node, dict))
            options |= ({group: names} if names else {}) | _stored_nodes(nodes, group)
    return options


@contextmanager
def initialized_hydra() -> Iterator[Any]:
    """Initializes Hydra on the shipped folder and restores its global state at the end, because a job of a sweep runs
    inside Hydra."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        conf = groups.conf_dir()
        with initialize_config_dir(str(conf), version_base="1.3", job_name="lmtool"):
            use_limited_files(GlobalHydra.instance().config_loader(), conf)
            yield GlobalHydra.instance().hydra
    finally:
        GlobalHydra.instance().hydra = outer


@cache
def _section_of_a_run() -> DictConfig:
    """Returns the part of Hydra's own section that a single run needs, as plain data. Launcher, the whole sweeper,
    logging and help are composed only for sweeps: they took a fifth of the time of composing."""
    separators = {"kv_sep": "=", "item_sep": ",", "exclude_keys": []}
    job = {"name": None, "config_name": None, "override_dirname": None, "config": {"override_dirname": separators}}
    return OmegaConf.create(
        {
            "searchpath": [],
            "overrides": {"hydra": [], "task": []},
            "job": {**job, "env_copy": [], "env_set": {}},
            "runtime": RuntimeConf(),
            "sweeper": {"params": None},
        }
    )


@contextmanager
def _hydra_for_a_run() -> Iterator[Any]:
    """Initializes Hydra with only the part of its own section that the YAML of a run may use."""
    nodes: JsonObject = ConfigStore.instance().repo["hydra"]
    original = nodes["config.yaml"]
    with initialized_hydra() as hydra:
        nodes["config.yaml"] = replace(original, node=_section_of_a_run())
        try:
            yield hydra
        finally:
            nodes["config.yaml"] = original


@contextmanager
def translated_errors() -> Iterator[None]:
    try:
        yield
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
        offered = tuple(error.options or ()) or groups.options(group)
        close = nearest(name, offered)
        hint = f"did you mean {group}={close}?" if close else f"`lmtool list {group}` prints its options"
        raise UserError(f"{group}={name} is not one of {messages.listed(offered)}", hint) from error
    except RecursionError as error:
        hint = "use fewer nested lists and sections in the overrides and in your YAML"
        raise UserError("the configuration cannot be composed: it is nested too deeply", hint) from error
    except _TooManyInterpolations as error:
        key, limits = str(error).splitlines()[0], f"{MAX_SIZE} characters, or {MAX_REFERENCES} references"
        message = f"{key}: the interpolations of this configuration expand to more than {limits}"
        hint = "remove the interpolations (${...}) of this key, or of the keys that refer to it"
        raise UserError(message, hint) from error
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
        message = " ".join(lines[:2]) if lines else type(error).__name__
        fault, hint = f"the configuration cannot be composed: {message}", "see `lmtool list` and the YAML you named"
        if unknown_section := re.search(r"In '(\S+)/(\S+)': Could not override '(\S+)'", message):
            group, name, section = unknown_section.groups()
            fault = f"{group}={name} sets {section}, which this command does not have"
            hint = f"`lmtool show {group}={name}` says which command it is for"
        elif unknown_group := re.search(r"Could not override '(\w+)/(\w+)'\. No match", message):
            section, name = unknown_group.groups()
            holders = [entry.name for entry in entries(section) if name in entry.config.model_fields]
            fault = f"{section}/{name} is set, but the selected {section} has no {name}"
            hint = f"omit it, or set {section}={'|'.join(holders)}" if holders else "omit it"
        raise UserError(fault, hint) from error


def set_values(config: DictConfig, values: Sequence[str]) -> None:
    """Sets the overrides of values in a composed configuration. Raises UserError for one that cannot be set, such as an
    item that a list does not have (data.packages.x=0)."""
    for override in OverridesParser.create().parse_overrides(list(values)):
        text = str(override.input_line).lstrip("+")
        key = text.partition("=")[0]
        try:
            OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
        except (ValueError, TypeError, OmegaConfBaseException) as error:
            sections = accumulate(key.split("."), "{}.{}".format)
            items = next((above for above in sections if OmegaConf.is_list(OmegaConf.select(config, above))), None)
            if items is None:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise UserError(f"{text}: {reason}", "`lmtool show KEY` explains a key") from error
            hint = f"set the whole list: {items}=[...]"
            raise UserError(f"{text}: {items} is a list without this item", hint) from error


def search_path(config_dirs: Sequence[Path]) -> list[str]:
    """Returns the override that adds the user's folders to Hydra's search path."""
    if not config_dirs:
        return []
    places = [source_path(folder.resolve()).replace("'", "\\'") for folder in config_dirs]
    paths = ",".join(f"'{place}'" for place in places)
    return [f"hydra.searchpath=[{paths}]"]


def compose(primary: str, checked: CheckedOverrides, config_dirs: Sequence[Path] = ()) -> JsonObject:
    """Returns the composed configuration as plain data with interpolations resolved; missing values stay `???`.

    Raises UserError if a selected YAML has several values for a key that is not on the command line, since a run takes
    one.
    """
    _require_package(checked.choices, config_dirs)
    with translated_errors():
        config = _composed(primary, checked.choices, config_dirs)
        set_values(config, checked.values)
        typed_keys = {key_of(text) for text in [*checked.choices, *checked.values]}
        remaining = {key: values for key, values in _grid(config).items() if key_of(key) not in typed_keys}
        # If there are other problems, they are reported instead.
        if remaining and not checked.problems and not checked.sweeps:
            firsts = {key: "VALUE" if "(" in value else value.partition(",")[0] for key, value in remaining.items()}
            set_first = f"set {' '.join(f'{key}={value}' for key, value in firsts.items())}"
            file = next((text for text in checked.choices if text.startswith(("sweep=", "experiment="))), None)
            message = f"{file or 'the YAML'} has several values for {', '.join(remaining)}, but a run takes one"
            command = f": lmtool {primary} -m {file}" if file else ""
            raise UserError(message, f"add -m to run a job for each{command}; or {set_first}")
        return to_data(config) | checked.verbatim


def _composed(primary: str, choices: Sequence[str], config_dirs: Sequence[Path]) -> DictConfig:
    """Returns what Hydra composes, before values are set. A result of shipped files alone is kept, since the jobs of a
    sweep often differ in values only."""
    shipped_only = not config_dirs and not _stored_nodes(ConfigStore.instance().repo)
    composing = _compose_choices if shipped_only else _compose_choices.__wrapped__
    return deepcopy(composing(primary, (*choices, *search_path(config_dirs))))


@lru_cache(maxsize=100)
def _compose_choices(primary: str, words: tuple[str, ...]) -> DictConfig:
    with _hydra_for_a_run():
        return hydra_compose(primary, overrides=list(words), return_hydra_config=True)


def _require_package(choices: Sequence[str], config_dirs: Sequence[Path]) -> None:
    """Raises UserError if a user's YAML in a group that sets run-wide keys, such as `experiment`, has no `# @package`
    line: Hydra would put its keys below the name of the group."""
    for text in choices:
        group, _, name = text.lstrip("+~").partition("=")
        path = groups.yaml_file(group, name, config_dirs) if name else None
        if path is None or path.is_relative_to(groups.conf_dir()) or b"@package" in saved.beginning(path):
            continue
        shipped = (groups.conf_dir() / group).glob("*.yaml")
        if any(WHOLE_RUN in file.read_text(encoding="utf-8") for file in shipped):
            raise UserError(f"{path} does not declare that its keys belong to the whole run", FIRST_LINE)


def grid(primary: str, checked: CheckedOverrides, config_dirs: Sequence[Path] = ()) -> dict[str, str]:
    """Returns the sweep values of the selected YAML by key, in the syntax of the command line. If a group is swept
    itself (task=a,b), the sweep values in its options are omitted: those in `a` apply only to the jobs of `a`."""
    _require_package([text for text in checked.choices if "," not in text], config_dirs)
    with translated_errors(), _hydra_for_a_run() as hydra:
        words = [*checked.choices, *search_path(config_dirs)]
        config = hydra.compose_config(primary, words, RunMode.MULTIRUN, with_log_configuration=False, from_shell=False)
        return _grid(config)


def _grid(config: Any) -> dict[str, str]:
    params = OmegaConf.select(config, GRID)
    return {} if params is None else {str(key): str(value) for key, value in params.items()}


def option(group: str, name: str, config_dirs: Sequence[Path] = ()) -> JsonObject:
    """Returns one option of a group as plain data. Raises UserError if the group has no such option."""
    with translated_errors():
        section: JsonObject = to_data(_composed(f"{group}/{name}", (), config_dirs))[group]
    return section


def to_data(config: DictConfig) -> JsonObject:
    """Returns a composed configuration as plain data with interpolations resolved, without Hydra's own section."""
    with open_dict(config):
        config.pop("hydra", None)
    with _limited_interpolations():
        data = OmegaConf.to_container(config, resolve=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}
