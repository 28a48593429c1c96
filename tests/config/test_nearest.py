"""Did you mean: of 200 one-edit typos of keys, choices and verbs at least 95% are named right."""

from __future__ import annotations

import random

from lmtool.cli import VERBS
from lmtool.commands.configs import COMMANDS
from lmtool.config import groups
from lmtool.config.nearest import distance, nearest, nearest_keys
from lmtool.config.problems import known_keys

ALPHABET = "abcdefghijklmnopqrstuvwxyz_"


def typo(word: str, draw: random.Random) -> str:
    """One slip: a letter dropped, added, doubled, changed, or swapped with its neighbour."""
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


def test_of_two_as_near_the_one_of_the_same_letters() -> None:
    assert nearest("adawm", ["adam", "adamw"]) == "adamw" and nearest("adamm", ["adam", "adamw"]) == "adam"


def test_two_hundred_typos() -> None:
    draw = random.Random(0)
    data = {
        "model": {"name": "bert"},
        "tokenizer": {"name": "wordpiece"},
        "data": {"name": "text"},
        "objective": {"name": "mlm"},
        "optimizer": {"name": "adamw"},
        "schedule": {"name": "linear"},
    }
    keys = known_keys(COMMANDS["pretrain"], data)
    asked, right, wrong = 0, 0, []
    while asked < 140:
        key = draw.choice(keys)
        above, _, last = key.rpartition(".")
        slip = f"{above}.{typo(last, draw)}" if above else typo(last, draw)
        if slip in keys:
            continue
        asked += 1
        good = key in nearest_keys(slip, keys)
        right += good
        wrong += [] if good else [(slip, key)]
    choices = [(group, name) for group in ("model", "objective", "task") for name in groups.options(group)]
    while asked < 180:
        group, name = draw.choice(choices)
        slip = typo(name, draw)
        if slip in groups.options(group):
            continue
        asked += 1
        good = nearest(slip, groups.options(group)) == name
        right += good
        wrong += [] if good else [(slip, name)]
    while asked < 200:
        name = draw.choice(list(VERBS))
        slip = typo(name, draw)
        asked += 1
        good = nearest(slip, VERBS) == name
        right += good
        wrong += [] if good else [(slip, name)]
    print(f"{right} of {asked}: wrong {wrong}")
    assert right >= 0.95 * asked, wrong


def test_strangers_behind_the_same_beginning() -> None:
    models = ["bert", "bert_cased", "bert_large", "bert_tiny", "t5", "t5_small"]
    assert nearest("bert_base", models) == "bert" and nearest("t5_base", models) == "t5"
    assert nearest("bert_lagre", models) == "bert_large" and nearest("t5-small", models) == "t5_small"


def test_what_other_tools_call_a_key() -> None:
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
    assert nearest_keys("max_things", keys + ["max_tokens"]) == [], "a part that many have says nothing"


def test_the_last_part_finds_its_section() -> None:
    keys = ["seed", "optimizer", "optimizer.lr", "model.dropout", "task.dropout", "max_steps", "max_tokens"]
    assert nearest_keys("lr", keys) == ["optimizer.lr"]
    assert nearest_keys("optim.lr", keys) == ["optimizer.lr"]
    assert nearest_keys("optimizr.lr", keys) == ["optimizer.lr"]
    assert nearest_keys("dropout", keys) == ["model.dropout", "task.dropout"]
    assert nearest_keys("something_else", keys) == []


def test_distance_counts_a_swap_once() -> None:
    assert distance("modle", "model") == 1 and distance("abc", "abc") == 0 and distance("", "ab") == 2


def test_nothing_close() -> None:
    assert nearest("zebra", ["bert", "gpt"]) is None and nearest("x", ["lr"]) is None
    assert nearest("bert_large_uncased", ["bert", "gpt", "bert_large"]) in ("bert_large", "bert")
