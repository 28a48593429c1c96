"""The table of commands: their purpose, their configuration, their function, and their help.

Imports the standard library only: classes and modules are named here, and imported when their command is typed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lmtool.config.base import CommandConfig
    from lmtool.resolver.commands import RunKeys


Reads = Literal["configuration", "run", "words", "options", "saved run"]


@dataclass(frozen=True)
class Verb:
    """A command: its name, its purpose, and one example.

    config: the class of its configuration in lmtool.resolver.commands. reads: the arguments of its function.
    "configuration": the decoded configuration; "run": the configuration of the training command typed after it, and
    additional keys; "words": the arguments as typed; "options": the same and the folders of --config-dir; "saved run":
    the arguments, from which it finds a run and its configuration. places: the keys of positional arguments, in order.
    keys: the class of the additional keys of a command about a run. action: its verb in messages. file and module:
    the primary file and the module (or `module:function`), if their names differ from the command's. trains: whether it
    is a training command. sweeps: whether -m is accepted. notes: lines of its help.
    """

    name: str
    about: str
    example: str
    config: str | None = None
    places: tuple[str, ...] = ()
    reads: Reads = "configuration"
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
        return None if self.config is None else self.file or self.name.replace(" ", "_")

    @property
    def function(self) -> str:
        """`module:function` of its implementation."""
        called = {"configuration": "run", "run": "run", "saved run": "read"}.get(self.reads, "main")
        module = self.module or "lmtool.commands." + self.name.replace(" ", "_")
        return module if ":" in module else f"{module}:{called}"


_TABLE = (
    Verb("demo", "pretrain, finetune and compare on text that every machine has", "lmtool demo", "DemoConfig"),
    Verb(
        "course", "a curriculum in commands, and its page", "lmtool course topics=[tokenizers,masks]", "CourseConfig"
    ),
    Verb(
        "pretrain", "learn a language from text", "lmtool pretrain model=bert_tiny", "PretrainConfig",
        trains=True, sweeps=True,
    ),
    Verb(
        "finetune", "learn a task from labeled text", "lmtool finetune task=pydocs checkpoint=runs/NAME",
        "FinetuneConfig", trains=True, sweeps=True,
    ),
    Verb(
        "evaluate", "score a checkpoint", "lmtool evaluate runs/NAME", "EvaluateRunsConfig",
        ("checkpoint", "against"), sweeps=True,
    ),
    Verb(
        "predict", "label texts, fill masks", 'lmtool predict runs/NAME text="..."', "PredictConfig",
        ("checkpoint", "text"),
    ),
    Verb(
        "generate", "write text", 'lmtool generate runs/NAME prompt="..."', "GenerateConfig",
        ("checkpoint", "prompt"),
    ),
    Verb(
        "embed", "texts as vectors", "lmtool embed runs/NAME input=FILE output=vectors.npy", "EmbedConfig",
        ("checkpoint",),
    ),
    Verb(
        "probe", "what every layer encodes", "lmtool probe runs/NAME target=next", "ProbeConfig", ("checkpoint",)
    ),
    Verb(
        "tokenizer", "train a vocabulary", "lmtool tokenizer output=vocabulary", "TokenizerCommandConfig",
        file="train_tokenizer",
    ),
    Verb(
        "export", "write a folder for transformers", "lmtool export runs/NAME output=exported", "ExportConfig",
        ("checkpoint", "output"),
    ),
    Verb(
        "import", "convert published weights, or change the vocabulary", "lmtool import hf://org/name output=imported",
        "ImportConfig", ("checkpoint",), module="lmtool.commands.importing",
    ),
    Verb("check", "read a data set before training", "lmtool check task=mydata.csv", "CheckConfig"),
    Verb("doctor", "what this machine can do, and what is missing", "lmtool doctor", "DoctorConfig"),
    Verb(
        "fetch", "download what a run will need", "lmtool fetch finetune task=sst2 checkpoint=hf://org/name",
        reads="run", action="fetches for",
    ),
    Verb(
        "plan", "sizes, steps and time before a run", "lmtool plan pretrain model=bert",
        reads="run", keys="PlanKeys", action="plans",
    ),
    Verb(
        "inspect", "what the model is fed, and its statistics", "lmtool inspect pretrain model=bert_tiny n=3",
        reads="run", keys="InspectKeys",
        notes=(
            "n=3: examples to print; tokens=200000: tokens to measure; brief=true: print only deviations",
            "output=FILE: write the examples as JSON lines; output=FILE.html: write everything as a page",
        ),
    ),
    Verb(
        "inspect tokenizer", "one text as each vocabulary splits it", 'lmtool inspect tokenizer text="unhappiness"',
        "InspectTokenizerConfig", ("text",),
        module="lmtool.commands.inspections:tokenizer",
    ),
    Verb(
        "inspect attention", "what each head attends to",
        'lmtool inspect attention checkpoint=runs/NAME text="..."', "InspectAttentionConfig",
        ("checkpoint", "text"),
        module="lmtool.commands.inspections:attention",
    ),
    Verb(
        "inspect positions", "how positions change attention", "lmtool inspect positions kinds=[rotary,t5]",
        "InspectPositionsConfig",
        module="lmtool.commands.inspections:positions",
    ),
    Verb(
        "inspect word", "one word in several sentences",
        'lmtool inspect word word=bank text="... | ..." checkpoint=runs/NAME', "InspectWordConfig", ("checkpoint",),
        module="lmtool.commands.inspections:word",
    ),
    Verb(
        "profile", "where a step's time goes", "lmtool profile pretrain model=bert_tiny steps=5",
        reads="run", keys="ProfileKeys", action="runs a few steps of",
        notes=("steps=5: steps to profile, after 2 of warm-up; output=FOLDER: write the trace and the table",),
    ),
    Verb(
        "profile generate", "where the time of a generated token goes",
        'lmtool profile generate checkpoint=runs/NAME prompt="..." max_new_tokens=32', "GenerateConfig",
        ("checkpoint", "prompt"), file="generate", module="lmtool.commands.profile:generation",
        notes=("input=FILE: profiles the first batch of its prompts; output=FOLDER: write the trace and the table",),
    ),
    Verb("resume", "resume a stopped run", "lmtool resume runs/NAME", reads="saved run"),
    Verb(
        "report", "rewrite the report of a run or sweep, or compare runs", "lmtool report runs/NAME", reads="words"
    ),
    Verb("runs", "all runs: start, model, score, state, size", "lmtool runs", reads="words"),
    Verb(
        "runs prune", "free the space of optimizer states that no finished run needs", "lmtool runs prune runs",
        "PruneConfig", ("folder",), module="lmtool.commands.runs:prune",
    ),
    Verb(
        "list", "what there is to choose from", "lmtool list model", reads="options",
        module="lmtool.commands.show:list_options",
    ),
    Verb(
        "show", "explain a key or print a choice", "lmtool show optimizer.lr", reads="options",
        notes=("schema: print the JSON Schema of the YAML, with which editors complete and check it",),
    ),
    Verb(
        "completion", "TAB in bash, zsh or fish", "source <(lmtool completion bash)",
        reads="words", module="lmtool.cli.completion",
    ),
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


class _Classes(Mapping[str, type["CommandConfig"]]):
    """The configuration class of each command, imported on access."""

    def __getitem__(self, verb: str) -> type[CommandConfig]:
        location = VERBS[verb].config
        if location is None:
            raise KeyError(verb)
        command: type[CommandConfig] = _class(location)
        return command

    def __iter__(self) -> Iterator[str]:
        return (name for name, verb in VERBS.items() if verb.config is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _class(location: str) -> type:
    from lmtool.config.registry import imported

    named_class: type = imported(f"lmtool.resolver.commands:{location}")
    return named_class


COMMANDS: Mapping[str, type[CommandConfig]] = _Classes()
"""The commands that read a configuration, and its class."""


def keys_of(verb: str) -> type[RunKeys] | None:
    """Returns the class of the additional keys of a command about a run."""
    location = VERBS[verb].keys
    return None if location is None else _class(location)


PARTS = {
    "new here": ("demo", "course"),
    "train": ("pretrain", "finetune", "resume"),
    "use a run": ("evaluate", "predict", "generate", "embed", "probe", "export"),
    "before a run": (
        "check", "tokenizer", "import", "fetch", "plan", "profile", "profile generate", "inspect", "inspect tokenizer",
        "inspect attention", "inspect positions", "inspect word",
    ),
    "results, choices and help": ("report", "runs", "runs prune", "list", "show", "doctor", "completion"),
}  # fmt: skip
"""The commands as `lmtool --help` groups them."""


FLAGS = """flags, anywhere after the command:
  -m, --multirun       run every combination of the values that commas separate: -m task=sst2,cola seed=1,2
  --config FILE        a saved configuration (runs/NAME/config.yaml) instead of a composed one
  --config-dir FOLDER  further YAML, structured like conf/
  --plugin MODULE      a Python module that adds components
  --cfg job            print the configuration and stop
  --debug              show tracebacks
  --version            print lmtool's version
  --help               print this"""


def overview() -> str:
    """Returns the text that `lmtool` alone prints."""
    width = max(map(len, VERBS))
    lines = [
        "lmtool: pretrain and finetune language models from composed YAML",
        "",
        "lmtool COMMAND [KEY=VALUE ...]",
        "",
    ]
    for part, names in PARTS.items():
        lines.append(f"{part}:")
        for name in names:
            lines += [f"  {name:<{width}} {VERBS[name].about}", f"  {'':<{width}}   {VERBS[name].example}"]
        lines.append("")
    lines.pop()
    return "\n".join([*lines, "", "`lmtool COMMAND --help` prints its keys.", "", FLAGS])


def help_of(verb: str, words: Sequence[str] = ()) -> str:
    """Returns the text that `lmtool VERB --help` prints: a command's primary file is its manual."""
    about = VERBS[verb]
    primary = about.primary
    if about.reads == "run":
        primary = words[0] if words and words[0] in TRAINING else "pretrain"
    lines = [f"lmtool {verb}: {about.about}", "", f"  {about.example}", ""]
    lines += [*(f"  {note}" for note in about.notes), ""] if about.notes else []
    if primary is not None:
        from lmtool.config.groups import conf_dir, options

        lines += ["keys and groups, with their defaults (`lmtool show KEY` explains one):", ""]
        text = (conf_dir() / f"{primary}.yaml").read_text(encoding="utf-8").splitlines()
        groups = [line.split("- ", 1)[1].split(":")[0] for line in text if line.startswith("  - ") and ": " in line]
        lines += [
            f"  {line}"
            for line in text
            if not line.startswith("# ") and "_self_" not in line and "optional" not in line
        ]
        offered = {group: options(group) for group in groups}
        lines += ["", *(f"  {group}: {', '.join(names)}" for group, names in offered.items() if names), ""]
    return "\n".join([*lines, FLAGS])
