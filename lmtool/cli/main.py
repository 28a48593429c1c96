"""The command line: runs the command that the first word names, reports errors, and determines the exit status.

`lmtool --help` imports only the standard library. A configuration is composed, decoded and checked before torch is
imported; the command's module is imported last.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtool import __version__, errors
from lmtool.cli.help import help_of, overview
from lmtool.config import groups
from lmtool.errors import ConfigError, LmtoolError, UserError, nearest
from lmtool.resolver.verbs import LOOKS, SWEPT, TRAINING, VERBS, Reads, keys_of
from lmtool.system import ranks
from lmtool.system.environment import ENVIRONMENT
from lmtool.system.files import user_path
from lmtool.system.ranks import RankExits, RankInfo, rank_info
from lmtool.system.signals import Interrupts, stop_error
from lmtool.system.terminal import open_closed_streams, say, say_error

if TYPE_CHECKING:
    from lmtool.config.base import CommandConfig
    from lmtool.resolver.shorthands import CommandLine


FLAGS = ("--multirun", "--debug", "--help", "--version", "--config", "--config-dir", "--plugin", "--cfg")

_SHORT = {"-m": "--multirun", "-h": "--help"}
_SWITCHES = ("--multirun", "--debug", "--help", "--version")


@dataclass
class Arguments:
    """A parsed command line. rest: all arguments that are not flags. typed: all arguments. cfg: whether to print the
    configuration (--cfg job)."""

    rest: list[str] = field(default_factory=list)
    typed: list[str] = field(default_factory=list)
    multirun: bool = False
    config: Path | None = None
    config_dirs: list[Path] = field(default_factory=list)
    plugins: list[str] = field(default_factory=list)
    cfg: bool = False
    debug: bool = False
    help: bool = False
    version: bool = False

    def words(self, verb: str) -> list[str]:
        """Returns the arguments of a command line that runs `verb` with the same flags, except --multirun and --cfg."""
        flags = ["--debug"] if self.debug else []
        flags += [] if self.config is None else [f"--config={self.config}"]
        flags += [f"--config-dir={folder}" for folder in self.config_dirs]
        flags += [f"--plugin={plugin}" for plugin in self.plugins]
        return [*flags, verb, *self.rest]


def parse(words: Sequence[str]) -> Arguments:
    """Separates the flags from the other arguments. Raises UserError for an unknown flag."""
    arguments, unread = Arguments(typed=list(words)), list(words)
    while unread:
        word = unread.pop(0)
        flag, equals, value = word.partition("=")
        flag = _SHORT.get(flag, flag)
        if not word.startswith("-") or word == "-":
            arguments.rest.append(word)
        elif flag in _SWITCHES:
            setattr(arguments, flag.removeprefix("--"), True)
        elif flag in ("--config", "--config-dir", "--plugin", "--cfg"):
            if not equals:
                if not unread:
                    raise UserError(f"{flag} needs a value", "lmtool --help prints the flags")
                value = unread.pop(0)
            _set_flag(arguments, flag, value)
        else:
            if not equals and unread and "=" not in unread[0]:
                value = unread[0]
            raise UserError(
                f"unknown flag {flag}; the flags are -m, -h, {', '.join(FLAGS)}",
                _flag_hint(flag, value, next((word for word in words if word in VERBS), "")),
            )
    return arguments


def _set_flag(arguments: Arguments, flag: str, value: str) -> None:
    if flag == "--config" and arguments.config is not None:
        raise UserError("--config is set twice", "use --config once")
    if flag == "--config":
        arguments.config = user_path(value)
    elif flag == "--config-dir":
        arguments.config_dirs.append(user_path(value))
    elif flag == "--plugin":
        arguments.plugins.append(value)
    elif value == "job":
        arguments.cfg = True
    else:
        raise UserError(f"--cfg {value}: the only value is job, which prints the configuration", "use --cfg job")


_COMMANDS = {
    "lmtool pretrain or lmtool finetune": "train fit run",
    "lmtool finetune": "tune sft",
    "lmtool evaluate": "eval test validate score perplexity ppl",
    "lmtool predict": "classify fill-mask fill_mask pipeline",
    "lmtool generate": "chat complete",
    "lmtool predict or lmtool generate": "infer inference",
    "lmtool embed": "encode vectors",
    "lmtool export or lmtool import": "convert",
    "lmtool export": "save save_pretrained",
    "lmtool export RUN output=FOLDER (other libraries quantize that folder)": "quantize gguf onnx",
    "lmtool inspect word word=... text=...": "neighbours neighbors nearest word",
    "lmtool inspect attention, lmtool inspect positions or lmtool inspect word": "visualize visualise show_attention",
    "lmtool plan pretrain model=NAME, or lmtool show model=NAME": "summary model_summary",
    "lmtool pretrain experiment=bert_tiny (nothing is set up before)": "init new setup",
    "lmtool fetch": "download",
    "lmtool check or lmtool tokenizer": "prepare preprocess",
    "lmtool inspect tokenizer text=... (how a text is split), or lmtool tokenizer (trains one)": "tokenize",
    "lmtool inspect attention checkpoint=RUN text=...": "attention",
    "lmtool inspect": "look debug",
    "lmtool show": "config explain",
    "lmtool doctor": "info env",
    "lmtool runs": "ls history",
    "lmtool runs prune": "prune clean delete remove rm",
    "lmtool report RUN (draws its curves), or lmtool report RUN RUN (compares runs)": "compare diff plot curves",
    "lmtool finetune -m task=sst2,cola seed=1,2 (-m runs every combination)": "sweep multirun grid",
    "lmtool finetune task=NAME distill=soft distill.teacher=RUN": "distill",
    "lmtool check FILE (reads a data set), or lmtool pretrain data=FILE": "data dataset",
    "lmtool embed RUN input=FILE output=vectors.npy (products of the vectors are similarities)": "similarity",
    "lmtool pretrain logger=tensorboard (writes what TensorBoard shows)": "tensorboard",
    "lmtool predict RUN, or lmtool.load(RUN) in Python (there is no server)": "serve server deploy api",
    "lmtool export RUN output=FOLDER (nothing is uploaded)": "push upload publish push_to_hub",
    "lmtool --version": "version",
}
"""Commands to type, and the words of other tools for them."""
FLAG_FORMS: dict[str, str] = {
    # Hydra's: hydra.cc/docs/advanced/hydra-command-line-flags
    "-cn": "--config FILE reads a saved configuration; experiment={} chooses a composed one",
    "--config-name": "--config FILE reads a saved configuration; experiment={} chooses a composed one",
    "-cd": "did you mean --config-dir {}?",
    "-cp": "did you mean --config-dir {}? It adds a folder of YAML",
    "--config-path": "did you mean --config-dir {}? It adds a folder of YAML",
    "-c": "did you mean --cfg {}?",
    "--info": "`lmtool doctor` prints what is installed, --cfg job prints a configuration",
    "--resolve": "omit it: --cfg job prints resolved values",
    "-p": "omit it: --cfg job prints the complete configuration",
    "--package": "omit it: --cfg job prints the complete configuration",
    "-r": "omit it: `lmtool pretrain` already runs",
    "--run": "omit it: `lmtool pretrain` already runs",
    "--hydra-help": "lmtool --help",
    # Common flags
    "--plugins": "did you mean --plugin {}?",
    "-v": "lmtool --version; --debug shows tracebacks",
    "--verbose": "--debug shows tracebacks",
    "-o": "did you mean output={}?",
    "--output": "did you mean output={}?",
    "--onnx": "lmtool export RUN output=FOLDER writes a folder for transformers, which optimum converts to ONNX",
    "--latex": "did you mean format=latex?",
    "--csv": "did you mean format=csv?",
}
"""By flag of another tool: what to type here."""


def command_hint(word: str) -> str:
    """Returns the hint for an unknown command."""
    if ours := next((ours for ours, others in _COMMANDS.items() if word.lower() in others.split()), None):
        return f"did you mean {ours}?"
    offered = groups.all_options()
    group = groups.singular(word, offered)
    if group in offered:
        return f"did you mean lmtool list {group}?"
    close = nearest(word, tuple(VERBS))
    return f"did you mean lmtool {close}?" if close else "write a command first; `lmtool --help` lists them"


def _flag_hint(flag: str, value: str, verb: str) -> str:
    """Returns the hint for an unknown flag. value: the typed value, after `=` or as the next argument; "" without one.
    verb: the typed command, such as "pretrain"; "" without one."""
    # Imported here because importing the configuration classes is slow.
    from lmtool.config import messages
    from lmtool.resolver.verbs import command_classes

    if flag in FLAG_FORMS:
        return FLAG_FORMS[flag].replace("{}", value or "NAME")
    key = flag.lstrip("-").replace("-", "_")
    command = command_classes().get(verb, command_classes()["finetune"])
    if key in messages.known_keys(command, {}):
        return f"a key has no dashes: write {key}={value or 'VALUE'}"
    # A command without the key model= reads a checkpoint.
    meaning = messages.meant_by("model_path" if key == "model" else key, value or None, command, {})
    if meaning.of_another_tool:
        return meaning.hint
    close = nearest(flag, FLAGS)
    if close:
        return f"did you mean {close}?"
    return meaning.hint or "`lmtool --help` prints the flags, `lmtool COMMAND --help` the keys"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status. argv: None means the arguments of this process."""
    open_closed_streams()
    os.environ |= ENVIRONMENT | os.environ
    # Figures need no backend, and the one that a notebook sets for its commands may not be installed here.
    os.environ.pop("MPLBACKEND", None)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with Interrupts():
            ranks.join(current_rank())
            with errors.system_errors():
                return _main(words)
    except BrokenPipeError:
        # The reader of the output is gone (`lmtool list | head`): flushing at exit must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.DONE
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"  # of the tokenizers library; not a subclass of Exception
        if not panic and not isinstance(error, Exception | KeyboardInterrupt):
            raise
        return report_error(error, debug="--debug" in words)
    finally:
        if argv is None:
            gc.freeze()  # garbage collection at exit took a quarter of the time of a command that ends with an error


def _main(words: list[str]) -> int:
    arguments = parse(words)
    if arguments.version:
        say(f"lmtool {__version__}")
        return errors.DONE
    if not arguments.rest or arguments.rest == ["help"]:
        say(overview())
        return errors.DONE
    _require_working_folder()
    verb = arguments.rest.pop(0)
    if verb == "help":
        verb, arguments.help = arguments.rest.pop(0), True
    if arguments.rest and f"{verb} {arguments.rest[0]}" in VERBS:
        verb = f"{verb} {arguments.rest.pop(0)}"
    if verb not in VERBS:
        raise UserError(f"unknown command {verb}", command_hint(verb))
    if arguments.help:
        say(help_of(verb, arguments.rest))
        return errors.DONE
    if arguments.config is not None:
        from lmtool.resolver.shorthands import words_of_file

        file_words = words_of_file(arguments.config, arguments.rest)
        if file_words is not None:
            arguments.rest, arguments.config = [*arguments.rest, *file_words], None
    return _BY_INPUT[VERBS[verb].reads](verb, arguments)


def _require_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working folder has been deleted", "run lmtool in another folder") from None


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disables garbage collection during imports, which create hardly any garbage: it took an eighth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _status(result: object) -> int:
    return result if isinstance(result, int) else errors.DONE


def _runner(verb: str) -> Callable[..., Any]:
    from lmtool.config.registry import imported

    with _without_collection():
        runner: Callable[..., Any] = imported(VERBS[verb].function)
    _freeze_modules()
    return runner


@cache
def _freeze_modules() -> None:
    """Excludes modules from garbage collection, once: they are never freed, and checking all of torch's takes 0.2 s."""
    gc.freeze()


def run(verb: str, config: CommandConfig) -> object:
    """Runs a command on its decoded configuration."""
    return _runner(verb)(config)


def configuration(verb: str, arguments: Arguments, *, running: bool) -> CommandConfig:
    """Returns the decoded configuration of a command line, and expands the shorthands in `arguments`. Raises
    ConfigError with all errors."""
    with _without_collection():
        from lmtool.resolver.decoding import configuration as resolve

        return resolve(_expanded_line(verb, arguments), running)


def _expanded_line(verb: str, arguments: Arguments) -> CommandLine:
    from lmtool.config import registry
    from lmtool.resolver.shorthands import CommandLine, expand_arguments

    registry.load_plugins(arguments.plugins)
    line = expand_arguments(CommandLine(verb, tuple(arguments.rest), tuple(arguments.config_dirs), arguments.config))
    arguments.rest = list(line.words)
    return line


def _print_config(verb: str, config: CommandConfig) -> int:
    from lmtool.config import saved

    say(saved.to_yaml(saved.save(config, verb)).removesuffix("\n"))
    return errors.DONE


def _start(verb: str, config: CommandConfig, words: list[str]) -> int:
    from lmtool.resolver.commands import RunConfig
    from lmtool.training.launching import launch, processes_to_start

    devices, device = (config.devices, config.device) if isinstance(config, RunConfig) else (None, "auto")
    processes = processes_to_start(verb, devices, device, isinstance(config, RunConfig))
    if processes > 1:
        return launch(processes, words)
    return _status(run(verb, config))


# One function for each kind of input that a command reads, see `Verb.reads`.


def _run_configured(verb: str, arguments: Arguments) -> int:
    if arguments.multirun:
        return _sweep(verb, arguments)
    config = configuration(verb, arguments, running=not arguments.cfg)
    if arguments.cfg:
        return _print_config(verb, config)
    return _start(verb, config, arguments.words(verb))


def _run_about_run(command: str, arguments: Arguments) -> int:
    if arguments.multirun:
        raise UserError(f"-m: lmtool {command} does not sweep", f"use -m with {', '.join(SWEPT)}")
    command_keys = keys_of(command)
    command_words = [word for word in arguments.rest if command_keys is not None and command_keys.has(word)]
    verb, typed_verb = _training_verb(command, arguments.rest)
    arguments.rest = [word for word in arguments.rest if word not in (*command_words, typed_verb)]
    keys = None if command_keys is None else command_keys.of(command_words)
    config = configuration(verb, arguments, running=command == "profile" and not arguments.cfg)
    if arguments.cfg:
        return _print_config(verb, config)
    return _status(_runner(command)(config, verb, arguments.words(verb) if keys is None else keys))


def _training_verb(command: str, words: Sequence[str]) -> tuple[str, str | None]:
    typed_verb = next((word for word in words if "=" not in word), None)
    if typed_verb in TRAINING:
        return typed_verb, typed_verb
    if typed_verb is not None:
        subjects = LOOKS.get(command, ())
        close = nearest(typed_verb, (*TRAINING, *subjects))
        if not close and command == "inspect" and typed_verb.isidentifier():
            raise UserError(
                f"inspect {typed_verb}: there is no such view",
                f"use lmtool inspect with pretrain or finetune (what the model is fed), {', '.join(subjects)}",
            )
        if close or typed_verb in VERBS:
            hint = f"did you mean lmtool {command} {close}?" if close else f"lmtool {command} pretrain"
            raise UserError(f"{command} {typed_verb}: {VERBS[command].action} pretrain or finetune", hint)
    typed_task = any(word.startswith(("task=", "task.")) for word in words)
    return "finetune" if typed_task else "pretrain", None


def _resume(verb: str, arguments: Arguments) -> int:
    _load_plugins(arguments)
    resumed, config = _runner(verb)(arguments.rest)
    if arguments.cfg:
        return _print_config(resumed, config)
    return _start(resumed, config, [verb, *arguments.rest])


def _run_with_words(verb: str, arguments: Arguments) -> int:
    _load_plugins(arguments)
    return _status(_runner(verb)(arguments.rest))


def _run_with_options(verb: str, arguments: Arguments) -> int:
    from lmtool.config import registry

    registry.load_plugins(arguments.plugins)
    return _status(_runner(verb)(arguments.rest, arguments.config_dirs))


def _load_plugins(arguments: Arguments) -> None:
    if arguments.plugins:
        from lmtool.config import registry

        registry.load_plugins(arguments.plugins)


_BY_INPUT: dict[Reads, Callable[[str, Arguments], int]] = {
    "configuration": _run_configured,
    "run": _run_about_run,
    "saved run": _resume,
    "words": _run_with_words,
    "options": _run_with_options,
}


def _sweep(verb: str, arguments: Arguments) -> int:
    from lmtool.resolver import decoding
    from lmtool.resolver.verbs import command_classes
    from lmtool.runs import branches
    from lmtool.sweeps import jobs, table

    if not VERBS[verb].sweeps:
        raise UserError(f"-m: lmtool {verb} does not sweep", f"use -m with {', '.join(SWEPT)}")
    branches.refuse_in_sweep(arguments.rest)
    if rank_info(os.environ).size > 1:
        raise UserError("-m under torchrun: each of its processes would start all jobs", "use -m without torchrun")
    if arguments.config is not None:
        raise UserError("-m and --config exclude each other", "omit --config and sweep over overrides, or omit -m")
    line = _expanded_line(verb, arguments)
    request = jobs.SweepRequest(
        verb=verb,
        primary=str(VERBS[verb].primary),
        accepted=decoding.accepted_by(line),
        overrides=line.words,
        config_dirs=line.config_dirs,
        decode=partial(decoding.decoded_job, line),
        run=partial(run_job, verb, tuple(arguments.plugins)),
        show=table.show,
        plugins=tuple(arguments.plugins),
        typed=[word for word in arguments.typed if word != verb],
        has_result="run_dir" in command_classes()[verb].model_fields,
    )
    return jobs.run(request, print_config=arguments.cfg)


def run_job(verb: str, plugin_names: tuple[str, ...], data: dict[str, object]) -> object:
    """Runs a job of a sweep, in any process, and returns the result. data: the job's complete configuration, so that
    neither YAML nor the checkpoint that the job starts from is read to decode it."""
    from lmtool.config import registry
    from lmtool.resolver.decoding import decode_config

    registry.load_plugins(plugin_names)
    return run(verb, decode_config(verb, data, running=True, reads_checkpoint=False))


# Errors and exit status.

_BUG_MESSAGE = "this is a bug in lmtool: please report it, with the lines above and what you typed"
_RERUN_HINT = "rerun the command: it continues from its last checkpoint"


def current_rank() -> RankInfo:
    """Returns the rank of this process; rank 0 of 1 if the environment is invalid, which `rank_info` reports later."""
    try:
        return rank_info(os.environ)
    except UserError:
        return RankInfo()


def report_error(error: BaseException, debug: bool) -> int:
    """Reports the error of a command and returns the exit status. In distributed training this runs in every rank:
    equal errors are printed once, and errors caused by the exit of another rank are not printed.

    debug: whether to print the traceback of a user error.
    """
    exits = RankExits.local(current_rank())
    user_error = _user_error(error)
    if user_error is None:
        return _report_bug(error, exits)
    if debug:
        _print_traceback()
    lines = tuple(line for pair in _messages(user_error) for line in pair if line is not None)
    prefix = exits.record_error(user_error.exit_status, lines)
    if prefix is not None:
        with suppress(OSError):  # the terminal may be gone, as after SIGHUP
            for message, hint in _messages(user_error):
                say_error(f"{prefix}{message}", hint)
    return user_error.exit_status


def _user_error(error: BaseException) -> LmtoolError | None:
    if isinstance(error, LmtoolError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return stop_error(error)
    return errors.out_of_memory(error) or errors.out_of_threads(error)


def _messages(error: LmtoolError) -> list[tuple[str, str | None]]:
    problems = error.problems if isinstance(error, ConfigError) else ()
    return [(problem.message, problem.hint) for problem in problems] or [(error.message, error.hint)]


def _report_bug(error: BaseException, exits: RankExits) -> int:
    prefix = exits.record_exception(errors.FAULT, (f"{type(error).__name__}: {error}",))
    if prefix is None:
        return errors.FAULT
    if (message := _connection_error(error, exits)) is not None:
        say_error(message, _RERUN_HINT)
        return errors.FAULT
    _print_traceback()
    say_error(f"{prefix}{_BUG_MESSAGE}")
    return errors.FAULT


def _connection_error(error: BaseException, exits: RankExits) -> str | None:
    if exits.process.size == 1 or not isinstance(error, RuntimeError):
        return None
    if "timed out" in str(error).lower():
        from lmtool.training.group import TIMEOUT

        ranks_at_fault = " and ".join(f"rank {rank}" for rank in exits.running_ranks()) or "a rank on another machine"
        return f"{ranks_at_fault} did not answer for {TIMEOUT.total_seconds():g} seconds: it hangs, or is far behind"
    if "onnection" in str(error):
        return f"rank {exits.process.rank}: the connection to another rank was lost: {str(error).splitlines()[0]}"
    return None


def _print_traceback() -> None:
    import traceback

    say(traceback.format_exc().rstrip(), sys.stderr)
