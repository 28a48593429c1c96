"""The command line: a thin dispatcher.

`lmtool --help` imports the standard library only. A configuration is composed and decoded, and its errors are reported,
before torch is imported; the command's module is imported last.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lmtool import __version__, errors
from lmtool.cli import exit_status, suggestions
from lmtool.cli.arguments import Arguments, keyed, parse
from lmtool.commands.verbs import LOOKS, OF_A_RUN, SWEEPABLE, SWEPT, VERBS, help_of, overview
from lmtool.config.nearest import nearest
from lmtool.errors import Problem, UserError
from lmtool.system import ranks
from lmtool.system.environment import ENVIRONMENT
from lmtool.system.signals import Interrupts
from lmtool.system.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    os.environ |= ENVIRONMENT | os.environ
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with Interrupts():
            ranks.join(exit_status.place())
            with errors.system_errors():
                return _main(words)
    except BrokenPipeError:
        # The reader of our output has gone (`lmtool list | head`): nothing is left to say, nor to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.DONE
    except (Exception, KeyboardInterrupt) as error:
        return exit_status.failed(error, debug="--debug" in words)


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
    if verb == "inspect" and arguments.rest and arguments.rest[0] in LOOKS:
        verb = f"inspect {arguments.rest.pop(0)}"
    if verb not in VERBS:
        raise UserError(
            f"unknown command {verb}; there are {', '.join(VERBS)}", suggestions.command(verb, tuple(VERBS))
        )
    if arguments.help:
        say(help_of(verb, arguments.rest))
        return errors.DONE
    return _dispatch(verb, arguments)


def _dispatch(verb: str, arguments: Arguments) -> int:
    if verb == "completion":
        from lmtool.cli.completion import shells

        return shells.main(arguments.rest)
    if verb == "probe":
        arguments.rest = _tasks_as_targets(arguments.rest)
    if verb == "check":
        from lmtool.resolver.task_file import named

        arguments.rest = named(arguments.rest)
    if verb != "predict" and any(word.startswith("task=") for word in arguments.rest):
        from lmtool.resolver.task_file import spelled_out

        arguments.rest = spelled_out(verb, arguments.rest, arguments.config_dirs)
    if any(word.startswith("data=") for word in arguments.rest):
        from lmtool.resolver import text_file as own_text

        arguments.rest = own_text.spelled_out(arguments.rest, arguments.config_dirs)
    if verb in OF_A_RUN:
        return _of_a_run(verb, arguments)
    if VERBS[verb].primary is not None:
        return _configured(verb, arguments)
    if arguments.plugins or verb in ("list", "show"):
        from lmtool.config import plugins

        plugins.load(arguments.plugins)
    if verb == "list":
        from lmtool.commands import list as command

        return command.main(arguments.rest, arguments.config_dirs)
    if verb == "show":
        from lmtool.commands import show

        return show.main(arguments.rest, arguments.config_dirs)
    if verb == "resume":
        from lmtool.commands import resume

        resumed, config = resume.read(arguments.rest)
        if arguments.cfg:
            return _print(config, resumed)
        return _start(resumed, config, [verb, *arguments.rest])
    if verb == "runs":
        from lmtool.commands import runs

        return runs.main(arguments.rest)
    from lmtool.commands import report

    return _status(report.main(arguments.rest))


def _status(returned: Any) -> int:
    """An exit status is passed on; a result, or nothing, is done."""
    return returned if isinstance(returned, int) else errors.DONE


def _of_a_run(command: str, arguments: Arguments) -> int:
    """fetch, plan, inspect, profile: what another command would read or do. The last three have keys of their own."""
    from lmtool.resolver.schema.inspection import OF_COMMANDS, Looking, PlanKeys, Profiling

    if arguments.multirun:
        raise UserError(f"-m: lmtool {command} does not sweep", f"-m goes with {', '.join(SWEPT)}")
    keys = OF_COMMANDS.get(command)
    own = [word for word in arguments.rest if keys is not None and keys.has(word)]
    first = next((word for word in arguments.rest if "=" not in word), None)
    if first is not None and first not in SWEEPABLE:
        close = nearest(first, (*SWEEPABLE, *(LOOKS if command == "inspect" else ())))
        does = {"fetch": "fetches for", "plan": "plans", "profile": "runs a few steps of"}.get(command, "looks into")
        if close or first in VERBS:
            hint = f"did you mean lmtool {command} {close}?" if close else f"lmtool {command} pretrain"
            raise UserError(f"{command} {first}: {does} pretrain or finetune", hint)
        first = None  # a word without a key, which is judged with the others
    typed_task = any(word.startswith(("task=", "task.")) for word in arguments.rest)
    verb = first or ("finetune" if typed_task else "pretrain")
    arguments.rest = [word for word in arguments.rest if word not in (*own, first)]
    asked = None if keys is None else keys.of(own)
    config = configuration(verb, arguments, running=command == "profile" and not arguments.cfg)
    if arguments.cfg:
        return _print(config, verb)
    from lmtool.commands import fetch, inspect, plan, profile

    if isinstance(asked, Looking):
        return _status(inspect.run(config, verb, asked))
    if isinstance(asked, Profiling):
        return _status(profile.run(config, verb, asked))
    if isinstance(asked, PlanKeys):
        return _status(plan.run(config, verb, asked))
    return _status(fetch.run(config, verb, arguments.words(verb)))


def _configured(verb: str, arguments: Arguments) -> int:
    arguments.rest = keyed(verb, arguments.rest)
    if arguments.multirun:
        return _sweep(verb, arguments)
    config = configuration(verb, arguments, running=not arguments.cfg)
    if arguments.cfg:
        return _print(config, verb)
    return _start(verb, config, arguments.words(verb))


def _start(verb: str, config: Any, words: list[str]) -> int:
    """Run a command: here, or in as many processes as it asks for. words: the command line that it stands for."""
    from lmtool.training import launching

    processes = launching.processes_to_start(config, verb)
    if processes > 1:
        return launching.launch(processes, words)
    return _status(run(verb, config))


def _tasks_as_targets(words: list[str]) -> list[str]:
    """`target=NAME` of a task as the two keys that it stands for."""
    spelled: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        of_task = key == "target" and value not in ("token", "previous", "next", "task")
        spelled += ["target=task", f"task={value}"] if of_task else [word]
    return spelled


def run(verb: str, config: Any) -> Any:
    """Run a command on its decoded configuration; its module is imported only now."""
    from lmtool.config.tables import imported

    return imported(f"lmtool.commands.{VERBS[verb].module}:run")(config)


def configuration(verb: str, arguments: Arguments, *, running: bool) -> Any:
    """The decoded configuration of a command line. Raises ConfigError with every error in it."""
    from lmtool.config import compose, overrides, plugins, problems
    from lmtool.resolver import members, trunks
    from lmtool.resolver.decoding import decoded
    from lmtool.resolver.schema.run import COMMANDS

    plugins.load(arguments.plugins)
    primary = VERBS[verb].primary
    assert primary is not None
    offers = compose.what_is_offered(primary, arguments.config_dirs)
    offers = replace(offers, takes=partial(problems.takes, COMMANDS[verb]))
    forms, words = _forms(verb), members.spelled_out(arguments.rest)
    if trunks.branch_of(words) is not None:
        return trunks.configuration(verb, words, offers, arguments.config_dirs, forms, running, arguments.config)
    if arguments.config is not None:
        data, found = _saved(verb, arguments.config)
        values, more = overrides.as_values(words, offers, **forms)
        from lmtool.config.auto import merge

        data, found = merge(data, values), found + more
    else:
        typed = overrides.read(words, offers, **forms)
        data, found = compose.compose(primary, typed, arguments.config_dirs), typed.problems
    data = members.with_sections(data, arguments.config_dirs)
    return decoded(verb, data, earlier=found, running=running)


def _forms(verb: str) -> dict[str, Any]:
    """What a command's class says of how its keys are typed."""
    from lmtool.resolver.schema.run import COMMANDS

    return {name: getattr(COMMANDS[verb], name) for name in ("verbatim", "alternatives")}


def _saved(verb: str, path: Path) -> tuple[dict[str, Any], list[Problem]]:
    from lmtool.config import plugins, saved

    data = saved.read(path)
    command = data.get("command", verb)
    if command != verb:
        hint = plugins.command_line(str(command), "--config", str(path))
        raise UserError(f"{path}: saved by lmtool {command}", hint)
    return saved.body(data), []


def _print(config: Any, verb: str) -> int:
    from lmtool.config import saved

    say(saved.to_yaml(saved.save(config, verb)).removesuffix("\n"))
    return errors.DONE


def _sweep(verb: str, arguments: Arguments) -> int:
    from lmtool.config import overrides, plugins
    from lmtool.resolver import members, trunks, unpretrained
    from lmtool.resolver.schema.run import COMMANDS
    from lmtool.sweeps import jobs, table

    if verb not in SWEPT:
        raise UserError(f"-m: lmtool {verb} does not sweep", f"-m goes with {', '.join(SWEPT)}")
    trunks.refuse_in_sweep(arguments.rest)
    if ranks.rank_info(os.environ).size > 1:
        raise UserError("-m under torchrun: its processes would each start all jobs", "start -m without torchrun")
    if arguments.config is not None:
        raise UserError("-m and --config together", "sweep over overrides, or run the saved configuration by itself")
    plugins.load(arguments.plugins)
    primary = VERBS[verb].primary
    assert primary is not None
    request = jobs.SweepRequest(
        verb=verb,
        primary=primary,
        overrides=members.spelled_out(arguments.rest),
        config_dirs=arguments.config_dirs,
        decode=partial(_decode_job, verb, tuple(arguments.config_dirs), unpretrained.shape_giver(arguments.rest)),
        read=partial(overrides.read, multirun=True, **_forms(verb)),
        run=partial(run_job, verb, tuple(arguments.plugins)),
        show=table.show,
        plugins=tuple(arguments.plugins),
        typed=[word for word in arguments.typed if word != verb],
        has_result="run_dir" in COMMANDS[verb].model_fields,
    )
    return jobs.run(request, print_config=arguments.cfg)


def _decode_job(
    verb: str,
    config_dirs: Sequence[Path],
    shape: str | None,
    data: dict[str, Any],
    problems: Sequence[Problem],
    running: bool,
) -> Any:
    """shape: the checkpoint whose shape a job with random weights takes."""
    from lmtool.resolver import members, unpretrained
    from lmtool.resolver.decoding import decoded

    data = data if shape is None else unpretrained.with_shape(data, shape)
    config = decoded(verb, members.with_sections(data, config_dirs), earlier=problems, running=running)
    if (devices := getattr(config, "devices", None) or 1) > 1:
        raise UserError(f"devices={devices} with -m: a job of a sweep runs in one process", "leave devices= out")
    return config


def run_job(verb: str, plugin_names: tuple[str, ...], data: dict[str, Any]) -> Any:
    """One job of a sweep, in whatever process its launcher has put it: decode, run, give back the result. data: a
    complete configuration, which needs nothing of the checkpoint it starts from, nor any YAML."""
    from lmtool.config import plugins
    from lmtool.resolver.decoding import decoded

    plugins.load(plugin_names)
    return run(verb, decoded(verb, data, running=True, reads_checkpoint=False))
