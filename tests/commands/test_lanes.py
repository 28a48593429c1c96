"""State carried along lanes in the commands: refused combinations, checkpoints, evaluation, and `inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmtool.cli import main as cli
from lmtool.runs.finding import CARRIED, saved_steps
from tests.commands.conftest import merge_overrides, pretrain, tiny

MODEL = "transformer_xl_tiny"
WORDS = ["pretrain", f"model={MODEL}", *tiny(MODEL), "data=text", "data.path=text.txt", "max_steps=2", "--cfg", "job"]
REFUSED = {
    "devices=2": "model=transformer_xl carries state from batch to batch, which stays within one process",
    "max_length=500": "max_length=500 after a memory of 192 tokens is more than model.max_positions=512",
    "phases=[{share: 0.5, max_length: 16}, {max_length: 32}]": "phases.0 sets max_length=16: model=transformer_xl",
    "distill=self": "carries state from batch to batch, but the other model does not",
    "objective=prefix_lm": "prefix_lm needs bidirectional attention between the first tokens",
}


@pytest.mark.parametrize("word", REFUSED)
def test_options_that_conflict_with_lanes_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert cli.main(merge_overrides(WORDS, [word])) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert REFUSED[word] in printed and "hint: " in printed
    if word.startswith(("devices", "phases")):
        assert cli.main([*WORDS, word, "data.documents=separate"]) == 0


def test_xlnet_memory_needs_objective_reuse(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word.replace(MODEL, "xlnet_tiny") for word in WORDS[:2]] + [*tiny("xlnet_tiny"), *WORDS[-5:]]
    assert cli.main([*words, "model.memory_length=24"]) == 2
    assert "model.memory_length=24 caches the states of reused tokens, but objective.reuse=0" in capsys.readouterr().err
    assert cli.main([*words, "model.memory_length=24", "objective.reuse=8"]) == 0
    assert cli.main([*words, "model.memory_length=24", "data.documents=separate"]) == 0
    assert cli.main([*words, "model.memory_length=24", "objective.reuse=8", "devices=2"]) == 2
    assert cli.main([*(word.replace("xlnet", "bert") for word in words), "objective=plm"]) == 2
    assert "plm trains a model with a query stream; model=bert has no query stream" in capsys.readouterr().err


def test_carried_state_is_saved_and_evaluated(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = pretrain("xl", "model.memory_length=24", "model.initializer_std=0.4", "evaluate_every=3", model=MODEL)
    result = json.loads((run / "result.json").read_text())
    newest = saved_steps(run / "checkpoints")[0]
    (memory,) = load_file(newest / CARRIED).values()
    assert memory.shape == (8, 1, 24, 32) and torch.isfinite(memory).all() and memory.abs().sum(-1).min() > 0
    capsys.readouterr()
    scores = []
    for words in ([], ["memory_length=64", "max_length=16"], ["memory_length=0"]):
        assert cli.main(["evaluate", "checkpoint=runs/xl", "cache_dir=cache", "device=cpu", *words]) == 0
        printed = capsys.readouterr().out
        scores.append(float(printed.split("loss")[1].split()[0]))
        assert f"each with a memory of {words[0].split('=')[1] if words else 192} tokens" in printed
    assert scores[0] == pytest.approx(result["metrics"]["loss"], abs=1e-4) and len(set(scores)) == 3
    assert cli.main(["evaluate", "checkpoint=runs/xl", "memory_length=490", "cache_dir=cache"]) == 2
    assert "set memory_length=480 or lower" in capsys.readouterr().err
    assert cli.main(["export", "checkpoint=runs/xl", "output=out"]) == 2
    assert "transformer_xl" in capsys.readouterr().err
    assert cli.main(["generate", "checkpoint=runs/xl", "prompt=the cat", "max_new_tokens=3"]) == 0


def test_evaluate_reports_overlapping_windows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("xlnet", "model.memory_length=24", "objective.reuse=8", "max_steps=1", model="xlnet_tiny")
    capsys.readouterr()
    assert cli.main(["evaluate", "checkpoint=runs/xlnet", "cache_dir=cache", "device=cpu"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "stream of text in windows of 32 tokens, 8 apart, each with a memory of 24 tokens" in printed
    assert "word perplexity" not in printed


def test_run_without_lanes_reports_no_carried_state(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "{name: task, task: {kind: classification, name: sst2, path: rows, text: [sentence]}}"
    pretrain("mixed", "objective=mixture", f"objective.members=[clm,{rows}]", "max_steps=1", model=MODEL)
    printed = " ".join(capsys.readouterr().out.split())
    assert "carries no state from batch to batch: objective=mixture" in printed and "lanes 8" not in printed


def test_inspect_shows_lanes_and_memory(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in WORDS[1:-2] if not word.startswith("max_steps")]
    words = ["inspect", "pretrain", *words, "cache_dir=cache", "model.memory_length=48", "batch_tokens=128", "n=3"]
    assert cli.main([*words, "tokens=1000", "output=seen.jsonl"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "DOES NOT HOLD" not in printed and "fraction of text in no example" in printed
    assert "1 of 4, 64 tokens read before, continues from 48 tokens of memory ..mmmmmmxxxx" in printed
    rows = [json.loads(line) for line in Path("seen.jsonl").read_text().splitlines()]
    assert [row["lane"]["read"] for row in rows] == [0, 32, 64]
