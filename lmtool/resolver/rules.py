"""Rules across sections: what no section can know alone. Each names the keys and the nearest legal override."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from lmtool.config.needs import Requirement
from lmtool.config.plugins import command_line
from lmtool.config.rules import rule
from lmtool.config.tables import entries
from lmtool.data.configs import DataConfig
from lmtool.errors import Problem
from lmtool.learners.configs import WHOLE_WEIGHTS, ObjectiveConfig
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.reporting.trackers.configs import TrackerConfig
from lmtool.resolver.schema.run import (
    SHORTEST,
    FinetuneConfig,
    PretrainConfig,
    RunConfig,
    TokenizerCommandConfig,
    TransferConfig,
)
from lmtool.resolver.schema.use import GenerateConfig, PredictConfig, UseConfig
from lmtool.runs.files import output_errors
from lmtool.tasks.configs import TaskConfig, TaskObjectiveConfig, TaskTextConfig, tasks_of
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.training.configs import OptimizerConfig
from lmtool.tuning.configs import TuningConfig


@rule(PretrainConfig, "objective", "max_steps")
def the_second_stage_is_reached(objective: ObjectiveConfig, max_steps: int | None) -> Iterator[Problem]:
    """Where the generator learns first, the model learns after it."""
    first = objective.steps_without_model
    if first and max_steps is not None and first >= max_steps:
        yield Problem(
            "objective.generator_steps",
            f"objective.generator_steps={first} leaves the model no step of max_steps={max_steps}",
            f"give objective.generator_steps={max(1, max_steps // 2)} or max_steps={2 * first}",
        )


@rule(RunConfig, "batch_examples", "batch_tokens")
def one_batch_size(batch_examples: int | None, batch_tokens: int | None) -> Iterator[Problem]:
    """A batch is sized in examples or in tokens."""
    if batch_examples is not None and batch_tokens is not None:
        yield Problem(
            "batch_tokens",
            f"batch_examples={batch_examples} and batch_tokens={batch_tokens}: a batch has one size",
            "set the other to null: batch_tokens=null or batch_examples=null",
        )
    if batch_examples is None and batch_tokens is None:
        yield Problem("batch_tokens", "no batch size given", "give batch_examples=32 or batch_tokens=2048")


@rule(RunConfig, "batch_tokens", "max_length")
def batch_holds_a_sequence(batch_tokens: int | None, max_length: int) -> Iterator[Problem]:
    """A batch holds at least one sequence."""
    if batch_tokens is not None and batch_tokens < max_length:
        yield Problem(
            "batch_tokens",
            f"batch_tokens={batch_tokens} holds no sequence of max_length={max_length}",
            f"give batch_tokens={max_length} or more, or max_length={max(8, batch_tokens)}",
        )


@rule(RunConfig, "micro_batch_tokens", "max_length")
def micro_batch_holds_a_sequence(micro_batch_tokens: int | None, max_length: int) -> Iterator[Problem]:
    """A micro-batch holds at least one sequence."""
    if micro_batch_tokens is not None and micro_batch_tokens < max_length:
        yield Problem(
            "micro_batch_tokens",
            f"micro_batch_tokens={micro_batch_tokens} holds no sequence of max_length={max_length}",
            f"give micro_batch_tokens={max_length} or more",
        )


@rule(RunConfig, "max_length", "model")
def length_fits_positions(max_length: int, model: ModelConfig) -> Iterator[Problem]:
    """No sequence is longer than the model's table of positions."""
    if max_length > model.max_positions:
        yield Problem(
            "max_length",
            f"max_length={max_length} is more than model.max_positions={model.max_positions}",
            f"give max_length={model.max_positions} at most",
        )


@rule(PretrainConfig, "model", "max_length")
def memory_fits_positions(model: ModelConfig, max_length: int) -> Iterator[Problem]:
    """A segment and the memory in front of it are a text that the model has positions for."""
    if max_length <= model.max_positions < max_length + model.remembers and model.remembers:
        yield Problem(
            "model.max_positions",
            f"max_length={max_length} behind a memory of {model.remembers} tokens is more than "
            f"model.max_positions={model.max_positions}",
            f"give model.max_positions={max_length + model.remembers}, or shorter memories, in training and evaluation",
        )


@rule(FinetuneConfig, "tuning", "model", "max_length")
def virtual_tokens_fit_positions(tuning: TuningConfig, model: ModelConfig, max_length: int) -> Iterator[Problem]:
    """A text and what a tuning method puts into it have a position each, where there is a last one."""
    virtual = tuning.reserved_positions(model)
    left = model.max_positions - virtual
    if virtual and left < max_length <= model.max_positions:  # more is another rule's
        fewer = f"a smaller tuning.length={max(1, model.max_positions - max_length)}"
        yield Problem(
            "max_length",
            f"max_length={max_length} and the {virtual} virtual tokens of tuning={tuning.name} are more than "
            f"model.max_positions={model.max_positions}",
            f"give max_length={left}" if left >= SHORTEST else f"give {fewer}",
        )


@rule(RunConfig, "model")
def positions_fit_model(model: ModelConfig) -> Iterator[Problem]:
    """A family has the kinds of positions its maths allows; rotary ones turn pairs of a head's dimensions."""
    if not isinstance(model, TransformerConfig):
        return
    positions, kinds, head_size = model.positions, model.position_kinds, model.width_of_head
    if kinds is not None and positions.name not in kinds:
        yield Problem(
            "model.positions",
            f"model/positions={positions.name}: model={model.name} has {' or '.join(kinds)} positions only",
            f"give model/positions={kinds[0]}",
        )
    if positions.even_heads and head_size % 2:
        yield Problem(
            "model.positions",
            f"model/positions={positions.name} turns pairs of dimensions; a head of model={model.name} has {head_size}",
            "give model/positions=alibi, or another model.num_heads",
        )


@rule(RunConfig, "optimizer", "model")
def rates_fall_with_the_depth(optimizer: OptimizerConfig, model: ModelConfig) -> Iterator[Problem]:
    """Layers with learning rates of their own are layers of their own."""
    if optimizer.layer_decay != 1 and model.shares_layers:
        yield Problem(
            "optimizer.layer_decay",
            f"optimizer.layer_decay={optimizer.layer_decay}: model={model.name} has one layer, applied at every depth",
            "give optimizer.layer_decay=1.0",
        )


@rule(RunConfig, "max_steps", "max_epochs", "max_tokens", "max_minutes", "max_flops")
def some_budget(*budgets: float | None) -> Iterator[Problem]:
    """A run ends some time."""
    if all(budget is None for budget in budgets):
        names = "max_steps, max_epochs, max_tokens, max_minutes or max_flops"
        yield Problem("max_steps", f"no budget given: one of {names}", "give max_steps=10000, for example")


@rule(RunConfig, "tokenizer", "model")
def vocabulary_fits_embedding(tokenizer: TokenizerConfig, model: ModelConfig) -> Iterator[Problem]:
    """The embedding has a row for every entry of the vocabulary."""
    entries, rows = tokenizer.vocab_size, model.vocab_size
    if entries is not None and entries > rows:
        yield Problem(
            "tokenizer.vocab_size",
            f"tokenizer.vocab_size={entries} is more than model.vocab_size={rows}",
            f"give tokenizer.vocab_size={rows} or model.vocab_size={entries}",
        )


@rule(RunConfig, "name")
def latest_names_another(name: str | None) -> Iterator[Problem]:
    """runs/latest is a link to the newest run."""
    if name == "latest":
        hint = f"give another name=; to resume the newest run: {command_line('resume', 'runs/latest')}"
        yield Problem("name", "name=latest: runs/latest is a link to the newest run", hint)


@rule(RunConfig, "run_dir", running=True)
def run_has_a_folder(run_dir: str | None) -> Iterator[Problem]:
    """A run's folder is not a file, nor below one."""
    file = None if run_dir is None else _file_on_the_way(run_dir)
    if file is not None:
        yield Problem("run_dir", f"run_dir={run_dir}: {file} is a file; a run has a folder", "give another run_dir=")


@rule(TransferConfig, "output", running=True)
@rule(TokenizerCommandConfig, "output", running=True)
def output_is_a_folder(output: str) -> Iterator[Problem]:
    """What is written is a folder, not a file, nor below one."""
    file = _file_on_the_way(output)
    if file is not None:
        yield Problem("output", f"output={output}: {file} is a file; a folder is written", "give another output=")


@rule(UseConfig, "output", running=True)
def output_is_a_file(output: str | None) -> Iterator[Problem]:
    """What is written is a file, in a folder that is there: said before hours of predicting."""
    yield from output_errors(output)


def _file_on_the_way(folder: str) -> Path | None:
    """The file that stands where a folder, or one above it, belongs."""
    path = Path(folder).expanduser()
    there = next((ancestor for ancestor in (path, *path.parents) if ancestor.exists()), None)
    return None if there is None or there.is_dir() else there


@rule(RunConfig, "name", "run_dir")
def one_place(name: str | None, run_dir: str | None) -> Iterator[Problem]:
    """A run has one folder."""
    if name is not None and run_dir is not None and Path(run_dir).name != name:
        yield Problem("run_dir", f"name={name} and run_dir={run_dir}: a run has one folder", "give one of the two")


@rule(FinetuneConfig, "task")
def task_has_data(task: TaskConfig) -> Iterator[Problem]:
    """Labelled data come from somewhere."""
    for part in (part for part in task.parts() if len(task.parts()) > 1 and not part.has_data):
        message = f"the member {part.name} of task.members names no data of its own"
        yield Problem(f"task.with.{part.name}.path", message, f"give task.with.{part.name}.path=FOLDER")
    if len(task.parts()) == 1 and not task.has_data:
        message = f"missing required value: task.path; task {task.name} names no data of its own"
        yield Problem("task.path", message, "give task.path=FOLDER, or a file to train on")


@rule(PretrainConfig, "objective")
def tasks_have_data(objective: ObjectiveConfig) -> Iterator[Problem]:
    """So do those of tasks among the objectives."""
    for task in (task for task in tasks_of(objective) if not task.has_data):
        message = f"the task {task.name} among the objectives names no data of its own"
        key = (
            "objective.task.path" if isinstance(objective, TaskObjectiveConfig) else f"objective.with.{task.name}.path"
        )
        yield Problem("objective", message, f"give {key}=FOLDER, or a file to train on")


@rule(PretrainConfig, "data")
@rule(TokenizerCommandConfig, "data")
def task_texts_come_from_somewhere(data: DataConfig) -> Iterator[Problem]:
    """So do the texts of a task."""
    parts = data.task.parts() if isinstance(data, TaskTextConfig) else ()
    for task in (task for task in parts if not task.has_data):
        message = f"data.task={task.name} names no data of its own"
        yield Problem("data.task.path", message, "give data.task.path=FOLDER, or a file")


@rule(FinetuneConfig, "task", "model", "max_length")
def target_leaves_room(task: TaskConfig, model: ModelConfig, max_length: int) -> Iterator[Problem]:
    """A decoder reads a source in front of its target, within max_length."""
    for part in task.parts():
        target = part.longest_target
        if model.architecture == "decoder" and target >= max_length:
            key = "task.target_tokens" if part is task else f"task.with.{part.name}.target_tokens"
            longer = f"max_length={2 * target} or " if 2 * target <= model.max_positions else ""
            yield Problem(
                "max_length",
                f"max_length={max_length} and {key}={target}: model={model.name} reads a source in front of its "
                "target, for which they leave no room",
                f"give {longer}{key}={max(2, max_length // 2)}",
            )


@rule(RunConfig, "device", running=True)
def device_is_there(device: str) -> Iterator[Problem]:
    """A CUDA device was asked for, and the machine has a driver for one. What the driver counts is known later."""
    if not device.startswith("cuda") or not sys.platform.startswith("linux"):
        return
    if not any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")):
        yield Problem("device", f"device={device}: this machine has no such device", "give device=cpu or device=auto")


@rule(PredictConfig, "text", "pair", "input")
def something_to_read(text: str | None, pair: str | None, source: str | None) -> Iterator[Problem]:
    """Predict reads one text or one file."""
    if (text is None) == (source is None):
        given = "neither text nor input given" if text is None else "text and input given"
        yield Problem("text", f"{given}: one of them is read", 'give text="..." or input=FILE (- reads standard input)')
    if pair is not None and text is None:
        yield Problem("pair", "pair is the second text, and text, the first, is not given", 'give text="..." too')


@rule(PredictConfig, "probabilities", "output")
def probabilities_are_written(probabilities: bool, output: str | None) -> Iterator[Problem]:
    """The probabilities of all classes are columns of a file."""
    if probabilities and output is None:
        message = "probabilities=true: they are written to a file, and output= names none"
        yield Problem("probabilities", message, "give output=FILE.csv (or .jsonl) too")


@rule(GenerateConfig, "prompt", "input")
def something_to_begin_with(prompt: str | None, source: str | None) -> Iterator[Problem]:
    """Generate reads one prompt or one file."""
    if (prompt is None) == (source is None):
        given = "neither prompt nor input given" if prompt is None else "prompt and input given"
        yield Problem("prompt", f"{given}: one of them is read", 'give prompt="..." or input=FILE (- reads lines)')


@rule(TokenizerCommandConfig, "tokenizer")
def tokenizer_is_trained(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """This command trains one; a tokenizer that exists needs no training."""
    if not tokenizer.reads_text:
        kinds = [
            entry.name
            for entry in entries("tokenizer")
            if issubclass(entry.config, TokenizerConfig) and entry.config.reads_text
        ]
        message = f"tokenizer={tokenizer.name} exists already; this command trains one"
        yield Problem("tokenizer", message, f"give tokenizer={' or '.join(kinds)}")


@rule(TokenizerCommandConfig, "tokenizer")
def vocabulary_has_a_size(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """Without a model, the size of the vocabulary must be typed."""
    if tokenizer.vocab_size is None:
        yield Problem(
            "tokenizer.vocab_size", "missing required value: tokenizer.vocab_size", "give tokenizer.vocab_size=8192"
        )


# What a run starts from, and what its processes share.


@rule(FinetuneConfig, "tuning", "checkpoint", running=True)
def pretrained_weights_are_there(tuning: TuningConfig, checkpoint: str | None) -> Iterator[Problem]:
    """What holds weights at the pretrained ones has some. A trained checkpoint is read without what it started from."""
    if tuning.needs_start and checkpoint in (None, "none"):
        holding = next((scheme.name for scheme in tuning.schemes if scheme.needs_start), tuning.name)
        yield Problem(
            "tuning.regularization",
            f"tuning/regularization={holding} holds weights at pretrained ones, and checkpoint=none has none",
            "give checkpoint=RUN, or tuning/regularization=none",
        )


@rule(FinetuneConfig, "forgetting", "checkpoint", running=True)
def something_to_forget(forgetting: str | None, checkpoint: str | None) -> Iterator[Problem]:
    """What is measured before finetuning was learned before."""
    if forgetting is not None and checkpoint in (None, "none"):
        message = f"forgetting={forgetting} measures what was pretrained, and checkpoint=none has nothing"
        yield Problem("forgetting", message, "give checkpoint=RUN, or leave forgetting= out")


@rule(RunConfig, "parallel", "precision")
def gradients_have_one_scaler(parallel: str, precision: str) -> Iterator[Problem]:
    """The scaler of fp16 judges the gradients of one process."""
    if precision == "fp16" and not WHOLE_WEIGHTS.holds(parallel):
        reason = "precision=fp16 scales the loss by what the gradients of one process are"
        yield Requirement(WHOLE_WEIGHTS, "precision", reason, "give precision=bf16").problem(parallel)


@rule(FinetuneConfig, "parallel", "forgetting")
def weights_are_compared(parallel: str, forgetting: str | None) -> Iterator[Problem]:
    """What reads weights beside a forward needs all of them."""
    if forgetting is not None and not WHOLE_WEIGHTS.holds(parallel):
        reason = "forgetting= compares weights before and after"
        yield Requirement(WHOLE_WEIGHTS, "forgetting", reason, "give forgetting=null").problem(parallel)


# Which trackers a run can have; what it cannot is refused before anything is read.


@rule(RunConfig, "logger", "offline")
def trackers_fit(logger: Mapping[str, TrackerConfig], offline: bool) -> Iterator[Problem]:
    """A run without a network has no tracker that needs it."""
    for name, config in logger.items():
        if offline and config.needs_network:
            key = f"logger.{name}.mode"
            yield Problem(key, f"{key}=online and offline=true", f"give {key}=offline, or offline=false")


@rule(RunConfig, "logger", running=True)
def trackers_are_installed(logger: Mapping[str, TrackerConfig]) -> Iterator[Problem]:
    """What a tracker needs is on this machine."""
    for name, config in logger.items():
        if (problem := config.missing(f"logger.{name}")) is not None:
            yield problem
