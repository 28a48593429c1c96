"""The cost of long texts: rows are kept, and what is printed of them is the power by which they grow."""

from __future__ import annotations

import sys

import pytest

from tests.breadth import slow_but


def test_rows_are_measured_once(script, monkeypatch, tmp_path, capsys):
    module = script("long_texts")
    measured = []

    def row(side, length):
        """Full attention is quadratic, the others are linear."""
        measured.append((side, length))
        cost = length**2 / 1000 if side == "full" else length
        return {"layers": 1, "hidden_size": 64, "side": side, "length": length, "seconds": cost, "bytes": 2 * cost}

    monkeypatch.setattr(module, "in_its_process", row)
    output = tmp_path / "rows.jsonl"
    words = ["long_texts.py", "--output", str(output), "--hidden-size", "64", "--lengths"]
    for lengths in (["100", "200"], ["100", "200", "400"]):
        monkeypatch.setattr(sys, "argv", [*words, *lengths])
        module.main()
    assert sorted(measured) == sorted((side, length) for side in module.SIDES for length in (100, 200, 400))
    assert len(output.read_text().splitlines()) == 9
    printed = capsys.readouterr().out.splitlines()[-3:]
    assert printed == [
        f"{side} grows by a power of the length of: seconds {power}, bytes {power}"
        for side, power in (("blocks", "1.00"), ("full", "2.00"), ("transformers", "1.00"))
    ]


@pytest.mark.parametrize("side", slow_but({"blocks"}, ["blocks", "full", "transformers"]))
def test_every_side_can_be_measured(side, script, monkeypatch):
    module = script("long_texts")
    monkeypatch.setattr(
        sys, "argv", ["long_texts.py", "--output", "-", "--hidden-size", "64", "--repeats", "1", "--one", side, "768"]
    )
    printed = []
    monkeypatch.setattr("builtins.print", printed.append)
    module.main()
    row = module.json.loads(printed[0])
    assert row["side"] == side and row["length"] == 768 and row["seconds"] > 0
