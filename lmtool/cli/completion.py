"""`lmtool completion SHELL`: prints a script that completes commands, flags, keys, options, values, runs and files.

The script calls `lmtool completion query SHELL LINE` at each TAB. This call prints nothing after any error, and imports
neither torch nor Hydra.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmtool.cli.completion_keys import CompletionTable, KeyNode, KeyNodes, table
from lmtool.errors import UserError, nearest
from lmtool.resolver.verbs import ABOUT_A_RUN, LOOKS, TRAINING, VERBS
from lmtool.system.files import RUNS, user_path
from lmtool.system.terminal import safe_line, say

FLAGS = ("--multirun", "--config", "--config-dir", "--plugin", "--cfg", "--debug", "--help", "-m", "-h")
_BASH = """\
# lmtool in bash: put this line into ~/.bashrc
#   source <(lmtool completion bash)
_lmtool() {
    local line="${COMP_LINE:0:${COMP_POINT:-0}}"
    [ -n "$line" ] || line="${COMP_WORDS[*]}"
    COMPREPLY=()
    local word
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(lmtool completion query bash "$line" 2>/dev/null)
}
complete -o nospace -F _lmtool lmtool
"""
_ZSH = """\
# lmtool in zsh: put this line into ~/.zshrc, after compinit
#   source <(lmtool completion zsh)
_lmtool() {
    local -a candidates
    candidates=("${(@f)$(lmtool completion query zsh "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    [[ -n "$candidates" ]] && compadd -Q -S '' -- "${candidates[@]}"
}
compdef _lmtool lmtool
"""
_FISH = """\
# lmtool in fish: put this line into ~/.config/fish/config.fish
#   lmtool completion fish | source
complete -c lmtool -f -a '(lmtool completion query fish (commandline -cp | string collect) 2>/dev/null)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_MAX_CANDIDATES = 1000
"""Maximum number of runs, and of files, since a folder may have a million files."""


@dataclass
class Line:
    """A command line up to the cursor.

    words: the complete words after the command. current: the word that is being typed. flag: the flag whose value is
    being typed.
    """

    verb: str | None
    words: list[str]
    current: str
    config_dirs: list[Path] = field(default_factory=list)
    plugins: list[str] = field(default_factory=list)
    flag: str | None = None

    @classmethod
    def parse(cls, text: str) -> Line:
        words = _split(text)
        current = "" if not words or text[-1:].isspace() else words.pop()
        line = cls(None, [], current)
        flag = None
        # Skip the words before the command, as in `cd there && OMP_NUM_THREADS=2 lmtool ...`.
        first = max((number for number, word in enumerate(words) if Path(word).name == "lmtool"), default=0)
        for word in words[first + 1 :]:
            if flag is not None:
                line._set_flag(flag, word)
                flag = None
            elif word in ("--config", "--config-dir", "--plugin", "--cfg"):
                flag = word
            elif word.startswith("--") and "=" in word:
                line._set_flag(*word.split("=", 1))
            elif not word.startswith("-"):
                line.verb, line.words = (word, []) if line.verb is None else (line.verb, [*line.words, word])
        line.flag = flag
        return line

    def _set_flag(self, flag: str, value: str) -> None:
        if flag == "--config-dir" and Path(value).is_dir():
            self.config_dirs.append(Path(value))
        elif flag == "--plugin":
            self.plugins.append(value)

    @property
    def overrides(self) -> dict[str, str]:
        return {key.lstrip("+~"): value for key, _, value in (word.partition("=") for word in self.words)}


def _split(text: str) -> list[str]:
    """Splits a line into words as a shell does; closes an open quote at the end of the line."""
    for closing in ("", "'", '"', "\\"):
        try:
            return shlex.split(text + closing)
        except ValueError:
            continue
    return text.split()


def candidates(text: str) -> list[str]:
    """Returns the completions of the last word of a command line that calls lmtool. A completion that ends with a space
    is a complete word."""
    line = Line.parse(text)
    return sorted({word for word in _candidates(line) if word.startswith(line.current)})


def _candidates(line: Line) -> Iterator[str]:
    current = line.current
    if line.flag is not None:
        yield from _flag_values(line.flag, current)
    elif current.startswith("-"):
        flag, equals, value = current.partition("=")
        yield from (
            (f"{flag}={word}" for word in _flag_values(flag, value)) if equals else (f"{flag} " for flag in FLAGS)
        )
    elif line.verb is None:
        yield from (f"{verb} " for verb in VERBS if " " not in verb)
    elif line.verb == "completion":
        yield from (f"{shell} " for shell in SCRIPTS)
    elif line.verb in ("resume", "report"):
        yield from _runs(current)
        yield from _files(current, folders_only=True)
    else:
        yield from _arguments(line, table(line.config_dirs, line.plugins))


def _flag_values(flag: str, value: str) -> Iterator[str]:
    if flag == "--cfg":
        yield "job "
    elif flag in ("--config", "--config-dir"):
        yield from _files(value, folders_only=flag == "--config-dir")


def _arguments(line: Line, table: CompletionTable) -> Iterator[str]:
    verb, current = line.verb or "", line.current
    if verb == "list":
        yield from (f"{group} " for group in table["options"])
        return
    if verb == "show":
        yield from _show_arguments(current, table)
        return
    page = next((word for word in line.words if word in LOOKS), None) if verb == "inspect" else None
    if page is not None:
        verb = f"inspect {page}"
    if verb in ABOUT_A_RUN:
        training = [word for word in line.words if word in TRAINING]
        if not training and "=" not in current:
            yield from (f"{name} " for name in (*TRAINING, *(LOOKS if verb == "inspect" else ())))
        if "=" not in current:
            yield from (f"{key}=" for key in table["own"].get(verb, ()) if key not in line.overrides)
        verb = training[0] if training else "finetune" if {"task"} & line.overrides.keys() else "pretrain"
    keys = table["verbs"].get(verb)
    if keys is None:
        return
    key, equals, value = current.partition("=")
    if equals:
        node = _find(keys, key.lstrip("+~").replace("/", "."), line.overrides, table)
        yield from (f"{key}={word}" for word in _values(node, value, table))
        return
    yield from _keys(keys, current, line.overrides, table)
    if VERBS.get(verb) is not None and VERBS[verb].places:
        yield from _runs(current)


def _keys(keys: KeyNodes, current: str, overrides: dict[str, str], table: CompletionTable) -> Iterator[str]:
    """Yields the keys in the section of the current word, such as `optimizer` for `optimizer.l`."""
    section = current.rpartition(".")[0]
    nodes = keys if not section else _children(_find(keys, section, overrides, table), section, overrides, table)
    for name, node in nodes.items():
        key = f"{section}.{name}" if section else name
        if "keys" in node or table["components"].get(node.get("group") or node.get("several", "")):
            yield f"{key}."
        if (
            "keys" not in node
            and key not in overrides
            and ("several" not in node or node["several"] in table["options"])
        ):
            yield f"{key}="


def _find(keys: KeyNodes, key: str, overrides: dict[str, str], table: CompletionTable) -> KeyNode:
    node: KeyNode = {"keys": keys}
    parent = ""
    for name in key.split("."):
        node = _children(node, parent, overrides, table).get(name, {})
        parent = f"{parent}.{name}" if parent else name
    return node


def _children(node: KeyNode, key: str, overrides: dict[str, str], table: CompletionTable) -> KeyNodes:
    """Returns the keys in a section: the selected component's keys, or all possible components' keys."""
    if "keys" in node:
        return node["keys"]
    if "several" in node:
        return {name: {"keys": keys} for name, keys in table["components"].get(node["several"], {}).items()}
    group = node.get("group", "")
    components = table["components"].get(group, {})
    selected = table["options"].get(group, {}).get(overrides.get(key, overrides.get(key.replace(".", "/"), "")))
    possible = [components[selected]] if selected in components else components.values()
    return {name: node for keys in possible for name, node in keys.items() if name not in ("name", "kind")}


def _values(node: KeyNode, value: str, table: CompletionTable) -> Iterator[str]:
    group = node.get("group") or node.get("several")
    if group is not None:
        # The complete values of a list or a sweep.
        complete_values = value[: max(value.rfind(","), value.rfind("[")) + 1]
        options = table["options"].get(group) or dict.fromkeys(table["components"].get(group, ()))
        unused = [option for option in options if option not in re.split(r"[\[,]", complete_values)]
        yield from (
            f"{complete_values}{option}" if "[" in complete_values else f"{complete_values}{option} "
            for option in unused
        )
        if group in ("data", "task") and value:  # a file is also allowed
            yield from _files(value)
        return
    yield from (f"{option} " for option in node.get("options", ()))
    if node.get("run"):
        yield from _runs(value)
    if node.get("path") or node.get("run"):
        yield from _files(value)


def _show_arguments(current: str, table: CompletionTable) -> Iterator[str]:
    group, equals, _ = current.partition("=")
    if equals:
        yield from (f"{group}={option} " for option in table["options"].get(group, ()))
        return
    yield "schema "
    yield from (f"{group}=" for group in table["options"])
    for keys in table["verbs"].values():
        for word in _keys(keys, current, {}, table):
            yield word.removesuffix("=") + ("" if word.endswith(".") else " ")


def _runs(current: str) -> Iterator[str]:
    """Yields the folders of runs and of sweep jobs, relative to the working directory."""
    for depth in ("*", "*/*"):
        for number, config in enumerate(RUNS.glob(f"{depth}/config.yaml")):
            if number < _MAX_CANDIDATES and str(config.parent).startswith(current):
                yield f"{config.parent} "


def _files(current: str, folders_only: bool = False) -> Iterator[str]:
    """Yields the files and folders whose paths start with `current`; hidden files only if the name starts with a
    dot."""
    parent, slash, name = current.rpartition("/")
    folder = user_path(f"{parent}{slash}" or ".")
    if not folder.is_dir():
        return
    count = 0
    for path in folder.iterdir():
        if not path.name.startswith(name) or (path.name.startswith(".") and not name):
            continue
        if path.is_dir():
            yield f"{parent}{slash}{path.name}/"
        elif not folders_only:
            yield f"{parent}{slash}{path.name} "
        count += 1
        if count == _MAX_CANDIDATES:
            return


def format_for_shell(words: Sequence[str], current: str, shell: str) -> Iterator[str]:
    """Yields candidates in the form that a shell expects: fish adds quotes and spaces itself, and bash splits words at
    = and : and expects only the text after the last = or :."""
    for word in words:
        if any(not character.isprintable() for character in word):
            continue
        text, space = word.rstrip(" "), " " if word.endswith(" ") else ""
        if shell == "fish":
            yield text
            continue
        if shell == "bash":
            text = text[len(re.match(r"(.*[=:])?", current)[0]) :]  # type: ignore[index]
        yield re.sub(r"([^\w@%+=:,./~-])", r"\\\1", text) + space


def main(words: Sequence[str]) -> int:
    """Prints the script of a shell, or with `query SHELL LINE` the completions. Raises UserError for an unknown
    shell."""
    if words and words[0] == "query":
        _print_candidates(words[1:])
        return 0
    if len(words) != 1 or words[0] not in SCRIPTS:
        close = nearest(words[0], tuple(SCRIPTS)) if words else None
        raise UserError(
            f"{' '.join(['completion', *words])}: give one of {', '.join(SCRIPTS)}",
            f"run `lmtool completion {close or 'bash'}`; the script says in its first lines where to put it",
        )
    say(SCRIPTS[words[0]].removesuffix("\n"))
    return 0


def _print_candidates(words: Sequence[str]) -> None:
    """Prints one candidate per line. Prints nothing after any error, since a message would garble the user's line."""
    try:
        shell, text = words
        for word in format_for_shell(candidates(text), Line.parse(text).current, shell):
            if safe_line(word) == word:  # omit paths with secrets
                say(word)
    except Exception:
        return
