"""Run folders of plain files, as a training command writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.figures import skip_drawing

HOSTILE = '<script>alert("x")</script>\x1b[31m\r\x00 & \' \u202e' + "long " * 2000


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def metric_rows(metric: str | None = None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in (1, *range(10, 310, 10)):
        loss = 5 + 4 * math.exp(-step / 60)
        speed = {"tokens": step * 400, "tokens_per_second": 9000.0, "grad_norm": 1 + 1 / step}
        rows.append({"step": step, "split": "train", "loss": loss, "learning_rate": 1e-4 * (1 - step / 300), **speed})
        if step % 100 == 0:
            scores = {metric: 1 - loss / 20} if metric else {}
            rows.append({"step": step, "split": "validation", "loss": loss + 0.1, **scores})
    return rows


@pytest.fixture
def language_run(tmp_path: Path) -> Path:
    folder = tmp_path / "pydocs-bert_tiny-0001"
    folder.mkdir()
    write_rows(folder / "metrics.jsonl", metric_rows())
    result = {"status": "done", "command": "pretrain", "model": "bert_tiny", "objective": "mlm", "metric": "loss"}
    result |= {"value": 5.12, "standard_error": 0.02, "metrics": {"loss": 5.12}, "steps": 300, "tokens": 120000}
    result |= {"seconds": 95.0, "tokens_per_second": 1263.2, "padding_fraction": 0.0, "seed": 3, "parameters": 1234567}
    (folder / "result.json").write_text(json.dumps(result))
    guesses = [["list", 0.61], ["set", 0.08]]
    masked = {"pieces": ["[CLS]", "return", "the", HOSTILE, "over", "##lap", "[SEP]"]}
    masked["masked"] = [{"position": 3, "truth": HOSTILE, "guesses": guesses}]
    generated = {"prompt": "Once", "text": f"Once upon a time {HOSTILE}"}
    (folder / "samples.json").write_text(json.dumps([masked, generated]))
    metadata = {"data": {"train": {"documents": 1234, "path": HOSTILE}}, "model": {"name": "bert_tiny"}}
    metadata["baseline"] = {"name": "unigram", "metric": "loss", "value": 6.81}
    (folder / "facts.json").write_text(json.dumps(metadata))
    (folder / "config.yaml").write_text(f"seed: 3\nmodel:\n  name: bert\n# {HOSTILE!r}\n")
    (folder / "environment.json").write_text(
        json.dumps({"arguments": ["lmtool", "pretrain", "name=a b"], "x": HOSTILE})
    )
    return folder


def write_task_run(folder: Path, value: float = 0.75, **config: Any) -> Path:
    """Writes a run of a task with 40 predictions, 10 of them wrong, and returns its folder. config: keys of its
    configuration."""
    folder.mkdir()
    write_rows(folder / "metrics.jsonl", metric_rows("accuracy"))
    rows = []
    for number in range(40):
        gold = ("negative", "positive")[number % 2]
        prediction = gold if number % 4 else "positive"
        rows.append({"id": number, "sentence": f"text {number} {HOSTILE if number == 4 else ''}", "gold": gold})
        rows[-1] |= {"prediction": prediction, "score": 0.5 + number / 100}
    write_rows(folder / "predictions.jsonl", rows)
    result = {"status": "done", "command": "finetune", "model": "bert", "task": "sst2", "metric": "accuracy"}
    (folder / "result.json").write_text(json.dumps({**result, "value": value, "seed": 1}))
    baseline = {"name": "majority", "metric": "accuracy", "value": 0.5}
    (folder / "facts.json").write_text(json.dumps({"baseline": baseline}))
    (folder / "config.yaml").write_text(json.dumps({"name": folder.name, "seed": 1, **config}))
    return folder


@pytest.fixture
def task_run(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "sst2-bert-0007", value: float = 0.75, **config: Any) -> Path:
        return write_task_run(tmp_path / name, value, **config)

    return make


@pytest.fixture
def undrawn_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that do not look at the figures."""
    skip_drawing(monkeypatch)
