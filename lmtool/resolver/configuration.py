"""From a command line to a decoded configuration, in three steps.

1. Expand the shorthands.
2. Compose with Hydra, read a saved configuration, or update the configuration of the run that a branch starts from.
3. Replace `auto`, decode, and apply the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lmtool.config import compose, overrides, plugins, problems, saved
from lmtool.config.accepted import AcceptedOverrides
from lmtool.config.auto import merge
from lmtool.config.base import CommandConfig
from lmtool.errors import Problem, UserError
from lmtool.resolver import trunks
from lmtool.resolver.decoding import decode_config
from lmtool.resolver.schema.run import RunConfig
from lmtool.resolver.schema.verbs import COMMANDS, VERBS
from lmtool.resolver.shorthands import CommandLine, Data, expand_sections


def configuration(line: CommandLine, running: bool) -> CommandConfig:
    """Returns the decoded configuration of a complete command line. running: whether the command runs on this machine,
    rather than only being planned. Raises ConfigError with all errors."""
    accepted = accepted_by(line)
    if trunks.branch_of(line.words) is not None:
        return trunks.configuration(line, accepted, running)
    data, override_problems = _compose(line, accepted) if line.saved is None else _read_saved(line, accepted)
    return decode_config(line.verb, expand_sections(data, line), earlier=override_problems, running=running)


def accepted_by(line: CommandLine) -> AcceptedOverrides:
    """Returns the groups, options and keys that the command accepts."""
    command, primary = COMMANDS[line.verb], VERBS[line.verb].primary
    assert primary is not None
    accepted = compose.accepted_overrides(primary, line.config_dirs)
    return replace(
        accepted,
        takes=partial(problems.takes, command),
        verbatim=command.verbatim,
        alternatives=command.alternatives,
    )


def _compose(line: CommandLine, accepted: AcceptedOverrides) -> tuple[Data, list[Problem]]:
    """Returns the data that Hydra composes, and the errors in the overrides."""
    checked = overrides.read(line.words, accepted)
    return compose.compose(str(VERBS[line.verb].primary), checked, line.config_dirs), checked.problems


def _read_saved(line: CommandLine, accepted: AcceptedOverrides) -> tuple[Data, list[Problem]]:
    """Returns a saved configuration updated with the overrides, and the errors in the overrides."""
    path = line.saved
    assert path is not None
    data = saved.read(path)
    command = str(data.get("command", line.verb))
    if command != line.verb:
        hint = plugins.command_line(command, "--config", str(path))
        raise UserError(f"{path} was saved by lmtool {command}, not by lmtool {line.verb}", hint)
    values, override_problems = overrides.as_values(line.words, accepted)
    return merge(saved.body(data), values), override_problems


def decoded_job(line: CommandLine, data: Data, override_problems: Sequence[Problem], running: bool) -> CommandConfig:
    """Returns the decoded configuration of one job of a sweep."""
    config = decode_config(line.verb, expand_sections(data, line), earlier=override_problems, running=running)
    if isinstance(config, RunConfig) and (config.devices or 1) > 1:
        raise UserError(f"devices={config.devices} with -m: a job of a sweep runs in one process", "omit devices=")
    return config
