"""Suggestions for misspelled names: the right name is first for 99% of 300 typos in keys, groups and commands."""

from __future__ import annotations

import random
import re
from collections.abc import Container, Iterator

from lmtool.cli.main import VERBS
from lmtool.config import groups
from lmtool.config.messages import known_keys
from lmtool.errors import distance, nearest, nearest_keys
from lmtool.resolver.verbs import command_classes

ALPHABET = "abcdefghijklmnopqrstuvwxyz_"


def typo(word: str, draw: random.Random) -> str:
    """The word with one letter dropped, added, doubled, changed, or swapped with the next one."""
    at = draw.randrange(len(word))
    kind = draw.choice(["drop", "add", "double", "change", "swap"])
    if kind == "drop" and len(word) > 2:
        return word[:at] + word[at + 1 :]
    if kind == "add":
        return word[:at] + draw.choice(ALPHABET) + word[at:]
    if kind == "double":
        return word[: at + 1] + word[at:]
    if kind == "swap" and len(set(word)) > 1:
        at = draw.choice([place for place in range(len(word) - 1) if word[place] != word[place + 1]])
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return word[:at] + draw.choice([letter for letter in ALPHABET if letter != word[at]]) + word[at + 1 :]


def test_nearest_prefers_name_with_same_letters() -> None:
    assert nearest("adawm", ["adam", "adamw"]) == "adamw" and nearest("adamm", ["adam", "adamw"]) == "adam"


SECTIONS = {
    "pretrain": {
        "model": {"name": "bert"},
        "tokenizer": {"name": "wordpiece"},
        "data": {"name": "text"},
        "objective": {"name": "mlm"},
        "optimizer": {"name": "adamw"},
        "schedule": {"name": "linear"},
    },
    "finetune": {
        "model": {"name": "t5"},
        "task": {"kind": "classification"},
        "tuning": {"name": "lora"},
        "optimizer": {"name": "adafactor"},
        "schedule": {"name": "cosine"},
    },
}
SHORTEST = 4
"""Minimum length of a misspelled name: a typo such as `lx` for `lr` cannot be corrected."""


def misspelled(name: str, known: Container[str], draw: random.Random) -> str:
    """The name with a typo in one part, mostly the last; the result is never a known name."""
    while True:
        parts = re.split(r"([./])", name)
        long = [place for place in range(0, len(parts), 2) if len(parts[place]) >= SHORTEST]
        at = long[-1] if draw.random() < 0.75 else draw.choice(long)
        wrong = "".join([*parts[:at], typo(parts[at], draw), *parts[at + 1 :]])
        if wrong not in known:
            return wrong


def typos(draw: random.Random) -> Iterator[tuple[str, str, str | None]]:
    """The misspelled name, the intended name, and the first suggestion."""
    for command, data in SECTIONS.items():
        # A group is a key as well; groups within a section are tested below.
        keys = known_keys(command_classes()[command], data)
        for key in draw.sample([key for key in keys if len(key.rpartition(".")[2]) >= SHORTEST], 80):
            wrong = misspelled(key, keys, draw)
            yield wrong, key, next(iter(nearest_keys(wrong, keys)), None)
    inner = [group for group in groups.all_options() if "/" in group]
    for group in inner * 3:
        wrong = misspelled(group, inner, draw)
        yield wrong, group, nearest(wrong, groups.all_options())
    for group in ("model", "objective", "task", "experiment"):
        known = groups.options(group)
        for name in draw.sample([name for name in known if len(name) >= SHORTEST], 20):
            wrong = misspelled(name, known, draw)
            yield f"{group}={wrong}", name, nearest(wrong, known)
    for verb in draw.choices([verb for verb in VERBS if len(verb) >= SHORTEST and " " not in verb], k=39):
        wrong = misspelled(verb, VERBS, draw)
        yield wrong, verb, nearest(wrong, VERBS)


def test_nearest_corrects_99_percent_of_typos() -> None:
    answers = [answer for seed in range(3) for answer in typos(random.Random(seed))]
    missed = [answer for answer in answers if answer[1] != answer[2]]
    assert len(answers) >= 870 and len(missed) <= 0.01 * len(answers), missed


def test_nearest_ignores_unrelated_suffix() -> None:
    models = ["bert", "bert_cased", "bert_large", "bert_tiny", "t5", "t5_small"]
    assert nearest("bert_base", models) == "bert" and nearest("t5_base", models) == "t5"
    assert nearest("bert_lagre", models) == "bert_large" and nearest("t5-small", models) == "t5_small"


def test_nearest_keys_recognizes_names_of_other_tools() -> None:
    keys = [
        "max_steps",
        "max_epochs",
        "max_length",
        "batch_examples",
        "batch_tokens",
        "model.num_layers",
        "optimizer.lr",
    ]
    assert nearest_keys("epochs", keys) == nearest_keys("num_train_epochs", keys) == ["max_epochs"]
    assert nearest_keys("batch_size", keys) == ["batch_examples", "batch_tokens"]
    assert nearest_keys("max_seq_length", keys) == ["max_length"] and nearest_keys("layers", keys) == [
        "model.num_layers"
    ]
    assert nearest_keys("max_things", keys + ["max_tokens"]) == [], "a part that many keys share suggests nothing"


def test_nearest_keys_adds_section_to_last_part() -> None:
    keys = ["seed", "optimizer", "optimizer.lr", "model.dropout", "task.dropout", "max_steps", "max_tokens"]
    assert nearest_keys("lr", keys) == ["optimizer.lr"]
    assert nearest_keys("optim.lr", keys) == ["optimizer.lr"]
    assert nearest_keys("optimizr.lr", keys) == ["optimizer.lr"]
    assert nearest_keys("dropout", keys) == ["model.dropout", "task.dropout"]
    assert nearest_keys("something_else", keys) == []


def test_distance_counts_swap_as_one_edit() -> None:
    assert distance("modle", "model") == 1 and distance("abc", "abc") == 0 and distance("", "ab") == 2


def test_unrelated_name_has_no_suggestion() -> None:
    assert nearest("zebra", ["bert", "gpt"]) is None and nearest("x", ["lr"]) is None
    assert nearest("bert_large_uncased", ["bert", "gpt", "bert_large"]) in ("bert_large", "bert")
