"""The texts of `lmtool --help` and of `lmtool COMMAND --help`. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from lmtool.config.groups import conf_dir, options
from lmtool.resolver.verbs import TRAINING, VERBS

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


_FLAGS = """flags, anywhere after the command:
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
    return "\n".join([*lines, "", "`lmtool COMMAND --help` prints its keys.", "", _FLAGS])


def help_of(verb: str, words: Sequence[str] = ()) -> str:
    """Returns the text that `lmtool VERB --help` prints: a command's primary file is its manual."""
    about = VERBS[verb]
    primary = about.primary
    if about.reads == "run":
        primary = words[0] if words and words[0] in TRAINING else "pretrain"
    lines = [f"lmtool {verb}: {about.about}", "", f"  {about.example}", ""]
    lines += [*(f"  {note}" for note in about.notes), ""] if about.notes else []
    if primary is not None:
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
    return "\n".join([*lines, _FLAGS])
