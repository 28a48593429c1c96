"""Compare the results of short commands, bit for bit, between this tree and a clean clone of REV.

    python scripts/compare_losses.py REV [--jobs bert_tiny,finetune_bert] [--output runs/compare_losses]

Runs every `experiment/*_tiny` of REV, each model family without such an experiment, a finetuning run of each
architecture and a mixture: 50 steps each on a little text, with one thread, in fp32 on the CPU, offline. Finetuning and
the mixture use dropout, which the experiments switch off. The exit status is 3 if a loss in metrics.jsonl or a final
weight differs, 2 if a command fails. OUTPUT keeps the runs of REV by commit; the runs of this tree, with its
uncommitted changes, are repeated each time. Takes about three minutes on slow cores; both trees run in parallel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import ROOT, processor, stop
from safetensors.torch import load_file
from torch import Tensor

from lmtool.reporting.console import Output, print_table

STEPS = ("max_steps=50", "log_every=1", "max_minutes=null", "device=cpu", "precision=fp32", "offline=true")
TEXT = ("data=pydocs", "data.packages=[python]", "data.max_bytes=400000", "model.vocab_size=1024")
ROWS = ("task=pydocs", "task.train_examples=400", "max_epochs=null")
DROPOUT = ("model.dropout=0.1", "model.attention_dropout=0.1")
FINETUNED_MODELS = ("bert_tiny", "gpt_tiny", "t5_tiny")
TASK = "{name: task, task: {kind: classification, name: pydocs, text: [text], embedded: pydocs, train_examples: 400}}"
# Runs the jobs of a tree one after the other in one process, which imports lmtool only once. Prints the name and the
# exit status of each job.
WORKER = """
import contextlib, json, sys
try:
    from lmtool.cli.main import main
except ImportError:  # of a revision in which the command line was one module
    from lmtool.cli import main
for name, words in json.loads(sys.argv[1]).items():
    with open(name + ".txt", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        status = main(words)
    print(json.dumps([name, status]), flush=True)
"""


@dataclass(frozen=True)
class Comparison:
    """The comparison of the two runs of a job. losses, tensors: how many were compared. differences: descriptions of
    all losses and tensors that differ."""

    losses: int
    tensors: int
    differences: tuple[str, ...]


def jobs_of(tree: Path) -> dict[str, list[str]]:
    """Returns the commands by the name of the job, in the order in which they run: a later command may start from the
    weights of an earlier one."""
    recipes = sorted(path.stem for path in (tree / "conf" / "experiment").glob("*_tiny.yaml"))
    models = sorted(path.stem for path in (tree / "conf" / "model").glob("*_tiny.yaml"))
    jobs = {name: ["pretrain", f"experiment={name}", *TEXT] for name in recipes}
    jobs |= {name: ["pretrain", f"model={name}", "max_length=64", *TEXT] for name in models if name not in recipes}
    for name in FINETUNED_MODELS:
        jobs[f"finetune_{name.removesuffix('_tiny')}"] = ["finetune", *ROWS, *DROPOUT, f"checkpoint={name}"]
    members = f"objective.members=[mlm,span,{TASK}]"
    jobs["mixture"] = ["pretrain", "model=bert_tiny", "objective=mixture", members, "max_length=64", *TEXT, *DROPOUT]
    return {name: [*words, *STEPS, "cache_dir=cache", f"run_dir={name}"] for name, words in jobs.items()}


def select_jobs(jobs: Mapping[str, list[str]], names: Sequence[str]) -> dict[str, list[str]]:
    """Selects jobs by name (all if `names` is empty), together with the jobs whose checkpoints they start from."""
    unknown = [name for name in names if name not in jobs]
    if unknown:
        stop(f"--jobs {','.join(unknown)}: unknown job", f"use some of {','.join(jobs)}")
    selected = set(names or jobs)
    for name in tuple(selected):
        selected.update(word.removeprefix("checkpoint=") for word in jobs[name] if word.startswith("checkpoint="))
    return {name: words for name, words in jobs.items() if name in selected}


def losses_of(run: Path) -> dict[str, float]:
    """Returns every loss in a run's metrics.jsonl, by split, field and step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        f"{row['split']} {field} of step {row['step']}": value
        for row in rows
        for field, value in row.items()
        if "loss" in field
    }


def weights_of(run: Path) -> dict[str, Tensor]:
    """Returns the tensors of a run's last checkpoint."""
    checkpoints = run / "checkpoints"
    return load_file(checkpoints / (checkpoints / "last").read_text().strip() / "model.safetensors")


def compare(run: Path, reference_run: Path) -> Comparison:
    """Compares the two runs of a job. metrics.jsonl contains all digits of floats, so that equal numbers in it have
    equal bits."""
    losses, reference = losses_of(run), losses_of(reference_run)
    differences = [
        f"{name}: {losses.get(name)}, not {reference.get(name)}"
        for name in dict.fromkeys([*reference, *losses])
        # As text, since two NaN are the same loss.
        if repr(losses.get(name)) != repr(reference.get(name))
    ]
    tensors, expected = weights_of(run), weights_of(reference_run)
    differences += [
        f"{name}: {difference}"
        for name in dict.fromkeys([*expected, *tensors])
        if (difference := difference_of(tensors.get(name), expected.get(name)))
    ]
    return Comparison(len(reference), len(expected), tuple(differences))


def difference_of(tensor: Tensor | None, expected: Tensor | None) -> str:
    """Describes how a tensor differs from the expected tensor; empty if all bits are equal."""
    if tensor is None or expected is None:
        return "missing" if tensor is None else "new"
    if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
        return f"{tuple(tensor.shape)} {tensor.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    if tensor.reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8)):
        return ""
    return f"differs by {(tensor.double() - expected.double()).abs().max():.3g} at most"


def start_worker(tree: Path, folder: Path, jobs: Mapping[str, list[str]]) -> subprocess.Popen[str]:
    """Starts a process that runs the jobs in a folder, with the code of a tree."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(jobs)],
        cwd=folder, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def await_worker(name: str, worker: subprocess.Popen[str], folder: Path) -> None:
    """Waits for the jobs of a tree. If a job fails, ends the script with its error."""
    assert worker.stdout is not None
    for line in worker.stdout:
        job, status = json.loads(line)
        if status:
            log = folder / f"{job}.txt"
            error = next((row for row in log.read_text().splitlines() if row.startswith("error:")), "")
            stop(f"{job} ended with status {status} on {name}. {error}", f"read {log}")
        print(f"  {name}: {job}", file=sys.stderr, flush=True)
    if worker.wait():
        stop(f"the process for the jobs of {name} ended with status {worker.returncode}", "read the lines above")


def git(*words: str, cwd: Path = ROOT) -> str:
    """Returns the output of a git command. Ends the script if the command fails."""
    done = subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        stop(f"git {' '.join(words)}: {done.stderr.strip()}", "use a commit, a branch or a tag of this repository")
    return done.stdout.strip()


def reference_folder(output: Path, commit: str, jobs: Mapping[str, list[str]]) -> Path:
    """Returns the folder for the runs of a commit. Its name depends on the commands, on the versions of torch and
    Python, and on the processor, since each of these may change the results."""
    settings = json.dumps([jobs, torch.__version__, sys.version, processor()])
    return output / f"{commit[:12]}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


def unfinished_jobs(folder: Path, jobs: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Returns the jobs that have no finished run in a folder. Deletes the folders of unfinished runs."""
    remaining = {name: words for name, words in jobs.items() if not (folder / name / "result.json").is_file()}
    for name in remaining:
        shutil.rmtree(folder / name, ignore_errors=True)
    return remaining


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rev", metavar="REV", help="a commit, branch or tag")
    parser.add_argument(
        "--jobs", type=lambda text: text.split(","), default=[], help="comma-separated jobs (default: all)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/compare_losses"))
    options = parser.parse_args()
    commit, output = git("rev-parse", "--verify", f"{options.rev}^{{commit}}"), options.output.resolve()
    with tempfile.TemporaryDirectory() as clone:
        git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), clone)
        git("checkout", "--quiet", "--detach", commit, cwd=Path(clone))
        jobs = jobs_of(Path(clone))
        reference, current = reference_folder(output, commit, jobs), output / "this_tree"
        jobs = select_jobs(jobs, options.jobs)
        shutil.rmtree(current, ignore_errors=True)
        workers = {
            commit[:12]: (start_worker(Path(clone), reference, unfinished_jobs(reference, jobs)), reference),
            "this tree": (start_worker(ROOT, current, jobs), current),
        }
        try:
            for name, (worker, folder) in workers.items():
                await_worker(name, worker, folder)
        finally:
            for worker, _ in workers.values():
                worker.kill()
                worker.wait()
    comparisons = {name: compare(current / name, reference / name) for name in jobs}
    table = [
        [name, run.losses, run.tensors, len(run.differences), run.differences[0] if run.differences else "equal"]
        for name, run in comparisons.items()
    ]
    print_table(Output(), ["job", "losses", "tensors", "differences", "first difference"], table)
    sys.exit(3 if any(run.differences for run in comparisons.values()) else 0)


if __name__ == "__main__":
    main()
