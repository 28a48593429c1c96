"""`task=glue`: one run per task, one table, the leaderboard's zip; repeating the command trains nothing again."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from tests.commands.conftest import TINY


def write(folder: Path, names: list[str], rows: list[list[object]], split: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(names), *("\t".join(map(str, row)) for row in rows)]
    (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")


def test_glue_trains_one_run_per_task_with_data(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "dev"):
        write(Path("data/SST-2"), ["sentence", "label"], [[f"a text {n}", n % 2] for n in range(12)], split)
        pairs = [[f"a text {n}", f"a thing {n}", ("entailment", "neutral", "contradiction")[n % 3]] for n in range(12)]
        write(Path("data/mnli_small"), ["sentence1", "sentence2", "gold_label"], pairs, split)
    write(Path("data/SST-2"), ["index", "sentence"], [[n, f"a text {n}"] for n in range(3)], "test")
    diagnostic = [[n, "a text", "a thing"] for n in range(2)]
    write(Path("data/diagnostic"), ["index", "sentence1", "sentence2"], diagnostic, "diagnostic")
    words = ["finetune", "task=glue", "task.path=data", "model=bert_tiny", "checkpoint=none", *TINY, "max_steps=1"]
    words += ["cache_dir=cache", "name=all"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "without data: cola, mrpc, stsb, qqp, qnli, rte, wnli" in shown and "of sst2, mnli" in shown
    assert "also asks for: CoLA.tsv, MRPC.tsv" in shown
    summary = json.loads(Path("runs/all/glue.json").read_text())
    assert summary["members"] == ["sst2", "mnli"] and set(summary["scores"]) == {"sst2", "mnli"}
    with zipfile.ZipFile("runs/all/glue.zip") as archive:
        assert archive.namelist() == ["SST-2.tsv", "AX.tsv"]
        lines = archive.read("AX.tsv").decode().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 3
    assert lines[1].split("\t")[1] in ("entailment", "neutral", "contradiction")
    table = Path("data/mnli_small/dev.tsv").read_text().splitlines()
    Path("diagnostic.tsv").write_text("\n".join(table) + "\n")
    evaluate = ["evaluate", "checkpoint=runs/all/mnli", "cache_dir=cache", "device=cpu"]
    assert cli.main([*evaluate, "task=ax", "task.path=diagnostic.tsv"]) == 0
    assert "n = 12" in capsys.readouterr().out
    assert cli.main([*evaluate, "task=cb", "task.path=data/SST-2"]) == 2
    capsys.readouterr()
    written = Path("runs/all/mnli/result.json").stat().st_mtime_ns
    assert cli.main(words) == 0
    assert Path("runs/all/mnli/result.json").stat().st_mtime_ns == written
    assert capsys.readouterr().out.count("is finished") == 2


def test_glue_without_task_folder_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", "task=glue", "model=bert_tiny", "checkpoint=none", "cache_dir=cache"]
    assert cli.main([*words, "task.path=rows"]) == 2
    assert "has no folder that is named after a task of glue" in capsys.readouterr().err
    assert cli.main([*words, "task.path=gone"]) == 2
