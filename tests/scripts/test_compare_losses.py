"""Comparison of losses and weights between two trees, with handwritten runs in place of real ones."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

# Copies the prepared run of its tree for each job; the clone is empty here.
FAKE_WORKER = """
import json, os, shutil, sys
for name in json.loads(sys.argv[1]):
    shutil.copytree(os.path.join("..", "mine" if os.listdir(os.environ["PYTHONPATH"]) else "theirs"), name)
    print(json.dumps([name, 0]), flush=True)
"""


def write_run(folder: Path, losses=(2.0, 1.0), weights=None) -> Path:
    """A run folder as lmtool writes it: one step per loss, and an evaluation."""
    checkpoint = folder / "checkpoints" / "step_00000002"
    checkpoint.mkdir(parents=True)
    (folder / "checkpoints" / "last").write_text("step_00000002\n")
    rows = [
        {"step": step, "split": "train", "loss": loss, "tokens_per_second": id(folder)}
        for step, loss in enumerate(losses, 1)
    ]
    rows.append({"step": len(losses), "split": "validation", "loss": 1.5, "mlm_loss": 1.5, "accuracy": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file(weights or {"backbone.w": torch.ones(2, 3), "heads.b": torch.zeros(3)}, checkpoint / "model.safetensors")
    return folder


def test_compare_ignores_speed(script, tmp_path):
    result = script("compare_losses").compare(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    assert (result.losses, result.tensors, result.differences) == (4, 2, ())


def test_nan_losses_compare_equal(script, tmp_path):
    runs = [write_run(tmp_path / name, losses=(math.nan,)) for name in "ab"]
    assert script("compare_losses").compare(*runs).differences == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses": (2.0, math.nextafter(1.0, 2.0))}, "train loss of step 2: 1.0000000000000002, not 1.0"),
        ({"losses": (2.0,)}, "train loss of step 2: None, not 1.0"),
        ({"weights": {"backbone.w": torch.ones(2, 3)}}, "heads.b: missing"),
        ({"weights": {"backbone.w": torch.ones(3, 2), "heads.b": torch.zeros(3)}}, "backbone.w: (3, 2)"),
        ({"weights": {"backbone.w": torch.ones(2, 3), "heads.b": -torch.zeros(3)}}, "heads.b: differs by 0 at most"),
        (
            {"weights": {"backbone.w": torch.full((2, 3), 1.0 + 2**-23), "heads.b": torch.zeros(3)}},
            "backbone.w: differs by 1.19e-07 at most",
        ),
    ],
)
def test_compare_reports_smallest_difference(script, tmp_path, changes, said):
    result = script("compare_losses").compare(write_run(tmp_path / "a", **changes), write_run(tmp_path / "b"))
    assert result.differences[0].startswith(said)


def test_jobs_cover_experiments_architectures_and_mixture(script):
    compare = script("compare_losses")
    jobs = compare.jobs_of(compare.ROOT)
    experiments = {path.stem for path in (compare.ROOT / "conf" / "experiment").glob("*_tiny.yaml")}
    assert experiments and experiments < set(jobs)
    assert {"finetune_bert", "finetune_gpt", "finetune_t5", "mixture", "albert_tiny"} <= set(jobs)
    assert all(
        {"max_steps=50", "log_every=1", "max_minutes=null", "offline=true"} <= set(words) for words in jobs.values()
    )
    # A finetuning run includes the pretraining run that it starts from, and comes after it.
    assert list(compare.select_jobs(jobs, ["finetune_gpt", "mixture"])) == ["gpt_tiny", "finetune_gpt", "mixture"]
    with pytest.raises(SystemExit) as ended:
        compare.select_jobs(jobs, ["bert"])
    assert ended.value.code == 2


def test_unfinished_jobs_are_run_again(script, tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "result.json").write_text("{}")
    write_run(tmp_path / "half")
    assert list(script("compare_losses").unfinished_jobs(tmp_path, {"whole": [], "half": [], "new": []})) == [
        "half",
        "new",
    ]
    assert not (tmp_path / "half").exists()


@pytest.mark.parametrize(("drift", "status"), [(0.0, 0), (1e-9, 3)])
def test_exit_status_is_3_if_losses_differ(script, monkeypatch, tmp_path, capfd, drift, status):
    compare = script("compare_losses")
    write_run(tmp_path / "mine", losses=(2.0, 1.0 + drift))
    write_run(tmp_path / "theirs")
    monkeypatch.setattr(compare, "git", lambda *words, cwd=None: "0123456789abcdef")
    monkeypatch.setattr(compare, "WORKER", FAKE_WORKER)
    monkeypatch.setattr(sys, "argv", ["compare_losses.py", "HEAD", "--jobs", "mixture", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == status
    assert ("equal" in capfd.readouterr().out) == (status == 0)
