"""Rules across sections: what no section can know alone. Each names the keys and the nearest legal override."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmtool.config.plugins import command_line
from lmtool.config.rules import rule
from lmtool.config.tables import entries
from lmtool.distillation.configs import DistillConfig, NoDistillConfig
from lmtool.errors import Problem
from lmtool.models.configs import TransformerConfig
from lmtool.reporting.trackers.configs import TrackerConfig
from lmtool.resolver.schema.phases import OF_A_PASS
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig, TokenizerCommandConfig, TransferConfig
from lmtool.resolver.schema.use import GenerateConfig, PredictConfig, UseConfig
from lmtool.runs.files import output_errors
from lmtool.tasks.configs import MixtureTaskConfig, TaskConfig, TaskObjectiveConfig, TaskTextConfig, tasks_of


@rule(PretrainConfig, "objective", "max_steps")
def the_second_stage_is_reached(objective: Any, max_steps: int | None) -> Iterator[Problem]:
    """Where the generator learns first, the model learns after it."""
    if getattr(objective, "training", "joint") == "two_stage" and max_steps is not None:
        first = objective.generator_steps
        if first >= max_steps:
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
def length_fits_positions(max_length: int, model: Any) -> Iterator[Problem]:
    """No sequence is longer than the model's table of positions."""
    positions = getattr(model, "max_positions", None)
    if positions is not None and max_length > positions:
        yield Problem(
            "max_length",
            f"max_length={max_length} is more than model.max_positions={positions}",
            f"give max_length={positions} at most",
        )


@rule(RunConfig, "model")
def positions_fit_model(model: Any) -> Iterator[Problem]:
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
def rates_fall_with_the_depth(optimizer: Any, model: Any) -> Iterator[Problem]:
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
def vocabulary_fits_embedding(tokenizer: Any, model: Any) -> Iterator[Problem]:
    """The embedding has a row for every entry of the vocabulary."""
    asked, rows = getattr(tokenizer, "vocab_size", None), getattr(model, "vocab_size", None)
    if asked is not None and rows is not None and asked > rows:
        yield Problem(
            "tokenizer.vocab_size",
            f"tokenizer.vocab_size={asked} is more than model.vocab_size={rows}",
            f"give tokenizer.vocab_size={rows} or model.vocab_size={asked}",
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
def task_has_data(task: Any) -> Iterator[Problem]:
    """Labelled data come from somewhere."""
    for part in filter(_without_data, task.parts() if len(task.parts()) > 1 else ()):
        message = f"the member {part.name} of task.members names no data of its own"
        yield Problem(f"task.with.{part.name}.path", message, f"give task.with.{part.name}.path=FOLDER")
    if len(task.parts()) == 1 and _without_data(task):
        message = f"missing required value: task.path; task {task.name} names no data of its own"
        yield Problem("task.path", message, "give task.path=FOLDER, or a file to train on")


@rule(PretrainConfig, "objective")
def tasks_have_data(objective: Any) -> Iterator[Problem]:
    """So do those of tasks among the objectives."""
    for task in filter(_without_data, tasks_of(objective)):
        message = f"the task {task.name} among the objectives names no data of its own"
        key = (
            "objective.task.path" if isinstance(objective, TaskObjectiveConfig) else f"objective.with.{task.name}.path"
        )
        yield Problem("objective", message, f"give {key}=FOLDER, or a file to train on")


@rule(PretrainConfig, "data")
@rule(TokenizerCommandConfig, "data")
def task_texts_come_from_somewhere(data: Any) -> Iterator[Problem]:
    """So do the texts of a task."""
    for task in filter(_without_data, data.task.parts() if isinstance(data, TaskTextConfig) else ()):
        message = f"data.task={task.name} names no data of its own"
        yield Problem("data.task.path", message, "give data.task.path=FOLDER, or a file")


@rule(FinetuneConfig, "task", "model")
def head_has_a_class(task: Any, model: Any) -> Iterator[Problem]:
    """A task read as transformers reads it is on a family of which transformers has a classifier."""
    for part in task.parts():
        if getattr(part, "head", None) == "transformers" and model.transformers_form is None:
            key = "task.head" if part is task else f"task.with.{part.name}.head"
            message = f"{key}=transformers: transformers has no text classifier of model={model.name}"
            yield Problem("task.head", message, f"give {key}=paper")


@rule(FinetuneConfig, "task", "model", "max_length")
def target_leaves_room(task: Any, model: Any, max_length: int) -> Iterator[Problem]:
    """A decoder reads a source in front of its target, within max_length."""
    for part in task.parts():
        wanted = getattr(part, "target_tokens", 0)
        if model.architecture == "decoder" and wanted >= max_length:
            key = "task.target_tokens" if part is task else f"task.with.{part.name}.target_tokens"
            longer = f"max_length={2 * wanted} or " if 2 * wanted <= model.max_positions else ""
            yield Problem(
                "max_length",
                f"max_length={max_length} and {key}={wanted}: model={model.name} reads a source in front of its "
                "target, for which they leave no room",
                f"give {longer}{key}={max(2, max_length // 2)}",
            )


@rule(FinetuneConfig, "task")
def scores_have_a_mean(task: Any) -> Iterator[Problem]:
    """Of the members of a mixture the larger score is the better one."""
    from lmtool.learners.metrics import smaller_is_better  # needs numpy, which no other configuration waits for

    for part in task.parts() if isinstance(task, MixtureTaskConfig) else ():
        if smaller_is_better(part.metric):
            others = [metric for metric in part.metrics if not smaller_is_better(metric)]
            key = f"task.with.{part.name}.metric"
            message = (
                f"{key}={part.metric}: small where it is good; the mean of the members is of scores that are large"
            )
            yield Problem("task.members", message, f"give {key}={others[0] if others else 'NAME'}")


def _without_data(task: TaskConfig) -> bool:
    return all(getattr(task, where, None) is None for where in ("path", "hub", "embedded"))


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
def tokenizer_is_trained(tokenizer: Any) -> Iterator[Problem]:
    """This command trains one; a tokenizer that exists needs no training."""
    if not getattr(tokenizer, "reads_text", True):
        kinds = [entry.name for entry in entries("tokenizer") if getattr(entry.config, "reads_text", True)]
        message = f"tokenizer={tokenizer.name} exists already; this command trains one"
        yield Problem("tokenizer", message, f"give tokenizer={' or '.join(kinds)}")


@rule(TokenizerCommandConfig, "tokenizer")
def vocabulary_has_a_size(tokenizer: Any) -> Iterator[Problem]:
    """Without a model, the size of the vocabulary must be typed."""
    if tokenizer.vocab_size is None:
        yield Problem(
            "tokenizer.vocab_size", "missing required value: tokenizer.vocab_size", "give tokenizer.vocab_size=8192"
        )


# Which trackers a run can have; what it cannot is refused before anything is read.


@rule(RunConfig, "logger", "offline")
def trackers_fit(logger: Mapping[str, TrackerConfig], offline: bool) -> Iterator[Problem]:
    """A run without a network has no tracker that needs it."""
    for name, config in logger.items():
        if (problem := config.misfit(f"logger.{name}", offline)) is not None:
            yield problem


@rule(RunConfig, "logger", running=True)
def trackers_are_installed(logger: Mapping[str, TrackerConfig]) -> Iterator[Problem]:
    """What a tracker needs is on this machine."""
    for name, config in logger.items():
        if (problem := config.missing(f"logger.{name}")) is not None:
            yield problem


# Rules for a run in phases: what goes with them, and that none of its keys is read by nobody.


Phases = tuple[dict[str, Any], ...]


@rule(PretrainConfig, "phases", "max_epochs", "max_steps")
def passes_are_alike(phases: Phases, max_epochs: float | None, max_steps: int | None) -> Iterator[Problem]:
    """A number of passes says how long a run is where all phases have passes of one length."""
    differing = [key for key in OF_A_PASS if len({json.dumps(phase.get(key), sort_keys=True) for phase in phases}) > 1]
    if max_epochs is not None and differing:
        other = f"max_steps={max_steps} is a budget" if max_steps is not None else "with max_steps=10000 or max_tokens="
        yield Problem(
            "max_epochs",
            f"max_epochs={max_epochs:g}: a pass is not of one length in phases that differ in {', '.join(differing)}",
            f"give max_epochs=null: {other}" if max_steps is not None else f"give max_epochs=null {other}",
        )


@rule(PretrainConfig, "phases", "max_length")
def length_is_read(phases: Phases, max_length: int) -> Iterator[Problem]:
    """The run's own length is that of the phases that give none."""
    lengths = [phase.get("max_length") for phase in phases]
    default = PretrainConfig.model_fields["max_length"].default
    if phases and None not in lengths and max_length not in (default, *lengths):
        yield Problem(
            "max_length",
            f"max_length={max_length} is read by no phase: each has its own",
            f"give phases.0.max_length={max_length}, or leave max_length= out",
        )


@rule(PretrainConfig, "phases", "distill")
def students_have_one_form(phases: Phases, distill: DistillConfig) -> Iterator[Problem]:
    """What a teacher says of a text is kept for one form of its examples."""
    if phases and not isinstance(distill, NoDistillConfig):
        yield Problem(
            "phases",
            f"distill={distill.name}: a distilled run has no phases",
            "give phases=[], and a run for each phase, the next one from the checkpoint of the one before",
        )
