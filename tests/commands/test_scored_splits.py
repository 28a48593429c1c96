"""A labeled test split is scored once, at the end of a run; `evaluate` scores all rows of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from tests.commands.conftest import TINY, finetune


@pytest.mark.usefixtures("reports")
def test_labeled_test_split_is_scored_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path("rows/dev.tsv").read_text().splitlines()
    Path("rows/test.tsv").write_text("\n".join(lines[:13]) + "\n")
    run = finetune("run", "model=bert_tiny", "checkpoint=none", *TINY, "max_steps=2")
    result = json.loads((run / "result.json").read_text())
    assert result["tests"]["test"]["examples"] == 12 and 0 <= result["tests"]["test"]["accuracy"] <= 1
    shown = capsys.readouterr().out
    assert "selected on these 40 rows" in shown and "on 12 rows, scored once" in shown
    report = (run / "report.html").read_text()
    assert "selected on these 40 rows" in report and "on 12 rows, scored once" in report
    # Evaluations during training do not use the test split.
    assert not any("test" in line for line in (run / "metrics.jsonl").read_text().splitlines())
    assert cli.main(["evaluate", "checkpoint=runs/run", "task=rows/test.tsv", "cache_dir=cache", "device=cpu"]) == 0
    assert "n = 12" in capsys.readouterr().out


def test_unlabeled_test_rows_are_not_scored(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows/test.tsv").write_text("index\tsentence\n0\ta text\n")
    run = finetune("run", "model=bert_tiny", "checkpoint=none", *TINY, "max_steps=1")
    assert "tests" not in json.loads((run / "result.json").read_text())
    assert "scored once" not in capsys.readouterr().out
