"""Labeled data from files: layouts, labels by name, held-out rows, and errors with file and line."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from task_fixtures import CONF, glue, singles, table, task_config

from lmtool.errors import UserError
from lmtool.tasks.files import hub_table
from lmtool.tasks.loading import load_task

OTHER_TASKS = ("ax", "banking77", "boolq", "cb", "wic")
GLUE = ["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]


def texts_of(rows):
    return tuple(rows.columns.values())


def load(config, seed=0, **keywords):
    return load_task(config, seed, "unused", True, **keywords)


def test_shipped_tasks_decode_and_are_all_tested():
    # The members of a mixture are typed.
    configs = {path.stem: task_config(path.stem) for path in CONF.glob("*.yaml") if path.stem != "mixture"}
    assert all(config.name == name for name, config in configs.items())
    # Other kinds have other test files.
    names = {name for name, config in configs.items() if config.kind in ("classification", "regression")}
    assert names == {*GLUE, *OTHER_TASKS, "classification", "regression", "custom", "pydocs"}


@pytest.mark.parametrize("name", GLUE)
def test_glue_folders_load_as_distributed(name, tmp_path):
    config = task_config(name, path=glue(name, tmp_path / name))
    data = load(config)
    assert len(data.train) == 12
    assert [*data.validation] == (["dev_matched", "dev_mismatched"] if name == "mnli" else ["dev"])
    assert all(len(rows) == 6 and rows.labels is not None for rows in data.validation.values())
    assert all(rows.labels is None for rows in data.test.values()) and data.test
    assert len(texts_of(data.train)) == len(config.text)
    assert data.metadata["skipped_rows"] == (1 if name == "qqp" else 0)
    assert data.train.origin[0] == (str(tmp_path / name / "train.tsv"), 1 if name == "cola" else 2)
    if name == "stsb":
        assert data.train.labels[:3].tolist() == [5.0, 0.25, 3.8]
    else:
        names = [data.config.labels[label] for label in data.train.labels[:3]]
        assert (
            names
            == {
                "cola": ["acceptable", "unacceptable", "acceptable"],
                "sst2": ["positive", "negative", "positive"],
                "mrpc": ["equivalent", "not_equivalent", "equivalent"],
                "qqp": ["not_duplicate", "duplicate", "not_duplicate"],
                "mnli": ["neutral", "contradiction", "entailment"],
                "qnli": ["not_entailment", "entailment", "not_entailment"],
                "rte": ["not_entailment", "entailment", "not_entailment"],
                "wnli": ["entailment", "not_entailment", "entailment"],
            }[name]
        )


def test_mrpc_loads_as_distributed_by_microsoft(tmp_path):
    """Two .txt files with a byte order mark; the labeled test file is used neither for training nor for validation."""
    names = ["\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    rows = [[label, 1, 2, text, text + " too"] for text, label in singles(20, [1, 0])]
    table(tmp_path / "msr_paraphrase_train.txt", names, rows, end="\r\n")
    table(tmp_path / "msr_paraphrase_test.txt", names, rows[:4], end="\r\n")
    data = load(task_config("mrpc", path=tmp_path))
    assert (len(data.train), len(data.validation["dev"]), len(data.test["test"])) == (18, 2, 4)
    assert data.test["test"].labels is not None


def test_mnli_loads_jsonl_without_genres(tmp_path):
    rows = [
        {"premise": text, "hypothesis": "so", "label": label} for text, label in singles(9, ["neutral", "entailment"])
    ]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load(task_config("mnli", path=tmp_path))
    assert [*data.validation] == ["dev"] and len(data.train) == 9
    assert data.metadata["warnings"] == ["no training row has the label contradiction"]


def test_custom_task_reads_csv(tmp_path):
    (tmp_path / "reviews.csv").write_text("stars,review\n" + "".join(f'{n % 3 + 9},"a, ""{n}"""\n' for n in range(30)))
    config = task_config("custom", path=tmp_path / "reviews.csv", text=["review"], label="stars")
    data = load(config)
    assert data.config.labels == ("9", "10", "11")  # sorted as numbers
    assert texts_of(data.train)[0][0].startswith('a, "')
    assert len(data.train) == 27 and len(data.validation["dev"]) == 3
    assert "3 of 30 training rows" in data.metadata["held out"]
    regression = load(
        task_config("custom", kind="regression", path=tmp_path / "reviews.csv", text=["review"], label="stars")
    )
    assert set(regression.train.labels) == {9.0, 10.0, 11.0}


def test_held_out_rows_are_seeded_and_disjoint_from_train(tmp_path):
    table(tmp_path / "train.tsv", ["text", "label"], [[f"text {number // 3}", number % 2] for number in range(300)])
    config = task_config("classification", path=tmp_path)
    first, again, other = (load(config, seed) for seed in (0, 0, 1))
    held = first.validation["dev"]
    assert len(held) == 30 and not set(texts_of(held)[0]) & set(texts_of(first.train)[0])
    assert held.ids == again.validation["dev"].ids != other.validation["dev"].ids


def test_train_examples_are_sampled_by_seed(tmp_path):
    path = glue("sst2", tmp_path)
    few = [load(task_config("sst2", path=path, train_examples=5), seed).train.ids for seed in (0, 0, 3)]
    assert len(few[0]) == 5 and few[0] == few[1] != few[2]
    assert load(task_config("sst2", path=path, train_examples=99)).metadata["train_rows"] == 12


def test_label_names_take_precedence_over_numbers(tmp_path):
    table(tmp_path / "train.tsv", ["text", "label"], [["a", 1], ["b", 0], ["c", 0]])
    by_name = load(task_config("classification", path=tmp_path, labels=["1", "0"]))
    rows = [
        (text, label)
        for part in (by_name.train, by_name.validation["dev"])
        for text, label in zip(texts_of(part)[0], part.labels, strict=True)
    ]
    assert dict(rows) == {"a": 0, "b": 1, "c": 1}
    by_number = load(task_config("classification", path=tmp_path, labels=["no", "yes"]))
    rows = [
        (text, label)
        for part in (by_number.train, by_number.validation["dev"])
        for text, label in zip(texts_of(part)[0], part.labels, strict=True)
    ]
    assert dict(rows) == {"a": 1, "b": 0, "c": 0}


def write_rows(path, labels):
    """Write one row per line; a list of labels gets a list of as many words."""
    rows = [
        {"text": ["word"] * len(label) if isinstance(label, list) else f"{path.stem} {number}", "label": label}
        for number, label in enumerate(labels)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", ["classification", "multi_label", "token_classification"])
def test_numeric_labels_are_not_indices(kind, tmp_path):
    """Every row keeps its label or the first unknown label is refused, for 200 pairs of label sets."""
    draw, refused = random.Random(0), 0
    spellings = ["-1", "0", "1", "2", "3", "4", "5", "10", "1.5", "other"]
    tags = {"text": ["text"], "label": "label", "scheme": "none", "metrics": ["accuracy"], "metric": "accuracy"}
    fields = tags if kind == "token_classification" else {}
    for _ in range(200):
        known = draw.sample(spellings, draw.randint(2, 4))
        known = known if {*known} - {"other", "-1"} else ["1", "2"]
        dev = draw.choices(known if draw.random() < 0.4 else draw.sample(spellings, draw.randint(1, 4)), k=8)
        files = {"train": known * 2, "dev": dev}
        for name, labels in files.items():
            write_rows(tmp_path / f"{name}.jsonl", [[tag] for tag in labels] if fields else labels)
        config = task_config(kind, path=tmp_path, **fields)
        unknown = [number for number, label in enumerate(dev) if label not in known]
        if unknown:
            refused += 1
            first = unknown[0]
            with pytest.raises(
                UserError, match=f"dev.jsonl:{first + 1}: label {re.escape(repr(dev[first]))} is unknown"
            ):
                load(config)
            continue
        data = load(config)
        for name, rows in (("train", data.train), ("dev", data.validation["dev"])):
            numbers = {
                "classification": lambda labels: labels,
                "multi_label": lambda labels: np.asarray(labels).argmax(axis=1),
                "token_classification": lambda labels: [tags[0] for tags in labels],
            }[kind](rows.labels)
            assert [data.config.labels[number] for number in numbers] == files[name]
    assert 60 < refused < 160


def test_minus_one_is_label_if_in_train(tmp_path):
    for name, labels in (("train", [-1, 1] * 2), ("dev", [-1, 1]), ("test", [-1, -1])):
        write_rows(tmp_path / f"{name}.jsonl", labels)
    data = load(task_config("classification", path=tmp_path, test=["test"]))
    assert data.test["test"].labels.tolist() == [0, 0]


@pytest.mark.parametrize(
    "spellings", [(1, 1.0), ("7", "07"), ("1", "+1"), ("2.50", "2.5"), ("9" * 5000, "+" + "9" * 5000)]
)
def test_two_spellings_of_same_number_are_refused(spellings, tmp_path):
    first, second = spellings
    write_rows(tmp_path / "train.jsonl", [first, second] * 3)
    with pytest.raises(UserError, match=r"train.jsonl:[12]: label .* is the same number as .* of .*train.jsonl:[12]"):
        load(task_config("classification", path=tmp_path))
    two = load(task_config("classification", path=tmp_path, labels=[str(first), str(second)]))
    assert two.config.labels == (str(first), str(second))


def test_balanced_class_weights_are_stored_in_config(tmp_path):
    table(
        tmp_path / "train.tsv", ["text", "label"], [[f"t{number}", "b" if number % 4 else "a"] for number in range(8)]
    )
    table(tmp_path / "dev.tsv", ["text", "label"], [["x", "a"]])
    data = load(task_config("classification", path=tmp_path, loss__class_weights="balanced"))
    assert data.config.loss.class_weights == pytest.approx((8 / (2 * 2), 8 / (2 * 6)))
    assert data.config.labels == ("a", "b")


def test_missing_path_is_refused():
    with pytest.raises(UserError, match="task=custom has no default data") as caught:
        load(task_config("custom"))
    assert "task.path=FOLDER" in caught.value.hint
    with pytest.raises(UserError, match="task.path=/no/such does not exist"):
        load(task_config("sst2", path="/no/such"))


def test_offline_error_suggests_commands(monkeypatch):
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a connection was opened"))
    with pytest.raises(UserError) as caught:
        load(task_config("sst2"))
    assert "hub=nyu-mll/glue:sst2" in caught.value.message
    assert "lmtool finetune task=sst2 task.path=" in caught.value.hint and "checkpoint=" in caught.value.hint


def test_missing_datasets_library_error_suggests_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="the library datasets, which is not installed") as caught:
        load(task_config("sst2"))
    assert "pip install 'lmtool[hub]'" in caught.value.hint and "task.path=FOLDER" in caught.value.hint


def test_unreachable_hub_is_refused(monkeypatch):
    monkeypatch.setattr("lmtool.data.hub_source.is_reachable", lambda _: False)
    with pytest.raises(UserError, match="cannot be read: no network"):
        load_task(task_config("sst2"), 0, "unused", offline=False)


def test_hub_class_numbers_become_names(monkeypatch):
    """Labels are matched by the hub's names, so their order there does not matter."""

    class Split(dict):
        column_names = ("sentence", "label", "idx")
        features = {"sentence": None, "label": types.SimpleNamespace(names=["positive", "negative"]), "idx": None}

        def __len__(self):
            return len(self["idx"])

    def rows(labels):
        return Split(sentence=[f"text {n}" for n in range(len(labels))], label=labels, idx=list(range(len(labels))))

    asked = []
    monkeypatch.setattr("lmtool.data.hub_source.is_reachable", lambda _: True)
    library = types.SimpleNamespace(
        config=types.SimpleNamespace(HF_HUB_OFFLINE=False),
        load_dataset=lambda *where, **_: (
            asked.append(where) or {"train": rows([0, 1, 1]), "validation": rows([1, 0]), "test": rows([-1, -1])}
        ),
    )
    monkeypatch.setitem(sys.modules, "datasets", library)
    data = load_task(task_config("sst2"), 0, "cache", offline=False)
    assert asked == [("nyu-mll/glue", "sst2")]
    assert data.train.labels.tolist() == [1, 0, 0]  # ours: negative, positive
    assert data.validation["dev"].labels.tolist() == [0, 1]
    assert data.test["test"].labels is None


def two_rows(tmp_path, header, *rows):
    table(tmp_path / "train.tsv", header, [list(row) for row in rows])
    return tmp_path


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((["a", "positive"], ["b", "Positive"]), r"train.tsv:3: label 'Positive' is unknown; .*negative, positive"),
        ((["a", "1"], ["b", "2"]), r"train.tsv:3: label '2' is unknown|train.tsv:2: label '1' is unknown"),
        ((["a", "1"], ["b", "0"], ["c", "0 1"]), r"train.tsv:4: label '0 1' is unknown"),
        ((["a", "positive"], ["b", ""]), r"train.tsv:3: no value in the column label"),
    ],
)
def test_unknown_labels_are_refused(tmp_path, rows, message):
    path = two_rows(tmp_path, ["sentence", "label"], *rows)
    with pytest.raises(UserError, match=message):
        load(task_config("sst2", path=path))


def test_missing_column_error_lists_columns(tmp_path):
    path = two_rows(tmp_path, ["phrase", "label"], ["a", 0], ["b", 1])
    with pytest.raises(UserError, match="no column sentence to read; there are phrase, label"):
        load(task_config("sst2", path=path))
    path = two_rows(tmp_path, ["sentence", "sentiment"], ["a", 0], ["b", 1])
    with pytest.raises(UserError, match="no column label to predict; there are sentence, sentiment") as caught:
        load(task_config("sst2", path=path))
    assert "task.label=" in caught.value.hint


def test_columns_are_joined_to_one_text(tmp_path):
    config = task_config("wic", path=glue("wic", tmp_path / "wic"))
    data = load(config)
    assert [*data.train.columns] == ["word+sentence1", "sentence2"]
    texts, sentences = texts_of(data.train)
    assert texts[0] == f"{sentences[0]} {sentences[0]}"
    table(tmp_path / "train.tsv", ["word", "sentence", "sentence2", "label"], [["a", "b", "c", "true"]])
    with pytest.raises(UserError, match="no column sentence1 to read; there are word, sentence, sentence2, label"):
        load(task_config("wic", path=tmp_path / "train.tsv"))
    with pytest.raises(ValidationError, match="reads label=label, which is predicted"):
        task_config("wic", text=["word+label", "sentence2"])


def test_hub_columns_are_decoded():
    """Lists of class numbers, booleans as classes, and objects, in the form of the datasets library."""

    class Split(dict):
        column_names = ("text", "labels", "answer")
        features = {
            "text": None,
            "labels": types.SimpleNamespace(feature=types.SimpleNamespace(names=["joy", "anger"])),
            "answer": types.SimpleNamespace(names=["False", "True"]),
        }

        def __len__(self):
            return 2

    texts = [{"de": "ja", "en": "yes"}, {"de": "nein", "en": "no"}]
    columns = hub_table("x", Split(text=texts, labels=[[1, 0], []], answer=[1, -1])).columns
    flat = {"text.de": ["ja", "nein"], "text.en": ["yes", "no"]}
    assert columns == {"text": texts, "labels": [["anger", "joy"], []], "answer": [True, ""], **flat}


def test_invalid_regression_values_are_refused(tmp_path):
    for given in ("five", "nan", "inf", ""):
        path = two_rows(tmp_path, ["sentence1", "sentence2", "label"], ["a", "b", "1.5"], ["a", "c", given])
        with pytest.raises(UserError, match=rf"train.tsv:3: label='{given}' is not a number"):
            load(task_config("stsb", path=path))
    path = two_rows(tmp_path, ["sentence1", "sentence2", "label"], ["a", "b", "1.5"], ["a", "c", "3,5"])
    with pytest.raises(UserError, match="label='3,5' is not a number: it has a decimal comma") as caught:
        load(task_config("stsb", path=path))
    assert caught.value.hint == "write decimals with a point: 3.5"


@pytest.mark.parametrize(
    ("labels", "warning"),
    [
        (["a", "b", "NA"], "1 training row is labeled NA: remove it if that means a missing label"),
        ([*["a", "b"] * 30, "nan", "nan"], "2 training rows are labeled nan: remove them if"),
        (["a", "NA", "b"] * 4, None),  # as frequent as the others: Namibia
        (["a", "b", "c"], None),
    ],
)
def test_label_like_missing_value_warns(labels, warning, tmp_path):
    for split in ("train", "dev"):
        table(tmp_path / f"{split}.tsv", ["text", "label"], [[f"t {n}", label] for n, label in enumerate(labels)])
    (*warnings,) = load(task_config("custom", path=tmp_path, kind="classification")).metadata["warnings"]
    assert not warnings if warning is None else len(warnings) == 1 and warnings[0].startswith(warning)


def test_unsuitable_label_columns_are_refused(tmp_path):
    table(tmp_path / "train.tsv", ["text", "label"], [[f"t{number}", number / 7] for number in range(60)])
    with pytest.raises(UserError, match="60 different values") as caught:
        load(task_config("classification", path=tmp_path))
    assert "task.kind=regression" in caught.value.hint
    table(tmp_path / "train.tsv", ["text", "label"], [["t", "same"], ["u", "same"]])
    with pytest.raises(UserError, match="nothing to learn"):
        load(task_config("classification", path=tmp_path))


def test_two_files_of_one_split_are_refused(tmp_path):
    path = two_rows(tmp_path, ["sentence", "label"], ["a", 0], ["b", 1])
    for name in ("dev.tsv", "validation.tsv"):
        table(path / name, ["sentence", "label"], [["a", 0]])
    with pytest.raises(UserError, match="dev.tsv and validation.tsv are both dev"):
        load(task_config("sst2", path=path))


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("dev.tsv", lambda path: path.symlink_to("nowhere.tsv"), "dev.tsv is not a regular file, but a dangling link"),
        ("dev.tsv", os.mkfifo, "dev.tsv is not a regular file"),
        ("dev.tsv", Path.mkdir, "dev.tsv is not a regular file, but a folder"),
        (
            "test.tsv",
            lambda path: path.symlink_to("nowhere.tsv"),
            "test.tsv is not a regular file, but a dangling link",
        ),
        ("validation.jsonl", os.mkfifo, "validation.jsonl is not a regular file"),
        ("dev", Path.mkdir, "dev is not read"),
        ("dev", lambda path: path.symlink_to("nowhere"), "dev is not read"),
        ("dev.arrow", lambda path: path.write_bytes(b"ARROW1"), "dev.arrow is not read"),
        ("val.tsv.bz2", lambda path: path.write_bytes(b"x"), "val.tsv.bz2 is not read"),
        ("dev.txt", lambda path: path.write_text("x"), "dev.txt is not read"),
    ],
)
def test_unreadable_split_is_refused(tmp_path, name, make, words):
    path = two_rows(tmp_path, ["sentence", "label"], ["a", 0], ["b", 1])
    assert [*load(task_config("sst2", path=path)).validation] == ["dev"]
    make(path / name)
    with pytest.raises(UserError, match=words) as caught:
        load(task_config("sst2", path=path))
    assert f"task.path={path}: " in caught.value.message and caught.value.hint
    (path / name).rmdir() if (path / name).is_dir() else (path / name).unlink()
    table(path / "dev.tsv", ["sentence", "label"], [["a", 0]])
    (path / "dev").mkdir()  # ignored beside a development file
    assert len(load(task_config("sst2", path=path)).validation["dev"]) == 1


def test_missing_validation_splits_are_refused(tmp_path):
    path = two_rows(tmp_path, ["sentence", "label"], ["a", 0], ["b", 1])
    with pytest.raises(UserError, match="names the split nope; the data have the splits train") as caught:
        load(task_config("sst2", path=path, validation=["nope"]))
    assert "omit task.validation=" in caught.value.hint
    table(path / "dev_easy.tsv", ["sentence", "label"], [["a", 0]])
    assert [*load(task_config("sst2", path=path, validation=["dev_easy"])).validation] == ["dev_easy"]
    with pytest.raises(UserError, match="dev_easy.tsv is not read: task.validation=") as caught:
        load(task_config("sst2", path=path, validation=["dev_esy"]))
    assert "task.validation=[dev_easy]" in caught.value.hint
    table(path / "dev.tsv", ["sentence", "label"], [["a", 0]])
    with pytest.raises(UserError, match="names the split hard; the data have the splits dev, train") as caught:
        load(task_config("sst2", path=path, validation=["dev", "hard"]))
    assert "task.validation=[dev]" in caught.value.hint
    # The preset of MNLI names two development sets; a single dev file replaces both.
    assert [*load(task_config("sst2", path=path, validation=["dev_matched", "dev_mismatched"])).validation] == ["dev"]


def test_unreadable_mapped_file_is_refused(tmp_path):
    names = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    rows = [[label, 1, 2, text, text + " too"] for text, label in singles(20, [1, 0])]
    table(tmp_path / "msr_paraphrase_train.txt", names, rows)
    (tmp_path / "msr_paraphrase_test.txt").symlink_to("nowhere.txt")
    with pytest.raises(UserError, match="msr_paraphrase_test.txt is not a regular file, but a dangling link"):
        load(task_config("mrpc", path=tmp_path))


def test_folder_without_train_file_is_refused(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(UserError, match="no train file; there is notes.md"):
        load(task_config("sst2", path=tmp_path))


def test_take_keeps_columns_aligned(tmp_path):
    rows = load(task_config("mrpc", path=glue("mrpc", tmp_path))).train
    taken = rows.take(np.array([3, 1]))
    assert taken.ids == [rows.ids[3], rows.ids[1]] and taken.origin == [rows.origin[3], rows.origin[1]]
    assert texts_of(taken)[1] == [texts_of(rows)[1][3], texts_of(rows)[1][1]]
    assert taken.labels.tolist() == rows.labels[[3, 1]].tolist()


def test_repeated_ids_and_unlabeled_tests_are_reported(tmp_path):
    table(tmp_path / "train.tsv", ["id", "text", "label"], [[n % 3, f"a text {n}", n % 2] for n in range(6)])
    table(tmp_path / "dev.tsv", ["id", "text", "label"], [[n, f"a text {n}", n % 2] for n in range(4)])
    table(tmp_path / "test.tsv", ["text"], [["a text"]])
    metadata = load(task_config("classification", path=tmp_path)).metadata
    (warning,) = metadata["warnings"]
    assert "train.tsv:5: id=0 repeats the id of" in warning and "train.tsv:2, and 2 more rows repeat an id" in warning
    assert metadata["not_scored"] == "test (no labels)"
