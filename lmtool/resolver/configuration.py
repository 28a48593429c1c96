"""The configuration of a command line: shorthands; then Hydra, a saved configuration or the trunk of a branch; then
`auto`, the decoder and the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lmtool.config import compose, overrides, plugins, problems, saved
from lmtool.config.auto import merge
from lmtool.config.offers import Offers
from lmtool.errors import Problem, UserError
from lmtool.resolver import trunks
from lmtool.resolver.decoding import decoded
from lmtool.resolver.schema.base import CommandConfig
from lmtool.resolver.schema.run import RunConfig
from lmtool.resolver.schema.verbs import COMMANDS, VERBS
from lmtool.resolver.shorthands import CommandLine, Data, sections_in_full


def configuration(line: CommandLine, running: bool) -> CommandConfig:
    """The decoded configuration of a complete command line. running: whether the command runs on this machine, rather
    than only being planned. Raises ConfigError with all errors."""
    offers = offers_of(line)
    if trunks.branch_of(line.words) is not None:
        return trunks.configuration(line, offers, running)
    data, found = _composed(line, offers) if line.saved is None else _saved(line, offers)
    return decoded(line.verb, sections_in_full(data, line), earlier=found, running=running)


def offers_of(line: CommandLine) -> Offers:
    """The groups, options and keys that the command accepts."""
    command, primary = COMMANDS[line.verb], VERBS[line.verb].primary
    assert primary is not None
    offers = compose.offers_of_primary(primary, line.config_dirs)
    return replace(
        offers,
        takes=partial(problems.takes, command),
        verbatim=command.verbatim,
        alternatives=command.alternatives,
    )


def _composed(line: CommandLine, offers: Offers) -> tuple[Data, list[Problem]]:
    """The data that Hydra composes, and the problems of the overrides."""
    typed = overrides.read(line.words, offers)
    return compose.compose(str(VERBS[line.verb].primary), typed, line.config_dirs), typed.problems


def _saved(line: CommandLine, offers: Offers) -> tuple[Data, list[Problem]]:
    """A saved configuration updated with the overrides, and the problems of the overrides."""
    path = line.saved
    assert path is not None
    data = saved.read(path)
    command = str(data.get("command", line.verb))
    if command != line.verb:
        hint = plugins.command_line(command, "--config", str(path))
        raise UserError(f"{path} was saved by lmtool {command}, not by lmtool {line.verb}", hint)
    values, found = overrides.as_values(line.words, offers)
    return merge(saved.body(data), values), found


def decoded_job(line: CommandLine, data: Data, problems: Sequence[Problem], running: bool) -> CommandConfig:
    """The decoded configuration of one job of a sweep."""
    config = decoded(line.verb, sections_in_full(data, line), earlier=problems, running=running)
    if isinstance(config, RunConfig) and (config.devices or 1) > 1:
        raise UserError(f"devices={config.devices} with -m: a job of a sweep runs in one process", "omit devices=")
    return config
