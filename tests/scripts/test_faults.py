"""The trials of scripts/faults.py: a small sample of each kind passes, a defect is detected, and a stopped script
resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults.py"


def run(output: Path, *words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the script, or the given code, with an output folder."""
    start = ["-c", code] if code else [str(SCRIPT)]
    command = [sys.executable, *start, "--output", str(output), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=output.parent, check=False)


QUICK = ("--quick", "--only", "tables,typos")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A small sample of the two kinds that train nothing, with its output folder."""
    output = tmp_path_factory.mktemp("faults") / "out"
    return output, run(output, *QUICK)


@pytest.mark.slow
def test_small_sample_of_each_kind_passes(tmp_path: Path) -> None:
    done = run(tmp_path / "out", "--quick")
    assert passed_kinds(tmp_path / "out", done) == 14


@pytest.mark.slow
def test_small_sample_of_two_kinds_passes(quick: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    assert passed_kinds(*quick) == 2


def passed_kinds(output: Path, done: subprocess.CompletedProcess[str]) -> int:
    """The number of sampled kinds, after checking that every trial passed."""
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]
    kinds = {row["kind"] for row in rows}
    assert all(f"\n{kind} " in done.stdout for kind in kinds)
    assert "the right name comes first in " in done.stdout
    assert not [row for row in rows if row["outcome"].isupper()]
    return len(kinds)


PADDING_READER = f"""
import runpy, sys
sys.path[:0] = [{str(SCRIPT.parents[1])!r}, {str(SCRIPT.parent)!r}]
from lmtool.data import tables
def padded(path, records, header, skip_ragged, rows, before=tables._from_records):
    width = 0
    def even():
        nonlocal width
        for number, cells in records:
            width = width or len(cells)
            yield number, (cells + [""] * width)[:width]
    return before(path, even(), header, skip_ragged, rows)
tables._from_records = padded
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_defective_reader_is_detected(tmp_path: Path, script: Any) -> None:
    """A trial with a ragged line fails if the reader silently pads such lines."""
    tables, trial_rng = import_module("tests.faults.inputs"), import_module("tests.faults.outcomes").trial_rng

    def is_ragged(seed: int) -> bool:
        form, role = tables.FORMATS[seed % 3], tables.TABLE_ROLES[seed // 3 % len(tables.TABLE_ROLES)]
        name, table = tables.faulty_table(trial_rng("tables", seed), form, role)
        return role != "corpus" and name in ("an extra column", "an extra cell") and bool(table.line)

    seed = next(seed for seed in range(1000) if is_ragged(seed))
    done = run(tmp_path / "out", "--only", "tables", "--seed", str(seed), code=PADDING_READER)
    assert done.returncode == 3 and "SILENT: " in done.stdout and "read without a message" in done.stdout, done.stderr
    done = run(tmp_path / "out", "--only", "tables", "--seed", str(seed))
    assert done.returncode == 0 and "refused: " in done.stdout, done.stdout


@pytest.mark.slow
def test_stopped_script_resumes(quick: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    output, before = quick
    rows = (output / "rows.jsonl").read_text().splitlines()
    kept = [row for row in rows if '"typos"' not in row]
    assert len(kept) < len(rows)
    (output / "rows.jsonl").write_text("".join(f"{row}\n" for row in kept))
    done = run(output, *QUICK)
    again = (output / "rows.jsonl").read_text().splitlines()
    assert again[: len(kept)] == kept and len(again) == len(rows)
    assert done.stdout == before.stdout  # same table


ANSWERS: list[tuple[int | None, str, str, str]] = [
    (None, "", "", "HANG"),
    (-6, "", "", "TRACEBACK"),
    (1, "", "ValueError: no\n", "TRACEBACK"),
    (0, "Traceback (most recent call last)\n", "", "TRACEBACK"),
    (2, "", "thread 'main' panicked at src/lib.rs\n", "TRACEBACK"),
    (2, "", "error: no \x1b[31m\nhint: x\n", "ESCAPE"),
    (0, "name \x9b31m\n", "", "ESCAPE"),
    (2, "", "no\n", "UNCLEAR"),
    (2, "", "error: no\n", "UNCLEAR"),
]


@pytest.mark.parametrize(("status", "out", "err", "outcome"), ANSWERS)
def test_unacceptable_answers_fail_a_trial(status: int | None, out: str, err: str, outcome: str, script: Any) -> None:
    commands = import_module("tests.faults.harness")
    with pytest.raises(commands.TrialFailed) as failed:
        commands.require_sound(commands.Answer(("pretrain",), status, out, err))
    assert failed.value.verdict.outcome.value == outcome
    good = commands.Answer(("pretrain",), 2, "", "error: no\nhint: yes\n")
    assert commands.require_sound(good) is good


def test_table_and_failures_are_formatted(script: Callable[[str], ModuleType]) -> None:
    faults = script("faults")
    rows = [
        {"kind": "kills", "seed": 0, "outcome": "recovered", "detail": "fine"},
        {"kind": "kills", "seed": 1, "outcome": "SILENT", "detail": "other weights"},
        {"kind": "typos", "seed": 0, "outcome": "refused", "detail": "fine"},
    ]
    assert faults.table(rows, {"kills": 3, "typos": 1}).splitlines() == [
        "kind   trials  recovered    refused     SILENT",
        "kills       2          1                     1  (1 not run)",
        "typos       1                     1           ",
    ]
    assert faults.failures(rows) == "SILENT  other weights\n    scripts/faults.py --only kills --seed 1"
