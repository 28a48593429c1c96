"""`lmtool inspect`: examples as the model reads them, statistics, exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lmtool import cli
from tests.commands.conftest import TINY

DATA = ["data=text", "data.path=text.txt", "cache_dir=cache"]
CASES = {
    "mlm_nsp": ("bert_tiny", {"mlm", "nsp"}),
    "span": ("bert_tiny", {"mlm", "sbo"}),
    "rtd": ("bert_tiny", {"mlm", "rtd"}),
    "clm": ("gpt_tiny", {"clm"}),
    "prefix_lm": ("gpt_tiny", {"prefix_lm"}),
    "span_corruption": ("t5_tiny", {"span_corruption"}),
    "denoising": ("bart_tiny", {"denoising"}),
}


def inspect(*words: str) -> int:
    return cli.main(["inspect", *words, *TINY, "tokens=4000"])


@pytest.mark.parametrize("objective", CASES)
def test_pretraining(place: Path, capsys: pytest.CaptureFixture[str], objective: str) -> None:
    model, terms = CASES[objective]
    assert inspect("pretrain", f"model={model}", f"objective={objective}", *DATA, "n=2", "output=seen.jsonl") == 0
    printed = capsys.readouterr().out
    assert "example 0" in printed and "DOES NOT HOLD" not in printed
    # Causal language modelling changes nothing: there is no interval to hold.
    assert "what has no definition is only told" in printed
    assert ("hold together with 99.9%" in printed) == (objective != "clm")
    examples = [json.loads(line) for line in Path("seen.jsonl").read_text().splitlines()]
    assert len(examples) == 2
    if objective == "mlm_nsp":
        assert all(one["text"].count(" ⏎ ") == 1 for one in examples), "where one text ends can be seen"
    for one in examples:
        assert set(one["targets"]) == terms and one["text"]
        sides = [one["input"], *([one["output"]] if "output" in one else [])]
        assert all(len(side["pieces"]) == len(side["ids"]) <= 32 for side in sides)
        side = sides[-1]
        for places in one["targets"].values():
            if isinstance(places, list):
                assert all(0 <= place["position"] < len(side["ids"]) and place["label"] for place in places)
    if objective == "span":
        borders = [place["borders"] for one in examples for place in one["targets"]["sbo"]]
        assert borders and all(first < last for first, last in borders)
    assert not Path("runs").exists()


def test_finetuning(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["task=sst2", "task.path=rows", "model=bert_tiny", "checkpoint=none", "cache_dir=cache"]
    assert inspect(*words, "n=1", "output=seen.jsonl") == 0
    (one,) = map(json.loads, Path("seen.jsonl").read_text().splitlines())
    assert one["text"].startswith("The ") and one["targets"]["sst2"] in ("negative", "positive", "0", "1")
    assert "truncated fraction" in capsys.readouterr().out


def test_a_deviation_exits_3(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtool.objectives.masking.budget", lambda eligible, _: np.minimum(eligible, 2))
    assert inspect("pretrain", "model=bert_tiny", "objective=mlm", *DATA, "n=0") == 3
    told = capsys.readouterr()
    assert "DOES NOT HOLD" in told.out and "error: 1 of" in told.err and "examples off their budget" in told.err


@pytest.mark.parametrize("words", [["n=some"], ["tokens=0"], ["predict"], ["n=1", "output=none/there.jsonl"]])
def test_mistakes_exit_2(place: Path, words: list[str]) -> None:
    assert cli.main(["inspect", *words, "model=bert_tiny", *TINY, *DATA]) == 2


def test_help_names_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--help"]) == 0
    assert "output=FILE" in capsys.readouterr().out
