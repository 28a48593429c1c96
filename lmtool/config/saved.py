"""Saved configurations: written resolved and with secrets masked; read without Hydra and without imports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from lmtool.config.base import Config, JsonObject
from lmtool.errors import UserError
from lmtool.system.files import read_json, verify_siblings
from lmtool.system.secrets import masked_data, masker
from lmtool.system.terminal import visible

MAX_BYTES = 1_000_000
MAX_DEPTH = 50
MAX_NODES = 20_000
"""Maximum keys and values, with aliases expanded. A configuration has about a hundred."""

# libyaml's parser, if PyYAML was built with it, is a hundred times faster and does not recurse.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


_PLAIN = "a configuration is plain YAML in UTF-8: keys, values and lists, as `lmtool show model=bert` prints them"


class TooLarge(yaml.MarkedYAMLError):
    """A document that exceeds the limits. `problem` says which one, `problem_mark` where."""

    def __init__(self, problem: str, mark: Any):
        super().__init__(problem=problem, problem_mark=mark)


def load(text: str, loader: Any = _LOADER) -> Any:
    """Returns a document as plain data. loader: a safe loader of YAML. Raises yaml.YAMLError if the document is not
    plain YAML, and TooLarge if it exceeds the limits."""
    check(text)
    loading = loader(text)
    try:
        return loading.get_single_data()
    except ValueError as error:  # a date of month 13, a number of thousands of digits
        raise yaml.MarkedYAMLError(problem=str(error)) from error
    finally:
        loading.dispose()


def read_yaml(path: Path, hint: str | None = None, parse: Callable[[str], Any] = load) -> Any:
    """Returns the document in a file. Raises OSError if it cannot be read, and UserError with the hint if it is not
    plain YAML."""
    try:
        return parse(read_text(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8", hint or _PLAIN) from error
    except yaml.YAMLError as error:
        raise refusal(error, str(path), hint) from error


def read_text(path: Path) -> str:
    """Returns the text of a file up to the maximum size; `check` refuses a longer one."""
    content = beginning(path)
    return content.decode("utf-8", "ignore" if len(content) > MAX_BYTES else "strict")


def beginning(path: Path) -> bytes:
    """Returns the bytes of a file up to one more than the maximum size of a configuration."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def refusal(error: yaml.YAMLError, name: str, hint: str | None = None) -> UserError:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    place = f"{name}:{mark.line + 1}" if mark is not None else name
    if isinstance(error, TooLarge):
        hint = "a configuration has about a hundred keys and values: check what this file is, and omit it"
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
    problem = error.reason if isinstance(error, ReaderError) else problem
    return UserError(f"{place}: {problem or 'not plain YAML'}", hint or _PLAIN)


def check(text: str) -> None:
    """Raises TooLarge for a document that exceeds the limits, before it is parsed."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        mark = yaml.Mark("<file>", 0, 0, 0, "", 0)
        raise TooLarge(f"more than {MAX_BYTES} bytes, which no configuration has", mark)
    sizes: dict[str, int] = {}
    # The anchor of each open collection, and the nodes in it so far; the outermost entry is the document.
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=_LOADER):
        nodes = 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > MAX_DEPTH + 1:
                raise TooLarge(f"nested more than {MAX_DEPTH} deep", event.start_mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, nodes = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = nodes
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise TooLarge(f"the alias *{event.anchor} has no complete anchor before it", event.start_mark)
            nodes = sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            nodes = 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        anchor, before = open_nodes[-1]
        open_nodes[-1] = (anchor, before + nodes)
        if before + nodes > MAX_NODES:
            problem = f"more than {MAX_NODES} keys and values, with aliases expanded"
            raise TooLarge(problem, event.start_mark)


VERSION = 1


def save(config: Config, command: str, environ: Mapping[str, str] | None = None) -> JsonObject:
    """Returns the configuration as plain data for `decode`: {"version", "command", keys and sections...}."""
    data = {"version": VERSION, "command": command, **json.loads(config.model_dump_json())}
    masked: JsonObject = masked_data(data, masker(environ))
    return masked


def to_yaml(data: JsonObject) -> str:
    """Returns plain data as YAML text in the same order. Characters that would control a terminal are written as
    escapes of YAML, so the printed text still parses to the same data."""
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
    if all(visible(line) == line for line in text.split("\n")):
        return text
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=False, width=120)


def read(path: Path) -> JsonObject:
    """Returns a saved configuration (YAML or JSON) as plain data, including `version` and `command`.

    Raises UserError for a file that is missing, too large, not UTF-8, not YAML, not a mapping or of another version,
    and for a changed config.json of a checkpoint.
    """
    if path.name == "config.json":
        verify_siblings(path.parent, [path.name])
    hint = "use the config.yaml of a run folder"
    if os.path.lexists(path) and not path.is_file():  # reading a pipe would block
        raise UserError(f"{path} is not a regular file", hint)
    try:
        # YAML reads JSON's 1e-12 as text.
        if path.suffix == ".json":
            data = read_json(path, MAX_BYTES, "use the config.json of a checkpoint")
        else:
            data = read_yaml(path, hint)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", hint) from error
    return with_earlier_model(require_version(data, path))


def require_version(data: object, path: Path) -> JsonObject:
    """Returns the data of a saved configuration. Raises UserError if it is not a mapping, or has another version."""
    if not isinstance(data, dict):
        raise UserError(f"{path} contains no keys and values", "use the config.yaml of a run folder")
    version = data.get("version", VERSION)
    if version != VERSION:
        message = f"{path} has version {version} of the configuration, but this lmtool reads version {VERSION}"
        raise UserError(message, "use the lmtool that wrote it")
    return data


# Keys whose default differs from what lmtool did before they existed.
_EARLIER_RUN: JsonObject = {"evaluate_rows": "all", "keep_optimizer": "all"}
_EARLIER = {"pretrain": _EARLIER_RUN, "finetune": _EARLIER_RUN}
# The same for models, by name: what models trained by an earlier lmtool compute.
_EARLIER_MODELS: dict[object, JsonObject] = {
    "rnn_attention": {"reset": "after"},
    "bigbird": {"random_plan": "transformers"},
}


def with_earlier_model(data: JsonObject) -> JsonObject:
    """Returns a saved configuration whose models compute what they did when it was saved: keys that are newer than it
    have the values that stand for that."""
    if "version" not in data:
        return data
    distill = data.get("distill")
    if isinstance(distill, dict) and "model" in distill:  # the second model of a run
        data = {**data, "distill": {**distill, "model": _as_earlier(distill["model"])}}
    return {**data, "model": _as_earlier(data["model"])} if "model" in data else data


def _as_earlier(model: Any) -> Any:
    return {**_EARLIER_MODELS.get(model.get("name"), {}), **model} if isinstance(model, dict) else model


def body(data: JsonObject) -> JsonObject:
    """Returns saved data without `version` and `command`: the input of the decoder."""
    earlier = _EARLIER.get(str(data.get("command")), {}) if "version" in data else {}
    data = with_earlier_model(data)
    return {**earlier, **{key: value for key, value in data.items() if key not in ("version", "command")}}
