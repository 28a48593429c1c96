"""`lmtool completion SHELL`: prints a script that completes commands, flags, keys, options, values, runs and files.

The script calls `lmtool completion query SHELL LINE` at each TAB. This call prints nothing after any error, and imports
neither torch nor Hydra. The keys and choices of every command are cached in a file as plain data, since importing the
configuration classes takes too long for a TAB: if the file is up to date, only the standard library is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypedDict, Union, get_args, get_origin

from lmtool import __version__
from lmtool.config import groups
from lmtool.errors import UserError, nearest
from lmtool.resolver.verbs import ABOUT_A_RUN, LOOKS, TRAINING, VERBS, command_classes, keys_of
from lmtool.system.files import RUNS, replace_bytes, user_path
from lmtool.system.terminal import safe_line, say

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from lmtool.config.base import Config

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


CACHE = "~/.cache/lmtool"
_PACKAGE = Path(__file__).resolve().parents[1]
# A field whose description contains these words has a path, or a run, as its value.
_PATH = re.compile(r"\b(file|folder)s?\b", re.IGNORECASE)
_RUN = re.compile(r"\b(a run|runs|checkpoint)\b", re.IGNORECASE)


class KeyNode(TypedDict, total=False):
    """A key. Its value is an option of a `group`, `several` options of a group, a section with `keys`, or a plain
    value. options: the allowed plain values. path, run: whether the value may be a path or a run."""

    group: str
    several: str
    keys: KeyNodes
    options: list[str]
    path: bool
    run: bool


KeyNodes: TypeAlias = dict[str, KeyNode]


class CompletionTable(TypedDict):
    """All keys and choices. verbs: keys by command. components: keys by group and component. options: the component
    that an option configures, by group and option. own: the names of the additional keys of commands about a run."""

    verbs: dict[str, KeyNodes]
    components: dict[str, dict[str, KeyNodes]]
    options: dict[str, dict[str, str]]
    own: dict[str, list[str]]


def table(config_dirs: Sequence[Path] = (), plugins: Sequence[str] = ()) -> CompletionTable:
    """Returns the table of this installation: reads the cached file, or builds the table and saves it."""
    file = user_path(CACHE) / "completion" / f"{_fingerprint(config_dirs, plugins)}.json"
    with suppress(OSError, ValueError):
        saved: CompletionTable = json.loads(file.read_text(encoding="utf-8"))
        return saved
    built = _build(config_dirs, plugins)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        outdated = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-20]
        replace_bytes(file, json.dumps(built).encode())
        for path in outdated:
            path.unlink(missing_ok=True)
    return built


def _fingerprint(config_dirs: Sequence[Path], plugins: Sequence[str]) -> str:
    files = [
        *_PACKAGE.rglob("*.py"),
        *(path for folder in groups.folders(config_dirs) for path in folder.rglob("*.yaml")),
    ]
    files += [path for name in plugins if (path := Path(f"{name.replace('.', '/')}.py").resolve()).is_file()]
    versions = sorted(f"{path}\0{path.stat().st_mtime_ns}" for path in files)
    return hashlib.sha256("\n".join([__version__, *plugins, *versions]).encode("utf-8", "replace")).hexdigest()[:32]


def _build(config_dirs: Sequence[Path], plugins: Sequence[str]) -> CompletionTable:
    from lmtool.config import registry
    from lmtool.config import saved as yaml_files

    registry.load_plugins(plugins)
    options = {
        group: {name: registry.component_of(group, name, config_dirs) for name in names}
        for group, names in registry.all_options(config_dirs).items()
    }
    verbs: dict[str, KeyNodes] = {}
    for verb, command in command_classes().items():
        keys = dict(_key_nodes(command))
        defaults = yaml_files.read_yaml(groups.conf_dir() / f"{VERBS[verb].primary}.yaml").get("defaults", [])
        groups_of_primary = {str(key).split()[-1] for item in defaults if isinstance(item, dict) for key in item}
        verbs[verb] = {name: KeyNode(group=name) for name in sorted(groups_of_primary & options.keys())} | keys
    components = {
        group: {entry.name: dict(_key_nodes(entry.config)) for entry in registry.entries(group)}
        for group in registry.groups()
    }
    own_keys = {verb: list(command_keys.model_fields) for verb in VERBS if (command_keys := keys_of(verb)) is not None}
    return {"verbs": verbs, "components": components, "options": options, "own": own_keys}


def _key_nodes(config: type[Config]) -> Iterator[tuple[str, KeyNode]]:
    from lmtool.config.messages import section_class
    from lmtool.config.registry import choice_of, several_of

    for name, info in config.model_fields.items():
        choice, several, section = choice_of(info), several_of(info), section_class(info)
        if choice is not None:
            yield name, {"group": choice.group}
        elif several is not None:
            yield name, {"several": several.group}
        elif section is not None:
            yield name, {"keys": dict(_key_nodes(section))}
        elif name != "plugins":  # typed with --plugin
            yield name, _value_node(info)


def _value_node(field: FieldInfo) -> KeyNode:
    allowed = list(_types_and_values(field.annotation))
    options = [str(option) for option in allowed if isinstance(option, str | int) and not isinstance(option, bool)]
    options += ["true", "false"] * (bool in allowed) + ["null"] * (type(None) in allowed)
    takes_text, description = str in allowed, field.description or ""
    node: KeyNode = {"options": options}
    if takes_text and _PATH.search(description):
        node["path"] = True
    if takes_text and _RUN.search(description):
        node["run"] = True
    return node


def _types_and_values(annotation: object) -> Iterator[object]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from arguments
    elif origin is Annotated:
        yield from _types_and_values(arguments[0])
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _types_and_values(argument)
    elif origin in (tuple, list):
        yield from (kind for item in arguments[:1] for kind in _types_and_values(item) if kind is str)
    else:
        yield annotation


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
    subject = next((word for word in line.words if word in LOOKS.get(verb, ())), None)
    if subject is not None:
        verb = f"{verb} {subject}"
    if verb in ABOUT_A_RUN:
        training = [word for word in line.words if word in TRAINING]
        if not training and "=" not in current:
            yield from (f"{name} " for name in (*TRAINING, *LOOKS.get(verb, ())))
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
    for depth in ("*", "*/*"):
        for number, config in enumerate(RUNS.glob(f"{depth}/config.yaml")):
            if number < _MAX_CANDIDATES and str(config.parent).startswith(current):
                yield f"{config.parent} "


def _files(current: str, folders_only: bool = False) -> Iterator[str]:
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
