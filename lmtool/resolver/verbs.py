"""The table of commands: their purpose, their configuration and their function.

Imports the standard library only: classes and modules are named here, and imported when their command is typed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lmtool.config.base import CommandConfig
    from lmtool.resolver.commands import RunKeys


Reads = Literal["configuration", "run", "words", "options", "saved run"]


@dataclass(frozen=True)
class Verb:
    """A command: its name, its purpose, and one example.

    places: the keys of positional arguments, in order. reads: the arguments of its function. "configuration": the
    decoded configuration; "run": the configuration of the training command typed after it, and additional keys;
    "words": the arguments as typed; "options": the same and the folders of --config-dir; "saved run": the arguments,
    from which it finds a run and its configuration. config, file and module: the class of its configuration in
    lmtool.resolver.commands, its primary file, and its module (or `module:function`), if their names differ from the
    command's. keys: the class of the additional keys of a command about a run. action: its verb in messages. trains:
    whether it is a training command. sweeps: whether -m is accepted. notes: lines of its help.
    """

    name: str
    about: str
    example: str
    places: tuple[str, ...] = ()
    reads: Reads = "configuration"
    config: str = ""
    keys: str | None = None
    action: str = "looks into"
    file: str | None = None
    module: str | None = None
    trains: bool = False
    sweeps: bool = False
    notes: tuple[str, ...] = ()

    @property
    def primary(self) -> str | None:
        """The primary file of its configuration in conf/."""
        return self.file or self.name.replace(" ", "_") if self.reads == "configuration" else None

    @property
    def function(self) -> str:
        """`module:function` of its implementation."""
        called = {"configuration": "run", "run": "run", "saved run": "read"}.get(self.reads, "main")
        module = self.module or "lmtool.commands." + self.name.replace(" ", "_")
        return module if ":" in module else f"{module}:{called}"


_TABLE = (
    Verb("demo", "pretrain, finetune and compare on text that every machine has", "lmtool demo"),
    Verb("course", "a curriculum in commands, and its page", "lmtool course topics=[tokenizers,masks]"),
    Verb("pretrain", "learn a language from text", "lmtool pretrain model=bert_tiny", trains=True, sweeps=True),
    Verb("finetune", "learn a task from labeled text", "lmtool finetune task=pydocs checkpoint=runs/NAME", trains=True,
        sweeps=True),
    Verb("evaluate", "score a checkpoint", "lmtool evaluate runs/NAME", ("checkpoint", "against"),
        config="EvaluateRunsConfig", sweeps=True),
    Verb("predict", "label texts, fill masks", 'lmtool predict runs/NAME text="..."', ("checkpoint", "text")),
    Verb("generate", "write text", 'lmtool generate runs/NAME prompt="..."', ("checkpoint", "prompt")),
    Verb("embed", "texts as vectors", "lmtool embed runs/NAME input=FILE output=vectors.npy", ("checkpoint",)),
    Verb("probe", "what every layer encodes", "lmtool probe runs/NAME target=next", ("checkpoint",)),
    Verb("tokenizer", "train a vocabulary", "lmtool tokenizer output=vocabulary", config="TokenizerCommandConfig",
        file="train_tokenizer"),
    Verb("export", "write a folder for transformers", "lmtool export runs/NAME output=exported",
        ("checkpoint", "output")),
    Verb("import", "convert published weights, or change the vocabulary",
        "lmtool import hf://org/name output=imported", ("checkpoint",), module="lmtool.commands.importing"),
    Verb("check", "read a data set before training", "lmtool check task=mydata.csv"),
    Verb("doctor", "what this machine can do, and what is missing", "lmtool doctor"),
    Verb("fetch", "download what a run will need", "lmtool fetch finetune task=sst2 checkpoint=hf://org/name",
        reads="run", action="fetches for"),
    Verb("plan", "sizes, steps and time before a run", "lmtool plan pretrain model=bert", reads="run", keys="PlanKeys",
        action="plans"),
    Verb("inspect", "what the model is fed, and its statistics", "lmtool inspect pretrain model=bert_tiny n=3",
        reads="run", keys="InspectKeys",
        notes=(
            "n=3: examples to print; tokens=200000: tokens to measure; brief=true: print only deviations",
            "output=FILE: write the examples as JSON lines; output=FILE.html: write everything as a page",
        )),
    Verb("inspect tokenizer", "one text as each vocabulary splits it", 'lmtool inspect tokenizer text="unhappiness"',
        ("text",), module="lmtool.commands.inspections:tokenizer"),
    Verb("inspect attention", "what each head attends to", 'lmtool inspect attention checkpoint=runs/NAME text="..."',
        ("checkpoint", "text"), module="lmtool.commands.inspections:attention"),
    Verb("inspect positions", "how positions change attention", "lmtool inspect positions kinds=[rotary,t5]",
        module="lmtool.commands.inspections:positions"),
    Verb("inspect word", "one word in several sentences",
        'lmtool inspect word word=bank text="... | ..." checkpoint=runs/NAME', ("checkpoint",),
        module="lmtool.commands.inspections:word"),
    Verb("profile", "where a step's time goes", "lmtool profile pretrain model=bert_tiny steps=5", reads="run",
        keys="ProfileKeys", action="runs a few steps of",
        notes=("steps=5: steps to profile, after 2 of warm-up; output=FOLDER: write the trace and the table",)),
    Verb("profile generate", "where the time of a generated token goes",
        'lmtool profile generate checkpoint=runs/NAME prompt="..." max_new_tokens=32', ("checkpoint", "prompt"),
        config="GenerateConfig", file="generate", module="lmtool.commands.profile:generation",
        notes=("input=FILE: profiles the first batch of its prompts; output=FOLDER: write the trace and the table",)),
    Verb("resume", "resume a stopped run", "lmtool resume runs/NAME", reads="saved run"),
    Verb("report", "rewrite the report of a run or sweep, or compare runs", "lmtool report runs/NAME", reads="words"),
    Verb("runs", "all runs: start, model, score, state, size", "lmtool runs", reads="words"),
    Verb("runs prune", "free the space of optimizer states that no finished run needs", "lmtool runs prune runs",
        ("folder",), config="PruneConfig", module="lmtool.commands.runs:prune"),
    Verb("list", "what there is to choose from", "lmtool list model", reads="options",
        module="lmtool.commands.show:list_options"),
    Verb("show", "explain a key or print a choice", "lmtool show optimizer.lr", reads="options",
        notes=("schema: print the JSON Schema of the YAML, with which editors complete and check it",)),
    Verb("completion", "TAB in bash, zsh or fish", "source <(lmtool completion bash)", reads="words",
        module="lmtool.cli.completion"),
)  # fmt: skip
VERBS = {verb.name: verb for verb in _TABLE}
LOOKS = {
    command: tuple(name.partition(" ")[2] for name in VERBS if name.startswith(f"{command} "))
    for command in ("inspect", "profile")
}
"""Subjects of `lmtool inspect` and `lmtool profile` other than runs."""
TRAINING = tuple(name for name, verb in VERBS.items() if verb.trains)
SWEPT = tuple(name for name, verb in VERBS.items() if verb.sweeps)
"""Commands that accept -m."""
ABOUT_A_RUN = tuple(name for name, verb in VERBS.items() if verb.reads == "run")
"""The commands that describe what a training command would do."""


def _class(name: str) -> type:
    from lmtool.config.registry import imported

    named_class: type = imported(f"lmtool.resolver.commands:{name}")
    return named_class


@cache
def command_classes() -> dict[str, type[CommandConfig]]:
    """Returns the class of the configuration of each command that reads one."""
    return {
        name: _class(verb.config or f"{name.title().replace(' ', '')}Config")
        for name, verb in VERBS.items()
        if verb.reads == "configuration"
    }


def keys_of(verb: str) -> type[RunKeys] | None:
    """Returns the class of the additional keys of a command about a run."""
    name = VERBS[verb].keys
    return None if name is None else _class(name)
