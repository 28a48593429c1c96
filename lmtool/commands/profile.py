"""`lmtool profile`: measures the time of each part of a training step.

The profiled command builds and trains the run in a temporary folder, and a few of its steps are recorded. The output is
a table, also as JSON, and a trace for chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lmtool.config.base import JsonObject
from lmtool.costs.rate import product_rate
from lmtool.distillation.recording import Teacher
from lmtool.errors import Stopped, UserError
from lmtool.models.configs import TransformerConfig
from lmtool.reporting.console import Output
from lmtool.reporting.costs import StepProfile, print_profile
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig, ProfileKeys, RunConfig
from lmtool.runs.finding import saved_steps
from lmtool.runs.identity import select_folder
from lmtool.session.fit import temporary_session, train_few_steps
from lmtool.session.session import Session
from lmtool.system.files import RUNS, user_path
from lmtool.tasks.configs.mixture import GlueConfig
from lmtool.training.attribution import attribute
from lmtool.training.precision import cpu_has_bf16, select_device, select_precision
from lmtool.training.profiling import TEACHER, ProfiledLoader, ranges
from lmtool.weights.exporting import require_new

WARM_UP = 2
TABLE, TRACE = "profile.json", "trace.json.gz"


def run(config: PretrainConfig | FinetuneConfig, verb: str, profiling: ProfileKeys) -> int:
    """Trains a few steps, prints the table, and writes it and the trace. Raises UserError if the command would not
    train a new run."""
    _require_new_run(config, verb)
    output = Output()
    learned_name = config.objective.name if isinstance(config, PretrainConfig) else config.task.name
    with _folder(profiling.output, f"profile-{learned_name}-{config.model.name}") as folder:
        output.line(
            f"profile of lmtool {verb} · {learned_name} · model={config.model.name}: {WARM_UP} steps of warm-up, then "
            f"{profiling.steps}{_phase_note(config)}"
        )
        profile = _profile(config, profiling.steps, folder)
        precision = select_precision(config.precision, select_device(config.device))
        profile = replace(profile, product_rate=product_rate(precision.name, str(precision.device)))
        (folder / TABLE).write_text(json.dumps({"command": verb, **asdict(profile)}, indent=1) + "\n", encoding="utf-8")
        print_profile(output, profile, f"a step of lmtool {verb} · {learned_name} · model={config.model.name}")
        output.line(f"table {folder / TABLE}; trace {folder / TRACE}, for https://ui.perfetto.dev or chrome://tracing")
    return 0


def _phase_note(config: PretrainConfig | FinetuneConfig) -> str:
    phases = len(config.phases) if isinstance(config, PretrainConfig) else 0
    return (
        f", of the first of {phases} phases; to profile another one, set its keys instead of phases=" if phases else ""
    )


def _require_new_run(config: PretrainConfig | FinetuneConfig, verb: str) -> None:
    """Raises UserError if the same command would train several runs, resume a run, or do nothing."""
    if isinstance(config, FinetuneConfig) and isinstance(config.task, GlueConfig):
        raise UserError(f"task={config.task.name} trains a run for each of its tasks", "profile one of them: task=sst2")
    if (config.devices or 1) > 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("lmtool profile measures a single process", "set devices=1, and start it without torchrun")
    if config.branch is not None:
        raise UserError(
            f"branch={config.branch}: a profile trains a new run", "omit branch= and repeat the overrides of the trunk"
        )
    folder = None if config.name is None else RUNS / config.name
    folder = folder if config.run_dir is None else user_path(config.run_dir)
    if folder is not None and (folder / "config.yaml").exists():
        steps = saved_steps(folder / "checkpoints")
        state = "finished" if (folder / "result.json").exists() else f"at step {max(steps, default=0)}"
        key = f"name={config.name}" if config.run_dir is None else f"run_dir={config.run_dir}"
        raise UserError(
            f"{key}: the run already exists ({state}), and a profile trains a new one",
            f"set {key.partition('=')[0]}=null, since lmtool profile {verb} does not keep its run",
        )


@contextmanager
def _folder(output: str | None, stem: str) -> Iterator[Path]:
    """Creates the folder of a profile; removes it if profiling fails. output: the folder; None: a new folder in runs/
    whose name begins with `stem`."""
    runs_existed = RUNS.exists()
    if output is not None:
        folder = user_path(output)
        require_new(folder)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = select_folder(RUNS, None, None, stem)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if output is None and not runs_existed and not any(RUNS.iterdir()):
            RUNS.rmdir()
        raise


def _profile(config: PretrainConfig | FinetuneConfig, steps: int, folder: Path) -> StepProfile:
    """Trains the run of a configuration for a few steps. folder: the folder for the trace."""
    try:
        # The temporary run is in the profile's folder, so that it uses the same disk.
        with temporary_session(config, folder) as session:
            return _record(session, steps, folder)
    except Stopped as stopped:
        raise Stopped("stopped: nothing was written", stopped.exit_status) from stopped


def _record(session: Session, steps: int, folder: Path) -> StepProfile:
    config, precision, compiles = session.config, session.run.precision, session.compilation.on
    on_gpu = precision.device.type == "cuda"
    profiled = ProfiledLoader(session.loader, precision.device, steps, WARM_UP)
    teacher = getattr(session.distilled, "teacher", None)
    extra_ranges = [] if teacher is None else [(teacher, Teacher.predict.__name__, TEACHER)]
    with ranges(session.trained_module, extra_ranges, compiles):
        train_few_steps(session, profiled, WARM_UP + 2 * steps)  # each step runs with and without the profiler
    recording = profiled.recording
    recording.profiler.export_chrome_trace(str(folder / TRACE))
    costs = attribute(recording.profiler.events(), on_gpu)
    return StepProfile(
        milliseconds=costs.milliseconds,
        unprofiled_milliseconds=1000 * recording.unprofiled_seconds,
        parts={name: asdict(cost) for name, cost in costs.parts.items()},
        products_milliseconds=costs.products,
        products_flops=costs.flops,
        steps=recording.steps,
        tokens=recording.tokens / recording.steps,
        micro_batches=recording.micro_batches / recording.steps,
        peak_memory_bytes=recording.peak_bytes,
        precision=precision.name,
        device=str(precision.device),
        threads=torch.get_num_threads(),
        metadata=_metadata(config, session.loader.metadata(), on_gpu, compiles),
    )


def _metadata(config: RunConfig, metadata: JsonObject, on_gpu: bool, compiles: bool) -> JsonObject:
    """Returns the properties of the run from which `print_profile` chooses its remarks. metadata: the metadata of the
    loader."""
    model = config.model
    return {
        "attention_dropout": model.attention_dropout if isinstance(model, TransformerConfig) else 0.0,
        "vocab_size": model.vocab_size,
        "batch_examples": config.batch_examples,
        "batch_tokens": config.batch_tokens,
        "micro_batch_tokens": config.micro_batch_tokens,
        "padding_avoided": metadata.get("padding_avoided"),
        "native_bf16": on_gpu or cpu_has_bf16(),
        "compiled": compiles,
        "gradient_checkpointing": config.gradient_checkpointing,
    }
