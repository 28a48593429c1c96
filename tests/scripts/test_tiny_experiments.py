"""scripts/tiny_experiments.py: the table, and what counts as learned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


METRICS = {
    "loss": 26.0, "mlm_loss": 5.0, "mlm_baseline": 6.0, "mlm_gain_standard_error": 0.1, "mlm_count": 9,
    "rtd_loss": 0.35, "rtd_baseline": 0.36, "rtd_gain_standard_error": 0.005, "other_loss": 3.0,
}  # fmt: skip


def test_terms_with_a_baseline_are_told_apart_from_chance(script) -> None:
    module = script("tiny_experiments")
    terms = dict(module.terms_of(METRICS))
    assert terms["mlm"] == {"loss": 5.0, "baseline": 6.0, "error": 0.1} and list(terms) == ["mlm", "rtd"]
    assert module.clear(terms["mlm"]) == pytest.approx(10) and module.clear(terms["rtd"]) == pytest.approx(2)
    row = {"experiment": "electra_tiny", "terms": terms, "tokens": 10_200_000, "cpu_seconds": 372}
    lines = list(module.table([row]))
    assert lines[2] == "| `electra_tiny` | mlm | 5 | 6 | 10 | 10.2 M | 6.2 |"
    assert lines[3] == "|  | rtd | 0.35 | 0.36 | 2 |  |  |"


def test_an_unknown_experiment_is_refused(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPTS / "tiny_experiments.py"), "--only", "bert_tinny"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no such experiment" in done.stderr and "bert_tiny" in done.stderr
