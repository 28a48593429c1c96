"""What the command line says of itself: the commands, their examples and keys. Imports the standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """A command: what it does, one example, the primary file of its configuration (none: plain arguments), the keys
    that words without = stand for, in their order, and its module in lmtool.commands where that has another name than
    the primary file."""

    about: str
    example: str
    primary: str | None = None
    places: tuple[str, ...] = ()
    implemented_in: str | None = None

    @property
    def module(self) -> str | None:
        """The module of lmtool.commands whose `run` takes the decoded configuration."""
        return self.implemented_in or self.primary


VERBS: dict[str, Verb] = {
    "pretrain": Verb("learn a language from text", "lmtool pretrain model=bert_tiny", "pretrain"),
    "finetune": Verb("learn a task from labelled text", "lmtool finetune task=pydocs checkpoint=runs/NAME", "finetune"),
    "evaluate": Verb("score a checkpoint", "lmtool evaluate runs/NAME", "evaluate", ("checkpoint", "against")),
    "predict": Verb(
        "label texts, fill masks", 'lmtool predict runs/NAME text="..."', "predict", ("checkpoint", "text")
    ),
    "generate": Verb("write text", 'lmtool generate runs/NAME prompt="..."', "generate", ("checkpoint", "prompt")),
    "embed": Verb("texts as vectors", "lmtool embed runs/NAME input=FILE output=vectors.npy", "embed", ("checkpoint",)),
    "probe": Verb("what every layer holds", "lmtool probe runs/NAME target=next", "probe", ("checkpoint",)),
    "tokenizer": Verb("train a vocabulary", "lmtool tokenizer output=vocabulary", "train_tokenizer", (), "tokenizer"),
    "export": Verb(
        "write a folder for transformers", "lmtool export runs/NAME output=exported", "export", ("checkpoint",)
    ),
    "import": Verb(
        "take published weights, or another vocabulary",
        "lmtool import hf://org/name output=imported",
        "import",
        ("checkpoint",),
        "importing",
    ),
    "check": Verb("read a data set before training", "lmtool check task=mydata.csv", "check"),
    "doctor": Verb("what this machine can do, and what is missing", "lmtool doctor", "doctor"),
    "fetch": Verb("download what a run will need", "lmtool fetch finetune task=sst2 checkpoint=hf://org/name"),
    "plan": Verb("sizes, steps and time, before spending them", "lmtool plan pretrain model=bert"),
    "inspect": Verb("what the model is fed, and its statistics", "lmtool inspect pretrain model=bert_tiny n=3"),
    "inspect tokenizer": Verb(
        "one text as each vocabulary cuts it", 'lmtool inspect tokenizer text="unhappiness"', "inspect_tokenizer"
    ),
    "inspect attention": Verb(
        "what each head looks at",
        'lmtool inspect attention checkpoint=runs/NAME text="..."',
        "inspect_attention",
        ("checkpoint", "text"),
    ),
    "inspect positions": Verb(
        "what positions do to attention", "lmtool inspect positions kinds=[rotary,t5]", "inspect_positions"
    ),
    "inspect word": Verb(
        "one word in several sentences",
        'lmtool inspect word word=bank text="... | ..." checkpoint=runs/NAME',
        "inspect_word",
    ),
    "profile": Verb("where a step's time goes", "lmtool profile pretrain model=bert_tiny steps=5"),
    "resume": Verb("resume a stopped run", "lmtool resume runs/NAME"),
    "report": Verb("the report of a run or a sweep again, runs side by side", "lmtool report runs/NAME"),
    "runs": Verb("all runs: when, what, score, state, size", "lmtool runs"),
    "list": Verb("what there is to choose from", "lmtool list model"),
    "show": Verb("explain a key or print a choice", "lmtool show optimizer.lr"),
    "completion": Verb("TAB in bash, zsh or fish", "source <(lmtool completion bash)"),
}
LOOKS = tuple(name.partition(" ")[2] for name in VERBS if " " in name)
"""What `lmtool inspect` looks at beside runs."""
SWEEPABLE = ("pretrain", "finetune")
OF_A_RUN = ("fetch", "plan", "inspect", "profile")
"""The commands about what another one would do."""
SWEPT = (*SWEEPABLE, "evaluate")
"""Commands that -m runs many times."""

FLAGS = """flags, anywhere after the command:
  -m, --multirun       run every combination of the values that commas separate: -m task=sst2,cola seed=1,2
  --config FILE        a saved configuration (runs/NAME/config.yaml) instead of a composed one
  --config-dir FOLDER  further YAML, laid out like conf/
  --plugin MODULE      a Python module that adds components
  --cfg job            print the configuration and stop
  --debug              show tracebacks
  --version            print lmtool's version
  --help               print this"""


def overview() -> str:
    """What `lmtool` alone prints."""
    width = max(map(len, VERBS))
    lines = [
        "lmtool: pretrain and finetune language models from composed YAML",
        "",
        "lmtool COMMAND [KEY=VALUE ...]",
        "",
    ]
    for name, verb in VERBS.items():
        lines += [f"  {name:<{width}} {verb.about}", f"  {'':<{width}}   {verb.example}"]
    return "\n".join([*lines, "", "`lmtool COMMAND --help` prints its keys.", "", FLAGS])


def help_of(verb: str, rest: Sequence[str] = ()) -> str:
    """What `lmtool VERB --help` prints: the primary file of a command is its manual."""
    about = VERBS[verb]
    primary = about.primary
    if verb in OF_A_RUN:
        primary = rest[0] if rest and rest[0] in SWEEPABLE else "pretrain"
    lines = [f"lmtool {verb}: {about.about}", "", f"  {about.example}", ""]
    if verb == "inspect":
        lines += [
            "  n=3 examples are printed, tokens=200000 measured; brief=true: what stands out, and nothing else",
            "  output=FILE: the examples as JSON lines; output=FILE.html: a page with all that is printed",
            "",
        ]
    if verb == "profile":
        lines += ["  steps=5 are profiled, after 2 of warm-up; output=FOLDER: the trace and the table", ""]
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
