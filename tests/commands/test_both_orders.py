"""GPT of 2018 on a symmetric task: commands read both orders of a pair, or refuse by name."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import lmtool
from lmtool.cli import main as cli
from lmtool.errors import UserError
from tests.commands.conftest import BAD, GOOD, KEEP, tiny

PAIRS = [(f"the {one} cat", f"a {two} dog") for one, two in zip(GOOD * 2, GOOD + BAD, strict=True)]
WORDS = ["finetune", "task=stsb", "task.path=pairs", "model=gpt1_tiny", "checkpoint=none", "cache_dir=cache", KEEP]
QUICK = ["max_steps=2", "batch_examples=4", *tiny("gpt1_tiny")]


def write_pairs(swapped: bool = False, folder: str = "pairs") -> None:
    Path(folder).mkdir(exist_ok=True)
    rows = [(*(pair[::-1] if swapped else pair), number % 6) for number, pair in enumerate(PAIRS)]
    for split in ("train", "dev"):
        lines = ["sentence1\tsentence2\tlabel", *("\t".join(map(str, row)) for row in rows)]
        Path(f"{folder}/{split}.tsv").write_text("\n".join(lines) + "\n")


def predictions(folder: str) -> list[float]:
    out = f"{folder}.csv"
    assert cli.main(["predict", "checkpoint=runs/run", f"input={folder}/dev.tsv", f"output={out}", "device=cpu"]) == 0
    with open(out) as file:
        return [float(row["prediction"]) for row in csv.DictReader(file)]


def test_both_orders_in_every_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs()
    write_pairs(swapped=True, folder="swapped")
    assert cli.main([*WORDS, *QUICK, "name=run"]) == 0
    assert predictions("pairs") == pytest.approx(predictions("swapped"), abs=1e-5)
    dev = [json.loads(line) for line in Path("runs/run/predictions.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in dev] == pytest.approx(predictions("pairs"), abs=1e-5)
    loaded = lmtool.load("runs/run")
    assert [row["prediction"] for row in loaded.predict(*map(list, zip(*PAIRS, strict=True)))] == pytest.approx(
        predictions("pairs"), abs=1e-5
    )
    with pytest.raises(UserError, match="reads both orders"):
        loaded.model(**loaded.tokenizer(*map(list, zip(*PAIRS, strict=True))))
    assert cli.main(["evaluate", "runs/run", "task=stsb", "task.path=swapped", "device=cpu"]) == 0
    capsys.readouterr()
    assert cli.main(["export", "checkpoint=runs/run", "output=out"]) == 2
    assert "heads.stsb does not fit transformers'" in capsys.readouterr().err and not Path("out").exists()


@pytest.mark.parametrize("more", ["task.windows=mean", "distill=self"])
def test_what_needs_one_order_is_refused(place: Path, more: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs()
    assert cli.main([*WORDS, *QUICK, "name=run", more]) == 2
    shown = capsys.readouterr().err
    assert "both orders" in shown and "set task.symmetric=false" in shown
    assert cli.main([*WORDS, *QUICK, "name=one", "task.symmetric=false", "task.windows=mean"]) == 0


def test_head_of_one_order_keeps_reading_one(place: Path) -> None:
    """Also if the task that the command names reads both; its checkpoint may be older than the key."""
    write_pairs()
    assert cli.main([*WORDS, *QUICK, "name=run", "task.symmetric=false"]) == 0
    trained = json.loads(Path("runs/run/result.json").read_text())["metrics"]
    words = ["evaluate", "runs/run", "task=stsb", "task.path=pairs", "device=cpu", "report=scored"]
    assert cli.main(words) == 0
    scored = json.loads(Path("scored/evaluation.json").read_text())["splits"]["dev"]["metrics"]
    assert scored["pearson"]["value"] == pytest.approx(trained["pearson"], abs=1e-4)
