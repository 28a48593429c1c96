"""`devices=` and torchrun with real processes: equal results, messages, and clean ends after a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands.conftest import write_rows, write_text
from tests.commands.test_suite import write
from tests.system.test_environment import PLANTED, plant_modules

ROOT = Path(__file__).parents[2]
TINY = [
    "model=bert_tiny", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.feedforward_size=32",
    "tokenizer.vocab_size=90", "precision=fp32", "cache_dir=cache", "max_length=32",
]  # fmt: skip
TEXT = ["pretrain", *TINY, "data=text", "data.path=text.txt", "objective.pairs=none", "batch_tokens=300"]
PLUGIN = "--plugin=tests.commands.rank_faults"
SECONDS = 120

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    write_text(folder / "text.txt")
    write_rows(folder / "rows")
    plant_modules(folder)
    return folder


def environment(fault=None):
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**kept, "PYTHONPATH": str(ROOT), **({"RANK_FAULT": fault} if fault else {})}


def start(place, *words, fault=None, by=(sys.executable, "-m", "lmtool")):
    files = {name: (place / f"{name}.txt").open("w") for name in ("stdout", "stderr")}
    return subprocess.Popen([*by, *words], cwd=place, env=environment(fault), **files)


def wait_for_end(place, process):
    """Exit status, standard output, and the lines of standard error."""
    status = process.wait(SECONDS)
    assert not (place / PLANTED).exists()
    return status, (place / "stdout.txt").read_text(), (place / "stderr.txt").read_text().splitlines()


def run(place, *words, **how):
    return wait_for_end(place, start(place, *words, **how))


def torchrun(processes=2):
    return (sys.executable, "-P", "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "-m", "lmtool")


def rows(place, name):
    lines = (place / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "tokens_per_second"} for line in lines]


def ranks_of(launcher):
    """Process ids started by a launcher, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) != launcher.pid:
                continue
            for entry in (folder / "environ").read_text().split("\0"):
                if entry.startswith("LOCAL_RANK="):
                    found[int(entry.removeprefix("LOCAL_RANK="))] = int(folder.name)
        except (OSError, IndexError):
            continue
    return found


def wait_for_step(place, process):
    """Waits until the run trains; returns process ids by rank."""
    until = time.monotonic() + SECONDS
    while "\nstep " not in (place / "stdout.txt").read_text():
        assert process.poll() is None and time.monotonic() < until, (place / "stderr.txt").read_text()
        time.sleep(0.05)
    return ranks_of(process)


def wait_until_gone(ranks):
    until = time.monotonic() + 10
    while any(Path(f"/proc/{process}").exists() for process in ranks.values()):
        assert time.monotonic() < until, "a process is still running"
        time.sleep(0.05)
    return True


def test_two_processes_write_the_rows_of_one(place):
    """One process, devices=2 and torchrun write the same rows."""
    budget = ["max_steps=12", "log_every=1", "evaluate_every=4"]
    expected = None
    for name, more, by in (("one", [], None), ("two", ["devices=2"], None), ("torchrun", [], torchrun())):
        status, out, errors = run(place, *TEXT, *budget, f"name={name}", *more, **({"by": by} if by else {}))
        assert status == 0, errors
        result = json.loads((place / "runs" / name / "result.json").read_text())
        assert result["devices"] == (1 if name == "one" else 2)
        assert (name == "one") == ("processes 2 (ddp" not in out)
        assert out.count("done in") == 1
        expected = expected or rows(place, name)
        for own, theirs in zip(rows(place, name), expected, strict=True):
            assert own.keys() == theirs.keys()
            for key, value in own.items():
                assert value == (pytest.approx(theirs[key], rel=1e-4) if isinstance(value, float) else theirs[key]), key
    # A finished run is reported once for all ranks.
    status, out, _ = run(place, *TEXT, *budget, "name=two", "devices=2")
    assert status == 0 and out.count("is finished") == 1


def test_finetuning_on_two_devices_predicts_the_same(place):
    words = [
        "finetune", *TINY, "checkpoint=none", "task=sst2", "task.path=rows", "max_steps=6", "batch_examples=5",
        "optimizer.lr=1e-3", "evaluate_every=3",
    ]  # fmt: skip
    written = []
    for name, more in (("f1", []), ("f2", ["devices=2"])):
        status, _, errors = run(place, *words, f"name={name}", *more)
        assert status == 0, errors
        folder = place / "runs" / name
        predictions = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
        written.append((predictions, json.loads((folder / "result.json").read_text())["metrics"]))
    (own, metrics), (theirs, others) = written
    assert [row["prediction"] for row in own] == [row["prediction"] for row in theirs] and len(own) > 1
    assert metrics == pytest.approx(others, rel=1e-4)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_run_and_is_named(place, victim):
    name = f"killed{victim}"
    words = [*TEXT, "max_steps=400", "checkpoint_every=2", "evaluate_every=100", "log_every=1", "devices=2"]
    process = start(place, *words, f"name={name}")
    ranks = wait_for_step(place, process)
    time.sleep(1)
    os.kill(ranks[victim], signal.SIGKILL)
    status, _, errors = wait_for_end(place, process)
    assert wait_until_gone(ranks) and status == 1
    assert errors[0].startswith(f"error: rank {victim} was killed (SIGKILL)")
    assert f"lmtool resume runs/{name}" in errors[1] and "micro_batch_tokens" in errors[1] and len(errors) == 2
    status, _, errors = run(place, *[word for word in words if word != "devices=2"], f"name={name}")
    assert status == 0, errors
    assert [row["step"] for row in rows(place, name) if row["split"] == "train"] == list(range(1, 401))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75), (signal.SIGKILL, None)]
)
def test_signal_to_launcher_saves_checkpoint(place, number, status):
    """Also after SIGKILL, which cannot be forwarded: the ranks stop too."""
    name = f"signal{int(number)}"
    process = start(place, *TEXT, "max_steps=100000", f"name={name}", "devices=2", "checkpoint_every=90000")
    ranks = wait_for_step(place, process)
    process.send_signal(number)
    assert process.wait(SECONDS) == (status or -number) and wait_until_gone(ranks)
    errors = (place / "stderr.txt").read_text().splitlines()
    shown = "SIGTERM" if status is None else number.name
    assert len(errors) == 2 and errors[0].startswith(f"error: stopped by {shown}: a checkpoint of step ")
    folder = place / "runs" / name
    assert not (folder / "LOCK").exists() and (folder / "checkpoints" / "last").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_signal_before_training_ends_run_cleanly(place, number, status):
    name = f"early{int(number)}"
    process = start(place, *TEXT, "max_steps=100000", f"name={name}", "devices=2")
    until = time.monotonic() + SECONDS
    while len(ranks := ranks_of(process)) < 2:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    code, _, errors = wait_for_end(place, process)
    assert code == status and wait_until_gone(ranks)
    assert errors[0].startswith(f"error: stopped by {number.name}") and len(errors) <= 2
    assert not (place / "runs" / name / "LOCK").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("memory", "error: rank 1: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("hang", "error: rank 1 did not answer for 4 seconds: it hangs, or is far behind"),
        ("bug", "error: rank 1: this is a bug in lmtool"),
        ("code", "error: rank 1 differs from rank 0: lmtool code is 0123456789abcdef, not "),
        ("data", "error: rank 1 differs from rank 0: data=text text is another, not "),
    ],
)
def test_fault_of_one_rank_is_reported_once(place, fault, message):
    words = [PLUGIN, *TEXT, "max_steps=9", f"name={fault}", "devices=2", "checkpoint_every=1", "log_every=1"]
    process = start(place, *words, fault=fault)
    status, _, errors = wait_for_end(place, process)
    shown = [line for line in errors if line.startswith("error:")]
    assert len(shown) == 1 and shown[0].startswith(message), errors
    assert status == (2 if fault in ("code", "data") else 1)
    assert wait_until_gone(ranks_of(process)) and not (place / "runs" / fault / "LOCK").exists()
    if status == 1:  # the run had trained and can resume
        assert run(place, *words)[0] == 0


def test_error_of_all_ranks_is_printed_once(place):
    (place / "bad").mkdir()
    for split in ("train", "dev"):
        (place / "bad" / f"{split}.tsv").write_text("sentence\tlabel\na text\n")
    for more, by in ((["devices=2"], None), ([], torchrun())):
        words = ["finetune", *TINY, "checkpoint=none", "task=sst2", "task.path=bad", "max_steps=3", *more]
        status, _, errors = run(place, *words, **({"by": by} if by else {}))
        (line,) = (line for line in errors if line.startswith("error:"))
        assert "bad/dev.tsv:2" in line and "rank" not in line
        assert status == (1 if by else 2)  # torchrun's own status


def test_diverged_run_on_two_devices_exits_with_4(place):
    words = [*TEXT, "max_steps=60", "name=diverged", "devices=2", "optimizer.lr=100", "schedule.warmup_steps=0"]
    status, _, errors = run(place, *words)
    assert status == 4 and len([line for line in errors if line.startswith("error:")]) == 1, errors
    assert list((place / "runs" / "diverged" / "diverged").glob("*.safetensors"))


def test_suite_runs_on_two_devices(place):
    for split in ("train", "dev"):
        write(place / "glue" / "SST-2", ["sentence", "label"], [[f"a text {n}", n % 2] for n in range(12)], split)
        pairs = [[f"a text {n}", f"a thing {n}", ("entailment", "neutral", "contradiction")[n % 3]] for n in range(12)]
        write(place / "glue" / "mnli_small", ["sentence1", "sentence2", "gold_label"], pairs, split)
    words = [
        "finetune", "task=glue", "task.path=glue", *TINY, "checkpoint=none", "max_steps=1", "devices=2", "name=suite",
    ]  # fmt: skip
    status, out, errors = run(place, *words)
    assert status == 0, errors
    assert out.count("done in") == 2 and (place / "runs" / "suite" / "glue.json").is_file()
