"""The rules that relate several keys of a command, in one table. Imports no torch.

A rule is a function whose parameters are the keys that it reads. It yields problems, each with a legal override. Those
of one subject are in its package (`learners/rules.py`, `distillation/rules.py`, ...), those of all runs below.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path

from lmtool.config.base import Config, JsonObject
from lmtool.config.registry import command_line, entries
from lmtool.data.configs import SHORTEST, DataConfig, contains
from lmtool.distillation import rules as distillation
from lmtool.distillation.configs.base import DistillConfig
from lmtool.errors import Problem
from lmtool.learners import rules as learners
from lmtool.learners.configs import ObjectiveConfig, needs_whole_weights
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.reporting.trackers.base import require_installed_trackers, require_offline_trackers
from lmtool.resolver.commands import (
    AskConfig,
    CheckConfig,
    EvaluateConfig,
    FinetuneConfig,
    GenerateConfig,
    PredictConfig,
    PretrainConfig,
    RunConfig,
    TokenizerCommandConfig,
    TransferConfig,
    UseConfig,
)
from lmtool.runs.files import output_errors, output_folder_errors, overwriting_errors, run_folder_errors
from lmtool.tasks import rules as tasks
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.training import rules as training
from lmtool.training.configs import OptimizerConfig
from lmtool.training.phases import EPOCH_KEYS, words_of_phase
from lmtool.tuning import rules as tuning


def require_batches_of_one_sequence(
    batch_tokens: int | None, micro_batch_tokens: int | None, max_length: int
) -> Iterator[Problem]:
    for key, tokens in (("batch_tokens", batch_tokens), ("micro_batch_tokens", micro_batch_tokens)):
        if tokens is not None and tokens < max_length:
            message = f"{key}={tokens} holds no sequence of max_length={max_length}"
            yield Problem(key, message, f"set {key}={max_length} or more, or max_length={max(SHORTEST, tokens)}")


def require_positions_for_length(max_length: int, model: ModelConfig) -> Iterator[Problem]:
    if max_length > model.max_positions:
        message = f"max_length={max_length} is more than model.max_positions={model.max_positions}"
        yield Problem("max_length", message, f"set max_length={model.max_positions} or lower")


def require_positions_for_memory(model: ModelConfig, max_length: int) -> Iterator[Problem]:
    memory, limit = model.max_memory_length, model.max_positions
    if memory and max_length <= limit < max_length + memory:
        message = f"max_length={max_length} after a memory of {memory} tokens is more than model.max_positions={limit}"
        hint = f"set model.max_positions={max_length + memory}, or smaller memory lengths"
        yield Problem("model.max_positions", message, hint)


def require_supported_positions(model: ModelConfig) -> Iterator[Problem]:
    """The family must support the type of position encoding; rotary positions need an even head size."""
    if not isinstance(model, TransformerConfig):
        return
    positions, kinds, head_size = model.positions, model.position_kinds, model.width_of_head
    if kinds is not None and positions.name not in kinds:
        message = f"model/positions={positions.name}: model={model.name} has {' or '.join(kinds)} positions only"
        yield Problem("model.positions", message, f"set model/positions={kinds[0]}")
    if positions.even_heads and head_size % 2:
        message = f"model/positions={positions.name} rotates pairs; the head size of model={model.name} is {head_size}"
        yield Problem("model.positions", message, "set model/positions=alibi, or another model.num_heads")


def require_separate_layers_for_decay(optimizer: OptimizerConfig, model: ModelConfig) -> Iterator[Problem]:
    if optimizer.layer_decay != 1 and model.shares_layers:
        message = f"optimizer.layer_decay={optimizer.layer_decay}: model={model.name} shares the weights of all layers"
        yield Problem("optimizer.layer_decay", message, "set optimizer.layer_decay=1.0")


def require_embedding_for_vocabulary(tokenizer: TokenizerConfig, model: ModelConfig) -> Iterator[Problem]:
    entries, rows = tokenizer.vocab_size, model.vocab_size
    if entries is not None and entries > rows:
        message = f"tokenizer.vocab_size={entries} is more than model.vocab_size={rows}"
        yield Problem("tokenizer.vocab_size", message, f"set tokenizer.vocab_size={rows} or model.vocab_size={entries}")


def require_own_folder(name: str | None, run_dir: str | None) -> Iterator[Problem]:
    if name == "latest":
        hint = f"set another name=; to resume the newest run: {command_line('resume', 'runs/latest')}"
        yield Problem("name", "name=latest: runs/latest is a link to the newest run", hint)
    elif name is not None and run_dir is not None and Path(run_dir).name != name:
        yield Problem("run_dir", f"name={name} and run_dir={run_dir}: a run has one folder", "set only one of the two")


def refuse_output_over_input(output: str | None, input: str | None) -> Iterator[Problem]:
    if input is not None:
        yield from overwriting_errors(output, partial(contains, input))


def refuse_output_over_data(output: str | None, task: TaskConfig | None, data: DataConfig | None) -> Iterator[Problem]:
    for source in (task, data):
        if source is not None:
            yield from overwriting_errors(output, source.reads_file)


def require_text_or_input(text: str | None, input: str | None) -> Iterator[Problem]:
    yield from _one_of_text_and_file("text", text, input)


def require_prompt_or_input(prompt: str | None, input: str | None) -> Iterator[Problem]:
    yield from _one_of_text_and_file("prompt", prompt, input)


def _one_of_text_and_file(key: str, text: str | None, file: str | None) -> Iterator[Problem]:
    if (text is None) == (file is None):
        message = f"neither {key} nor input is set" if text is None else f"both {key} and input are set"
        yield Problem(key, message, f'set {key}="..." or input=FILE (- reads standard input)')


def require_text_for_pair(text: str | None, pair: str | None) -> Iterator[Problem]:
    if pair is not None and text is None:
        yield Problem("pair", "pair, the second text, is set without text, the first", 'set text="..." too')


def require_output_for_probabilities(probabilities: bool, output: str | None) -> Iterator[Problem]:
    if probabilities and output is None:
        message = "probabilities=true needs an output file, but output= is not set"
        yield Problem("probabilities", message, "set output=FILE.csv (or .jsonl) too")


def require_trainable_tokenizer(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    if not tokenizer.reads_text:
        configs = {entry.name: entry.config for entry in entries("tokenizer")}
        trainable = [
            name for name, config in configs.items() if issubclass(config, TokenizerConfig) and config.reads_text
        ]
        message = f"tokenizer={tokenizer.name} is trained already, but this command trains a tokenizer"
        yield Problem("tokenizer", message, f"set tokenizer={' or '.join(trainable)}")
    if tokenizer.vocab_size is None:
        message = "missing required value: tokenizer.vocab_size"
        yield Problem("tokenizer.vocab_size", message, "set tokenizer.vocab_size=8192")


def require_checkpoint_for_forgetting(forgetting: str | None, checkpoint: str | None) -> Iterator[Problem]:
    if forgetting is not None and checkpoint in (None, "none"):
        message = f"forgetting={forgetting} measures the pretraining loss, but checkpoint=none was not pretrained"
        yield Problem("forgetting", message, "set checkpoint=RUN, or omit forgetting=")


def refuse_scaler_with_fsdp(parallel: str, precision: str) -> Iterator[Problem]:
    """The fp16 gradient scaler checks the gradients of one process only."""
    if precision == "fp16" and parallel == "fsdp":
        reason = "precision=fp16 scales the loss by the gradients of one process"
        yield needs_whole_weights("precision", reason, "set precision=bf16")


def refuse_forgetting_with_fsdp(parallel: str, forgetting: str | None) -> Iterator[Problem]:
    if forgetting is not None and parallel == "fsdp":
        reason = "forgetting= compares the weights before and after training"
        yield needs_whole_weights("forgetting", reason, "set forgetting=null")


def refuse_interrupted_state(
    model: ModelConfig,
    objective: ObjectiveConfig,
    data: DataConfig,
    devices: int | None,
    distill: DistillConfig,
    phases: Sequence[JsonObject],
) -> Iterator[Problem]:
    """A recurrent model, or one with a memory, carries state from batch to batch along parallel streams of joined text.
    One process must therefore read all streams from the beginning of an epoch to its end."""
    if not learners.reads_lanes(model, objective, data):
        return
    carries = f"model={model.name} carries state from batch to batch"
    separate = "or data.documents=separate, which carries no state"
    processes = devices or int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        message = f"devices={processes}: {carries}, which stays within one process"
        yield Problem("devices", message, f"set devices=1, {separate}")
    if distill.name != "none":
        message = f"distill={distill.name}: {carries}, but the other model does not"
        yield Problem("distill", message, f"set distill=none, {separate}")
    for number, phase in enumerate(phases):
        if settings := {key: phase[key] for key in EPOCH_KEYS if key in phase}:
            message = f"phases.{number} sets {words_of_phase(settings)}: {carries}, which these keys interrupt"
            yield Problem("phases", message, f"set them for the whole run instead, {separate}")
            return


def refuse_unused_length(phases: Sequence[JsonObject], max_length: int) -> Iterator[Problem]:
    lengths = [phase.get("max_length") for phase in phases]
    default = PretrainConfig.model_fields["max_length"].default
    if phases and None not in lengths and max_length not in (default, *lengths):
        message = f"max_length={max_length} is not used: every phase sets its own max_length"
        yield Problem("max_length", message, f"set phases.0.max_length={max_length}, or omit max_length=")


Rule = Callable[..., Iterable[Problem]]
"""Yields the problems of the values that it is called with. Its parameters are named after their keys; `learned` is the
objective or the task, and `teachers` are the saved configurations of the teachers by path."""

RULES: Mapping[type[Config], Sequence[Rule]] = {
    RunConfig: (
        distillation.refuse_conflicts,
        distillation.refuse_fsdp,
        distillation.require_fitting_task,
        distillation.refuse_generated_inputs,
        distillation.require_trained_heads_for_patience,
        distillation.require_text_format_of_teachers,
        distillation.require_comparable_layers,
        distillation.require_vocabulary_of_teachers,
        learners.require_trainable_model,
        learners.require_trees,
        learners.refuse_fsdp,
        learners.require_tokens_of_text_format,
        require_embedding_for_vocabulary,
        require_supported_positions,
        require_positions_for_length,
        require_separate_layers_for_decay,
        training.require_one_batch_size,
        training.require_unit_of_reference,
        require_batches_of_one_sequence,
        training.require_budget,
        training.require_ascending_amounts,
        require_own_folder,
        refuse_scaler_with_fsdp,
        require_offline_trackers,
    ),
    PretrainConfig: (
        learners.require_tokens_of_objective,
        learners.require_reuse_for_memory,
        learners.require_one_text,
        learners.require_steps_after_generator,
        tasks.require_objective_task_data,
        tasks.require_task_texts,
        distillation.refuse_phases,
        distillation.require_objective_of_teachers,
        require_positions_for_memory,
        learners.require_words_of_one_text,
        training.refuse_epochs_of_unequal_phases,
        refuse_unused_length,
        refuse_interrupted_state,
    ),
    FinetuneConfig: (
        learners.refuse_conflicts,
        tasks.require_task_data,
        tasks.require_length_for_source,
        tuning.refuse_conflicts,
        tuning.require_tunable_model,
        tuning.refuse_fsdp,
        tuning.require_positions_for_virtual_tokens,
        tuning.refuse_virtual_tokens_in_trees,
        distillation.refuse_annealed_sampling,
        distillation.refuse_both_orders,
        distillation.require_task_of_teachers,
        refuse_forgetting_with_fsdp,
        learners.refuse_words_of_rows,
    ),
    TokenizerCommandConfig: (tasks.require_task_texts, require_trainable_tokenizer),
    PredictConfig: (require_text_or_input, require_text_for_pair, require_output_for_probabilities),
    GenerateConfig: (require_prompt_or_input,),
}
"""The rules of each command and of its subclasses."""

RULES_OF_MACHINE: Mapping[type[Config], Sequence[Rule]] = {
    RunConfig: (
        distillation.require_teachers,
        distillation.require_label_file,
        distillation.require_one_student_start,
        run_folder_errors,
        training.require_device,
        require_installed_trackers,
    ),
    FinetuneConfig: (
        tasks.require_available_task_data,
        tuning.require_pretrained_weights,
        require_checkpoint_for_forgetting,
    ),
    TokenizerCommandConfig: (output_folder_errors,),
    TransferConfig: (output_folder_errors,),
    UseConfig: (output_errors,),
    AskConfig: (refuse_output_over_input,),
    GenerateConfig: (refuse_output_over_input,),
    EvaluateConfig: (refuse_output_over_data,),
    CheckConfig: (output_errors, refuse_output_over_data),
}
"""The rules that apply only on the machine that runs the command, not to `lmtool plan`."""


def violations(command: type[Config], values: JsonObject, running: bool) -> Iterator[Problem]:
    """Yields the problems of all rules whose keys have valid values. values: the valid values by key. running: whether
    the command runs on this machine."""
    learned = "objective" if issubclass(command, PretrainConfig) else "task"
    values = values | ({"learned": values[learned]} if learned in values else {})
    for rules in (RULES, RULES_OF_MACHINE) if running else (RULES,):
        for owner, checks in rules.items():
            for check in checks if issubclass(command, owner) else ():
                keys = signature(check).parameters
                if all(key in values for key in keys):
                    yield from check(**{key: values[key] for key in keys})
