"""The rules that relate several keys of a command, in one table. Imports no torch.

A rule is a function that reads the values of some keys and yields problems, each with the keys and a legal override.
Those of one subject are in its package (`learners/rules.py`, `distillation/rules.py`, ...), those of all runs below.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
from lmtool.reporting.trackers.base import TrackerConfig
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
from lmtool.runs.files import output_errors, overwriting_errors
from lmtool.system.files import user_path
from lmtool.tasks import rules as tasks
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.training.configs import OptimizerConfig, amounts_of
from lmtool.training.phases import EPOCH_KEYS, words_of_phase
from lmtool.tuning import rules as tuning


def require_one_batch_size(batch_examples: int | None, batch_tokens: int | None) -> Iterator[Problem]:
    if batch_examples is not None and batch_tokens is not None:
        yield Problem(
            "batch_tokens",
            f"batch_examples={batch_examples} and batch_tokens={batch_tokens} both set the batch size",
            "set one of them to null: batch_tokens=null or batch_examples=null",
        )
    if batch_examples is None and batch_tokens is None:
        yield Problem("batch_tokens", "missing batch size", "set batch_examples=32 or batch_tokens=2048")


def require_batches_of_one_sequence(
    batch_tokens: int | None, micro_batch_tokens: int | None, max_length: int
) -> Iterator[Problem]:
    for key, tokens in (("batch_tokens", batch_tokens), ("micro_batch_tokens", micro_batch_tokens)):
        if tokens is not None and tokens < max_length:
            yield Problem(
                key,
                f"{key}={tokens} holds no sequence of max_length={max_length}",
                f"set {key}={max_length} or more, or max_length={max(SHORTEST, tokens)}",
            )


def require_positions_for_length(max_length: int, model: ModelConfig) -> Iterator[Problem]:
    if max_length > model.max_positions:
        yield Problem(
            "max_length",
            f"max_length={max_length} is more than model.max_positions={model.max_positions}",
            f"set max_length={model.max_positions} or lower",
        )


def require_positions_for_memory(model: ModelConfig, max_length: int) -> Iterator[Problem]:
    if max_length <= model.max_positions < max_length + model.max_memory_length and model.max_memory_length:
        yield Problem(
            "model.max_positions",
            f"max_length={max_length} after a memory of {model.max_memory_length} tokens is more than "
            f"model.max_positions={model.max_positions}",
            f"set model.max_positions={max_length + model.max_memory_length}, or smaller memory lengths",
        )


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


def require_separate_layers_for_decay(optimizer: OptimizerConfig, model: ModelConfig) -> Iterator[Problem]:
    if optimizer.layer_decay != 1 and model.shares_layers:
        yield Problem(
            "optimizer.layer_decay",
            f"optimizer.layer_decay={optimizer.layer_decay}: model={model.name} shares the weights of all layers",
            "set optimizer.layer_decay=1.0",
        )


def require_unit_of_reference(
    optimizer: OptimizerConfig, batch_examples: int | None, batch_tokens: int | None
) -> Iterator[Problem]:
    scaling = optimizer.batch_scaling
    if scaling is None or (batch_examples is None) == (batch_tokens is None):
        return
    unit, other = ("examples", "tokens") if batch_tokens is None else ("tokens", "examples")
    if getattr(scaling, unit) is None:
        reference, batch = getattr(scaling, other), batch_tokens or batch_examples
        yield Problem(
            "optimizer.batch_scaling",
            f"optimizer.batch_scaling has its reference in {other} ({reference}), but batch_{unit}={batch} in {unit}",
            f'set "optimizer.batch_scaling={{rule: {scaling.rule}, {unit}: N}}", or batch_{other}=N batch_{unit}=null',
        )


def require_budget(*budgets: float | None) -> Iterator[Problem]:
    if all(budget is None for budget in budgets):
        names = "max_steps, max_epochs, max_tokens, max_words, max_minutes or max_flops"
        yield Problem("max_steps", f"missing budget: one of {names}", "set max_steps=10000, for example")


def require_ascending_amounts(
    checkpoint_at: Sequence[int | str] | None, max_tokens: int | None, max_words: int | None
) -> Iterator[Problem]:
    try:
        amounts = amounts_of(checkpoint_at)
    except ValueError as error:
        yield Problem(
            "checkpoint_at",
            f"checkpoint_at: {error}",
            "set checkpoint_at=[500K,1.5M,2B] (tokens) or [10Mw,100Mw] (words)",
        )
        return
    listed = f"checkpoint_at={_listed(checkpoint_at)}"
    if checkpoint_at == ():
        yield Problem("checkpoint_at", "checkpoint_at=[] lists no amount", "set checkpoint_at=null")
    if len({amount.words for amount in amounts}) > 1:
        yield Problem("checkpoint_at", f"{listed} mixes tokens and words", "use amounts of one of them")
        return
    if any(later.number <= earlier.number for earlier, later in pairwise(amounts)):
        ascending = sorted({amount.number: amount.name for amount in amounts}.items())
        yield Problem(
            "checkpoint_at",
            f"{listed} is not ascending",
            f"set checkpoint_at={_listed([name for _, name in ascending])}",
        )
        return
    key, budget = ("max_words", max_words) if amounts and amounts[0].words else ("max_tokens", max_tokens)
    beyond = [amount for amount in amounts if budget is not None and amount.number > budget]
    if beyond:
        yield Problem(
            "checkpoint_at",
            f"checkpoint_at={beyond[0].name} is beyond the budget, {key}={budget}",
            f"set {key}={beyond[-1].number}, or omit the amount",
        )


def _listed(amounts: Sequence[int | str] | None) -> str:
    return f"[{','.join(map(str, amounts or ()))}]"


def _counts_words(max_words: int | None, checkpoint_at: Sequence[int | str] | None) -> str | None:
    """Returns the key that needs the words of the text, or None."""
    if max_words is not None:
        return f"max_words={max_words}"
    words = [str(amount) for amount in checkpoint_at or () if str(amount).endswith("w")]
    return f"checkpoint_at={words[0]}" if words else None


def refuse_words_of_rows(max_words: int | None, checkpoint_at: Sequence[int | str] | None) -> Iterator[Problem]:
    if setting := _counts_words(max_words, checkpoint_at):
        yield Problem(
            setting.partition("=")[0],
            f"{setting}: the words of labeled rows are not counted",
            "use max_tokens= or max_epochs=, and amounts of tokens",
        )


def require_words_of_one_text(
    max_words: int | None, checkpoint_at: Sequence[int | str] | None, phases: Sequence[JsonObject], data: DataConfig,
    objective: ObjectiveConfig,
) -> Iterator[Problem]:  # fmt: skip
    setting = _counts_words(max_words, checkpoint_at)
    reason = "phases=" if phases else f"data={data.name}" if data.name == "mixture" else None
    if not objective.reads_text:
        reason = f"objective={objective.name}"
    if setting and reason:
        yield Problem(
            setting.partition("=")[0],
            f"{setting}: words are counted in passes over one text, not with {reason}",
            "use max_tokens=, and amounts of tokens",
        )


def require_embedding_for_vocabulary(tokenizer: TokenizerConfig, model: ModelConfig) -> Iterator[Problem]:
    entries, rows = tokenizer.vocab_size, model.vocab_size
    if entries is not None and entries > rows:
        yield Problem(
            "tokenizer.vocab_size",
            f"tokenizer.vocab_size={entries} is more than model.vocab_size={rows}",
            f"set tokenizer.vocab_size={rows} or model.vocab_size={entries}",
        )


def refuse_name_latest(name: str | None) -> Iterator[Problem]:
    if name == "latest":
        hint = f"set another name=; to resume the newest run: {command_line('resume', 'runs/latest')}"
        yield Problem("name", "name=latest: runs/latest is a link to the newest run", hint)


def require_folder(key: str, folder: str | None) -> Iterator[Problem]:
    """Neither the folder nor one of its parents is a file. key: the key that sets the folder."""
    paths = () if folder is None else (user_path(folder), *user_path(folder).parents)
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None and not existing.is_dir():
        yield Problem(key, f"{key}={folder}: {existing} is a file, not a folder", f"set another {key}=")


def require_output_file(output: str | None) -> Iterator[Problem]:
    """The folder of the output file must exist. Checked at the start, because predicting may take hours."""
    yield from output_errors(output)


def refuse_output_over_input(output: str | None, *sources: str | TaskConfig | DataConfig | None) -> Iterator[Problem]:
    for source in (source for source in sources if source is not None):
        reads = partial(contains, source) if isinstance(source, str) else source.reads_file
        yield from overwriting_errors(output, reads)


def require_one_run_folder(name: str | None, run_dir: str | None) -> Iterator[Problem]:
    if name is not None and run_dir is not None and Path(run_dir).name != name:
        yield Problem("run_dir", f"name={name} and run_dir={run_dir}: a run has one folder", "set only one of the two")


def require_device(device: str) -> Iterator[Problem]:
    """A run on CUDA needs a driver. The number of devices is checked later."""
    if not device.startswith("cuda") or not sys.platform.startswith("linux"):
        return
    if not any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")):
        yield Problem("device", f"device={device}: this machine has no such device", "set device=cpu or device=auto")


def require_text_or_input(key: str, text: str | None, source: str | None) -> Iterator[Problem]:
    """A command reads either one text or one file. key: the key of the text."""
    if (text is None) == (source is None):
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
        trainable = [
            entry.name
            for entry in entries("tokenizer")
            if issubclass(entry.config, TokenizerConfig) and entry.config.reads_text
        ]
        message = f"tokenizer={tokenizer.name} is trained already, but this command trains a tokenizer"
        yield Problem("tokenizer", message, f"set tokenizer={' or '.join(trainable)}")


def require_vocabulary_size(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    if tokenizer.vocab_size is None:
        yield Problem(
            "tokenizer.vocab_size", "missing required value: tokenizer.vocab_size", "set tokenizer.vocab_size=8192"
        )


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


def require_offline_trackers(logger: Mapping[str, TrackerConfig], offline: bool) -> Iterator[Problem]:
    for name, config in logger.items():
        if offline and config.needs_network:
            key = f"logger.{name}.mode"
            yield Problem(key, f"{key}=online contradicts offline=true", f"set {key}=offline, or offline=false")


def require_installed_trackers(logger: Mapping[str, TrackerConfig]) -> Iterator[Problem]:
    for name, config in logger.items():
        if (problem := config.missing(f"logger.{name}")) is not None:
            yield problem


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
            message = (
                f"phases.{number} sets {words_of_phase(settings)}: model={model.name} carries state along streams of "
                "text, which these keys interrupt"
            )
            yield Problem("phases", message, f"set them for the whole run instead, {separate}")
            return


def refuse_epochs_of_unequal_phases(
    phases: Sequence[JsonObject], max_epochs: float | None, max_steps: int | None
) -> Iterator[Problem]:
    differing = [key for key in EPOCH_KEYS if len({json.dumps(phase.get(key), sort_keys=True) for phase in phases}) > 1]
    if max_epochs is not None and differing:
        hint = "set max_epochs=null max_steps=10000"
        if max_steps is not None:
            hint = f"set max_epochs=null; max_steps={max_steps} ends the run"
        yield Problem(
            "max_epochs",
            f"max_epochs={max_epochs:g}: the length of an epoch changes between phases, which differ in "
            f"{', '.join(differing)}",
            hint,
        )


def refuse_unused_length(phases: Sequence[JsonObject], max_length: int) -> Iterator[Problem]:
    lengths = [phase.get("max_length") for phase in phases]
    default = PretrainConfig.model_fields["max_length"].default
    if phases and None not in lengths and max_length not in (default, *lengths):
        yield Problem(
            "max_length",
            f"max_length={max_length} is not used: every phase sets its own max_length",
            f"set phases.0.max_length={max_length}, or omit max_length=",
        )


@dataclass(frozen=True)
class Rule:
    """A rule of a command and of its subclasses.

    Attributes:
        command: The class of the command.
        keys: The keys that `check` is called with, separated by spaces; "teachers" are the saved configurations of the
            teachers by path. A rule applies if all of them have valid values.
        check: Yields the problems.
        running: Whether the rule applies only on the machine that runs the command, not to `lmtool plan`.
    """

    command: type[Config]
    keys: str
    check: Callable[..., Iterable[Problem]]
    running: bool = False


RULES = (
    # What is learned, with which model
    Rule(PretrainConfig, "objective model", learners.require_trainable_model),
    Rule(PretrainConfig, "objective parallel", learners.refuse_fsdp),
    Rule(PretrainConfig, "objective model tokenizer", learners.require_tokens_of_objective),
    Rule(PretrainConfig, "model objective data", learners.require_reuse_for_memory),
    Rule(PretrainConfig, "objective data", learners.require_one_text),
    Rule(PretrainConfig, "objective max_steps", learners.require_steps_after_generator),
    Rule(PretrainConfig, "objective", tasks.require_objective_task_data),
    Rule(FinetuneConfig, "task", learners.refuse_conflicts),
    Rule(FinetuneConfig, "task model", learners.require_trainable_model),
    Rule(PretrainConfig, "objective model", learners.require_trees),
    Rule(FinetuneConfig, "task model", learners.require_trees),
    Rule(FinetuneConfig, "task parallel", learners.refuse_fsdp),
    Rule(FinetuneConfig, "task", tasks.require_task_data),
    Rule(FinetuneConfig, "task cache_dir offline", tasks.require_available_task_data, running=True),
    Rule(FinetuneConfig, "task model max_length", tasks.require_length_for_source),
    # How pretrained weights are tuned
    Rule(FinetuneConfig, "tuning", tuning.refuse_conflicts),
    Rule(FinetuneConfig, "tuning model task", tuning.require_tunable_model),
    Rule(FinetuneConfig, "tuning parallel", tuning.refuse_fsdp),
    Rule(FinetuneConfig, "tuning model max_length", tuning.require_positions_for_virtual_tokens),
    Rule(FinetuneConfig, "tuning model", tuning.refuse_virtual_tokens_in_trees),
    Rule(FinetuneConfig, "tuning checkpoint", tuning.require_pretrained_weights, running=True),
    Rule(FinetuneConfig, "forgetting checkpoint", require_checkpoint_for_forgetting, running=True),
    Rule(FinetuneConfig, "parallel forgetting", refuse_forgetting_with_fsdp),
    # From whom it is learned
    Rule(RunConfig, "distill", distillation.refuse_conflicts),
    Rule(RunConfig, "distill parallel", distillation.refuse_fsdp),
    Rule(PretrainConfig, "distill phases", distillation.refuse_phases),
    Rule(PretrainConfig, "distill objective model", distillation.require_fitting_task),
    Rule(FinetuneConfig, "distill task model", distillation.require_fitting_task),
    Rule(PretrainConfig, "distill model objective", distillation.refuse_generated_inputs),
    Rule(FinetuneConfig, "distill model task", distillation.refuse_generated_inputs),
    Rule(FinetuneConfig, "distill task", distillation.refuse_annealed_sampling),
    Rule(FinetuneConfig, "distill task model", distillation.refuse_both_orders),
    Rule(RunConfig, "distill patience", distillation.require_trained_heads_for_patience),
    Rule(RunConfig, "distill", distillation.require_teachers, running=True),
    Rule(RunConfig, "distill", distillation.require_label_file, running=True),
    Rule(RunConfig, "distill checkpoint", distillation.require_one_student_start, running=True),
    Rule(PretrainConfig, "distill objective teachers", distillation.require_objective_of_teachers),
    Rule(FinetuneConfig, "distill task teachers", distillation.require_task_of_teachers),
    Rule(PretrainConfig, "distill objective model max_length teachers", distillation.require_text_format_of_teachers),
    Rule(FinetuneConfig, "distill task model max_length teachers", distillation.require_text_format_of_teachers),
    Rule(RunConfig, "distill model teachers", distillation.require_comparable_layers),
    Rule(
        PretrainConfig,
        "distill objective model tokenizer checkpoint teachers",
        distillation.require_vocabulary_of_teachers,
    ),
    Rule(
        FinetuneConfig, "distill task model tokenizer checkpoint teachers", distillation.require_vocabulary_of_teachers
    ),
    # Sizes: positions, vocabularies, batches, budgets
    Rule(RunConfig, "model tokenizer", learners.require_tokens_of_text_format),
    Rule(RunConfig, "tokenizer model", require_embedding_for_vocabulary),
    Rule(RunConfig, "model", require_supported_positions),
    Rule(RunConfig, "max_length model", require_positions_for_length),
    Rule(PretrainConfig, "model max_length", require_positions_for_memory),
    Rule(RunConfig, "optimizer model", require_separate_layers_for_decay),
    Rule(RunConfig, "batch_examples batch_tokens", require_one_batch_size),
    Rule(RunConfig, "optimizer batch_examples batch_tokens", require_unit_of_reference),
    Rule(RunConfig, "batch_tokens micro_batch_tokens max_length", require_batches_of_one_sequence),
    Rule(RunConfig, "max_steps max_epochs max_tokens max_words max_minutes max_flops", require_budget),
    Rule(RunConfig, "checkpoint_at max_tokens max_words", require_ascending_amounts),
    Rule(FinetuneConfig, "max_words checkpoint_at", refuse_words_of_rows),
    Rule(PretrainConfig, "max_words checkpoint_at phases data objective", require_words_of_one_text),
    Rule(PretrainConfig, "phases max_epochs max_steps", refuse_epochs_of_unequal_phases),
    Rule(PretrainConfig, "phases max_length", refuse_unused_length),
    Rule(PretrainConfig, "model objective data devices distill phases", refuse_interrupted_state),
    # The machine, its folders, and trackers
    Rule(RunConfig, "name", refuse_name_latest),
    Rule(RunConfig, "name run_dir", require_one_run_folder),
    Rule(RunConfig, "run_dir", partial(require_folder, "run_dir"), running=True),
    Rule(RunConfig, "device", require_device, running=True),
    Rule(RunConfig, "parallel precision", refuse_scaler_with_fsdp),
    Rule(RunConfig, "logger offline", require_offline_trackers),
    Rule(RunConfig, "logger", require_installed_trackers, running=True),
    # Other commands
    Rule(PretrainConfig, "data", tasks.require_task_texts),
    Rule(TokenizerCommandConfig, "data", tasks.require_task_texts),
    Rule(TokenizerCommandConfig, "tokenizer", require_trainable_tokenizer),
    Rule(TokenizerCommandConfig, "tokenizer", require_vocabulary_size),
    Rule(TokenizerCommandConfig, "output", partial(require_folder, "output"), running=True),
    Rule(TransferConfig, "output", partial(require_folder, "output"), running=True),
    Rule(PredictConfig, "text input", partial(require_text_or_input, "text")),
    Rule(PredictConfig, "text pair", require_text_for_pair),
    Rule(PredictConfig, "probabilities output", require_output_for_probabilities),
    Rule(GenerateConfig, "prompt input", partial(require_text_or_input, "prompt")),
    Rule(UseConfig, "output", require_output_file, running=True),
    Rule(CheckConfig, "output", require_output_file, running=True),
    Rule(AskConfig, "output input", refuse_output_over_input, running=True),
    Rule(GenerateConfig, "output input", refuse_output_over_input, running=True),
    Rule(EvaluateConfig, "output task data", refuse_output_over_input, running=True),
    Rule(CheckConfig, "output task data", refuse_output_over_input, running=True),
)


def violations(command: type[Config], values: JsonObject, running: bool) -> Iterator[Problem]:
    """Yields the problems of all rules whose keys have valid values.

    Args:
        command: The class of the command.
        values: The valid values by key.
        running: Whether the command runs on this machine.
    """
    for rule in RULES:
        keys = rule.keys.split()
        if issubclass(command, rule.command) and (running or not rule.running) and all(key in values for key in keys):
            yield from rule.check(*(values[key] for key in keys))
