"""`lmtool predict output=` of large files: portions, a stopped command continues, and errors come first."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.commands import predict as command
from lmtool.data.examples import Rows
from lmtool.learners.base import Answers, Inference
from lmtool.tasks.kinds.learner import TaskResponder
from tests.commands.conftest import TINY, finetune, merge_overrides, pretrain

TEXTS = ["The happy cat" + " saw" * number + "." for number in range(8)]


def predict(*words: str, status: int = 0) -> None:
    assert cli.main(merge_overrides(["predict", "device=cpu", "precision=fp32"], words)) == status


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Portions of three rows, and an interrupt in the third one. Returns the sizes of the predicted portions."""
    monkeypatch.setattr(command, "PORTION", 3)
    sizes: list[int] = []
    answers = TaskResponder.answers

    def stop_at_third(responder: TaskResponder, rows: Rows, inference: Inference) -> Answers:
        if len(sizes) == 2:
            raise KeyboardInterrupt
        sizes.append(len(rows))
        return answers(responder, rows, inference)

    monkeypatch.setattr(TaskResponder, "answers", stop_at_third)
    return sizes


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_stopped_prediction_continues_after_its_finished_portions(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    stopped: list[int],
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    table: bool,
) -> None:
    finetune("sst2", "model=bert_tiny", "checkpoint=none", "max_steps=1", *TINY[:5])
    asked = Path("asked.csv" if table else "asked.txt")
    asked.write_text("".join(f"{line}\n" for line in (["sentence", *TEXTS] if table else TEXTS)))
    words = ["runs/sst2", f"input={asked}", "probabilities=true"]
    predict(*words, f"output=out.{suffix}", status=130)
    (unfinished,) = Path().glob(f"out.{suffix}.*.unfinished")
    assert not Path(f"out.{suffix}").exists() and len(unfinished.read_bytes().splitlines()) == 6
    with unfinished.open("ab") as file:
        file.write(b'{"prediction"')  # a kill may leave an incomplete line
    stopped.clear()
    capsys.readouterr()
    predict(*words, f"output=out.{suffix}")
    assert "continues after 6 of 8 rows" in capsys.readouterr().out and not unfinished.exists()
    assert stopped == [2]
    monkeypatch.undo()
    monkeypatch.chdir(place)
    predict(*words, f"output=whole.{suffix}")
    assert Path(f"out.{suffix}").read_bytes() == Path(f"whole.{suffix}").read_bytes()
    if suffix == "csv":
        with Path("out.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["sentence"] for row in rows] == TEXTS
    if not table:
        assert [int(row["id"]) for row in rows] == list(range(8))


def test_error_in_the_last_row_comes_before_any_prediction(
    place: Path, capsys: pytest.CaptureFixture[str], stopped: list[int]
) -> None:
    finetune("sst2", "model=bert_tiny", "checkpoint=none", "max_steps=1", *TINY[:5])
    rows = [{"sentence": text} for text in TEXTS]
    Path("asked.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, {"said": "A"}]))
    capsys.readouterr()
    predict("runs/sst2", "input=asked.jsonl", "output=out.jsonl", status=2)
    assert "asked.jsonl:9: the object has the additional key said, unlike line 1" in capsys.readouterr().err
    assert not stopped and not list(Path().glob("out.jsonl*"))
    labels = ["null"] * 6 + ['"positive"'] * 2
    lines = [f'{{"sentence": "{text}", "label": {label}}}\n' for text, label in zip(TEXTS, labels, strict=True)]
    Path("labeled.jsonl").write_text("".join(lines))  # only the last portion has labels
    predict("runs/sst2", "input=labeled.jsonl", "output=out.jsonl", status=2)
    assert "labeled.jsonl:1: no value in the column label" in capsys.readouterr().err
    assert not stopped and not list(Path().glob("out.jsonl*"))
    Path("blank.txt").write_text("\n" * 7)
    predict("runs/sst2", "input=blank.txt", "output=out.jsonl", status=2)
    assert "input=blank.txt has no text" in capsys.readouterr().err


def test_truncated_texts_of_all_portions_are_counted(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finetune("sst2", "model=bert_tiny", "checkpoint=none", "max_steps=1", *TINY[:5])
    monkeypatch.setattr(command, "PORTION", 2)
    long = "cat " * 200
    Path("asked.txt").write_text(f"cat\n{long}\n{long}\ncat\n{long}\n")
    capsys.readouterr()
    predict("runs/sst2", "input=asked.txt", "output=out.jsonl")
    assert "warning: 3 of 5 texts are truncated to" in capsys.readouterr().out


def test_filled_masks_continue_after_their_portions(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain("bert", model="bert_tiny")
    Path("asked.txt").write_text("".join(f"The [MASK] saw {number}.\n" for number in range(5)))
    words = ["runs/bert", "input=asked.txt"]
    predict(*words, "output=whole.jsonl")
    monkeypatch.setattr(command, "PORTION", 2)
    predict(*words, "output=out.jsonl")
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


def test_column_named_like_one_of_the_predictions_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finetune("labels", "model=bert_tiny", "checkpoint=none", "max_steps=1", *TINY[:5])
    pretrain("masks", "max_steps=1")
    Path("asked.csv").write_text("sentence,text,probability_positive,filled\nA cat saw.,A [MASK] saw.,mine,mine\n")
    for words, column in (
        (["runs/labels", "probabilities=true", "output=out.csv"], "probability_positive"),
        (["runs/masks", "output=out.jsonl"], "filled"),
    ):
        predict("input=asked.csv", *words, status=2)
        assert f"asked.csv already has a column {column}, which the predictions need" in capsys.readouterr().err
    assert not list(Path().glob("out.*"))
    predict("input=asked.csv", "runs/labels", "output=out.csv")
    assert Path("out.csv").read_text().startswith("sentence,text,probability_positive,filled,prediction,score\n")


def test_column_with_the_name_of_the_task_is_read_instead_of_its_alias(place: Path) -> None:
    task = "task.aliases={other: sentence}"
    finetune("run", "model=bert_tiny", "checkpoint=none", "max_steps=1", *TINY[:5], task)
    Path("both.csv").write_text("sentence,other\nThe cat saw.,A dog.\n")
    Path("alias.csv").write_text("other\nThe cat saw.\n")
    for name in ("both", "alias"):
        predict("runs/run", f"input={name}.csv", f"output={name}.jsonl", "probabilities=true")
        assert cli.main(["embed", "runs/run", f"input={name}.csv", f"output={name}.npy", "device=cpu"]) == 0
    both, alias = (json.loads(Path(f"{name}.jsonl").read_text()) for name in ("both", "alias"))
    assert both["probabilities"] == alias["probabilities"]
    assert Path("both.npy").read_bytes() == Path("alias.npy").read_bytes()


@pytest.mark.parametrize("value", ["null", "true", '{"a": 1}'])
def test_cell_without_text_is_refused(place: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    pretrain("masks", "max_steps=1")
    Path("asked.jsonl").write_text(f'{{"text": {value}}}\n')
    for words in (["predict"], ["predict", "output=out.jsonl"], ["embed"], ["embed", "output=out.npy"]):
        assert cli.main([*words, "runs/masks", "input=asked.jsonl", "device=cpu"]) == 2
        assert "asked.jsonl:1: the column text has no text" in capsys.readouterr().err
    assert not list(Path().glob("out.*"))
