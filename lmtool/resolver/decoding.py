"""Decodes a command's configuration: reads the configurations of its checkpoint and of its teachers, and applies the
rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lmtool.config import compose, registry, saved
from lmtool.config.base import CommandConfig, JsonMapping, JsonObject
from lmtool.config.compose import AcceptedOverrides
from lmtool.config.decode import AUTO, MISSING, decode, merge
from lmtool.distillation.teacher_configs import saved_teacher
from lmtool.errors import ConfigError, Problem, UserError
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.resolver.rules import violations
from lmtool.resolver.shorthands import CommandLine, expand_sections
from lmtool.resolver.verbs import VERBS, command_classes
from lmtool.runs.branches import Trunk, branch_of
from lmtool.runs.finding import started_config
from lmtool.runs.identity import BRANCH_KEYS, changed_values
from lmtool.tasks.configs.mixture import tasks_of
from lmtool.training.devices import DEVICES
from lmtool.weights.folders import NoNetwork, saved_configuration


def decode_config(
    verb: str,
    data: JsonObject,
    *,
    earlier: Sequence[Problem] = (),
    running: bool = False,
    reads_checkpoint: bool = True,
) -> Any:
    """Returns the decoded configuration of `verb`, an instance of its class. Raises ConfigError with all errors.

    Args:
        verb: the command.
        data: composed plain data, or the body of a saved configuration.
        earlier: problems found before, reported together with the others.
        running: whether the command runs on this machine, rather than only being planned.
        reads_checkpoint: whether to take sections from the checkpoint; False for a complete configuration. The teachers
            are read if this or `running` is true.
    """
    problems = list(earlier)
    for plugin in data.get("plugins") or ():
        if plugin not in registry.typed_plugins():
            message = f"plugins: {plugin} is not loaded, because names in a configuration are never imported"
            problems.append(Problem("plugins", message, f"type --plugin {plugin}"))
    data = {**data, "plugins": list(registry.typed_plugins())}
    command = command_classes()[verb]
    reads = reads_checkpoint and command.starts_with_checkpoint
    checkpoint_config = _checkpoint_config(data, problems) if reads else None
    try:
        return decode(
            command,
            data,
            checkpoint_config=checkpoint_config,
            teachers=_read_teachers(data, problems) if reads_checkpoint or running else None,
            earlier=problems,
            rules=partial(violations, running=running),
        )
    except ConfigError as error:
        raise ConfigError([_explained(data, problem) for problem in error.problems]) from error


def _checkpoint_config(data: JsonMapping, problems: list[Problem]) -> JsonObject | None:
    """Returns the saved configuration of the checkpoint that training starts from, or None. Errors are appended to
    `problems`."""
    checkpoint = data.get("checkpoint")
    if isinstance(checkpoint, list) and checkpoint:
        checkpoint = checkpoint[0]  # `auto` uses the first of several checkpoints
    if checkpoint == "none":
        return None
    config = _read_saved_run("checkpoint", checkpoint, data, problems)
    missing = [name for name in (config or {}).get("plugins") or () if name not in registry.typed_plugins()]
    if missing:
        message = f"checkpoint={checkpoint} needs the plugin {missing[0]}, which is not loaded"
        problems.append(Problem("checkpoint", message, "add " + " ".join(f"--plugin {name}" for name in missing)))
        return None
    return config


def _read_teachers(data: JsonMapping, problems: list[Problem]) -> dict[str, JsonObject]:
    """Returns the saved configurations of the teachers named in the composed data. The errors of teachers that cannot
    be read are appended to `problems`."""
    section = data.get("distill")
    section = section if isinstance(section, dict) else {}
    paths = section.get("teachers")
    keys = {section.get("teacher"): "distill.teacher"}
    keys |= dict.fromkeys(paths if isinstance(paths, list | tuple) else (), "distill.teachers")
    read = {path: _read_saved_run(key, path, data, problems) for path, key in keys.items()}
    return {path: config for path, config in read.items() if path is not None and config is not None}


def _read_saved_run(key: str, path: object, data: JsonMapping, problems: list[Problem]) -> JsonObject | None:
    """Returns the saved configuration of the run or published folder that a key names, or None. Its error is appended
    to `problems`."""
    if not isinstance(path, str) or path in (MISSING, ""):
        return None
    try:
        return (saved_configuration if key == "checkpoint" else saved_teacher)(path, bool(data.get("offline")))
    except UserError as error:
        hint = f"{error.hint}{_local_start(data.get('task'))}" if isinstance(error, NoNetwork) else error.hint
        problems.append(Problem(key, error.message.replace(f"checkpoint={path}", f"{key}={path}"), hint))
    except OSError as error:  # a name too long for the file system, or a folder without permission
        message = f"{key}={path[:100]}: {(error.strerror or str(error)).lower()}"
        problems.append(Problem(key, message, "use a folder that you can read"))
    return None


def _local_start(task: object) -> str:
    """Returns what to start from instead of a download, for the hint of a command with a task."""
    if not isinstance(task, dict):
        return ""
    tiny = "t5_tiny" if task.get("kind") == "seq2seq" else "bert_tiny"
    runs = "a run on this machine, checkpoint=RUN (`lmtool runs` lists them)"
    return f"; or start from {runs}, or from random weights: checkpoint=none model={tiny}"


def _explained(data: JsonMapping, problem: Problem) -> Problem:
    """Returns a problem with a hint that names other commands: those that have an unknown key, or `plan` for a type of
    device (`h100`). Other problems are returned unchanged."""
    if problem.key == "device" and (name := data.get("device")) in DEVICES:
        fault = f"device={name} is a type of device, not a device of this machine"
        return Problem("device", fault, "set device=auto, cpu, cuda or cuda:N; `lmtool plan` takes types too")
    others = [name for name, command in command_classes().items() if problem.key in command.model_fields]
    if not problem.message.startswith("unknown key") or problem.likely_keys or not others:
        return problem
    return replace(problem, hint=f"omit it: {problem.key} is a key of lmtool {', '.join(others)}")


def with_defaults(config: JsonMapping) -> JsonMapping:
    """Returns a saved configuration with default values for keys that are newer than it. A configuration that cannot be
    decoded is returned unchanged."""
    verb = str(config.get("command"))
    if verb not in command_classes():
        return config
    try:
        decoded = decode_config(verb, saved.body(dict(config)), reads_checkpoint=False)
        # A run with labeled tasks saves all keys of its members, so these get the new keys, too.
        if isinstance(decoded, FinetuneConfig):
            decoded = decoded.model_copy(update={"task": decoded.task.replace_members(decoded.task.member_configs())})
        elif isinstance(decoded, PretrainConfig) and tasks_of(objective := decoded.objective):
            members = objective.replace_members(objective.member_configs())
            decoded = decoded.model_copy(update={"objective": members})
        return saved.save(decoded, verb)
    except UserError:
        return config


def configuration(line: CommandLine, running: bool) -> CommandConfig:
    """Returns the decoded configuration of a complete command line. running: whether the command runs on this machine,
    rather than only being planned. Raises ConfigError with all errors."""
    accepted = accepted_by(line)
    if branch_of(line.words) is not None:
        return branch_configuration(line, accepted, running)
    if line.saved is not None:
        values, problems = compose.as_values(line.words, accepted)
        data = merge(_saved_body(line.saved, line.verb), values)
    else:
        checked = compose.read_overrides(line.words, accepted)
        data, problems = compose.compose(str(VERBS[line.verb].primary), checked, line.config_dirs), checked.problems
    return decode_config(line.verb, expand_sections(data, line), earlier=problems, running=running)


def accepted_by(line: CommandLine) -> AcceptedOverrides:
    command = command_classes()[line.verb]
    accepted = compose.accepted_overrides(str(VERBS[line.verb].primary), line.config_dirs)
    return replace(accepted, verbatim=command.verbatim, alternatives=command.alternatives)


def _saved_body(path: Path, verb: str) -> JsonObject:
    data = saved.read(path)
    command = str(data.get("command", verb))
    if command != verb:
        hint = registry.command_line(command, "--config", str(path))
        raise UserError(f"{path} was saved by lmtool {command}, not by lmtool {verb}", hint)
    return saved.body(data)


def decoded_job(
    line: CommandLine, data: JsonObject, override_problems: Sequence[Problem], running: bool
) -> CommandConfig:
    config = decode_config(line.verb, expand_sections(data, line), earlier=override_problems, running=running)
    if isinstance(config, RunConfig) and (config.devices or 1) > 1:
        raise UserError(f"devices={config.devices} with -m: a job of a sweep runs in one process", "omit devices=")
    return config


# --- branch=RUN@STEP: the configuration of the trunk, updated with the overrides ------------------------------------


def _complete(trunk: Trunk) -> JsonObject:
    """Returns the trunk's configuration with default values for keys that are newer than it. Raises UserError if it is
    not a configuration."""
    data = trunk.config()
    verb = str(data.get("command"))
    return saved.save(decode_config(verb, saved.body(data), reads_checkpoint=False), verb)


def require_same_learning(trunk: Trunk, config: JsonObject) -> None:
    """Raises UserError if a configuration differs from the trunk's in a key that a branch cannot change."""
    if keys := changed_values(_complete(trunk), config, BRANCH_KEYS):
        raise UserError(
            f"branch={trunk} cannot change what its trunk learns: {'; '.join(keys)}",
            f"omit the changes; checkpoint={trunk.point} instead of branch= starts a new run from its weights",
        )


def branch_configuration(line: CommandLine, accepted: AcceptedOverrides, running: bool) -> CommandConfig:
    """Returns the decoded configuration of a branch: that of its trunk's checkpoint, updated with the overrides.

    Raises:
        ConfigError: all overrides that would change what is learned.
        UserError: --config is used too.
    """
    if line.saved is not None:
        raise UserError("branch= cannot be used with --config", "omit --config: a branch has its trunk's configuration")
    words = [word for word in line.words if not word.lstrip("+").startswith("branch=")]
    pairs = (word.lstrip("+").partition("=") for word in words)
    typed = {key: value for key, _, value in pairs if value != "null"}
    started = started_config(typed)
    trunk, base = Trunk.with_config(branch_of(line.words) or "", started)
    command = base.get("command")
    if command != line.verb:
        hint = f"use lmtool {command} branch={trunk} name=NEW"
        raise UserError(f"branch={trunk}: {trunk.run} is a run of lmtool {command}", hint)
    sections, words, problems = _branch_choices(replace(line, words=tuple(words)), saved.body(base), accepted, trunk)
    values, override_problems = compose.as_values(words, accepted)
    data = saved.body(base) | {"name": None, "run_dir": None} | sections
    config = decode_config(
        line.verb,
        merge(data, values) | {"branch": str(trunk)},
        earlier=[*problems, *override_problems, *trunk.conflicts_with_words(typed)],
        running=running,
        reads_checkpoint=False,  # the configuration is complete, and the checkpoint of the trunk may be deleted
    )
    assert isinstance(config, RunConfig)
    if base is not started and (errors := list(trunk.conflicts(_complete(trunk), saved.save(config, line.verb)))):
        raise ConfigError(errors)
    return config


def _branch_choices(
    line: CommandLine, base: JsonObject, accepted: AcceptedOverrides, trunk: Trunk
) -> tuple[JsonObject, list[str], list[Problem]]:
    """Sorts the arguments of a branch. Returns the selected sections that may differ from the trunk's, the arguments
    that do not select a section, and the errors of selections that would change what is learned."""
    changeable, others, problems = list[str](), list[str](), list[Problem]()
    for word in line.words:
        group, _, name = word.lstrip("+~").partition("=")
        if group not in accepted.groups and "/" not in group:
            others.append(word)
        elif group in BRANCH_KEYS:
            changeable.append(word)
        elif not _equals_trunk(group, name, base, line.config_dirs):
            problems.append(trunk.forbidden_change(group, word))
    overrides_by_key = compose.read_overrides(changeable, accepted)
    problems += overrides_by_key.problems
    composed = compose.compose(line.verb, overrides_by_key, line.config_dirs) if overrides_by_key.choices else {}
    groups = {word.lstrip("+~").partition("=")[0] for word in changeable}
    return {group: composed[group] for group in groups if group in composed}, others, problems


def _equals_trunk(group: str, name: str, base: JsonObject, config_dirs: Sequence[Path]) -> bool:
    if not isinstance(base.get(group), dict):
        return False
    option = compose.option(group, name, config_dirs)
    return name == AUTO or all(base[group].get(key) == value for key, value in option.items() if value != MISSING)
