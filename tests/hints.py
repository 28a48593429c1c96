"""What a message tells its reader to type, held against what there is: keys, their values, commands, flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from lmtool.cli import main
from lmtool.config import groups, messages, registry
from lmtool.resolver import verbs
from lmtool.resolver.verbs import command_classes
from lmtool.training.devices import DEVICES

UNKNOWN = "\0"
"""Stands for what is put into a message when it is raised."""
_WORD = re.compile(r"(?<![\w./=@<{\0-])[+~]{0,2}([a-z_][\w.]*(?:/[a-z_]+)?)=((?:\[[^\]]*\]|[^\s;,()`'\"?])*)")
_COMMAND = re.compile(r"(`?)lmtool ([a-z]+)((?: [^\s`,;:()]+)*)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_OPEN = re.compile(r"\0|\.\.\.|…|\||^$|[A-Z]|{")
"""In a value that the reader is to choose: FOLDER, a|b, ..."""
_OF_PROGRAMS = ("--master-port", "--nproc-per-node", "--upgrade")  # torchrun's and pip's
_OF_FILES = (
    "answer_start", "bias", "extra_ids", "id2label", "model_input_names", "model_type", "num_attention_heads",
    "pad_token_id", "peft_type", "problem_type", "step", "task_type", "tie_word_embeddings", "tokenizer_class",
    "binary", "rate", "do_lower_case", "eos_token_id", "init_lora_weights", "lora_bias", "num_transformer_submodules",
    "num_virtual_tokens", "path_initial_model_for_weight_conversion", "return_tensors", "truncate_dim",
)  # fmt: skip
"""Keys of other tools' files and calls, of a checkpoint's state.json, and of what a module prints of itself."""


@cache
def _fields(components: int) -> dict[str, list[messages.FieldInfo | None]]:
    """Every key of every command, with its fields. components: how many there are; plugins add some."""
    known: dict[str, list[messages.FieldInfo | None]] = {}
    for command in command_classes().values():
        known |= {key: [*known.get(key, []), None] for key in command.overlays}
        for key, field in messages.fields_of(command, "", {}):
            known.setdefault(key, []).append(field)
    for keys in filter(None, map(verbs.keys_of, verbs.VERBS)):
        known |= {key: [None] for key in keys.model_fields if key not in known}
    return known | {"against": [None], "format": [None], "fit": [None], "predict": [None]}


@cache
def _keys_of(verb: str) -> frozenset[str]:
    return frozenset(messages.known_keys(command_classes()[verb], {}))


def fields() -> dict[str, list[messages.FieldInfo | None]]:
    """Every key of every command, with its fields."""
    return _fields(sum(len(registry.names(group)) for group in registry.groups()))


@cache
def _ends(keys: int) -> frozenset[str]:
    """The names that keys have within their sections, and their sections'. keys: how many there are."""
    return frozenset(key[at + 1 :] for key in fields() for at, sign in enumerate(key) if sign == ".")


_groups, _options = cache(groups.all_options), cache(groups.options)


def wrong_in(text: str, local: bool = False) -> Iterator[str]:
    """What is wrong in a message. local: names of a section's own keys may stand in it alone."""
    known, ends = fields(), _ends(len(fields())) if local else frozenset()
    for match in _WORD.finditer(text):
        key, value = match[1].replace("/", "."), match[2].rstrip(".:")
        key = re.sub(r"^phases\.\d+\.(?!share)|(?<=^task|^data)\.with\.\w+(?=\.)|\.KEY$", "", key)
        if key.startswith(("objective.with.", "phases.")):  # of whatever the member is; of a part of the run
            continue
        open_value = _OPEN.search(value) or text[match.end() : match.end() + 1] == "("
        if key.startswith("hydra.") or key.isupper() or key in _OF_FILES:
            continue
        if key not in known and key not in ends and key.replace(".", "/") not in _groups():
            yield f"{match[0]}: no command has the key"
        elif not open_value and key in known and not _takes(key, value):
            yield f"{match[0]}: the key does not take it"
    for match in _COMMAND.finditer(text):
        quoted, verb, *_ = match.groups()
        rest = match[3].rstrip("?.").split()
        if verb not in verbs.VERBS and quoted:
            yield f"{match[0]}: there is no such command"
        elif verb in command_classes():
            typed = {word.partition("=")[0] for word in rest if re.match(r"[a-z][\w.]*=", word)}
            yield from (f"{match[0]}: it has no {key}" for key in typed - _keys_of(verb) if key not in _groups())
        elif verb in ("show", "list") and rest and not _OPEN.search(rest[0]):
            yield from _wrong_topic(verb, rest[0])
    # A flag alone is a word that is looked for, or handed to another program.
    for flag in _FLAG.findall(text) if " " in text else ():
        if flag not in main.FLAGS and flag not in _OF_PROGRAMS:
            yield f"{flag}: there is no such flag"


def _wrong_topic(verb: str, topic: str) -> Iterator[str]:
    """What is wrong with what `lmtool show` or `lmtool list` is asked for."""
    group, equals, name = topic.partition("=")
    there = group in _groups() and (not equals or name in _options(group))
    if not there and (equals or verb == "list" or topic not in fields()):
        yield f"lmtool {verb} {topic}: there is no such thing"


def _takes(key: str, value: str) -> bool:
    if key == "max_length":  # tests read shorter texts than a run may
        return value.isdigit()
    if key == "device" and value in DEVICES:  # of `lmtool plan`
        return True
    group = key.replace(".", "/")
    if group in _groups():
        options = (*_options(group), *registry.names(group), "null")
        parts = value.strip("[]").split(",")
        return group in ("experiment", "sweep") or groups.is_path_like(value) or all(part in options for part in parts)
    found = fields()[key]
    sections = [choice.group for field in found if field is not None and (choice := registry.choice_of(field))]
    return (
        None in found
        or any(value in (*_options(group), *registry.names(group)) for group in sections)
        or any(field is not None and messages._takes(field, messages.plain_value(value)) for field in found)
    )
