"""`make gpu` on a machine without a GPU: its table from fake workers, and its real workers with tiny sizes."""

from __future__ import annotations

import io
import json
import subprocess
import warnings

import pytest
import torch

# Answers as scripts/timing/worker.py does: lmtool four times as fast as the Trainer, which ends where it is told to.
FAKE_WORKER = """
import json, sys
variant, own = sys.argv[1], sys.argv[1].startswith("lmtool")
print(json.dumps({"ready": variant, "imports_bytes": 10, "flops_per_token": 5e6}), flush=True)
for turn, line in enumerate(sys.stdin):
    if not own and turn == END:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory")
    command = json.loads(line)
    row = {"steps": command["steps"], "tokens": 1000 * command["steps"], "examples": 1, "slots": 1, "graphs": 0}
    row |= {"waits": 2 * command["steps"]} if command["count"] else {}
    print(json.dumps({**row, "seconds": command["steps"] * (0.25 if own else 1.0), "peak_bytes": 2e9}), flush=True)
"""


@pytest.fixture
def gpu(script, monkeypatch, tmp_path):
    """The script with fake workers, on a machine whose products run at 100 GFLOP/s."""
    module = script("gpu")
    monkeypatch.setattr(
        module, "ask", lambda job, folder, settings: folder.mkdir(parents=True) or {"gflops": {"bf16": 100}}
    )
    monkeypatch.setattr(module, "missing", lambda: None)
    monkeypatch.setattr(module, "cuda", lambda: (True, "a GPU"))
    monkeypatch.setattr(module, "run_tests", lambda options: "31 passed in 9.87s")
    monkeypatch.setenv("PYTHONPATH", "")  # put back after it, whatever the script sets
    return module


def table(gpu, script, monkeypatch, tmp_path, *words, end=-1):
    """The lines of the table behind its head, as cells; exit status."""
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_WORKER.replace("END", str(end)))
    monkeypatch.setattr(script("timing.turns"), "WORKERS", worker)
    settings = {"rounds": 3, "turn_seconds": 4.0, "most_steps": 40}
    monkeypatch.setattr(gpu.Case, "settings", lambda case, options: settings)
    output = tmp_path / "out" / "table.md"
    status = gpu.main(["--output", str(output), *words])
    lines = output.read_text().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| ---"))
    assert lines[head - 1] == gpu.row(*gpu.COLUMNS)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[head + 1 :]], lines, status


def test_without_a_gpu_it_prints_one_line(script, monkeypatch, capsys):
    gpu = script("gpu")
    monkeypatch.setattr(gpu, "cuda", lambda: (False, "torch 2 sees no CUDA device"))
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "make gpu: torch 2 sees no CUDA device; nothing to run\n"


def test_the_table_has_a_row_for_each_side(gpu, script, monkeypatch, tmp_path, capsys):
    rows, lines, status = table(gpu, script, monkeypatch, tmp_path)
    assert status == 0 and "gpu-marked tests: 31 passed in 9.87s" in lines
    assert [row[1] for row in rows] == ["lmtool, compile=true", "lmtool", "Trainer, tuned", "Trainer"] * len(gpu.CASES)
    assert {len(row) for row in rows} == {len(gpu.COLUMNS)}
    # 4000 tokens a second at 5 MFLOP each, of 100 GFLOP/s; a wait is counted in a turn of its own.
    assert rows[0][2:] == ["4,000", "4,000-4,000", "4.00x", "4.00x", "20.0%", "2.0", "0", "2.0", "250.0"]
    assert rows[3][2:] == ["1,000", "1,000-1,000", "–", "–", "5.0%", "2.0", "0", "2.0", "1000.0"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_missing_peer_is_a_line_in_its_place(gpu, script, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "missing", lambda: "accelerate not installed")
    rows, _, status = table(gpu, script, monkeypatch, tmp_path, "--only", "bert_128")
    assert status == 0 and rows[0][2] == "4,000" and rows[0][4] == "–"
    assert rows[3][1:3] == ["Trainer", "accelerate not installed"]


@pytest.mark.parametrize("end", [0, 5])
def test_a_side_that_ends_leaves_the_other(gpu, script, monkeypatch, tmp_path, end):
    """In its first step, or in a round."""
    rows, _, status = table(gpu, script, monkeypatch, tmp_path, "--only", "gpt_1024", end=end)
    assert status == 0 and rows[1][1:3] == ["lmtool", "4,000"]
    assert rows[3][1] == "Trainer" and "CUDA out of memory" in rows[3][2]


def test_no_time_is_left_for_what_comes_last(gpu, script, monkeypatch, tmp_path):
    rows, _, _ = table(gpu, script, monkeypatch, tmp_path, "--minutes", "0")
    assert [row[2] for row in rows] == ["no time left"] * len(gpu.CASES)


def test_failed_tests_are_its_exit_status(gpu, script, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "run_tests", lambda options: "1 failed, 30 passed in 9.87s")
    _, lines, status = table(gpu, script, monkeypatch, tmp_path, "--minutes", "0")
    assert status == 1 and "gpu-marked tests: 1 failed, 30 passed in 9.87s" in lines


def test_the_tests_are_a_line_where_they_cannot_run(script, monkeypatch):
    gpu = script("gpu")

    def endless(*words, **named):
        raise subprocess.TimeoutExpired(words, named["timeout"])

    monkeypatch.setattr(gpu.subprocess, "run", endless)
    assert gpu.run_tests(None) == "not finished in 200 seconds"
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert gpu.run_tests(None) == "not run, pytest is not installed"
    assert gpu.missing() == "transformers and accelerate not installed"


def test_waits_are_counted_by_their_warnings(script, monkeypatch, recwarn):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    waits = script("timing.gate").Waits()
    waits.start()
    for _ in range(3):  # from one line: by default Python shows a warning of a line once
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
    assert waits.stop() == 3 and modes == ["warn", "default"]
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert waits.count == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_128", "gpt_1024", "classification"])
def test_lmtools_side_of_a_case_runs_with_tiny_sizes(name, gpu, script, tmp_path):
    case = next(case for case in gpu.CASES if case.work.name == name)
    settings = {**case.settings(gpu.parse(["--device", "cpu", "--tiny"])), "corpus_bytes": 100_000, "rows": 40}
    answers = io.StringIO()
    script("timing.examples").prepare(tmp_path / name, settings)
    gate = script("timing.gate").Gate(io.StringIO('{"steps": 2}\n'), answers, "cpu")
    told = {**settings, "variant": dict(case.work.own[0].options)}
    script("timing.worker").side_of("lmtool")(tmp_path / name, told, gate)
    turn = json.loads(answers.getvalue().splitlines()[1])
    assert (turn["steps"], turn["examples"]) == (2, 2 * settings["batch"])
    if name != "classification":
        assert turn["tokens"] == 2 * settings["batch"] * settings["max_length"]


def test_unknown_cases_are_named(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["--only", "bert_128,bart"])
    assert "--only bart: there is no such name" in capsys.readouterr().err


def test_cases_say_all_that_the_workers_read(script):
    gpu = script("gpu")
    options = gpu.parse(["--device", "cpu", "--tiny"])
    for case in gpu.CASES:
        assert case.settings(options).keys() == script("timing.works").settings_of().keys()
