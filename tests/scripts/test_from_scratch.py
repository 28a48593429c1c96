"""The comparison of starts really runs here, from a tiny pretrained run."""

from __future__ import annotations

import json
import sys

import pytest

from tests.commands.conftest import pretrain, skip_reports, write_rows, write_text


@pytest.fixture
def words(tmp_path, monkeypatch):
    """What is typed: a run, labelled rows, and lists with commas before further keys."""
    monkeypatch.chdir(tmp_path)
    skip_reports(monkeypatch)
    write_text(tmp_path / "text.txt")
    write_rows(tmp_path / "rows")
    run = pretrain("start")
    further = ["max_epochs=10", "device=cpu", "precision=fp32", "cache_dir=cache"]
    return ["--checkpoint", str(run), "--path", "rows", "--examples", "96", "--output", "out", *further]


def run(script, monkeypatch, words):
    """The exit status of the script."""
    monkeypatch.setattr(sys, "argv", ["from_scratch.py", *words])
    try:
        script("from_scratch").main()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.slow
def test_each_start_takes_its_best_rate_and_finished_runs_stay(script, monkeypatch, capfd, words, tmp_path):
    # The first rate changes nothing, with the second both starts learn the adjectives.
    typed = [*words, "--rates", "1e-7,1e-2", "--seeds", "1,2"]
    assert run(script, monkeypatch, typed) == 0
    text = (tmp_path / "out/rows.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 8 and {(row["steps"], row["validation_examples"]) for row in rows} == {(30, 40)}
    table = capfd.readouterr().out.split("96 training rows, 40 scored")[1]
    for start in ("pretrained", "scratch"):
        tried = {row["rate"]: row["value"] for row in rows if row["start"] == start and row["seed"] == 0}
        counted = [row for row in rows if row["start"] == start and row["seed"]]
        assert tried[1e-2] > tried[1e-7]
        assert [(row["rate"], row["seed"]) for row in counted] == [(1e-2, 1), (1e-2, 2)]
        assert f"{sum(row['value'] for row in counted) / 2:.4f}" in next(
            line for line in table.splitlines() if line.strip().startswith(start)
        )
    assert run(script, monkeypatch, typed) == 0
    assert (tmp_path / "out/rows.jsonl").read_text() == text


def test_both_starts_are_the_same_model(script, words):
    """Random weights, but the checkpoint's family, sizes, positions and tokenizer."""
    wanted = script("from_scratch").words_of("scratch", words[1])
    assert wanted[:3] == ["checkpoint=none", "model=bert", "model/positions=learned"]
    assert {"model.num_layers=1", "model.hidden_size=32", "model.vocab_size=400"} <= set(wanted)
    assert wanted[-2:] == ["tokenizer=folder", f"tokenizer.path={words[1]}"]


def test_what_it_refuses(script, monkeypatch, capsys, words):
    assert run(script, monkeypatch, [*words, "--rates", "1e-3,1e-2", "--seeds", "0,1"]) == 2
    assert "seed 0 chooses the rate" in capsys.readouterr().err
    assert run(script, monkeypatch, [*words, "--seeds", "1 2"]) == 2
    assert "invalid int list value: '1 2'" in capsys.readouterr().err
