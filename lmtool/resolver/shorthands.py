"""Shorthands for longer overrides.

There are two tables. `ARGUMENT_SHORTHANDS` are expanded on the command line, before Hydra composes the configuration;
the result is a valid command line. `SECTION_SHORTHANDS` are expanded in the composed configuration, before `auto` and
the decoder. Each shorthand names the function that expands it, whose module is imported only when it is needed. Imports
no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtool.config import compose, saved
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.decode import AUTO, merge
from lmtool.config.messages import unknown_choice
from lmtool.config.registry import Choice, imported, lookup
from lmtool.errors import ConfigError, UserError
from lmtool.resolver.commands import nested_keys
from lmtool.resolver.verbs import COMMANDS, TRAINING, VERBS
from lmtool.runs.finding import RUNS, read_checkpoint, run_folder
from lmtool.system.files import user_path
from lmtool.tasks.configs.base import TaskConfig
from lmtool.weights.folders import hf_folder

Data = JsonObject
OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w./@-]*=|~")
"""The start of an override."""


@dataclass(frozen=True)
class CommandLine:
    """A command and its arguments, without flags. verb: the command. words: the arguments. config_dirs: the folders of
    --config-dir. saved: the file of --config."""

    verb: str
    words: tuple[str, ...]
    config_dirs: tuple[Path, ...] = ()
    saved: Path | None = None

    @property
    def values(self) -> dict[str, str]:
        """The overrides by key."""
        return {word.partition("=")[0]: word.partition("=")[2] for word in self.words}


@dataclass(frozen=True)
class ArgumentShorthand:
    """A shorthand on the command line.

    form: its syntax. verbs: the commands that accept it. matches: whether an argument may be this shorthand. expander:
    `module:function` in this package, which returns the arguments with the shorthand expanded.
    """

    form: str
    verbs: Collection[str]
    matches: Callable[[str], bool]
    expander: str


@dataclass(frozen=True)
class SectionShorthand:
    """A shorthand in a composed configuration. expander: `module:function` in this package, which returns the
    configuration with the shorthand expanded."""

    form: str
    verbs: Collection[str]
    expander: str


_NAMED_SECTIONS = {"data.task": "data", "objective.task": "objective"}
"""Keys that name a task, and the group of the section that contains each."""
_MEMBER = re.compile(r"^((?:\+\+?)?(?:task|objective|data))\.members\.([A-Za-z_]\w*)\.(?=[\w.]+=)")
_DOMAIN = (".domain", "/domain")


def _sets(*keys: str) -> Callable[[str], bool]:
    return lambda word: word.startswith(tuple(f"{key}=" for key in keys))


ARGUMENT_SHORTHANDS = (
    ArgumentShorthand(
        "VALUE",
        [name for name, verb in VERBS.items() if verb.places],
        lambda word: not OVERRIDE.match(word),
        "shorthands:with_positional_keys",
    ),
    ArgumentShorthand("FILE", ("check",), lambda word: "=" not in word, "files:with_keys"),
    ArgumentShorthand("target=TASK", ("probe",), _sets("target"), "shorthands:with_target"),
    ArgumentShorthand("task=FILE", COMMANDS.keys() - {"predict"}, _sets("task"), "files:with_task"),
    ArgumentShorthand("data=FILE", COMMANDS, _sets("data"), "files:with_text"),
    ArgumentShorthand("data=task:NAME", COMMANDS, _sets("data", "objective"), "shorthands:with_task_of_text"),
    ArgumentShorthand(
        "data.task=NAME, task.domain=NAME",
        COMMANDS,
        lambda word: (key := word.partition("=")[0]) in _NAMED_SECTIONS or key.endswith(_DOMAIN),
        "shorthands:with_names",
    ),
    ArgumentShorthand(
        "a key of a member",
        COMMANDS,
        lambda word: _MEMBER.match(word) is not None,
        "shorthands:with_members",
    ),
)
SECTION_SHORTHANDS = (
    SectionShorthand("-m checkpoint=RUN,none", COMMANDS, "shorthands:with_random_weights"),
    SectionShorthand("tasks and texts by name among members", COMMANDS, "shorthands:with_sections_of"),
    SectionShorthand("runs/latest", TRAINING, "shorthands:with_latest_run"),
    SectionShorthand("neither checkpoint= nor model=", ("finetune",), "shorthands:with_published_weights"),
)


def expand_arguments(line: CommandLine) -> CommandLine:
    """Returns the line with its shorthands expanded into overrides. Raises UserError if one cannot be expanded."""
    for shorthand in ARGUMENT_SHORTHANDS:
        if line.verb in shorthand.verbs and any(map(shorthand.matches, line.words)):
            line = replace(line, words=tuple(imported(f"lmtool.resolver.{shorthand.expander}")(line)))
    return line


def expand_sections(data: Data, line: CommandLine) -> Data:
    """Returns a composed configuration with its shorthands expanded. Raises UserError if one cannot be expanded."""
    for shorthand in SECTION_SHORTHANDS:
        if line.verb in shorthand.verbs:
            data = imported(f"lmtool.resolver.{shorthand.expander}")(data, line)
    return data


# --- words ---------------------------------------------------------------------------------------------------------


def with_positional_keys(line: CommandLine) -> list[str]:
    """Assigns arguments without = to the positional keys of the command, in order. Surplus arguments stay as they are,
    and are refused later."""
    keys = iter(VERBS[line.verb].places)
    return [
        word if OVERRIDE.match(word) or (key := next(keys, None)) is None else f"{key}={word}" for word in line.words
    ]


def with_target(line: CommandLine) -> list[str]:
    """Replaces `target=NAME` by `target=task task=NAME` if NAME is a task."""
    words: list[str] = []
    for word in line.words:
        key, _, value = word.partition("=")
        is_task = key == "target" and value not in ("token", "previous", "next", "task")
        words += ["target=task", f"task={value}"] if is_task else [word]
    return words


def with_task_of_text(line: CommandLine) -> list[str]:
    """Replaces `data=task:NAME` by `data=task data.task.name=NAME`."""
    words: list[str] = []
    for word in line.words:
        key, _, value = word.partition("=")
        group, _, name = value.partition(":")
        is_task = key in _NAMED_SECTIONS.values() and group == "task" and name
        words += [f"{key}=task", f"{key}.task.name={name}"] if is_task else [word]
    return words


def with_names(line: CommandLine) -> list[str]:
    """Replaces `data.task=NAME` and `task.domain=NAME` by overrides of `name` within these sections, so that other keys
    of the sections may be set too."""
    words = []
    for word in line.words:
        key, _, value = word.partition("=")
        is_name = (key in _NAMED_SECTIONS or key.endswith(_DOMAIN)) and value.isidentifier() and value != "null"
        words.append(f"{key.replace('/', '.')}.name={value}" if is_name else word)
    return words


def with_members(line: CommandLine) -> list[str]:
    """Replaces `data.members.NAME.KEY=VALUE` by `data.with.NAME.KEY=VALUE`: `members` is a list, and Hydra cannot
    override elements of a list."""
    return [_MEMBER.sub(r"\1.with.\2.", word) for word in line.words]


# --- -m checkpoint=RUN,none ------------------------------------------------------------------------------------------

_NONE = "none"


def with_random_weights(data: Data, line: CommandLine) -> Data:
    """Gives the job `none` of a sweep over `checkpoint=RUN,none` the model and the vocabulary of RUN with random
    weights, so that the jobs differ only in their initial weights. Raises UserError if several checkpoints are
    listed."""
    checkpoints = next((word.partition("=")[2] for word in line.words if word.startswith("checkpoint=")), "")
    values = [value.strip() for value in checkpoints.split(",")]
    runs = [value for value in values if value != _NONE]
    if _NONE not in values or not runs or any(word.startswith(("model=", "tokenizer=")) for word in line.words):
        return data
    if len(runs) > 1:
        raise UserError(
            f"checkpoint={checkpoints}: none means random weights in the model of the other checkpoint, but there are "
            f"{len(runs)} others",
            f"run one sweep for each: -m checkpoint={runs[0]},{_NONE}",
        )
    if data.get("checkpoint") != _NONE:
        return data
    published = hf_folder(runs[0], bool(data.get("offline")))
    config = read_checkpoint(runs[0]) if published is None else published.saved_config()
    return {**data, "model": config["model"], "tokenizer": {"name": "folder", "path": runs[0]}}


# --- neither checkpoint= nor model= ----------------------------------------------------------------------------------


def with_published_weights(data: Data, line: CommandLine) -> Data:
    """Sets the checkpoint to the published weights of the task's default model if neither a checkpoint nor a model is
    set. A task with an error is left to the decoder."""
    model = data.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    if data.get("checkpoint") is not None or name not in (None, AUTO):
        return data
    try:
        task = Choice("task", key="kind").validate(data.get("task"))
    except (ValidationError, PydanticCustomError):
        return data
    return {**data, "checkpoint": task.default_checkpoint} if isinstance(task, TaskConfig) else data


# --- runs/latest ---------------------------------------------------------------------------------------------------

_LINK = "latest"
_FOLDER_KEYS = ("name", "run_dir")  # they set the folder of this run, which is not read


def started_config(config: JsonMapping) -> Data:
    """Returns the configuration with which the run in the folder of `config` was started; empty if there is no run."""
    folder = _folder(config)
    if folder is None or not (folder / "config.yaml").is_file():
        return {}
    return saved.read(folder / "config.yaml")


def with_latest_run(data: Data, line: CommandLine) -> Data:
    """Replaces `runs/latest` in paths by the run that it points to now, because the new run becomes `runs/latest` when
    it starts. If it points to this very run, which is being resumed, the path that the run was started with is used."""
    if _LINK not in repr(data):
        return data
    try:
        before = started_config(data)
    except UserError:  # reported when the run is opened
        before = {}
    folder = _folder(data)
    run = None if folder is None else folder.absolute()
    return {key: value if key in _FOLDER_KEYS else _resolve(value, before.get(key), run) for key, value in data.items()}


def _folder(config: JsonMapping) -> Path | None:
    if config.get("run_dir"):
        return user_path(str(config["run_dir"]))
    return RUNS / str(config["name"]) if config.get("name") else None


def _resolve(value: object, before: object, current: Path | None) -> Any:
    """Replaces `runs/latest` in a value. before: the value with which the run was started, or None. current: the folder
    of this run."""
    if isinstance(value, dict):
        earlier = before if isinstance(before, dict) else {}
        return {key: _resolve(inner, earlier.get(key), current) for key, inner in value.items()}
    if isinstance(value, list):
        unknown: Sequence[Any] = [None] * len(value)
        items_before = before if isinstance(before, list) and len(before) == len(value) else unknown
        return [_resolve(inner, old, current) for inner, old in zip(value, items_before, strict=True)]
    if not isinstance(value, str) or _LINK not in value or "://" in value or _LINK not in Path(value).parts:
        return value
    parts = Path(value).parts
    end = parts.index(_LINK) + 1
    run = run_folder(Path(*parts[:end]))
    if current is not None and run.absolute() == current and isinstance(before, str):
        return before
    return str(run.joinpath(*parts[end:])) if run.name != _LINK and run.is_dir() else value


def with_sections_of(data: JsonObject, line: CommandLine) -> JsonObject:
    """Calls `with_sections` with the signature of a shorthand."""
    return with_sections(data, line.config_dirs)


def with_sections(data: JsonObject, config_dirs: Sequence[Path] = ()) -> JsonObject:
    """Returns composed data with names replaced by sections: in lists of members, `data.task`, `objective.task` and
    `phases`. Raises ConfigError for an unknown name."""
    completed = dict(data)
    for key in ("task", "objective", "data"):
        section = data.get(key)
        if not isinstance(section, dict):
            continue
        section = dict(section)
        if isinstance(section.get("members"), list):
            expanders: dict[str, Callable[[Any, Sequence[Path]], Any]]
            expanders = {
                "task": partial(_task_section, "task.members"),
                "objective": _objective_member,
                "data": _text_member,
            }
            section["members"] = [expanders[key](member, config_dirs) for member in section["members"]]
        if key != "task" and section.get("name") == "task" and "task" in section:
            section["task"] = _task_section(f"{key}.task", section["task"], config_dirs)
        completed[key] = section
    if isinstance(data.get("phases"), list):
        completed["phases"] = [
            _phase_section(phase, number, config_dirs) for number, phase in enumerate(data["phases"])
        ]
    return completed


def _phase_section(phase: object, number: int, config_dirs: Sequence[Path]) -> Any:
    """Returns a phase with the name of its text source replaced by the section of the source, updated with the keys of
    the phase."""
    nested = nested_keys(phase) if isinstance(phase, dict) else {}
    text = nested.get("data")
    if not isinstance(text, dict) or not isinstance(text.get("name"), str):
        return phase
    name, offered = text["name"], compose.accepted_overrides("pretrain", config_dirs).groups.get("data", ())
    if name in offered:
        section = merge(compose.option("data", name, config_dirs), text)
        return {**nested, "data": with_sections({"data": section}, config_dirs)["data"]}
    if lookup("data", name) is None:
        raise ConfigError([unknown_choice("data", f"phases.{number}.data", name, offered)])
    return nested


def _task_section(key: str, member: object, config_dirs: Sequence[Path]) -> Any:
    """Returns the section of a task. member: the task's name, or a section with this name and keys to change; any
    other member is returned unchanged. key: the key that errors name."""
    name = member if isinstance(member, str) else None
    if isinstance(member, dict) and "kind" not in member and isinstance(member.get("name"), str):
        name = member["name"]
    if name is None or name == "???":
        return member
    offered = _task_names(config_dirs)
    if name not in offered:
        raise ConfigError([unknown_choice("task", key, name, offered)])
    section = compose.option("task", name, config_dirs)
    return merge(section, member) if isinstance(member, dict) else section


def _objective_member(member: object, config_dirs: Sequence[Path]) -> Any:
    """Returns a member of a mixture of objectives. A name that is not an objective but a task becomes a task's
    section."""
    if isinstance(member, dict) and member.get("name") == "task" and "task" in member:
        return {**member, "task": _task_section("objective.members", member["task"], config_dirs)}
    if isinstance(member, str) and lookup("objective", member) is None and member in _task_names(config_dirs):
        return {"name": "task", "task": _task_section("objective.members", member, config_dirs)}
    return member


def _text_member(member: object, config_dirs: Sequence[Path]) -> Any:
    """Returns the section of a text source. member: the name of an option of `data`, or a section with this name and
    keys to change."""
    name = member.get("name") if isinstance(member, dict) else member
    if not isinstance(name, str) or name == "???":
        return member
    if name.startswith("task:"):
        return {"name": "task", "task": _task_section("data.members", name.removeprefix("task:"), config_dirs)}
    offered = compose.accepted_overrides("pretrain", config_dirs).groups.get("data", ())
    if name not in offered:
        if lookup("data", name) is not None:
            return member
        raise ConfigError([unknown_choice("data", "data.members", name, offered)])
    # Required values (???) are left out: the member may set them, and the decoder reports them if it does not.
    section = {key: value for key, value in compose.option("data", name, config_dirs).items() if value != "???"}
    title = {} if section.get("name") == name else {"title": name}
    changes = {key: value for key, value in member.items() if key != "name"} if isinstance(member, dict) else {}
    return {**title, **merge(section, changes)}


def _task_names(config_dirs: Sequence[Path]) -> tuple[str, ...]:
    return compose.accepted_overrides("finetune", config_dirs).groups.get("task", ())
