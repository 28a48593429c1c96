"""Rules that relate several keys of a command. Each problem names the keys and the nearest legal override."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from lmtool.config.decode import rule
from lmtool.config.needs import Requirement
from lmtool.config.plugins import command_line
from lmtool.config.tables import entries
from lmtool.data.configs import DataConfig, contains
from lmtool.errors import Problem
from lmtool.learners.configs import WHOLE_WEIGHTS, ObjectiveConfig
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.reporting.trackers.base import TrackerConfig
from lmtool.resolver.schema.run import (
    SHORTEST,
    FinetuneConfig,
    PretrainConfig,
    RunConfig,
    TokenizerCommandConfig,
    TransferConfig,
)
from lmtool.resolver.schema.use import AskConfig, CheckConfig, EvaluateConfig, GenerateConfig, PredictConfig, UseConfig
from lmtool.runs.files import output_errors, overwriting_errors
from lmtool.system.files import user_path
from lmtool.tasks.configs import TaskConfig, TaskObjectiveConfig, TaskTextConfig, tasks_of
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.training.configs import OptimizerConfig
from lmtool.tuning.configs import TuningConfig


@rule(PretrainConfig, "objective", "max_steps")
def require_steps_after_generator(objective: ObjectiveConfig, max_steps: int | None) -> Iterator[Problem]:
    """If the generator is trained alone first, steps for the model must remain."""
    generator_steps = objective.steps_without_model
    if generator_steps and max_steps is not None and generator_steps >= max_steps:
        yield Problem(
            "objective.generator_steps",
            f"objective.generator_steps={generator_steps} leaves the model no step of max_steps={max_steps}",
            f"set objective.generator_steps={max(1, max_steps // 2)} or max_steps={2 * generator_steps}",
        )


@rule(RunConfig, "batch_examples", "batch_tokens")
def require_one_batch_size(batch_examples: int | None, batch_tokens: int | None) -> Iterator[Problem]:
    """The batch size is set in examples or in tokens, not in both."""
    if batch_examples is not None and batch_tokens is not None:
        yield Problem(
            "batch_tokens",
            f"batch_examples={batch_examples} and batch_tokens={batch_tokens} both set the batch size",
            "set one of them to null: batch_tokens=null or batch_examples=null",
        )
    if batch_examples is None and batch_tokens is None:
        yield Problem("batch_tokens", "missing batch size", "set batch_examples=32 or batch_tokens=2048")


@rule(RunConfig, "batch_tokens", "micro_batch_tokens", "max_length")
def require_batches_of_one_sequence(
    batch_tokens: int | None, micro_batch_tokens: int | None, max_length: int
) -> Iterator[Problem]:
    """Batches and micro-batches hold at least one sequence."""
    for key, tokens in (("batch_tokens", batch_tokens), ("micro_batch_tokens", micro_batch_tokens)):
        if tokens is not None and tokens < max_length:
            yield Problem(
                key,
                f"{key}={tokens} holds no sequence of max_length={max_length}",
                f"set {key}={max_length} or more, or max_length={max(SHORTEST, tokens)}",
            )


@rule(RunConfig, "max_length", "model")
def require_positions_for_length(max_length: int, model: ModelConfig) -> Iterator[Problem]:
    """max_length is at most the number of positions of the model."""
    if max_length > model.max_positions:
        yield Problem(
            "max_length",
            f"max_length={max_length} is more than model.max_positions={model.max_positions}",
            f"set max_length={model.max_positions} or lower",
        )


@rule(PretrainConfig, "model", "max_length")
def require_positions_for_memory(model: ModelConfig, max_length: int) -> Iterator[Problem]:
    """The model has positions for a segment together with the memory before it."""
    if max_length <= model.max_positions < max_length + model.max_memory_length and model.max_memory_length:
        yield Problem(
            "model.max_positions",
            f"max_length={max_length} after a memory of {model.max_memory_length} tokens is more than "
            f"model.max_positions={model.max_positions}",
            f"set model.max_positions={max_length + model.max_memory_length}, or smaller memory lengths",
        )


@rule(FinetuneConfig, "tuning", "model", "max_length")
def require_positions_for_virtual_tokens(
    tuning: TuningConfig, model: ModelConfig, max_length: int
) -> Iterator[Problem]:
    """The model has positions for a text together with the virtual tokens of the tuning method."""
    virtual = tuning.reserved_positions(model)
    remaining = model.max_positions - virtual
    # A longer max_length is refused by require_positions_for_length.
    if virtual and remaining < max_length <= model.max_positions:
        fewer = f"tuning.length={max(1, model.max_positions - max_length)}"
        yield Problem(
            "max_length",
            f"max_length={max_length} and the {virtual} virtual tokens of tuning={tuning.name} are more than "
            f"model.max_positions={model.max_positions}",
            f"set max_length={remaining}" if remaining >= SHORTEST else f"set {fewer}",
        )


@rule(RunConfig, "model")
def require_supported_positions(model: ModelConfig) -> Iterator[Problem]:
    """The family must support the type of position encoding; rotary positions need an even head size."""
    if not isinstance(model, TransformerConfig):
        return
    positions, kinds, head_size = model.positions, model.position_kinds, model.width_of_head
    if kinds is not None and positions.name not in kinds:
        yield Problem(
            "model.positions",
            f"model/positions={positions.name}: model={model.name} has {' or '.join(kinds)} positions only",
            f"set model/positions={kinds[0]}",
        )
    if positions.even_heads and head_size % 2:
        yield Problem(
            "model.positions",
            f"model/positions={positions.name} rotates pairs of dimensions, but the head size of "
            f"model={model.name} is {head_size}",
            "set model/positions=alibi, or another model.num_heads",
        )


@rule(RunConfig, "optimizer", "model")
def require_separate_layers_for_decay(optimizer: OptimizerConfig, model: ModelConfig) -> Iterator[Problem]:
    """Layer-wise learning rates need layers that do not share weights."""
    if optimizer.layer_decay != 1 and model.shares_layers:
        yield Problem(
            "optimizer.layer_decay",
            f"optimizer.layer_decay={optimizer.layer_decay}: model={model.name} shares the weights of all layers",
            "set optimizer.layer_decay=1.0",
        )


@rule(RunConfig, "max_steps", "max_epochs", "max_tokens", "max_minutes", "max_flops")
def require_budget(*budgets: float | None) -> Iterator[Problem]:
    """At least one budget is set."""
    if all(budget is None for budget in budgets):
        names = "max_steps, max_epochs, max_tokens, max_minutes or max_flops"
        yield Problem("max_steps", f"missing budget: one of {names}", "set max_steps=10000, for example")


@rule(RunConfig, "tokenizer", "model")
def require_embedding_for_vocabulary(tokenizer: TokenizerConfig, model: ModelConfig) -> Iterator[Problem]:
    """The embedding has a row for every token of the vocabulary."""
    entries, rows = tokenizer.vocab_size, model.vocab_size
    if entries is not None and entries > rows:
        yield Problem(
            "tokenizer.vocab_size",
            f"tokenizer.vocab_size={entries} is more than model.vocab_size={rows}",
            f"set tokenizer.vocab_size={rows} or model.vocab_size={entries}",
        )


@rule(RunConfig, "name")
def refuse_name_latest(name: str | None) -> Iterator[Problem]:
    """runs/latest is a link to the newest run."""
    if name == "latest":
        hint = f"set another name=; to resume the newest run: {command_line('resume', 'runs/latest')}"
        yield Problem("name", "name=latest: runs/latest is a link to the newest run", hint)


@rule(RunConfig, "run_dir", running=True)
def require_run_folder(run_dir: str | None) -> Iterator[Problem]:
    """Neither run_dir nor one of its parents is a file."""
    file = None if run_dir is None else _file_in_path(run_dir)
    if file is not None:
        yield Problem(
            "run_dir", f"run_dir={run_dir}: {file} is a file, but a run needs a folder", "set another run_dir="
        )


@rule(TransferConfig, "output", running=True)
@rule(TokenizerCommandConfig, "output", running=True)
def require_output_folder(output: str) -> Iterator[Problem]:
    """Neither the output folder nor one of its parents is a file."""
    file = _file_in_path(output)
    if file is not None:
        yield Problem("output", f"output={output}: {file} is a file, but the output is a folder", "set another output=")


@rule(UseConfig, "output", running=True)
@rule(CheckConfig, "output", running=True)
def require_output_file(output: str | None) -> Iterator[Problem]:
    """The folder of the output file must exist. Checked at the start, because predicting may take hours."""
    yield from output_errors(output)


@rule(AskConfig, "output", "input", running=True)
@rule(GenerateConfig, "output", "input", running=True)
@rule(EvaluateConfig, "output", "task", "data", running=True)
@rule(CheckConfig, "output", "task", "data", running=True)
def refuse_output_over_input(output: str | None, *sources: str | TaskConfig | DataConfig | None) -> Iterator[Problem]:
    """A command must not replace a file that it reads."""
    for source in (source for source in sources if source is not None):
        reads = partial(contains, source) if isinstance(source, str) else source.reads_file
        yield from overwriting_errors(output, reads)


def _file_in_path(folder: str) -> Path | None:
    """Returns the file, if any, at the path of a folder or of one of its parents."""
    path = user_path(folder)
    existing = next((ancestor for ancestor in (path, *path.parents) if ancestor.exists()), None)
    return None if existing is None or existing.is_dir() else existing


@rule(RunConfig, "name", "run_dir")
def require_one_run_folder(name: str | None, run_dir: str | None) -> Iterator[Problem]:
    """A run has one folder."""
    if name is not None and run_dir is not None and Path(run_dir).name != name:
        yield Problem("run_dir", f"name={name} and run_dir={run_dir}: a run has one folder", "set only one of the two")


@rule(FinetuneConfig, "task")
def require_task_data(task: TaskConfig) -> Iterator[Problem]:
    """Every task has labeled data."""
    members = task.member_configs()
    for member in (member for member in members if len(members) > 1 and not member.has_data):
        message = f"the member {member.name} of task.members has no data by default"
        yield Problem(f"task.with.{member.name}.path", message, f"set task.with.{member.name}.path=FOLDER")
    if len(members) == 1 and not task.has_data:
        message = f"missing required value: task.path; task {task.name} has no data by default"
        yield Problem("task.path", message, "set task.path=FOLDER, or a file to train on")


@rule(PretrainConfig, "objective")
def require_objective_task_data(objective: ObjectiveConfig) -> Iterator[Problem]:
    """Every task among the objectives has labeled data."""
    for task in (task for task in tasks_of(objective) if not task.has_data):
        message = f"the task {task.name} among the objectives has no data by default"
        key = (
            "objective.task.path" if isinstance(objective, TaskObjectiveConfig) else f"objective.with.{task.name}.path"
        )
        yield Problem("objective", message, f"set {key}=FOLDER, or a file to train on")


@rule(PretrainConfig, "data")
@rule(TokenizerCommandConfig, "data")
def require_task_texts(data: DataConfig) -> Iterator[Problem]:
    """A task that is used as a text source must have data."""
    parts = data.task.member_configs() if isinstance(data, TaskTextConfig) else ()
    for task in (task for task in parts if not task.has_data):
        message = f"data.task={task.name} has no data by default"
        yield Problem("data.task.path", message, "set data.task.path=FOLDER, or a file")


@rule(FinetuneConfig, "task", "model", "max_length")
def require_length_for_source(task: TaskConfig, model: ModelConfig, max_length: int) -> Iterator[Problem]:
    """A decoder reads the source before the target: both fit into max_length."""
    for member in task.member_configs():
        target = member.longest_target
        if model.architecture == "decoder" and target >= max_length:
            key = "task.target_tokens" if member is task else f"task.with.{member.name}.target_tokens"
            longer = f"max_length={2 * target} or " if 2 * target <= model.max_positions else ""
            yield Problem(
                "max_length",
                f"max_length={max_length} and {key}={target}: model={model.name} reads the source before the "
                "target, which leaves no tokens for the source",
                f"set {longer}{key}={max(2, max_length // 2)}",
            )


@rule(RunConfig, "device", running=True)
def require_device(device: str) -> Iterator[Problem]:
    """A run on CUDA needs a driver. The number of devices is checked later."""
    if not device.startswith("cuda") or not sys.platform.startswith("linux"):
        return
    if not any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")):
        yield Problem("device", f"device={device}: this machine has no such device", "set device=cpu or device=auto")


@rule(PredictConfig, "text", "pair", "input")
def require_text_or_input(text: str | None, pair: str | None, source: str | None) -> Iterator[Problem]:
    """`lmtool predict` reads either one text or one file."""
    if (text is None) == (source is None):
        message = "neither text nor input is set" if text is None else "both text and input are set"
        yield Problem("text", message, 'set text="..." or input=FILE (- reads standard input)')
    if pair is not None and text is None:
        yield Problem("pair", "pair, the second text, is set without text, the first", 'set text="..." too')


@rule(PredictConfig, "probabilities", "output")
def require_output_for_probabilities(probabilities: bool, output: str | None) -> Iterator[Problem]:
    """The probabilities of all classes are written to a file only."""
    if probabilities and output is None:
        message = "probabilities=true needs an output file, but output= is not set"
        yield Problem("probabilities", message, "set output=FILE.csv (or .jsonl) too")


@rule(GenerateConfig, "prompt", "input")
def require_prompt_or_input(prompt: str | None, source: str | None) -> Iterator[Problem]:
    """`lmtool generate` reads either one prompt or one file."""
    if (prompt is None) == (source is None):
        message = "neither prompt nor input is set" if prompt is None else "both prompt and input are set"
        yield Problem("prompt", message, 'set prompt="..." or input=FILE (- reads lines)')


@rule(TokenizerCommandConfig, "tokenizer")
def require_trainable_tokenizer(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """`lmtool tokenizer` trains a tokenizer, so it accepts only tokenizers that are trained on text."""
    if not tokenizer.reads_text:
        trainable = [
            entry.name
            for entry in entries("tokenizer")
            if issubclass(entry.config, TokenizerConfig) and entry.config.reads_text
        ]
        message = f"tokenizer={tokenizer.name} is trained already, but this command trains a tokenizer"
        yield Problem("tokenizer", message, f"set tokenizer={' or '.join(trainable)}")


@rule(TokenizerCommandConfig, "tokenizer")
def require_vocabulary_size(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """Without a model, the size of the vocabulary must be set."""
    if tokenizer.vocab_size is None:
        yield Problem(
            "tokenizer.vocab_size", "missing required value: tokenizer.vocab_size", "set tokenizer.vocab_size=8192"
        )


@rule(FinetuneConfig, "tuning", "checkpoint", running=True)
def require_pretrained_weights(tuning: TuningConfig, checkpoint: str | None) -> Iterator[Problem]:
    """Regularization towards pretrained weights needs a checkpoint to start from."""
    if tuning.needs_initial_weights and checkpoint in (None, "none"):
        scheme_name = next((scheme.name for scheme in tuning.schemes if scheme.needs_initial_weights), tuning.name)
        yield Problem(
            "tuning.regularization",
            f"tuning/regularization={scheme_name} pulls the weights towards pretrained ones, but "
            "checkpoint=none has no pretrained weights",
            "set checkpoint=RUN, or tuning/regularization=none",
        )


@rule(FinetuneConfig, "forgetting", "checkpoint", running=True)
def require_checkpoint_for_forgetting(forgetting: str | None, checkpoint: str | None) -> Iterator[Problem]:
    """Forgetting is measured for a pretrained checkpoint only."""
    if forgetting is not None and checkpoint in (None, "none"):
        message = f"forgetting={forgetting} measures the pretraining loss, but checkpoint=none was not pretrained"
        yield Problem("forgetting", message, "set checkpoint=RUN, or omit forgetting=")


@rule(RunConfig, "parallel", "precision")
def refuse_scaler_with_fsdp(parallel: str, precision: str) -> Iterator[Problem]:
    """The fp16 gradient scaler checks the gradients of one process only."""
    if precision == "fp16" and not WHOLE_WEIGHTS.holds(parallel):
        reason = "precision=fp16 scales the loss by the gradients of one process"
        yield Requirement(WHOLE_WEIGHTS, "precision", reason, "set precision=bf16").problem(parallel)


@rule(FinetuneConfig, "parallel", "forgetting")
def refuse_forgetting_with_fsdp(parallel: str, forgetting: str | None) -> Iterator[Problem]:
    """The comparison of weights needs all of them in one process."""
    if forgetting is not None and not WHOLE_WEIGHTS.holds(parallel):
        reason = "forgetting= compares the weights before and after training"
        yield Requirement(WHOLE_WEIGHTS, "forgetting", reason, "set forgetting=null").problem(parallel)


@rule(RunConfig, "logger", "offline")
def require_offline_trackers(logger: Mapping[str, TrackerConfig], offline: bool) -> Iterator[Problem]:
    """An offline run has no tracker that needs a network."""
    for name, config in logger.items():
        if offline and config.needs_network:
            key = f"logger.{name}.mode"
            yield Problem(key, f"{key}=online contradicts offline=true", f"set {key}=offline, or offline=false")


@rule(RunConfig, "logger", running=True)
def require_installed_trackers(logger: Mapping[str, TrackerConfig]) -> Iterator[Problem]:
    """The libraries and credentials of a tracker must be on this machine."""
    for name, config in logger.items():
        if (problem := config.missing(f"logger.{name}")) is not None:
            yield problem
