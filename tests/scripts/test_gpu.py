"""`make gpu` without a GPU: tables from fake workers, and real workers with tiny sizes."""

from __future__ import annotations

import io
import json
import subprocess
import warnings

import pytest
import torch

# Answers like scripts/timing/worker.py: lmtool is four times as fast as the Trainer, which fails at turn END.
FAKE_WORKER = """
import json, sys
variant, own = sys.argv[1], sys.argv[1].startswith("lmtool")
print(json.dumps({"ready": variant, "imports_bytes": 10, "flops_per_token": 5e6}), flush=True)
for turn, line in enumerate(sys.stdin):
    if variant.startswith("trainer") and turn == END:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory")
    command = json.loads(line)
    row = {"steps": command["steps"], "tokens": 1000 * command["steps"], "examples": 1, "slots": 1000, "graphs": 0}
    row["slots"] *= command["steps"]
    row |= {"flops": 1e11 * command["steps"]} if variant == "products" else {}
    row |= {"waits": 2 * command["steps"]} if command["count"] else {}
    print(json.dumps({**row, "seconds": command["steps"] * (0.25 if own else 1.0), "peak_bytes": 2e9}), flush=True)
"""


@pytest.fixture
def gpu(script, monkeypatch, tmp_path):
    """The script with fake workers, on a machine with 100 GFLOP/s in matrix products."""
    module = script("gpu")
    monkeypatch.setattr(
        module, "ask", lambda job, folder, settings: folder.mkdir(parents=True) or {"gflops": {"bf16": 100}}
    )
    monkeypatch.setattr(module, "missing_packages", lambda: None)
    monkeypatch.setattr(module, "describe_cuda", lambda: (True, "a GPU"))
    monkeypatch.setattr(module, "run_tests", lambda options: "31 passed in 9.87s")
    monkeypatch.setenv("PYTHONPATH", "")  # restored after the test
    return module


def tables(gpu, script, monkeypatch, tmp_path, *words, end=-1):
    """The written tables and the exit status."""
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_WORKER.replace("END", str(end)))
    monkeypatch.setattr(script("timing.turns"), "WORKERS", worker)
    settings = {"device": "cuda", "rounds": 3, "turn_seconds": 4.0, "most_steps": 40}
    monkeypatch.setattr(gpu.Case, "settings", lambda case, options: settings)
    output = tmp_path / "out" / "table.txt"
    status = gpu.main(["--output", str(output), *words])
    return output.read_text().split("\n\n"), status


def line_of(table, label):
    return next(line for line in table.splitlines() if line.startswith(f"  {label} "))[25:].split()


def test_no_gpu_prints_one_line(script, monkeypatch, capsys):
    gpu = script("gpu")
    monkeypatch.setattr(gpu, "describe_cuda", lambda: (False, "torch 2 sees no CUDA device"))
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "make gpu: torch 2 sees no CUDA device; nothing to run\n"


def test_each_case_has_table_of_both_sides(gpu, script, monkeypatch, tmp_path, capsys):
    (_, tests, *cases, _), status = tables(gpu, script, monkeypatch, tmp_path)
    assert status == 0 and tests == "gpu-marked tests: 31 passed in 9.87s" and len(cases) == len(gpu.CASES)
    for case, text in zip(gpu.CASES, cases, strict=True):
        assert text.startswith(case.work.title) and text.count("4.00x as fast") == 4
        # 4000 tokens per second at 5 MFLOP each, of 100 GFLOP/s; waits are counted in a separate turn.
        speed, *_, step, graphs, waits = line_of(text, "lmtool, compile=true")
        assert (speed, step, graphs, waits) == ("4000", "250.0", "0", "2.0") and " 20% " in text and " 5% " in text
    assert capsys.readouterr().out == (tmp_path / "out" / "table.txt").read_text()


def test_missing_trainer_is_reported_as_not_measured(gpu, script, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "missing_packages", lambda: "accelerate not installed")
    (_, table, _), status = tables(gpu, script, monkeypatch, tmp_path, "--only", "bert_128")
    assert status == 0 and line_of(table, "lmtool")[0] == "4000"
    assert "  Trainer               not measured: accelerate not installed" in table and "as fast" not in table


@pytest.mark.parametrize("end", [0, 3])
def test_failed_trainer_keeps_lmtool_row(gpu, script, monkeypatch, tmp_path, end):
    """The Trainer fails in its first step or in a later round."""
    (_, table, _), status = tables(gpu, script, monkeypatch, tmp_path, "--only", "gpt_1024", end=end)
    assert status == 0 and line_of(table, "lmtool")[0] == "4000"
    assert "CUDA out of memory" in table or end


def test_cases_beyond_time_limit_are_skipped(gpu, script, monkeypatch, tmp_path):
    (_, _, *cases, _), _ = tables(gpu, script, monkeypatch, tmp_path, "--minutes", "0")
    assert [case.partition(": ")[2] for case in cases] == ["no time left"] * len(gpu.CASES)


def test_failed_gpu_tests_set_exit_status(gpu, script, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "run_tests", lambda options: "1 failed, 30 passed in 9.87s")
    written, status = tables(gpu, script, monkeypatch, tmp_path, "--minutes", "0")
    assert status == 1 and written[1] == "gpu-marked tests: 1 failed, 30 passed in 9.87s"


def test_gpu_tests_that_cannot_run_are_reported(script, monkeypatch):
    gpu = script("gpu")

    def endless(*words, **named):
        raise subprocess.TimeoutExpired(words, named["timeout"])

    monkeypatch.setattr(gpu.subprocess, "run", endless)
    assert gpu.run_tests(None) == "not finished in 200 seconds"
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert gpu.run_tests(None) == "not run, pytest is not installed"
    assert gpu.missing_packages() == "transformers and accelerate not installed"


def test_waits_are_counted_from_warnings(script, monkeypatch, recwarn):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    waits = script("timing.gate").Waits()
    waits.start()
    for _ in range(3):  # by default, Python shows repeated warnings of a line once
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
    assert waits.stop() == 3 and modes == ["warn", "default"]
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert waits.count == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_128", "gpt_1024", "classification"])
def test_lmtool_side_runs_with_tiny_sizes(name, gpu, script, tmp_path):
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


def test_unknown_case_is_refused(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["--only", "bert_128,bart"])
    assert "--only bart: unknown name" in capsys.readouterr().err


def test_cases_have_all_settings_of_workers(script):
    gpu = script("gpu")
    options = gpu.parse(["--device", "cpu", "--tiny"])
    for case in gpu.CASES:
        assert case.settings(options).keys() == script("timing.works").settings_of().keys()
