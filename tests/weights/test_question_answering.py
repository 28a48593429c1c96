"""Question answering runs, exported to transformers folders, loaded and scored again."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import lmtool
from lmtool.cli import main as cli
from tests.breadth import slow_but
from tests.commands.conftest import GOOD, TINY, follow_card, merge_overrides, sentence


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with SQuAD files in questions/."""
    monkeypatch.chdir(tmp_path)
    chance = random.Random(2)
    (tmp_path / "questions").mkdir()
    for split, count in (("train", 12), ("dev", 5)):
        paragraphs = []
        for number in range(count):
            context = " ".join(sentence(chance, GOOD) for _ in range(4))
            word = context.split()[2]
            gold = [{"text": word, "answer_start": context.index(word)}]
            asked = [{"id": f"{number}a", "question": "who saw it?", "answers": gold, "is_impossible": False}]
            asked.append({"id": f"{number}b", "question": "who else?", "answers": [], "is_impossible": True})
            paragraphs.append({"context": context, "qas": asked})
        content = {"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}
        (tmp_path / "questions" / f"{split}.json").write_text(json.dumps(content))
    return tmp_path


def run(*words: str, status: int = 0) -> None:
    assert cli.main([*words, "offline=true"]) == status


def finetune(model: str) -> None:
    words = ["task=squad_v2", "task.path=questions", "checkpoint=none", "max_steps=2", "cache_dir=cache", "name=run"]
    assert cli.main(["finetune", f"model={model}", *merge_overrides(TINY, words), "batch_examples=8"]) == 0


@pytest.mark.parametrize("model", slow_but({"bert_tiny"}, ["bert_tiny", "gpt_tiny", "bart_tiny"]))
def test_exported_qa_run_has_same_scores(model: str, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finetune(model)
    run("export", "checkpoint=runs/run", "output=exported")
    follow_card("exported")
    out = capsys.readouterr().out
    assert "ForQuestionAnswering" in out and "null_threshold (transformers compares with 0)" in out
    again = lmtool.load("exported")
    assert again.model.parts.scores_tokens
    # With the same threshold, the folder has the scores of the run.
    scores = []
    for folder in ("runs/run", "exported"):
        run("evaluate", f"checkpoint={folder}", "task=squad_v2", "task.path=questions", "task.null_threshold=0.1")
        scores.append(capsys.readouterr().out.split("\n", 1)[1])
    assert scores[0] == scores[1] and "best_f1" in scores[0]
    run("predict", "checkpoint=exported", "text=who saw it?", "pair=The warm king saw a cat.")
    assert "who saw it?" in capsys.readouterr().out
    run("predict", "checkpoint=runs/run", "input=questions/dev.json", "output=answers.jsonl")
    records = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert len(records) == 10 and records[1]["id"] == "0b"
    for record in records:
        assert record["prediction"] == record["context"][record["start"] : record["end"]]
