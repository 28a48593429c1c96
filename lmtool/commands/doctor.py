"""`lmtool doctor`: checks the machine, and reports what is missing and what would be faster."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lmtool.config.groups import conf_dir
from lmtool.costs.memory_of_run import available_bytes
from lmtool.costs.rate import STEP_FRACTION, measure_rate
from lmtool.errors import CheckFailed, UserError
from lmtool.nn.kernels import has_flash
from lmtool.reporting.console import Output
from lmtool.reporting.text import size
from lmtool.resolver.commands import DoctorConfig
from lmtool.runs.run_folder import processor
from lmtool.system.environment import available_cores, is_reachable
from lmtool.system.files import RUNS, user_path
from lmtool.system.terminal import counted
from lmtool.training.precision import cpu_has_bf16, select_device, select_precision

TESTED_TORCH = "2.13"
OLDEST_TORCH = (2, 11)
# Minimum free disk: three checkpoints of a base-size model with its optimizer.
_MIN_DISK = 4 * 10**9
_MIN_MEMORY = 2 * 10**9
# Hidden size and feed-forward size of a base-size model.
_BASE_SIZES = 768, 3072
# A run of seconds without network.
_TINY_RUN = shlex.split(
    "pretrain model=bert_tiny model.num_layers=1 model.hidden_size=32 model.num_heads=2 model.feedforward_size=64 "
    "model.vocab_size=300 data=pydocs data.packages=[json,logging] data.validation_fraction=0.2 objective=mlm "
    "objective.pairs=none max_steps=5 max_minutes=null batch_tokens=512 batch_examples=null log_every=1 offline=true"
)
# Optional packages: their purpose, and the extra of lmtool that installs them.
_OPTIONAL = {
    "datasets": ("data sets of the hub, parquet", "hub"),
    "sacrebleu": ("BLEU and chrF of generated text", "scores"),
    "rouge_score": ("ROUGE of generated text", "scores"),
    "h5py": ("published weights of ELMo", "elmo"),
    "wandb": ("logger=wandb", "trackers"),
    "tensorboard": ("logger=tensorboard", "trackers"),
    "submitit": ("sweeps on a cluster", "sweeps"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check. state: `good`, `note` (works, but could be better) or `problem` (does not work)."""

    subject: str
    details: str
    state: Literal["good", "note", "problem"] = "good"
    hint: str | None = None


_MARKS = {"good": ("✔", "green"), "note": ("·", "yellow"), "problem": ("✘", "bold red")}


def run(config: DoctorConfig) -> list[Finding]:
    """Prints the findings. Raises CheckFailed if there is a problem."""
    output, findings = Output(), []
    for finding in _findings(config):
        mark, style = _MARKS[finding.state]
        output.line(f"{mark} {finding.subject:<12} {finding.details}", style if finding.state != "good" else None)
        if finding.hint is not None:
            output.line(f"  {'':<12} {finding.hint}")
        findings.append(finding)
    broken = [finding.subject for finding in findings if finding.state == "problem"]
    if broken:
        message = f"{counted(len(broken), 'problem')} found: {', '.join(broken)}"
        raise CheckFailed(message, "correct the marked lines, then run lmtool doctor again")
    return findings


def _findings(config: DoctorConfig) -> Iterator[Finding]:
    yield _python()
    yield _torch()
    yield _processor()
    device = None
    try:
        device = select_device(config.device)
        yield from _devices(device)
    except UserError as error:
        yield Finding("device", error.message, "problem", error.hint)
    if device is not None:
        yield _speed(device)
    yield _memory()
    yield _folder("runs", RUNS, "start in a folder on another disk, or set run_dir=")
    yield _folder("cache_dir", user_path(config.cache_dir), "set cache_dir=FOLDER on another disk")
    yield Finding("conf", f"{conf_dir()}, {sum(1 for _ in conf_dir().rglob('*.yaml'))} files")
    yield from _packages()
    yield _hub(config.offline)
    if config.trains and device is not None:
        yield _training(config.device)


def _python() -> Finding:
    return Finding("python", f"{platform.python_version()} on {platform.platform(terse=True)}")


def _torch() -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    details = f"{torch.__version__}, {'CUDA ' + torch.version.cuda if torch.version.cuda else 'built without CUDA'}"
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Finding("torch", details, "problem", f"lmtool needs {oldest} or newer: pip install 'torch>={oldest}'")
    if not torch.__version__.startswith(TESTED_TORCH):
        return Finding("torch", details, "note", f"the tests run under {TESTED_TORCH}")
    return Finding("torch", details)


def _processor() -> Finding:
    cores = available_cores()
    threads = torch.get_num_threads()
    bf16 = "native bf16" if cpu_has_bf16() else "no native bf16"
    capacity = f"{counted(cores, 'core')} for this process, {counted(threads, 'thread')}, {bf16}"
    details = f"{processor() or platform.machine()}, {capacity}"
    if threads != cores and "OMP_NUM_THREADS" in os.environ:
        return Finding("processor", details, "note", f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} is set")
    return Finding("processor", details)


def _devices(selected_device: torch.device) -> Iterator[Finding]:
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        properties = torch.cuda.get_device_properties(device)
        flash = "flash attention" if has_flash(device) else "no flash attention: its GPU is older than Ampere"
        free = size(available_bytes(device) or 0)
        details = f"{properties.name}, {size(properties.total_memory)}, {free} free, {flash}"
        yield Finding(f"cuda:{number}", details, "good" if has_flash(device) else "note")
    if (count := torch.cuda.device_count()) > 1:
        yield Finding("devices", f"{count}; a run uses one of them", "note", f"devices={count} trains on all")
    if not torch.cuda.device_count():
        driver_files = [path for path in ("/dev/nvidia0", "/proc/driver/nvidia/version") if Path(path).exists()]
        if not driver_files:
            details = "no GPU: the tiny models train in minutes"
            yield Finding("device", details, "note", "use model=bert_tiny, gpt_tiny or t5_tiny")
        elif not torch.version.cuda:
            details = f"there is a GPU ({driver_files[0]}), but torch is built without CUDA"
            yield Finding("device", details, "problem", "install torch with CUDA: README, Set-up")
        else:
            details = f"there is a GPU ({driver_files[0]}), but torch does not find it"
            yield Finding("device", details, "problem", "run nvidia-smi: it says whether the driver works")


def _speed(device: torch.device) -> Finding:
    precision = select_precision("auto", device)
    rates = {}
    for name in dict.fromkeys(("fp32", precision.name)):
        rates[name] = measure_rate(*_BASE_SIZES, name, str(device)) / STEP_FRACTION
    details = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in rates.items())
    return Finding("speed", f"{details} on {device}; precision=auto selects {precision.name}")


def _memory() -> Finding:
    free = available_bytes(torch.device("cpu"))
    if free is None:
        return Finding("memory", "the system does not report free memory", "note")
    if free < _MIN_MEMORY:
        hint = "tiny models fit; lmtool plan estimates the memory of a run"
        return Finding("memory", f"{size(free)} available", "note", hint)
    return Finding("memory", f"{size(free)} available")


def _folder(subject: str, folder: Path, hint: str) -> Finding:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding(subject, f"{folder}: {error.strerror}", "problem", hint)
    state: Literal["good", "note"] = "good" if free >= _MIN_DISK else "note"
    return Finding(subject, f"{folder}, {size(free)} free", state, None if state == "good" else hint)


def _packages() -> Iterator[Finding]:
    missing: dict[str, list[str]] = {}
    for package, (purpose, extra) in _OPTIONAL.items():
        if importlib.util.find_spec(package) is None:
            missing.setdefault(extra, []).append(f"{package} ({purpose})")
    if not missing:
        yield Finding("packages", f"all {len(_OPTIONAL)} optional packages")
    for extra, packages in missing.items():
        yield Finding("packages", f"without {', '.join(packages)}", "note", f"pip install 'lmtool[{extra}]'")


def _hub(offline: bool) -> Finding:
    if offline:
        return Finding("hub", "not checked: offline=true")
    from huggingface_hub import constants

    address = constants.ENDPOINT
    if is_reachable(address, seconds=2.0):
        return Finding("hub", f"{address} answers")
    return Finding("hub", f"{address} does not answer", "note", "use local folders; offline=true skips this check")


def _training(device: str) -> Finding:
    losses = []
    with tempfile.TemporaryDirectory() as root:
        for name in ("first", "second"):
            words = [*_TINY_RUN, f"device={device}", f"run_dir={root}/{name}", f"cache_dir={root}/cache"]
            command = [sys.executable, "-P", "-m", "lmtool", *words]
            process = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
            if process.returncode:
                lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
                return Finding(
                    "training", f"a tiny run failed: {lines[0]}", "problem", shlex.join(["lmtool", *_TINY_RUN])
                )
            rows = (Path(root) / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            losses.append([json.loads(row).get("loss") for row in rows])
    if losses[0] == losses[1]:
        return Finding("training", "two runs of a tiny BERT have equal losses, bit for bit")
    details = "two runs of a tiny BERT have different losses"
    if device != "cpu" and torch.cuda.is_available():
        return Finding("training", details, "note", "CUDA kernels add in varying order; device=cpu is exact")
    return Finding("training", details, "problem", "please report it, with the lines above")
