"""Rows of finished runs: kept, found again, never mixed."""

from __future__ import annotations

import math

import pytest


def test_rows_are_kept_and_found_again(script, tmp_path):
    rows = script("rows").Rows(tmp_path / "out", ("side", "seed"), {"examples": 8})
    for seed in (3, 1):
        rows.add({"side": "one", "seed": seed, "value": seed / 10})
    again = script("rows").Rows(tmp_path / "out", ("side", "seed"), {"examples": 8})
    assert again.has("one", 3) and again.has("one", 1)
    assert not again.has("other", 1) and not again.has("one", 2)
    assert again.values("value", side="one") == [0.1, 0.3]


def test_rows_of_other_settings_are_not_mixed(script, tmp_path, capsys):
    script("rows").Rows(tmp_path, ("seed",), {"examples": 8})
    with pytest.raises(SystemExit) as ended:
        script("rows").Rows(tmp_path, ("seed",), {"examples": 9})
    assert ended.value.code == 2
    assert "examples 8, not 9" in capsys.readouterr().err


def test_mean_and_standard_error(script):
    mean, error = script("rows").mean_and_error([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3) and error == pytest.approx(math.sqrt(7 / 3) / math.sqrt(3))
    assert math.isnan(script("rows").mean_and_error([1.0])[1])
