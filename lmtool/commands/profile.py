"""`lmtool profile`: where the time of a training step goes.

The run is built and trained by the command that is profiled, in a folder that is taken away again; a few of its steps
are recorded. What stays is the table, as JSON, and a trace that chrome://tracing and ui.perfetto.dev open.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lmtool.commands import finetune, pretrain
from lmtool.commands.configs import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.commands.looking import Profiling
from lmtool.commands.opening import RUNS, OpenRun
from lmtool.commands.reading import Reads, planned
from lmtool.commands.training import reading_of, settings_of
from lmtool.config.checkpoint import saved_steps
from lmtool.costs.rate import product_rate
from lmtool.data.split import SplitData
from lmtool.distillation.distilled import Distilled
from lmtool.errors import Stopped, UserError
from lmtool.learners.base import BaseLearner
from lmtool.reporting.console import Output
from lmtool.reporting.profile import StepProfile, print_profile
from lmtool.runs.run_folder import choose_folder
from lmtool.tasks.configs import GlueConfig
from lmtool.training.attribution import attributed
from lmtool.training.compiling import choose_compilation
from lmtool.training.loop import train
from lmtool.training.precision import choose_device, choose_precision, cpu_has_bf16
from lmtool.training.profiling import TEACHER, Enough, ProfiledLoader, ranges
from lmtool.weights.exporting import require_new

WARM_UP = 2
TABLE, TRACE = "profile.json", "trace.json.gz"
# More steps than any profile has: nothing is evaluated nor saved in between.
_NEVER = 2**31


def run(config: PretrainConfig | FinetuneConfig, verb: str, profiling: Profiling) -> int:
    """Train a few steps, print the table, write it and the trace. UserError where the words would train no new run."""
    _require_new_run(config, verb)
    output = Output()
    learned = config.objective.name if isinstance(config, PretrainConfig) else config.task.name
    with _folder(profiling.output, f"profile-{learned}-{config.model.name}") as folder:
        output.line(
            f"profile of lmtool {verb} · {learned} · model={config.model.name}: {WARM_UP} steps of warm-up, then "
            f"{profiling.steps}{_of_first_phase(config)}"
        )
        profile = _profile(config, profiling.steps, folder)
        precision = choose_precision(config.precision, choose_device(config.device))
        profile = replace(profile, product_rate=product_rate(precision.name, str(precision.device)))
        (folder / TABLE).write_text(json.dumps({"command": verb, **asdict(profile)}, indent=1) + "\n", encoding="utf-8")
        print_profile(output, profile, f"a step of lmtool {verb} · {learned} · model={config.model.name}")
        output.line(f"table {folder / TABLE}; trace {folder / TRACE}, for https://ui.perfetto.dev or chrome://tracing")
    return 0


def _of_first_phase(config: PretrainConfig | FinetuneConfig) -> str:
    """Of a run in phases, which of them is seen."""
    phases = len(config.phases) if isinstance(config, PretrainConfig) else 0
    return f", of the first of {phases} phases: give another one's keys in the place of phases=" if phases else ""


def _require_new_run(config: PretrainConfig | FinetuneConfig, verb: str) -> None:
    """UserError where the same words would train several runs, go on with one, or do nothing."""
    if isinstance(config, FinetuneConfig) and isinstance(config.task, GlueConfig):
        raise UserError(f"task={config.task.name} is a run of every task in it", "profile one of them: task=sst2")
    if (config.devices or 1) > 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            "a profile is of one process, not of several that train together", "devices=1, without torchrun"
        )
    if config.branch is not None:
        raise UserError(
            f"branch={config.branch}: a profile trains a run of its own", "give the trunk's words in its place"
        )
    folder = None if config.name is None else RUNS / config.name
    folder = folder if config.run_dir is None else Path(config.run_dir).expanduser()
    if folder is not None and (folder / "config.yaml").exists():
        steps = saved_steps(folder / "checkpoints")
        state = "finished" if (folder / "result.json").exists() else f"at step {max(steps, default=0)}"
        key = f"name={config.name}" if config.run_dir is None else f"run_dir={config.run_dir}"
        raise UserError(
            f"{key}: that run is there already, {state}; a profile trains a new one",
            f"give {key.partition('=')[0]}=null: lmtool profile {verb} keeps no run",
        )


@contextmanager
def _folder(given: str | None, stem: str) -> Iterator[Path]:
    """The folder of a profile, a new one; taken away where there is none."""
    before = RUNS.exists()
    if given is not None:
        folder = Path(given).expanduser()
        require_new(folder)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = choose_folder(RUNS, None, None, stem)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if given is None and not before and not any(RUNS.iterdir()):
            RUNS.rmdir()
        raise


def _profile(config: PretrainConfig | FinetuneConfig, steps: int, folder: Path) -> StepProfile:
    """Train the run that a configuration describes for a few steps; the trace is put into the folder."""
    # Beside the profile, since a run asks its disk for room.
    with TemporaryDirectory(prefix=".run-", dir=folder) as place:
        changes: dict[str, Any] = {"run_dir": str(Path(place) / "run"), "name": None, "logger": {}}
        then = partial(_fit, steps=steps, folder=folder)
        try:
            if isinstance(config, PretrainConfig):
                return StepProfile(**pretrain.run(config.model_copy(update=changes), [], then))
            changes["forgetting"] = None
            return StepProfile(**finetune.run(config.model_copy(update=changes), [], then))
        except Stopped as stopped:
            raise Stopped("stopped: nothing was written", stopped.exit_status) from stopped


def _fit(
    opened: OpenRun,
    learner: BaseLearner,
    data: dict[str, SplitData],
    *_: Any,
    steps: int,
    folder: Path,
    distilled: Distilled | None = None,
    phases: Sequence[Reads] = (),
) -> dict[str, Any]:
    """What `fit` does until it trains, then some steps of the training. Returns the fields of a `StepProfile`."""
    config, precision = opened.config, opened.precision
    parts = phases or [Reads(config, learner, data)]
    loader, plan = planned(config, learner, parts, precision)
    compiles = choose_compilation(config.compile, precision.device, plan.flops, config.max_minutes).on
    learner.begin(loader.steps_in_epoch)
    if distilled is not None:
        distilled.begin(reading_of(parts[-1], opened.output.stage))
    settings = replace(
        settings_of(config, learner.metric, plan.flops_per_token, 0.0, compiles),
        max_steps=max(plan.steps, WARM_UP + 2 * steps + 1), max_epochs=None, max_tokens=None, max_minutes=None,
        max_flops=None, evaluate_every=_NEVER, checkpoint_every=_NEVER, keep_every=None,
    )  # fmt: skip
    profiled = ProfiledLoader(loader, precision.device, steps, WARM_UP)
    trained = learner if distilled is None else distilled
    teacher = getattr(distilled, "teacher", None)
    beside = {TEACHER: [] if teacher is None else [teacher]}
    with ranges(trained, beside, compiled=compiles), suppress(Enough):
        train(trained, profiled, lambda step: {}, opened.folder, settings, config.optimizer, config.schedule)
    recording, on_device = profiled.recording, precision.device.type == "cuda"
    recording.profiler.export_chrome_trace(str(folder / TRACE))
    costs = attributed(recording.profiler.events(), on_device)
    return {
        "milliseconds": costs.milliseconds,
        "unprofiled_milliseconds": 1000 * recording.unprofiled_seconds,
        "parts": {name: asdict(cost) for name, cost in costs.parts.items()},
        "products_milliseconds": costs.products,
        "products_flops": costs.flops,
        "steps": recording.steps,
        "tokens": recording.tokens / recording.steps,
        "micro_batches": recording.micro_batches / recording.steps,
        "peak_memory_bytes": recording.peak_bytes,
        "precision": precision.name,
        "device": str(precision.device),
        "threads": torch.get_num_threads(),
        "facts": _facts(config, loader.facts(), on_device, compiles),
    }


def _facts(config: RunConfig, facts: dict[str, Any], on_device: bool, compiles: bool) -> dict[str, Any]:
    """What the remarks ask of a run beside its times."""
    model = config.model
    return {
        "attention_dropout": getattr(model, "attention_dropout", 0.0),
        "vocab_size": model.vocab_size,
        "batch_examples": config.batch_examples,
        "batch_tokens": config.batch_tokens,
        "micro_batch_tokens": config.micro_batch_tokens,
        "padding_avoided": facts.get("padding_avoided"),
        "native_bf16": on_device or cpu_has_bf16(),
        "compiled": compiles,
        "gradient_checkpointing": config.gradient_checkpointing,
    }
