"""Tiny data sets in the layouts of their sources, and a tokenizer and models, for the tests of tasks."""

from __future__ import annotations

import json
from pathlib import Path

from lmtool.config import saved
from lmtool.config.registry import build, lookup
from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.learners.evaluation import evaluate
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.tokenizers.configs import ByteBpeConfig, WordPieceConfig

CONF = Path(__file__).parents[2] / "conf" / "task"
SIZES = {
    "vocab_size": 300, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "feedforward_size": 48,
    "max_positions": 64, "attention_dropout": 0.0,
}  # fmt: skip
GOOD, BAD = ["a fine and warm film", "what a lovely story"], ["a dull, cold mess", "this is a waste of time"]
TEXTS = [*GOOD, *BAD, 'she said "no"', "it isn't\u00a0bad", "the end", "nobody knows why"]


def task_data(name, **overrides):
    """A shipped YAML as plain data, merged with its defaults; overrides are keys with `__` for dots."""
    data = saved.read_yaml(CONF / f"{name}.yaml")
    merged = {}
    for base in data.pop("defaults", []):
        merged = {**merged, **task_data(base)} if base != "_self_" else merged
    merged |= data
    for key, value in overrides.items():
        *sections, last = key.split("__")
        inside = merged
        for section in sections:
            inside = inside[section]
        inside[last] = str(value) if isinstance(value, Path) else value
    return merged


def task_config(name, **overrides):
    data = task_data(name, **overrides)
    return lookup("task", data["kind"]).config.model_validate_json(json.dumps(data))


def tokenizer(kind="wordpiece"):
    config = WordPieceConfig(minimum_count=1) if kind == "wordpiece" else ByteBpeConfig(minimum_count=1)
    return build(config, TEXTS * 3, 290)


def backbone(family="bert", **fields):
    return build((BertConfig if family == "bert" else GptConfig)(**{**SIZES, **fields}), 0)


def split_data(learner, rows, name="train"):
    """Rows as the data of a split of the learner's task."""
    return SplitData(name, rows=dict.fromkeys([learner.config.name], rows))


def examples_of(learner, rows, max_length=32, name="train"):
    return learner.examples(split_data(learner, rows, name), max_length)


def evaluation(learner, rows, name="dev", max_length=32, **sizes):
    """All rows of a split, predicted and scored."""
    data = split_data(learner, rows, name)
    examples = learner.examples(data, max_length)
    batches = PackedLoader(examples, 0, shuffle=False, **(sizes or {"batch_examples": 4})).epoch_batches()
    return evaluate(learner, learner.scorer(data, examples, {}), batches)


def table(path, header, rows, end="\n"):
    lines = ["\t".join(map(str, row)) for row in ([header] if header else []) + rows]
    path.write_text(end.join(lines) + end, encoding="utf-8", newline="")


def singles(count, labels):
    return [(TEXTS[number % len(TEXTS)] + f" {number}", labels[number % len(labels)]) for number in range(count)]


def glue(name, folder):
    """Write a data set as GLUE distributes it. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    {
        "cola": _cola, "sst2": _sst2, "mrpc": _mrpc, "qqp": _qqp, "stsb": _stsb, "mnli": _mnli,
        "qnli": _qnli, "rte": _rte, "wnli": _wnli, "banking77": _banking77, "boolq": _boolq, "cb": _cb, "wic": _wic,
    }[name](folder)  # fmt: skip
    return folder


def _cola(folder):
    for split, count in (("train", 12), ("dev", 6)):
        rows = [["gj04", label, "*" if label == 0 else "", text] for text, label in singles(count, [1, 0])]
        table(folder / f"{split}.tsv", None, rows)
    table(folder / "test.tsv", ["index", "sentence"], [[0, "Bill whistled past the house."]])


def _sst2(folder):
    for split, count in (("train", 12), ("dev", 6)):
        table(
            folder / f"{split}.tsv",
            ["sentence", "label"],
            [[text + " ", label] for text, label in singles(count, [1, 0])],
        )
    table(folder / "test.tsv", ["index", "sentence"], [[0, "uneasy mishmash"], [1, "a treat"]])


def _mrpc(folder):
    names = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    for split, count in (("train", 12), ("dev", 6)):
        rows = [
            [label, 7 * number, 9 * number, text, f'He said "{text}']
            for number, (text, label) in enumerate(singles(count, [1, 0]))
        ]
        table(folder / f"{split}.tsv", ["\ufeff" + names[0], *names[1:]], rows)
    table(folder / "test.tsv", ["index", *names[1:]], [[0, 1, 2, "one text", "another text"]])


def _qqp(folder):
    names = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    for split, count in (("train", 12), ("dev", 6)):
        rows = [[number, 1, 2, text, text + " ?", label] for number, (text, label) in enumerate(singles(count, [0, 1]))]
        table(folder / f"{split}.tsv", names, [*rows, ["13", "a line cut short"]] if split == "train" else rows)
    table(folder / "test.tsv", ["id", "question1", "question2"], [[0, "why ?", "why not ?"]])


def _stsb(folder):
    names = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2"]
    for split, count in (("train", 12), ("dev", 6)):
        rows = [
            [number, "main-captions", "MSRvid", "2012test", "0001", "none", "none", text, text[::-1], score]
            for number, (text, score) in enumerate(singles(count, ["5.000", "0.25", "3.8"]))
        ]
        table(folder / f"{split}.tsv", [*names, "score"], rows)
    table(folder / "test.tsv", names, [[0, "g", "f", "2012", "1", "none", "none", "a girl", "a boy"]])


def _mnli(folder):
    start = ["index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"]
    start += ["sentence1_parse", "sentence2_parse", "sentence1", "sentence2"]
    labels = ["neutral", "contradiction", "entailment"]

    def rows(count, annotators):
        return [
            [
                number,
                1,
                "1n",
                "fiction",
                "( a )",
                "( b )",
                "(S a)",
                "(S b)",
                text,
                text + " no",
                *[label] * annotators,
                label,
            ]
            for number, (text, label) in enumerate(singles(count, labels))
        ]

    table(folder / "train.tsv", [*start, "label1", "gold_label"], rows(12, 1))
    for genres in ("matched", "mismatched"):
        names = [*start, *(f"label{number}" for number in range(1, 6)), "gold_label"]
        table(folder / f"dev_{genres}.tsv", names, rows(6, 5))
        table(folder / f"test_{genres}.tsv", start, [row[: len(start)] for row in rows(3, 1)])
    (folder / "original").mkdir()


def _qnli(folder):
    for split, count in (("train", 12), ("dev", 6)):
        rows = [
            [number, text + " ?", text, label]
            for number, (text, label) in enumerate(singles(count, ["not_entailment", "entailment"]))
        ]
        table(folder / f"{split}.tsv", ["index", "question", "sentence", "label"], rows)
    table(folder / "test.tsv", ["index", "question", "sentence"], [[0, "who ?", "you"]])


def _rte(folder):
    _pairs(folder, ["not_entailment", "entailment"])


def _banking77(folder):
    for split, count in (("train", 12), ("test", 6)):
        rows = [",".join(row) for row in singles(count, ["card_arrival", "Refund_not_showing_up"]) if "," not in row[0]]
        (folder / f"{split}.csv").write_text(
            "\n".join(["text,category", *(row.replace('"', "") for row in rows)]) + "\n"
        )


def _boolq(folder):
    _objects(folder, "val", ["question", "passage"], [True, False])


def _cb(folder):
    _objects(folder, "val", ["premise", "hypothesis"], ["contradiction", "entailment", "neutral"])


def _wic(folder):
    _objects(folder, "val", ["word", "sentence1", "sentence2"], [True, False])


def _objects(folder, development, names, labels):
    for split, count in (("train", 12), (development, 6)):
        rows = [{**dict.fromkeys(names, text), "label": label} for text, label in singles(count, labels)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _wnli(folder):
    _pairs(folder, [1, 0])


def _pairs(folder, labels):
    for split, count in (("train", 12), ("dev", 6)):
        rows = [[number, text, text + " so", label] for number, (text, label) in enumerate(singles(count, labels))]
        table(folder / f"{split}.tsv", ["index", "sentence1", "sentence2", "label"], rows)
    table(folder / "test.tsv", ["index", "sentence1", "sentence2"], [[0, "he ran", "he moved"]])
