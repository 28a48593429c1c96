"""`make gpu` on a machine without a GPU: its table from fake workers, and its real workers with tiny sizes."""

from __future__ import annotations

import io
import json
import subprocess
import warnings

import pytest
import torch

# Answers as scripts/peers.py does: lmtool four times as fast as the Trainer, which ends where it is told to.
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
        module, "prepare", lambda folder, settings: folder.mkdir(parents=True) or {"gflops": {"bf16": 100}}
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
    monkeypatch.setattr(script("benchmark"), "WORKERS", worker)
    monkeypatch.setattr(gpu.Case, "settings", lambda case, options: {"rounds": 3, "turn_seconds": 4.0})
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
    assert [row[1] for row in rows] == ["lmtool", "Trainer"] * len(gpu.CASES)
    assert {len(row) for row in rows} == {len(gpu.COLUMNS)}
    # 4000 tokens a second at 5 MFLOP each, of 100 GFLOP/s; a wait is counted in a turn of its own.
    assert rows[0][2:] == ["4,000", "4,000-4,000", "4.00x", "20.0%", "2.0", "0", "2.0", "250.0"]
    assert rows[1][2:] == ["1,000", "1,000-1,000", "–", "5.0%", "2.0", "0", "2.0", "1000.0"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_missing_peer_is_a_line_in_its_place(gpu, script, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "missing", lambda: "accelerate not installed")
    rows, _, status = table(gpu, script, monkeypatch, tmp_path, "--only", "bert_128")
    assert status == 0 and rows[0][2] == "4,000" and rows[0][4] == "–"
    assert rows[1][1:3] == ["Trainer", "accelerate not installed"]


@pytest.mark.parametrize("end", [0, 5])
def test_a_side_that_ends_leaves_the_other(gpu, script, monkeypatch, tmp_path, end):
    """In its first step, or in a round."""
    rows, _, status = table(gpu, script, monkeypatch, tmp_path, "--only", "gpt_1024", end=end)
    assert status == 0 and rows[0][1:3] == ["lmtool", "4,000"]
    assert rows[1][1] == "Trainer" and "CUDA out of memory" in rows[1][2]


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
    waits = script("peers").Waits()
    waits.start()
    for _ in range(3):  # from one line: by default Python shows a warning of a line once
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
    assert waits.stop() == 3 and modes == ["warn", "default"]
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert waits.count == 3


# The real workers, in this process.


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Where the examples of all cases share a corpus."""
    return tmp_path_factory.mktemp("gpu")


CASES = ("bert_128", "bert_512", "gpt_1024", "classification")


def prepared(script, name, examples):
    """A case, its tiny settings, and the folder of its examples."""
    gpu = script("gpu")
    case = next(case for case in gpu.CASES if case.work.name == name)
    settings, folder = case.settings(gpu.parse(["--device", "cpu", "--tiny"])), examples / name
    if not (folder / "examples.npz").exists():
        assert script("peers").prepare(folder, settings)["gflops"]["bf16"] > 0
    return case, settings, folder


def answers_of(run, variant, folder, settings, gate):
    """What a worker says when it is let go twice."""
    answers = io.StringIO()
    run(variant, folder, settings, gate(io.StringIO('{"steps": 2}\n{"steps": 1, "count": true}\n'), answers, "cpu"))
    return [json.loads(line) for line in answers.getvalue().splitlines()]


@pytest.mark.parametrize("name", CASES)
def test_lmtools_side_of_every_case_runs_with_tiny_sizes(name, script, examples):
    peers = script("peers")
    case, settings, folder = prepared(script, name, examples)
    ready, first, second = answers_of(peers.run_lmtool, case.work.own.name, folder, settings, peers.Gate)
    assert ready["flops_per_token"] > 6 * settings["model"]["num_layers"] * 4 * settings["model"]["hidden_size"] ** 2
    assert (first["steps"], first["examples"], second["steps"]) == (2, 2 * settings["batch"], 1)
    assert first["tokens"] == first["slots"] > 0 and first["graphs"] == 0 and first["seconds"] > 0
    if case.work.own.name == "lmtool_language_model":
        assert first["tokens"] == 2 * settings["batch"] * settings["max_length"]


@pytest.mark.parametrize("name", CASES)
def test_the_trainers_side_of_every_case_reads_the_same_examples(name, script, examples):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    peers = script("peers")
    case, settings, folder = prepared(script, name, examples)
    ours = answers_of(peers.run_lmtool, case.work.own.name, folder, settings, peers.Gate)[1]
    _, theirs, _ = answers_of(peers.run_trainer, case.work.rivals[0].name, folder, settings, peers.Gate)
    assert (theirs["steps"], theirs["tokens"]) == (2, ours["tokens"])


def test_flops_are_those_of_the_formula(script, examples):
    """6 L (4d^2 + 2df) for the layers, 12 L d S for the attention, half of it where it is causal, and 6 (V d) for the
    head where it predicts."""
    peers = script("peers")
    case, settings, folder = prepared(script, "gpt_1024", examples)
    ready = answers_of(peers.run_lmtool, case.work.own.name, folder, settings, peers.Gate)[0]
    size, length = settings["model"], settings["max_length"]
    d, layers = size["hidden_size"], size["num_layers"]
    body = 6 * layers * (4 * d * d + 2 * d * size["feedforward_size"])
    head = 6 * size["vocab_size"] * d * (length - 1) / length
    assert ready["flops_per_token"] == pytest.approx(body + 6 * layers * d * length + head, rel=1e-2)
