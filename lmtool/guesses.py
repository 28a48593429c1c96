"""What people type who know other tools, and how lmtool says it. Imports the standard library only."""

from __future__ import annotations

from lmtool.config.nearest import nearest

_COMMANDS = {
    "train": ("pretrain", "finetune"),
    "fit": ("pretrain", "finetune"),
    "run": ("pretrain", "finetune"),
    "tune": ("finetune",),
    "sft": ("finetune",),
    "eval": ("evaluate",),
    "test": ("evaluate",),
    "validate": ("evaluate",),
    "score": ("evaluate",),
    "infer": ("predict", "generate"),
    "inference": ("predict", "generate"),
    "classify": ("predict",),
    "chat": ("generate",),
    "encode": ("embed",),
    "convert": ("export", "import"),
    "save": ("export",),
    "download": ("fetch",),
    "prepare": ("check", "tokenizer"),
    "tokenize": ("tokenizer",),
    "config": ("show",),
    "info": ("doctor",),
    "models": ("list model",),
    "tasks": ("list task",),
    "ls": ("runs",),
    "history": ("runs",),
    "version": ("--version",),
}
_FLAGS = {
    "--info": "lmtool doctor says what is installed, lmtool COMMAND --cfg job prints a configuration",
    "--resolve": "leave it out: what --cfg job prints is resolved",
    "--package": "leave it out: --cfg job prints the whole configuration",
    "--config-name": "--config FILE reads a saved configuration; experiment=NAME chooses a composed one",
    "--config-path": "--config-dir FOLDER adds a folder of YAML",
    "--hydra-help": "lmtool --help, lmtool COMMAND --help",
    "--run": "leave it out: lmtool COMMAND runs",
    "-v": "lmtool --version; --debug shows tracebacks",
    "--verbose": "--debug shows tracebacks",
    "--output-dir": "write run_dir=FOLDER, or name=NAME for runs/NAME",
    "--output_dir": "write run_dir=FOLDER, or name=NAME for runs/NAME",
    "--model-name-or-path": "write checkpoint=FOLDER, or checkpoint=hf://org/name",
    "--model_name_or_path": "write checkpoint=FOLDER, or checkpoint=hf://org/name",
}


def command(word: str, known: tuple[str, ...]) -> str:
    """The hint for a word that is no command."""
    if meant := _COMMANDS.get(word.lower()):
        return f"did you mean {' or '.join(f'lmtool {name}' for name in meant)}?"
    close = nearest(word, known)
    return f"did you mean lmtool {close}?" if close else "a command comes first: lmtool --help"


def flag(word: str, value: str, known: tuple[str, ...]) -> str:
    """The hint for a flag that there is not. value: what follows it, behind `=` or as the next word; empty: nothing."""
    if word in _FLAGS:
        return _FLAGS[word]
    close = nearest(word, known)
    if close:
        return f"did you mean {close}?"
    key = word.lstrip("-").replace("-", "_")
    if not key.replace(".", "").replace("_", "").replace("/", "").isalnum():
        return "lmtool --help prints the flags"
    return f"a key has no dashes: write {key}={value or 'VALUE'}"
