"""Decodes a command's configuration: reads the configurations of its checkpoint and of its teachers, and applies the
rules."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtool.config import plugins, saved
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.checkpoint import RUNS, read_checkpoint, saved_steps
from lmtool.config.decode import decode
from lmtool.config.needs import unmet
from lmtool.config.tables import Choice
from lmtool.errors import ConfigError, Problem, UserError
from lmtool.resolver import matcher as matcher  # these modules register their rules when imported
from lmtool.resolver import rules as rules
from lmtool.resolver import teachers
from lmtool.resolver.schema.verbs import COMMANDS
from lmtool.tasks.configs import TaskConfig
from lmtool.training.devices import DEVICES
from lmtool.weights.folders import NoNetwork, hf_folder


def decode_config(
    verb: str,
    data: JsonObject,
    *,
    earlier: Sequence[Problem] = (),
    running: bool = False,
    reads_checkpoint: bool = True,
) -> Any:
    """Returns the decoded configuration of `verb`, an instance of COMMANDS[verb].

    Args:
        verb: the command.
        data: composed plain data, or the body of a saved configuration.
        earlier: problems found before, reported together with the others.
        running: whether the command runs on this machine, rather than only being planned.
        reads_checkpoint: whether to take sections from the checkpoint; False for a complete configuration. The teachers
            are read if this or `running` is true.

    Raises:
        ConfigError: all errors.
    """
    problems = list(earlier)
    not_loaded = [plugin for plugin in data.get("plugins") or () if plugin not in plugins.typed_plugins()]
    problems += [
        Problem(
            "plugins",
            f"plugins: {plugin} is not loaded, because names in a configuration are never imported",
            f"type --plugin {plugin}",
        )
        for plugin in not_loaded
    ]
    data = {**data, "plugins": list(plugins.typed_plugins())}
    reads = reads_checkpoint and COMMANDS[verb].starts_with_checkpoint
    checkpoint_config = _checkpoint_config(data, problems) if reads else None
    try:
        return decode(
            COMMANDS[verb],
            data,
            checkpoint_config=checkpoint_config,
            teachers=teachers.read_teachers(data, problems) if reads_checkpoint or running else None,
            earlier=problems,
            running=running,
        )
    except ConfigError as error:
        problems = [_suggest_plan(verb, data, _suggest_other_commands(verb, problem)) for problem in error.problems]
        raise ConfigError(problems) from error


def _checkpoint_config(data: JsonMapping, problems: list[Problem]) -> JsonObject | None:
    """Returns the saved configuration of the checkpoint that training starts from, or None. Errors are appended to
    `problems`."""
    checkpoint = data.get("checkpoint")
    if isinstance(checkpoint, list) and checkpoint:
        checkpoint = checkpoint[0]  # `auto` uses the first of several checkpoints
    if not isinstance(checkpoint, str) or checkpoint in ("none", "???", ""):
        return None
    try:
        hf = hf_folder(checkpoint, bool(data.get("offline")))
        config = read_checkpoint(checkpoint) if hf is None else hf.saved_config()
    except NoNetwork as error:
        problems.append(Problem("checkpoint", error.message, _local_start(data, error.hint)))
        return None
    except UserError as error:
        problems.append(Problem("checkpoint", error.message, error.hint))
        return None
    except OSError as error:  # a name too long for the file system, or a folder without permission
        message = f"checkpoint={checkpoint[:100]}: {(error.strerror or str(error)).lower()}"
        problems.append(Problem("checkpoint", message, "use a folder that you can read"))
        return None
    missing = [plugin for plugin in config.get("plugins") or () if plugin not in plugins.typed_plugins()]
    if missing:
        message = f"checkpoint={checkpoint} needs the plugin {missing[0]}, which is not loaded"
        problems.append(Problem("checkpoint", message, "add " + " ".join(f"--plugin {name}" for name in missing)))
        return None
    return config


def _local_start(data: JsonMapping, hint: str | None) -> str | None:
    """Returns the hint for weights that cannot be downloaded: for finetuning, the newest finished pretraining run whose
    model fits the task, and random weights; for other commands `hint`."""
    try:
        task = Choice("task", key="kind").validate(data.get("task"))
    except (ValidationError, PydanticCustomError):
        return hint
    if not isinstance(task, TaskConfig):
        return hint
    members = task.member_configs()
    finished = sorted(RUNS.glob("*/result.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in (path.parent for path in finished):
        with suppress(UserError, ValidationError, PydanticCustomError, OSError):
            config = saved.read(folder / "config.yaml")
            model = Choice("model").validate(config.get("model"))
            is_pretrained = config.get("command") == "pretrain" and saved_steps(folder / "checkpoints")
            if is_pretrained and all(next(unmet(member, model=model), None) is None for member in members):
                return f"start from a run on this machine: checkpoint={folder}; {hint}"
    tiny = "t5_tiny" if task.generates_text else "bert_tiny"
    return f"{hint}; or start from random weights: checkpoint=none model={tiny}"


def _suggest_plan(verb: str, data: JsonMapping, problem: Problem) -> Problem:
    """If the problem is a type of device (`h100`), returns a problem that says that only `lmtool plan` accepts types.
    Other problems are returned unchanged."""
    name = data.get("device")
    if problem.key != "device" or name not in DEVICES:
        return problem
    plans = f"lmtool plan {verb} device={name} plans for it; " if verb in ("pretrain", "finetune") else ""
    hint = f"{plans}set device=auto, cpu, cuda or cuda:N"
    return Problem("device", f"device={name} is a type of device, not a device of this machine", hint)


def _suggest_other_commands(verb: str, problem: Problem) -> Problem:
    """Returns a problem with an unknown key, with a hint that names the commands that have the key. Other problems are
    returned unchanged."""
    others = [name for name, command in COMMANDS.items() if problem.key in command.model_fields and name != verb]
    if not problem.message.startswith("unknown key") or problem.likely_keys or not others:
        return problem
    return replace(problem, hint=f"omit it: {problem.key} is a key of lmtool {', '.join(others)}")


def with_defaults(config: JsonMapping) -> JsonMapping:
    """Returns a saved configuration with default values for keys that are newer than it. A configuration that cannot be
    decoded is returned unchanged."""
    verb = str(config.get("command"))
    if verb not in COMMANDS:
        return config
    try:
        return saved.save(decode_config(verb, saved.body(dict(config)), reads_checkpoint=False), verb)
    except UserError:
        return config
