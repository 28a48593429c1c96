"""Shorthands for longer overrides.

`expand_arguments` expands those on the command line, before Hydra composes the configuration; the result is a valid
command line. `expand_sections` expands those in the composed configuration, before `auto` and the decoder. Imports no
torch; what reads files is imported only when a file is typed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtool.config import compose, saved
from lmtool.config.base import JsonObject
from lmtool.config.decode import AUTO, MISSING, merge
from lmtool.config.groups import options
from lmtool.config.messages import as_typed, unknown_choice
from lmtool.config.registry import Choice, lookup
from lmtool.errors import ConfigError, UserError
from lmtool.resolver.verbs import TRAINING, VERBS
from lmtool.runs.finding import names_several, own_folder, run_folder, runs_named, started_config
from lmtool.system.terminal import counted, listing, say, shell_line
from lmtool.tasks.configs.base import TaskConfig
from lmtool.training.phases import nested_keys
from lmtool.weights.folders import saved_configuration

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
        return {word.partition("=")[0]: word.partition("=")[2] for word in self.words}


_PLAIN = re.compile(r"[\w./:@~-]+")
_MEMBER = re.compile(r"^((?:\+\+?)?(?:task|objective|data))\.members\.([A-Za-z_]\w*)\.(?=[\w.]+=)")


def expand_arguments(line: CommandLine) -> CommandLine:
    """Returns the line with its shorthands expanded into overrides. Raises UserError if one cannot be expanded."""
    line = _with_listed_runs(line) if line.verb == "evaluate" else line
    keys = iter(VERBS[line.verb].places)
    # Surplus positional arguments stay as they are, and are refused later.
    words = [
        word if OVERRIDE.match(word) or (key := next(keys, None)) is None else f"{key}={word}" for word in line.words
    ]
    if line.verb == "check" and any("=" not in word for word in words):
        from lmtool.tasks.guessing import TABLES

        keys_of_files = ("task" if Path(word).suffix.lower() in TABLES else "data" for word in words)
        words = [word if "=" in word else f"{key}={word}" for key, word in zip(keys_of_files, words, strict=True)]
    line = replace(line, words=tuple(full for word in words for full in _words_in_full(line.verb, word)))
    if line.verb != "predict" and "task" in line.values:
        line = replace(line, words=_with_task_file(line))
    return replace(line, words=_with_text_file(line)) if "data" in line.values else line


def _with_listed_runs(line: CommandLine) -> CommandLine:
    """Makes positional arguments of `evaluate` a list of runs, unless they are a run, or two to compare."""
    runs = [word for word in line.words if not OVERRIDE.match(word)]
    if len(runs) < 2 or (len(runs) == 2 and not any(map(names_several, runs))):
        return line
    return replace(line, words=(f"checkpoint={_typed(runs)}", *(word for word in line.words if word not in runs)))


def _words_in_full(verb: str, word: str) -> list[str]:
    """Returns the overrides that an argument stands for.

    `target=TASK` (of `probe`) is `target=task task=TASK`. `data=task:NAME` is `data=task data.task.name=NAME`.
    `data.task=NAME` and `task.domain=NAME` set `name` within these sections, so that other keys of the sections may be
    set too. `data.members.NAME.KEY=VALUE` is `data.with.NAME.KEY=VALUE`: `members` is a list, and Hydra cannot override
    elements of a list."""
    key, _, value = word.partition("=")
    if verb == "probe" and key == "target" and value not in ("token", "previous", "next", "task", "evolution"):
        return ["target=task", f"task={value}"]
    if key in ("data", "objective") and (name := value.removeprefix("task:")) not in ("", value):
        return [f"{key}=task", f"{key}.task.name={name}"]
    if key.endswith(("data.task", "objective.task", ".domain", "/domain")) and value.isidentifier() and value != "null":
        return [f"{key.replace('/', '.')}.name={value}"]
    return [_MEMBER.sub(r"\1.with.\2.", word)]


def words_of_file(path: Path, typed: Sequence[str]) -> list[str] | None:
    """Returns the overrides that a YAML file of some keys stands for, except keys that are typed, too; None for a saved
    configuration, which is complete. Raises UserError if the file cannot be read."""
    if path.suffix not in (".yaml", ".yml"):
        return None
    data = saved.read(path)
    if "version" in data or "command" in data:
        return None
    keys = {word.partition("=")[0].lstrip("+").replace("/", ".") for word in typed}
    words = _words_of_section(data, "")
    return [f"{key}={value}" for key, value in words if key.replace("/", ".") not in keys]


def _words_of_section(section: Mapping[str, object], above: str) -> Iterator[tuple[str, str]]:
    """Yields keys and values. The `name` of a section that is a group selects the option."""
    for name, value in section.items():
        key = f"{above}{name}"
        if not isinstance(value, dict):
            yield key, _typed(value)
            continue
        option, group = value.get("name"), key.replace(".", "/")
        if isinstance(option, str) and option in options(group):
            yield group, option
            value = {inner: item for inner, item in value.items() if inner != "name"}
        yield from _words_of_section(value, f"{key}.")


def _typed(value: object) -> str:
    """Returns a value in the grammar of overrides."""
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_typed(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "null" if value is None else as_typed(value)


def expand_sections(data: JsonObject, line: CommandLine) -> JsonObject:
    """Returns a composed configuration with its shorthands expanded. Raises UserError if one cannot be expanded."""
    data = with_sections(with_random_weights(data, line), line.config_dirs)
    data = with_latest_run(data) if line.verb in TRAINING else data
    data = with_table_of_vocabulary(data, line)
    data = with_several_runs(data) if line.verb == "evaluate" else data
    return with_published_weights(data) if line.verb == "finetune" else data


# --- task=FILE, data=FILE --------------------------------------------------------------------------------------------


def _with_task_file(line: CommandLine) -> tuple[str, ...]:
    names = options("task", line.config_dirs)
    if line.values["task"] in names:
        return line.words
    from lmtool.data.files import collect_errors
    from lmtool.tasks import guessing

    def expand(file: str) -> list[str]:
        if line.verb == "evaluate":
            return [f"task.path={file}"]  # the rest of the task is in the checkpoint
        typed_keys = {key.removeprefix("task."): value for key, value in line.values.items() if key.startswith("task.")}
        # `check` lists the rows with errors instead of stopping.
        with collect_errors() if line.verb == "check" else nullcontext():
            return guessing.guess(file, typed_keys).words(file)

    return _with_files(line, "task", lambda file: guessing.is_path(file, names), expand)


def _with_text_file(line: CommandLine) -> tuple[str, ...]:
    names = options("data", line.config_dirs)
    if line.values["data"] in names:
        return line.words
    from lmtool.tasks.guessing import is_text_path, text_overrides

    is_file, expand = partial(is_text_path, names=names), partial(text_overrides, values=line.values)
    return _with_files(line, "data", is_file, expand)


def _with_files(
    line: CommandLine,
    section: str,
    is_file: Callable[[str], bool],
    expand: Callable[[str], list[str]],
) -> tuple[str, ...]:
    """Returns the overrides with SECTION=FILE expanded, and prints the expansion together with other keys of the
    section. The files of a sweep (-m SECTION=FILE,FILE2) may differ only in their paths. is_file: whether a value is a
    file or folder rather than a name. expand: returns the overrides for a file. Raises UserError if the path is also
    set by its key, or the values of a sweep cannot be expanded together."""
    value, path = line.values.get(section, ""), f"{section}.path"
    files = [value] if set(value) & set("[]()") else value.split(",")
    if not any(map(is_file, files)):
        return line.words
    if path in line.values:
        typed = f"{path}={line.values[path]}"
        hint = f"set {section}=NAME {typed}, or only {section}={value}"
        raise UserError(f"{section}={value} and {typed} both set {path}", hint)
    if not all(map(is_file, files)):
        raise UserError(f"{section}={value}: a sweep takes either names or files", "sweep them separately")
    expansions = [dict(word.split("=", 1) for word in expand(file)) for file in files]
    if any({**expansion, path: ""} != {**expansions[0], path: ""} for expansion in expansions):
        message = f"{section}={value}: the files have different columns or types, so one sweep cannot read them"
        raise UserError(message, "repeat the command for each file")
    merged = expansions[0] | {path: ",".join(expansion[path] for expansion in expansions)}
    expanded = [f"{key}={item}" for key, item in merged.items() if key == section or key not in line.values]
    typed_keys = [word for word in line.words if word.startswith(f"{section}.")]
    say(f"{section}={value} is read as: {shell_line([*expanded, *typed_keys])}", sys.stderr)
    index = line.words.index(f"{section}={value}")
    return (*line.words[:index], *expanded, *line.words[index + 1 :])


# --- -m checkpoint=RUN,none ------------------------------------------------------------------------------------------

_NONE = "none"


def with_random_weights(data: JsonObject, line: CommandLine) -> JsonObject:
    """Gives the job `none` of a sweep over `checkpoint=RUN,none` the model and the vocabulary of RUN with random
    weights, so that the jobs differ only in their initial weights. Raises UserError if several checkpoints are
    listed."""
    checkpoints = next((word.partition("=")[2] for word in line.words if word.startswith("checkpoint=")), "")
    values = [value.strip() for value in checkpoints.split(",")]
    runs = [value for value in values if value != _NONE]
    if _NONE not in values or not runs or any(word.startswith(("model=", "tokenizer=")) for word in line.words):
        return data
    if len(runs) > 1:
        others = f"the other checkpoint, but there are {len(runs)} others"
        message = f"checkpoint={checkpoints}: none means random weights in the model of {others}"
        raise UserError(message, f"run one sweep for each: -m checkpoint={runs[0]},{_NONE}")
    if data.get("checkpoint") != _NONE:
        return data
    model = saved_configuration(runs[0], bool(data.get("offline")))["model"]
    return {**data, "model": model, "tokenizer": {"name": "folder", "path": runs[0]}}


def with_table_of_vocabulary(data: JsonObject, line: CommandLine) -> JsonObject:
    """Gives a model with random weights as many token vectors as `tokenizer.vocab_size=` asks for, unless
    `model.vocab_size=` is typed, too."""
    model, tokenizer = data.get("model"), data.get("tokenizer")
    entries = tokenizer.get("vocab_size") if isinstance(tokenizer, dict) else None
    typed = line.saved is not None or "model.vocab_size" in line.values or data.get("checkpoint") not in (None, _NONE)
    if typed or not isinstance(entries, int) or not isinstance(model, dict) or "vocab_size" not in model:
        return data
    return {**data, "model": {**model, "vocab_size": entries}}


# --- evaluate checkpoint=SWEEP, checkpoint=runs/gpt_* ----------------------------------------------------------------


def with_several_runs(data: JsonObject) -> JsonObject:
    """Replaces the folder of a sweep, or a pattern, by its finished runs, and prints those left out. Raises UserError
    if there are none."""
    checkpoint = data.get("checkpoint")
    paths = [checkpoint] if isinstance(checkpoint, str) else checkpoint
    if checkpoint == MISSING or not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        return data
    if not any(map(names_several, paths)):
        return data
    runs = list[str]()
    for path in paths:
        found, unfinished = runs_named(path)
        runs += found
        if unfinished:
            left_out = f"{counted(len(unfinished), 'unfinished run')} left out: {listing(unfinished, 3)}"
            say(f"checkpoint={path}: {left_out}", sys.stderr)
    return {**data, "checkpoint": runs}


# --- neither checkpoint= nor model= ----------------------------------------------------------------------------------


def with_published_weights(data: JsonObject) -> JsonObject:
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


def with_latest_run(data: JsonObject) -> JsonObject:
    """Replaces `runs/latest` in paths by the run that it points to now, because the new run becomes `runs/latest` when
    it starts. If it points to this very run, which is being resumed, the path that the run was started with is used."""
    if _LINK not in repr(data):
        return data
    try:
        before = started_config(data)
    except UserError:  # reported when the run is opened
        before = {}
    folder = own_folder(data)
    run = None if folder is None else folder.absolute()
    # `name` and `run_dir` set the folder of this run, which is not read.
    paths = {key: value for key, value in data.items() if key not in ("name", "run_dir")}
    return {**data, **{key: _resolve(value, before.get(key), run) for key, value in paths.items()}}


def _resolve(value: object, before: object, current: Path | None) -> Any:
    """Replaces `runs/latest` in a value. before: the value with which the run was started, or None. current: the folder
    of this run."""
    if isinstance(value, dict):
        earlier = before if isinstance(before, dict) else {}
        return {key: _resolve(inner, earlier.get(key), current) for key, inner in value.items()}
    if isinstance(value, list):
        items_before = before if isinstance(before, list) and len(before) == len(value) else [None] * len(value)
        return [_resolve(inner, old, current) for inner, old in zip(value, items_before, strict=True)]
    parts = Path(value).parts if isinstance(value, str) and "://" not in value else ()
    if _LINK not in parts:
        return value
    end = parts.index(_LINK) + 1
    run = run_folder(Path(*parts[:end]))
    if current is not None and run.absolute() == current and isinstance(before, str):
        return before
    return str(run.joinpath(*parts[end:])) if run.name != _LINK and run.is_dir() else value


def with_sections(data: JsonObject, config_dirs: Sequence[Path] = ()) -> JsonObject:
    """Returns composed data with names replaced by sections: in lists of members, `data.task`, `objective.task` and
    `phases`. Raises ConfigError for an unknown name."""
    completed = dict(data)
    for key in ("task", "objective", "data"):
        section = dict(data[key]) if isinstance(data.get(key), dict) else {}
        if isinstance(section.get("members"), list):
            section["members"] = [_member(key, member, config_dirs) for member in section["members"]]
        if key != "task" and section.get("name") == "task" and "task" in section:
            section["task"] = _section("task", f"{key}.task", section["task"], config_dirs)
        completed |= {key: section} if section else {}
    if isinstance(data.get("phases"), list):
        phases = [nested_keys(phase) if isinstance(phase, dict) else phase for phase in data["phases"]]
        for number, phase in enumerate(phases):
            if isinstance(phase, dict) and isinstance(phase.get("data"), dict):
                text = _section("data", f"phases.{number}.data", phase["data"], config_dirs)
                phases[number] = {**phase, "data": with_sections({"data": text}, config_dirs)["data"]}
        completed["phases"] = phases
    return completed


def _member(group: str, member: Any, config_dirs: Sequence[Path]) -> Any:
    """Returns the section of a member of a mixture. Among objectives, a task by name becomes its section;
    among texts, `task:NAME` does."""
    key = f"{group}.members"
    name = member.get("name") if isinstance(member, dict) else member
    if group == "objective":
        if isinstance(member, str) and lookup("objective", member) is None and member in _options("task", config_dirs):
            member = {"name": "task", "task": member}
        is_task = isinstance(member, dict) and member.get("name") == "task" and "task" in member
        return {**member, "task": _section("task", key, member["task"], config_dirs)} if is_task else member
    if group == "data" and isinstance(name, str) and name.startswith("task:"):
        return {"name": "task", "task": _section("task", key, name.removeprefix("task:"), config_dirs)}
    section = _section(group, key, member, config_dirs)
    has_title = group == "task" or not isinstance(section, dict) or section.get("name") == name
    return section if has_title else {"title": name, **section}


def _section(group: str, key: str, section: Any, config_dirs: Sequence[Path]) -> Any:
    """Returns the section of an option. section: the option's name, or a section with this name and keys to change;
    any other section is returned unchanged. key: the key that errors name."""
    name = section.get("name") if isinstance(section, dict) else section
    is_complete = group == "task" and isinstance(section, dict) and "kind" in section
    if not isinstance(name, str) or name == MISSING or is_complete:
        return section
    offered = _options(group, config_dirs)
    if name not in offered:
        if group != "task" and lookup(group, name) is not None:
            return section
        raise ConfigError([unknown_choice(group, key, name, offered)])
    # Required values are left out: the section may set them, and the decoder reports them if it does not.
    option = {key: value for key, value in compose.option(group, name, config_dirs).items() if value != MISSING}
    changes = {key: value for key, value in section.items() if key != "name"} if isinstance(section, dict) else {}
    return merge(option, changes)


def _options(group: str, config_dirs: Sequence[Path]) -> tuple[str, ...]:
    return compose.accepted_overrides("pretrain", config_dirs).groups.get(group, ())
