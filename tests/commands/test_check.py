"""`lmtool check` finds, counts and lists every planted fault of a data set by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtool.cli import main as cli


def check(*words: str, status: int = 0) -> dict:
    assert cli.main(["check", *words, "output=found.jsonl", "cache_dir=cache", "offline=true"]) == status
    return json.loads(Path("found.jsonl").read_text().splitlines()[0])


def write(path: str, *lines: str) -> None:
    Path(path).write_text("\n".join(lines) + "\n")


@pytest.fixture
def rows(place: Path) -> Path:
    """Rows of two classes: some are in both splits, some are repeated, and one is repeated with another label."""
    folder = place / "mine"
    folder.mkdir()
    long = "a story of a man who walks through the whole of a large city"
    train = ["sentence,label", *(f"sentence number {n} of all,{n % 2}" for n in range(200)), f"{long} at night,0"]
    train += ["Sentence number 4 of ALL!,0", "sentence number 5 of all,0"]
    write("mine/train.csv", *train)
    write(
        "mine/dev.csv",
        "sentence,label",
        *(f"row {n} {'x' * n},{n % 2}" for n in range(150)),
        f"{long} by night,1",
        ",0",
    )
    return folder


def test_check_counts_and_lists_duplicates_and_labels(rows, capsys):
    said = check("task=sst2", f"task.path={rows}", "near=0.6")["splits"]
    assert said["train"]["rows"] == 203 and said["dev"]["empty"] == 1
    assert said["train"]["labels"] == {"0": 103, "1": 100} or said["train"]["labels"] == {
        "negative": 103,
        "positive": 100,
    }
    twice = said["train"]["within"]
    assert (twice["equal"], twice["other_label"]) == (2, 1)
    first = twice["pairs"][0]
    assert first["row"].endswith("train.csv:204") and first["repeats"].endswith("train.csv:7") and "label" in first
    shared = said["dev"]["in_training"]
    assert (shared["equal"], shared["similar"]) == (0, 1) and shared["pairs"][0]["repeats"].endswith("train.csv:202")
    screen = capsys.readouterr().out
    assert "dev in train" in screen and "train.csv:204 = " in screen and "median words" in screen


def test_sampled_comparison_is_reported_with_seed(rows, capsys, monkeypatch):
    monkeypatch.setattr("lmtool.data.duplicates.MOST_TEXTS", 160)
    said = check("task=sst2", f"task.path={rows}", "near=0.6")["splits"]
    assert said["train"]["near_compared"] == {"texts": 160, "of": 201} and said["train"]["within"]["equal"] == 2
    screen = " ".join(capsys.readouterr().out.split())
    assert "a sample of 160 of 201 texts of train; seed= draws another sample" in screen and "of dev," not in screen


def test_validation_rows_in_training_fail_the_check(rows, capsys):
    with (rows / "dev.csv").open("a") as file:
        file.writelines(f"sentence number {n} of all,{n % 2}\n" for n in range(1))
    assert check("task=sst2", f"task.path={rows}", "near=null")["splits"]["dev"]["in_training"]["equal"] == 1
    with (rows / "dev.csv").open("a") as file:
        file.write("sentence number 7 of all,1\n")
    check("task=sst2", f"task.path={rows}", "near=null", status=3)
    assert "dev of sst2 also occur in the training rows" in capsys.readouterr().err


def test_invalid_rows_are_listed_by_line(rows, capsys):
    lines = (rows / "train.csv").read_text().splitlines()
    lines[2], lines[9], lines[30] = "one,two,0", "no label", "a text with none of the labels,7"
    (rows / "train.csv").write_text("\n".join(lines) + "\n")
    found = check("task=sst2", f"task.path={rows}", "task.labels=['0','1']", status=3)
    assert sorted(message.partition(": ")[0].rpartition(":")[2] for message in found["failing"]) == ["10", "3", "31"]
    assert found["splits"]["train"]["rows"] == 200
    assert "3 rows failed" in capsys.readouterr().err


def test_labels_outside_training_labels_fail_the_check(place, capsys):
    Path("votes").mkdir()
    for name, labels in (("train", (1, 2, 3)), ("dev", (0, 1, 2))):
        write(f"votes/{name}.csv", "text,label", *(f"a {name} text of number {n},{labels[n % 3]}" for n in range(12)))
    found = check("task=custom", "task.kind=classification", "task.path=votes", "near=null", status=3)
    assert [message.partition(": ")[0] for message in found["failing"]] == [f"votes/dev.csv:{n}" for n in (2, 5, 8, 11)]


def test_check_accepts_a_single_file(place, capsys):
    lines = ["text,label", *(f"a text of number {n},{n % 2}" for n in range(30)), "x,y,z", "one more,"]
    write("mine.csv", *lines)
    found = check("mine.csv", "near=null", status=3)
    assert [message.partition(": ")[0] for message in found["failing"]] == ["mine.csv:32", "mine.csv:33"]


def test_invalid_json_rows_are_listed_by_line(place, capsys):
    good = [json.dumps({"sentence": f"text {n}", "label": n % 2}) for n in range(20)]
    bad = ["{", json.dumps({"sentence": "a"}), json.dumps({"sentence": "b", "label": "1"}), "[1]"]
    write("rows.jsonl", *good[:10], *bad, *good[10:])
    found = check("task=sst2", "task.path=rows.jsonl", status=3)
    assert [message.split(":")[1] for message in found["failing"]] == ["11", "12", "13", "14"]


def test_check_of_text_counts_tokens_and_duplicates(place, capsys):
    assert cli.main(["tokenizer", "data=text", "data.path=text.txt", "tokenizer.vocab_size=200", "output=words"]) == 0
    with Path("text.txt").open("a") as file:
        file.write("\n" + Path("text.txt").read_text().partition("\n\n")[0] + "\n")
    said = check("data=text", "data.path=text.txt", "checkpoint=words", "max_length=16")["splits"]
    assert said["train"]["within"]["equal"] + said["validation"]["in_training"]["equal"] == 1
    assert said["train"]["lengths"]["cut"] == 1
    assert "truncated" in capsys.readouterr().out


def test_repeated_text_is_judged_by_its_words(place, capsys):
    """Repeated headings and separators are accepted by their number of words; a repeated page is not."""
    bodies = [" ".join(f"{n} tells {word}" for word in range(300)) for n in range(300)]
    chapters = [f"CHAPTER {n % 5}\n\n{body}\n\n* * * *" for n, body in enumerate(bodies)]
    write("novel.txt", "\n\n".join(chapters))
    found = check("novel.txt", "near=null")["splits"]["validation"]
    assert found["in_training"]["equal"] > 0.3 * found["rows"] and found["in_training"]["share"] < 0.01
    assert "words in equal texts" in capsys.readouterr().out
    write("page.txt", "* * * *", "", chapters[7], "", "And a line of its own.")
    check("novel.txt", "near=null", "data.validation=page.txt", status=3)
    said = capsys.readouterr().err
    assert "of the words of validation of text also occur in the training text" in said
    # The hint's overrides list all pairs.
    words = said.partition("; ")[2].split()[:2]
    assert words[0].startswith("listed=") and words[1] == "output=FILE.jsonl"
    pairs = check("novel.txt", "near=null", "data.validation=page.txt", words[0], status=3)["splits"]["validation"]
    assert len(pairs["in_training"]["pairs"]) == pairs["in_training"]["equal"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs either task= or data="),
        (["task=sst2", "data=pydocs"], "needs either task= or data="),
        (["task=sst2", "task.path=nowhere"], "does not exist"),
        (["task=sst2", "task.path=rows", "near=1.5"], "near"),
        (["task=sst2", "task.path=rows", "checkpoint=runs/none"], "runs/none"),
    ],
)
def test_invalid_check_is_refused(place, capsys, words, message):
    assert cli.main(["check", *words]) == 2
    assert message in capsys.readouterr().err
