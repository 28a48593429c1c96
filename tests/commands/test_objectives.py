"""Objectives through the command: the baseline of labels the model makes, members of a mixture, two stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtool import cli
from tests.commands.conftest import TINY, pretrain


def test_the_base_rate_is_told_as_it_was_found(place: Path) -> None:
    folder = pretrain("run", "objective=rtd", "max_steps=3")
    result, facts = (json.loads((folder / name).read_text()) for name in ("result.json", "facts.json"))
    metrics = result["metrics"]
    found = metrics["mlm_baseline"] + 50 * metrics["rtd_baseline"]
    assert result["baseline"] == pytest.approx(found) == facts["baseline"]["value"]
    assert facts["baseline"]["name"] == "unigram and base rate" and facts["data"]


def test_the_second_stage_begins_after_the_first(place: Path) -> None:
    stages = [
        "objective=rtd",
        "objective.training=two_stage",
        "objective.generator_steps=4",
        "objective.generator_size=1",
    ]
    folder = pretrain("run", *stages, "max_steps=8")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["split"] == "train"}
    assert losses.keys() == set(range(1, 9))
    assert max(losses[step] for step in range(1, 5)) < 10, "the generator alone"
    assert min(losses[step] for step in range(5, 9)) > 15, "the model alone, with its weight of 50"


def test_members_must_fit_the_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "model=gpt_tiny", *TINY, "objective=mixture", "objective.members=[mlm,clm]"]
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert "objective.members: objective=mlm trains an encoder; model=gpt is a decoder" in told
    assert "objective.members=[clm,prefix_lm]" in told
