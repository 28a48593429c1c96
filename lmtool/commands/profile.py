"""`lmtool profile`: measures the time of each part of a training step, or of a step of generation.

The profiled command builds and trains the run in a temporary folder, and a few of its steps are recorded; of a
generation, the first batch is recorded. The output is a table, also as JSON, and a trace for chrome://tracing or
ui.perfetto.dev.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtool.commands.generate import requested
from lmtool.config.base import JsonObject
from lmtool.costs.memory_of_run import TrainingConfig
from lmtool.costs.rate import product_rate
from lmtool.distillation.recording import Teacher
from lmtool.errors import Stopped, UserError
from lmtool.learners.generation.decoding import Decoding
from lmtool.learners.generation.generate import GenerativeModel
from lmtool.models.configs import TransformerConfig
from lmtool.nn import linear
from lmtool.reporting.console import Output
from lmtool.reporting.costs import StepProfile, print_profile
from lmtool.resolver.commands import FinetuneConfig, GenerateConfig, PretrainConfig, ProfileKeys, RunConfig
from lmtool.runs.finding import saved_steps
from lmtool.runs.identity import select_folder
from lmtool.session.fit import temporary_session, train_few_steps
from lmtool.session.session import Session
from lmtool.system.files import RUNS, user_path
from lmtool.system.terminal import counted
from lmtool.tasks.configs.mixture import GlueConfig
from lmtool.training.attribution import OTHER, MeanStep, attribute
from lmtool.training.loop import StopTraining
from lmtool.training.precision import cpu_has_bf16
from lmtool.training.profiling import PRODUCT, STEP, TEACHER, ProfiledLoader, profiler_of, profiler_range, ranges
from lmtool.training.progress import peak_memory
from lmtool.weights.exporting import require_new

WARM_UP = 2
TABLE, TRACE = "profile.json", "trace.json.gz"


def run(config: TrainingConfig, verb: str, profiling: ProfileKeys) -> int:
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
        heading = f"a step of lmtool {verb} · {learned_name} · model={config.model.name}"
        _publish(profile, verb, folder, output, heading)
    return 0


def generation(config: GenerateConfig) -> int:
    """Generates the first batch of texts three times: to warm up, to measure, and with the profiler. Prints the table
    of a step, which chooses a token of each text, and writes it and the trace."""
    output = Output()
    request = requested(config, output)
    trained, model = request.trained, request.trained.config.model.name
    precision, generative = trained.precision, request.writer.model
    with _folder(config.output, f"profile-generate-{model}") as folder, precision.autocast():

        def generate(recording: DecodingRecording) -> None:
            with recording.of(generative), suppress(StopTraining):
                request.writer.write(
                    request.prompts, request.settings, config.seed, config.batch_tokens, keep=recording.stop
                )

        for measured in (DecodingRecording(precision.device), DecodingRecording(precision.device)):
            generate(measured)  # the first one warms up
        if not measured.steps:
            raise UserError("a profile needs two tokens of a text", "set max_new_tokens=32, or use another prompt")
        profiler = profiler_of(precision.device)
        profiled = DecodingRecording(precision.device, profiler)
        with ranges(request.learner, [(linear, linear.few_rows.__name__, PRODUCT)]):
            generate(profiled)
        profiler.export_chrome_trace(str(folder / TRACE))
        on_gpu = precision.device.type == "cuda"
        costs = attribute(profiler.events(), on_gpu)
        costs.parts["choice of tokens"] = costs.parts.pop(OTHER)
        profile = StepProfile(
            **_costs(costs),
            unprofiled_milliseconds=1000 * measured.seconds / measured.steps,
            steps=profiled.steps,
            tokens=profiled.tokens / profiled.steps,
            micro_batches=0,
            peak_memory_bytes=peak_memory(precision.device),
            precision=precision.name,
            device=str(precision.device),
            threads=torch.get_num_threads(),
            metadata={"vocab_size": trained.config.model.vocab_size, "native_bf16": on_gpu or cpu_has_bf16()},
        )
        others = len(request.prompts) - measured.texts
        output.line(
            f"{counted(measured.texts, 'prompt')} read in {1000 * measured.prompt_seconds:.2f} ms before the first step"
            + (f"; {counted(others, 'prompt')} of further batches were not profiled" if others else "")
        )
        _publish(profile, "generate", folder, output, f"a step of lmtool generate · model={model}")
    return 0


class DecodingRecording:
    """Measurements of the first batch of a generation. A step lasts from one `Decoding.advance` to the next, or to the
    end of the batch.

    prompt_seconds: time of reading the prompts. seconds, steps: time and number of all steps. tokens: those that the
    steps read, one of each unfinished text. texts: number of texts in the batch.
    """

    def __init__(self, device: torch.device, profiler: torch.profiler.profile | None = None):
        self.device, self.profiler = device, profiler
        self.prompt_seconds = self.seconds = 0.0
        self.steps = self.tokens = self.texts = 0
        self._range: Any = None

    @contextmanager
    def of(self, model: GenerativeModel) -> Iterator[None]:
        """Records what the model generates in the block."""
        new_decoding = model.decoding

        def decoding(prompts: Sequence[Sequence[int]], limit: int) -> Decoding:
            batch = new_decoding(prompts, limit)
            read_prompts, advance = batch.read_prompts, batch.advance

            def timed_prompts() -> Tensor:
                started = self._now()
                logits_NV = read_prompts()
                self.prompt_seconds = self._now() - started
                return logits_NV

            def timed_step(tokens_R: Tensor, rows: Sequence[int] | None = None) -> Tensor:
                self._end_step()
                self._begin_step(len(tokens_R))
                return advance(tokens_R, rows)

            vars(batch).update(read_prompts=timed_prompts, advance=timed_step)
            return batch

        vars(model)["decoding"] = decoding
        try:
            yield
        finally:
            del vars(model)["decoding"]

    def stop(self, texts: Mapping[int, list[int]]) -> None:
        """Ends the recording after a batch: raises StopTraining."""
        self._end_step()
        self.texts = len(texts)
        if self.steps:
            self.seconds = self._now() - self._started
            if self.profiler is not None:
                self.profiler.stop()
        raise StopTraining

    def _begin_step(self, texts: int) -> None:
        if not self.steps:
            self._started = self._now()
            if self.profiler is not None:
                self.profiler.start()
        self.steps, self.tokens = self.steps + 1, self.tokens + texts
        self._range = profiler_range(STEP)
        self._range.__enter__()

    def _end_step(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _publish(profile: StepProfile, verb: str, folder: Path, output: Output, heading: str) -> None:
    profile = replace(profile, product_rate=product_rate(profile.precision, profile.device))
    (folder / TABLE).write_text(json.dumps({"command": verb, **asdict(profile)}, indent=1) + "\n", encoding="utf-8")
    print_profile(output, profile, heading)
    output.line(f"table {folder / TABLE}; trace {folder / TRACE}, for https://ui.perfetto.dev or chrome://tracing")


def _phase_note(config: TrainingConfig) -> str:
    phases = len(config.phases) if isinstance(config, PretrainConfig) else 0
    return (
        f", of the first of {phases} phases; to profile another one, set its keys instead of phases=" if phases else ""
    )


def _require_new_run(config: TrainingConfig, verb: str) -> None:
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


def _profile(config: TrainingConfig, steps: int, folder: Path) -> StepProfile:
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
        **_costs(costs),
        unprofiled_milliseconds=1000 * recording.unprofiled_seconds,
        steps=recording.steps,
        tokens=recording.tokens / recording.steps,
        micro_batches=recording.micro_batches / recording.steps,
        peak_memory_bytes=recording.peak_bytes,
        precision=precision.name,
        device=str(precision.device),
        threads=torch.get_num_threads(),
        metadata=_metadata(config, session.loader.metadata(), on_gpu, compiles),
    )


def _costs(costs: MeanStep) -> dict[str, Any]:
    return {
        "milliseconds": costs.milliseconds,
        "parts": {name: asdict(cost) for name, cost in costs.parts.items()},
        "products_milliseconds": costs.products,
        "products_flops": costs.flops,
    }


def _metadata(config: RunConfig, metadata: JsonObject, on_gpu: bool, compiles: bool) -> JsonObject:
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
