"""The comparison of ways to learn from a few rows really runs here, from a tiny masked language model."""

from __future__ import annotations

import json
import sys

import pytest

from tests.commands.conftest import pretrain, skip_reports, write_rows, write_text


@pytest.fixture
def words(tmp_path, monkeypatch):
    """What is typed: a task and its rows, a run, small numbers, the words of the classes."""
    monkeypatch.chdir(tmp_path)
    skip_reports(monkeypatch)
    write_text(tmp_path / "text.txt")
    write_rows(tmp_path / "rows")
    run = pretrain("start", "max_steps=2", "max_length=64", "batch_tokens=512")
    numbers = ["--shots", "4", "--steps", "2", "--batch", "4", "--seeds", "13,21", "--output", "out"]
    keys = ["sst2:task.prompt.words={negative: awful, positive: lovely}", "cola:no.key=1", "pet:no.key=1", "device=cpu",
            "precision=fp32", "cache_dir=cache", "max_length=64", "lm_bff:task.demonstrations=3"]  # fmt: skip
    return ["sst2=rows", "--checkpoint", str(run), *numbers, *(word for key in keys for word in ("--set", key))]


def run(script, monkeypatch, words):
    """The exit status of the script."""
    monkeypatch.setattr(sys, "argv", ["few_shot.py", *words])
    try:
        script("few_shot").main()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.slow
def test_all_ways_learn_the_same_rows_and_finished_runs_stay(script, monkeypatch, capfd, words, tmp_path):
    typed = [*words, "--rates", "1e-7,1e-2", "--head-rates", "1e-2", "--ways", "head,lm_bff"]
    assert run(script, monkeypatch, typed) == 0
    text = (tmp_path / "out/rows.jsonl").read_text()
    zero, *rows = map(json.loads, text.splitlines())
    assert (zero["way"], zero["scored"]) == ("zero", 40)
    assert len(rows) == 6 and {(row["steps"], row["scored"]) for row in rows} == {(2, 40)}
    for way, demonstrations in (("head", 0), ("lm_bff", 3)):
        (config,) = (tmp_path / "out").glob(f"sst2-{way}-0.01-13/config.yaml")
        assert f"demonstrations: {demonstrations}\n" in config.read_text()
    for seed in (13, 21):
        assert len({json.dumps(row["few_shot"]) for row in rows if row["seed"] == seed}) == 1
    table = capfd.readouterr().out.split("4 rows of a class, 40 scored, seeds 13, 21")[-1]
    for way in ("head", "lm_bff"):
        picked = []
        for seed in (13, 21):
            tried = [row for row in rows if (row["way"], row["seed"]) == (way, seed)]
            picked.append(max(tried, key=lambda row: (row["development"], -row["development_loss"]))["value"])
        line = next(line for line in table.splitlines() if line.strip().startswith(way))
        assert f"{sum(picked) / 2:.4f}" in line and f"{max(picked):.4f}" in line
    assert f"zero    {zero['metrics']['accuracy']:.4f}" in table
    assert run(script, monkeypatch, typed) == 0
    assert (tmp_path / "out/rows.jsonl").read_text() == text


def test_what_it_refuses(script, monkeypatch, capsys, words):
    assert run(script, monkeypatch, [*words, "--ways", "best"]) == 2
    assert "--ways best: one of head, full, pet, lm_bff" in capsys.readouterr().err
    assert run(script, monkeypatch, ["sst2"]) == 2
    assert "sst2: give TASK=FOLDER" in capsys.readouterr().err
    assert run(script, monkeypatch, ["sst2=rows"]) == 2
    assert "no --checkpoint, and no --texts" in capsys.readouterr().err
