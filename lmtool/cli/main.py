"""The command line: a thin dispatcher.

`lmtool --help` imports the standard library only. A configuration is composed and decoded, and its errors are reported,
before torch is imported; the command's module is imported last.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from lmtool import __version__, errors
from lmtool.cli import exit_status, suggestions
from lmtool.cli.arguments import Arguments, parse
from lmtool.errors import UserError
from lmtool.resolver.schema.verbs import LOOKS, SWEPT, TRAINING, VERBS, Reads, help_of, keys_of, overview
from lmtool.system import ranks
from lmtool.system.environment import ENVIRONMENT
from lmtool.system.signals import Interrupts
from lmtool.system.terminal import say

if TYPE_CHECKING:
    from lmtool.resolver.schema.base import CommandConfig
    from lmtool.resolver.shorthands import CommandLine


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    os.environ |= ENVIRONMENT | os.environ
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with Interrupts():
            ranks.join(exit_status.current_rank())
            with errors.system_errors():
                return _main(words)
    except BrokenPipeError:
        # The reader of our output has gone (`lmtool list | head`): nothing is left to say, nor to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.DONE
    except (Exception, KeyboardInterrupt) as error:
        return exit_status.failed(error, debug="--debug" in words)
    finally:
        if argv is None:
            gc.freeze()  # the process ends: its last collection, of all modules, took a quarter of a refusal's time


def _main(words: list[str]) -> int:
    arguments = parse(words)
    if arguments.version:
        say(f"lmtool {__version__}")
        return errors.DONE
    if not arguments.rest or arguments.rest == ["help"]:
        say(overview())
        return errors.DONE
    verb = arguments.rest.pop(0)
    if verb == "help":
        verb, arguments.help = arguments.rest.pop(0), True
    if arguments.rest and f"{verb} {arguments.rest[0]}" in VERBS:
        verb = f"{verb} {arguments.rest.pop(0)}"
    if verb not in VERBS:
        raise UserError(
            f"unknown command {verb}; there are {', '.join(VERBS)}", suggestions.command(verb, tuple(VERBS))
        )
    if arguments.help:
        say(help_of(verb, arguments.rest))
        return errors.DONE
    return _BY_INPUT[VERBS[verb].reads](verb, arguments)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Modules and configurations are made here, hardly any garbage: looking for it took an eighth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _status(result: object) -> int:
    """An exit status is passed on; a result, or nothing, is done."""
    return result if isinstance(result, int) else errors.DONE


def _runner(verb: str) -> Callable[..., Any]:
    """The function that a command runs; its module is imported only now."""
    from lmtool.config.tables import imported

    with _without_collection():
        runner: Callable[..., Any] = imported(VERBS[verb].function)
    if not gc.get_freeze_count():
        gc.freeze()  # modules stay: a collection that looks at all of torch's takes 0.2 s
    return runner


def run(verb: str, config: CommandConfig) -> Any:
    """Run a command on its decoded configuration."""
    return _runner(verb)(config)


def configuration(verb: str, arguments: Arguments, *, running: bool) -> Any:
    """The decoded configuration of a command line, whose words stand in full in the arguments afterwards. Raises
    ConfigError with every error in it."""
    with _without_collection():
        from lmtool.resolver.configuration import configuration as resolve

        return resolve(_line(verb, arguments), running)


def _line(verb: str, arguments: Arguments) -> CommandLine:
    """The line with its shorthands in full."""
    from lmtool.config import plugins
    from lmtool.resolver.shorthands import CommandLine, in_full

    plugins.load(arguments.plugins)
    line = in_full(CommandLine(verb, tuple(arguments.rest), tuple(arguments.config_dirs), arguments.config))
    arguments.rest = list(line.words)
    return line


def _print(verb: str, config: CommandConfig) -> int:
    from lmtool.config import saved

    say(saved.to_yaml(saved.save(config, verb)).removesuffix("\n"))
    return errors.DONE


def _start(verb: str, config: CommandConfig, words: list[str]) -> int:
    """Run a command: here, or in as many processes as it asks for. words: the command line that it stands for."""
    from lmtool.training import launching

    processes = launching.processes_to_start(config, verb)
    if processes > 1:
        return launching.launch(processes, words)
    return _status(run(verb, config))


# --- by what a command reads ---------------------------------------------------------------------------------------


def _configured(verb: str, arguments: Arguments) -> int:
    if arguments.multirun:
        return _sweep(verb, arguments)
    config = configuration(verb, arguments, running=not arguments.cfg)
    if arguments.cfg:
        return _print(verb, config)
    return _start(verb, config, arguments.words(verb))


def _about_a_run(command: str, arguments: Arguments) -> int:
    """What a training command would read or do. Keys of its own may stand among those of the run."""
    if arguments.multirun:
        raise UserError(f"-m: lmtool {command} does not sweep", f"-m goes with {', '.join(SWEPT)}")
    own_keys = keys_of(command)
    own = [word for word in arguments.rest if own_keys is not None and own_keys.has(word)]
    verb, first = _training_verb(command, arguments.rest)
    arguments.rest = [word for word in arguments.rest if word not in (*own, first)]
    keys = None if own_keys is None else own_keys.of(own)
    config = configuration(verb, arguments, running=command == "profile" and not arguments.cfg)
    if arguments.cfg:
        return _print(verb, config)
    return _status(_runner(command)(config, verb, arguments.words(verb) if keys is None else keys))


def _training_verb(command: str, words: Sequence[str]) -> tuple[str, str | None]:
    """The training command that the words are of, and the word that names it, if one does."""
    from lmtool.config.nearest import nearest

    first = next((word for word in words if "=" not in word), None)
    if first in TRAINING:
        return first, first
    if first is not None:  # else a word without a key, which is judged with the others
        close = nearest(first, (*TRAINING, *(LOOKS if command == "inspect" else ())))
        if close or first in VERBS:
            hint = f"did you mean lmtool {command} {close}?" if close else f"lmtool {command} pretrain"
            raise UserError(f"{command} {first}: {VERBS[command].action} pretrain or finetune", hint)
    typed_task = any(word.startswith(("task=", "task.")) for word in words)
    return "finetune" if typed_task else "pretrain", None


def _resumed(verb: str, arguments: Arguments) -> int:
    _load_plugins(arguments)
    resumed, config = _runner(verb)(arguments.rest)
    if arguments.cfg:
        return _print(resumed, config)
    return _start(resumed, config, [verb, *arguments.rest])


def _with_words(verb: str, arguments: Arguments) -> int:
    _load_plugins(arguments)
    return _status(_runner(verb)(arguments.rest))


def _with_options(verb: str, arguments: Arguments) -> int:
    from lmtool.config import plugins

    plugins.load(arguments.plugins)
    return _status(_runner(verb)(arguments.rest, arguments.config_dirs))


def _load_plugins(arguments: Arguments) -> None:
    if arguments.plugins:
        from lmtool.config import plugins

        plugins.load(arguments.plugins)


_BY_INPUT: dict[Reads, Callable[[str, Arguments], int]] = {
    "configuration": _configured,
    "run": _about_a_run,
    "saved run": _resumed,
    "words": _with_words,
    "options": _with_options,
}


# --- sweeps --------------------------------------------------------------------------------------------------------


def _sweep(verb: str, arguments: Arguments) -> int:
    from lmtool.resolver import configuration as resolver
    from lmtool.resolver import trunks
    from lmtool.resolver.schema.verbs import COMMANDS
    from lmtool.sweeps import jobs, table

    if not VERBS[verb].sweeps:
        raise UserError(f"-m: lmtool {verb} does not sweep", f"-m goes with {', '.join(SWEPT)}")
    trunks.refuse_in_sweep(arguments.rest)
    if ranks.rank_info(os.environ).size > 1:
        raise UserError("-m under torchrun: its processes would each start all jobs", "start -m without torchrun")
    if arguments.config is not None:
        raise UserError("-m and --config together", "sweep over overrides, or run the saved configuration by itself")
    line = _line(verb, arguments)
    request = jobs.SweepRequest(
        verb=verb,
        primary=str(VERBS[verb].primary),
        offers=resolver.offers_of(line),
        overrides=line.words,
        config_dirs=line.config_dirs,
        decode=partial(resolver.decoded_job, line),
        run=partial(run_job, verb, tuple(arguments.plugins)),
        show=table.show,
        plugins=tuple(arguments.plugins),
        typed=[word for word in arguments.typed if word != verb],
        has_result="run_dir" in COMMANDS[verb].model_fields,
    )
    return jobs.run(request, print_config=arguments.cfg)


def run_job(verb: str, plugin_names: tuple[str, ...], data: dict[str, Any]) -> Any:
    """One job of a sweep, in whatever process its launcher has put it: decode, run, give back the result. data: a
    complete configuration, which needs nothing of the checkpoint it starts from, nor any YAML."""
    from lmtool.config import plugins
    from lmtool.resolver.decoding import decoded

    plugins.load(plugin_names)
    return run(verb, decoded(verb, data, running=True, reads_checkpoint=False))
