"""The benchmark's figures and tables, from made-up rows and made-up workers: nothing is timed, no peer is needed."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"

# Answers as scripts/peers.py does, at a made-up rate: lmtool four times as fast, in half the memory.
FAKE_WORKER = """
import json, sys
variant = sys.argv[1]
own = variant.startswith("lmtool")
if "broken" in json.loads(sys.argv[3]):
    sys.exit("RuntimeError: out of paper")
print(json.dumps({"ready": variant, "imports_bytes": 10, "parameters": 7}), flush=True)
for line in sys.stdin:
    steps = json.loads(line)["steps"]
    seconds = steps * (0.25 if own else 1.0)
    row = {"steps": steps, "tokens": 100 * steps, "examples": steps, "slots": 200 * steps}
    print(json.dumps({**row, "seconds": seconds, "peak_bytes": 60 if own else 110}), flush=True)
"""


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["benchmark"]


def turn(variant, round_number, seconds, tokens=1000, slots=1000, examples=16, peak=200, imports=100):
    return {
        "kind": "turn", "work": "masked_lm", "variant": variant, "round": round_number, "steps": 1, "seconds": seconds,
        "tokens": tokens, "slots": slots, "examples": examples, "peak_bytes": peak, "imports_bytes": imports,
    }  # fmt: skip


@pytest.fixture
def rows():
    """Three rounds; the machine is twice as slow in the second, for all alike. The fourth was cut short."""
    lines = []
    for number, (slow, own) in enumerate([(1, 1.0), (2, 1.0), (1, 1.25)]):
        lines.append(turn("trainer_lines", number, 8.0 * slow, slots=2000, peak=400))
        lines.append(turn("trainer_packed", number, 4.0 * slow, tokens=2000, slots=2000, peak=500))
        lines.append(turn("lmtool_language_model", number, own * slow, peak=250))
    return [*lines, turn("trainer_lines", 3, 1.0, slots=2000, peak=400)]


def test_ratios_are_taken_within_their_round(benchmark, rows):
    lines, packed = benchmark.ratios(benchmark.WORKS[0], rows)
    assert (lines["median"], lines["smallest"], lines["largest"], lines["rounds"]) == (8.0, 6.4, 8.0, 3)
    assert (packed["median"], packed["smallest"], packed["largest"]) == (2.0, 1.6, 2.0)
    assert (lines["memory"], lines["memory_above_imports"]) == (250 / 400, 150 / 300)
    assert (packed["memory"], packed["memory_above_imports"]) == (250 / 500, 150 / 400)
    assert (lines["aim"], packed["aim"]) == (6.0, 3.0)


def test_the_table_says_what_was_measured(benchmark, rows):
    table = benchmark.compose(benchmark.WORKS[0], rows)
    padded = next(line for line in table.splitlines() if "padded to the longest" in line)
    assert "50%" in padded and "125" in padded  # half of the places are padding; the median of 125, 62.5, 125, 1000
    assert "8.00x" in table and "(6.40-8.00)" in table and "0.62x" in table
    assert "first rival had the same examples: yes" in table


def test_a_table_without_rows_or_with_different_examples_says_so(benchmark, rows):
    assert benchmark.compose(benchmark.WORKS[1], rows).count("not measured") == len(benchmark.WORKS[1].variants)
    rows[0]["tokens"] += 1
    assert "had the same examples: no" in benchmark.compose(benchmark.WORKS[0], rows)


def test_turns_alternate_and_each_round_has_every_variant(benchmark):
    for work in benchmark.WORKS:
        there, back = benchmark.order_of(work, 0), benchmark.order_of(work, 1)
        assert there == back[::-1] and set(there) == set(work.variants)
        assert there[0] is not work.own and there[-1] is not work.own


def test_workers_take_turns_until_the_rounds_are_done(benchmark, tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(FAKE_WORKER)
    monkeypatch.setattr(benchmark, "WORKERS", script)
    settings = {"threads": 1, "rounds": 3, "turn_seconds": 5.0}
    rows: list = []
    work = benchmark.WORKS[1]
    benchmark.measure(work, tmp_path, settings, time.monotonic() + 60, rows.append)
    assert json.loads(json.dumps(rows)) == rows
    for variant in work.variants:
        own = benchmark.turns(rows, variant.name)
        assert [row["round"] for row in own] == [0, 1, 2]
        assert {row["steps"] for row in own} == {benchmark.GROUPED_STEPS if variant.steps else 5}
    assert {row["median"] for row in benchmark.ratios(work, rows)} == {4.0}
    assert {row["memory"] for row in benchmark.ratios(work, rows)} == {60 / 110}


def test_a_worker_that_ends_early_is_one_line_with_its_log(benchmark, tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(FAKE_WORKER)
    monkeypatch.setattr(benchmark, "WORKERS", script)
    with pytest.raises(benchmark.Failed, match="out of paper") as caught:
        benchmark.Worker(benchmark.WORKS[0].own, tmp_path, {"threads": 1, "broken": True})
    assert caught.value.status == 1 and ".log" in caught.value.hint


def test_without_the_peer_one_line_says_what_to_type(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["benchmark.py"])
    with pytest.raises(SystemExit) as caught:
        benchmark.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: the peer is not installed: transformers and accelerate",
        "hint: make bench",
    ]


def test_the_machine_line_warns_of_company(benchmark):
    machine = {"processor": "P", "cores": 2, "torch": "1", "transformers": "2", "lmtool": "3"}
    quiet = benchmark.machine_line({**machine, "load_before": 0.1, "gflops": {"fp32": 15.2, "bf16": 60.0}})
    assert "fp32 15, bf16 60 GFLOP/s" in quiet and "do not trust" not in quiet
    assert "do not trust" in benchmark.machine_line({**machine, "load_before": 3.0})
