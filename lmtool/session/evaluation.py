"""`lmtool evaluate` on text and by prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lmtool.config.needs import refusal
from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.config.tables import build
from lmtool.data.configs import DataConfig
from lmtool.data.examples import Rows, SplitData
from lmtool.data.file_source import FileSource
from lmtool.data.sources import open_source
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.held_out import HeldOutSplits
from lmtool.models.base import Backbone, Remembers
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.evaluations import print_few_shot, write_evaluation
from lmtool.resolver.schema.run import PretrainConfig
from lmtool.resolver.schema.use import EvaluateConfig
from lmtool.session.requests import write_output
from lmtool.session.session import tokenized_split
from lmtool.session.trained import Trained
from lmtool.system.terminal import counted
from lmtool.tasks.configs.base import PROMPT
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.loading import TaskData, load_task
from lmtool.tasks.mixture import read_tasks, rows_of
from lmtool.tasks.prompting.few_shot import FewShot, PromptedEvaluation, demonstrations
from lmtool.training.precision import Precision

# `lmtool evaluate` on text: scores of a pretrained checkpoint over windows as in training, or over overlapping windows.

_ENDS = "the ends of documents count in loss and perplexity, not in word perplexity and bits per byte"


def evaluate_text(config: EvaluateConfig, trained: Trained, before: PretrainConfig, output: Output) -> JsonObject:
    """Score a checkpoint, print the metrics and, with output=, write predictions. Returns the metrics."""
    if config.task is not None:
        raise UserError(
            f"checkpoint={config.checkpoint} has no head for task={config.task.name}",
            f"prompt it: shots=4; or train it: lmtool finetune task={config.task.name} checkpoint={config.checkpoint}",
        )
    require_unset(config, ("against", "report"), f"{config.checkpoint} was trained on text", "evaluate each by itself")
    require_length(config, before)
    learner, max_length = trained.learner(), config.max_length or before.max_length
    if config.memory_length is not None:
        remember(config, learner, max_length)
    if config.stride is not None and not learner.slides:
        raise UserError(
            f"stride={config.stride} needs a causal language model; {config.checkpoint} was trained on "
            f"{learner.config.name}",
            "omit stride=",
        )
    data, title = text_to_score(config, trained, before)
    held_out = HeldOutSplits(learner, {"validation": data}, max_length, config.batch_tokens, before.seed)
    evaluations = held_out.score(trained.precision)
    if config.output is not None:
        write_output(config.output, evaluations.records())
    metrics = evaluations.metrics()
    rows = [[name, f"{value:.4f}"] for name, value in metrics.items()]
    print_table(output, ["metric", "value"], rows, heading=f"{config.checkpoint} · {title}")
    metadata = held_out.first.loader.metadata()
    streams = "lanes" in metadata
    policy = _stream_policy(metadata, max_length, learner.backbone) if streams else _policy(config, max_length)
    if learner.slides:
        output.line(f"{policy}; {_ENDS}")
    elif streams:
        output.line(policy)
    for warning in evaluations.warnings:
        output.line(f"warning: {warning}", "yellow")
    return metrics


def require_unset(config: EvaluateConfig, keys: Sequence[str], because: str, hint: str | None = None) -> None:
    """Raise UserError for a key that has no effect."""
    for key in keys:
        if getattr(config, key) is not None:
            raise UserError(
                f"{key}={getattr(config, key)} does not apply: checkpoint={because}", hint or f"omit {key}="
            )


def require_length(config: EvaluateConfig, before: PretrainConfig) -> None:
    """Raise UserError if max_length exceeds the positions of the model."""
    positions = before.model.max_positions
    if config.max_length is not None and config.max_length > positions:
        raise UserError(
            f"max_length={config.max_length} exceeds the {positions} positions of checkpoint={config.checkpoint}",
            f"set max_length={positions} or lower",
        )


def remember(config: EvaluateConfig, learner: BaseLearner, max_length: int) -> None:
    """Change the length of a model's memory. UserError if it has none, or too few positions."""
    backbone, tokens, positions = learner.backbone, config.memory_length or 0, learner.backbone.config.max_positions
    if not isinstance(backbone, Remembers):
        raise UserError(
            f"memory_length={tokens}: model={backbone.config.name} of checkpoint={config.checkpoint} has no memory",
            "omit memory_length=",
        )
    if tokens + max_length > positions:
        raise UserError(
            f"memory_length={tokens} plus max_length={max_length} exceeds the {positions} positions of "
            f"checkpoint={config.checkpoint}",
            f"set memory_length={max(0, positions - max_length)} or lower",
        )
    backbone.remember(tokens)


def _stream_policy(metadata: JsonMapping, max_length: int, backbone: Backbone) -> str:
    memory, distance = backbone.memory_length, metadata.get("segments_apart")
    state = "the state is carried from one to the next" if memory is None else f"behind a memory of {memory} tokens"
    windows = f"segments of {max_length} tokens"
    if distance is not None:
        windows = f"windows of {max_length} tokens, {distance} apart"
    return f"{counted(metadata['lanes'], 'lane')} in {windows}, {state}"


def _policy(config: EvaluateConfig, max_length: int) -> str:
    stride = config.stride
    windows = f"windows of {max_length} tokens"
    if stride is None:
        return windows
    return f"{windows}, {stride} apart: each token is predicted once, from {max_length - stride} tokens or more"


def text_to_score(config: EvaluateConfig, trained: Trained, before: PretrainConfig) -> tuple[SplitData, str]:
    """The text to score, and its title: the held-out text of the training data, or the text of data=. Text files of
    data= are scored completely, unless data.validation= names others."""
    data, trained_on = config.data or before.data, before.data
    source, title = open_source(data, config.cache_dir, offline=config.offline), f"validation text of data={data.name}"
    if isinstance(source, FileSource) and _names_no_validation(data, trained_on):
        named = next(f"data.{key}={getattr(data, key)}" for key in ("path", "hub") if hasattr(data, key))
        source, title = source.complete(), f"all text of {named}"
    _, tasks = read_tasks(before.objective, before.seed, config.cache_dir, config.offline)
    rows, progress = rows_of(tasks, "validation"), Output().stage
    text = tokenized_split(
        data, source, "validation", trained.tokenizer, config.cache_dir, progress, rows, config.stride
    )
    return text, title


def _names_no_validation(data: DataConfig, known: DataConfig) -> bool:
    """Whether data= names other files or another data set than the training data, and nothing to validate on."""
    typed, trained_on = data.model_dump(), known.model_dump()
    other = any(typed.get(key) != trained_on.get(key) for key in ("path", "hub", "split"))
    return other and typed["validation"] in (None, trained_on.get("validation"))


# `lmtool evaluate shots=`: a task by prompts, over several samples of demonstrations. Nothing is trained.


def evaluate_prompted(config: EvaluateConfig, trained: Trained, output: Output) -> JsonObject:
    """Score every sample of demonstrations, print means and standard deviations, and write the files of output= and
    report=. Returns for the first split the mean of each metric and, over several samples, its
    `_standard_deviation`."""
    before, shots = trained.config, config.shots or 0
    if config.task is None or not isinstance(before, PretrainConfig):
        reason = "no task is named" if config.task is None else "it was trained for a task, and has its head"
        raise UserError(
            f"shots={shots} prompts a language model; checkpoint={config.checkpoint}: {reason}",
            "set task=NAME and the checkpoint of lmtool pretrain, or a published language model",
        )
    if before.model.architecture == "encoder":
        raise UserError(
            f"shots={shots} needs a generative model; checkpoint={config.checkpoint} fills masks",
            f"set shots=0 (classes alone), a decoder or an encoder-decoder, or: lmtool finetune "
            f"task={config.task.name} checkpoint={config.checkpoint}",
        )
    require_unset(config, ("against", "stride"), f"{config.checkpoint} is prompted, by shots={shots}")
    # Without demonstrations, training rows are only used for the baseline.
    data = load_task(config.task, before.seed, config.cache_dir, config.offline, scoring=not shots)
    learner, kind = trained.learner(), build(data.config)
    few_shot = FewShot(
        kind, learner.writer(), _longest(config, trained, before), config.normalisation, config.batch_tokens,
        trained.precision,
    )  # fmt: skip
    checksum = _checksum(learner)
    scored = [*data.validation.values(), *data.test.values()]
    seeds = range(config.prompt_seeds if shots else 1)
    demonstration_sets = [demonstrations(kind, data.train, scored, shots, seed) for seed in seeds]
    splits = {
        split: [few_shot.evaluate(examples, rows, seed) for seed, examples in enumerate(demonstration_sets)]
        for split, rows in data.validation.items()
    }
    if _checksum(learner) != checksum:
        raise RuntimeError("prompting changed the model's parameters")
    if config.output is not None:
        write_output(config.output, _records(kind, splits))
    results = {split: _summary(kind, data.train, evaluations) for split, evaluations in splits.items()}
    if config.report is not None:
        folder = Path(config.report).expanduser()
        write_output(str(folder / "predictions.jsonl"), _records(kind, splits), key="report")
        about = {"checkpoint": config.checkpoint, "task": data.config.name, "shots": shots}
        about |= {"template": few_shot.template.text, "normalisation": config.normalisation}
        write_evaluation(folder, {**about, "splits": results})
    for split, evaluations in splits.items():
        title = f"{config.checkpoint} · {data.config.name} · {split}"
        print_few_shot(output, title, shots, results[split], evaluations[0].prompt)
    if config.report is not None:
        output.line(f"evaluation.json and predictions.jsonl: {Path(config.report).expanduser()}")
    first = next(iter(results.values()))["metrics"]
    metrics = {name: score["mean"] for name, score in first.items()}
    spread = {f"{name}_standard_deviation": score["standard_deviation"] for name, score in first.items()}
    return metrics | {name: value for name, value in spread.items() if value is not None}


@dataclass(frozen=True)
class FilledPrompts:
    """A masked language model, and a classification task as prompts with a mask. max_length: tokens of a prompt."""

    learner: BaseLearner
    task: TaskData
    max_length: int
    seed: int
    precision: Precision


def fills_prompts(config: EvaluateConfig, trained: Trained) -> FilledPrompts | None:
    """Prompts that score a task by the words at a mask, without training (Schick and Schuetze 2021, section 3.1; Gao et
    al. 2021, table 3); None without shots=0 and for generative models. UserError if the words do not fit."""
    before = trained.config
    if config.shots != 0 or not isinstance(before, PretrainConfig) or before.model.architecture != "encoder":
        return None
    if config.task is None or not config.task.fills_prompts:
        return None
    require_unset(config, ("against", "stride"), f"{config.checkpoint} is prompted, by shots=0")
    if config.normalisation == "calibrated":
        raise UserError(
            "normalisation=calibrated is supported for generative models only; "
            f"checkpoint={config.checkpoint} fills a mask",
            "omit normalisation=, or prompt a decoder or an encoder-decoder",
        )
    task = config.task.model_copy(update={"head": PROMPT})
    problem = refusal(task, model=before.model)
    if problem is not None:
        raise UserError(problem.message, problem.hint)
    labels_known = task.class_names is not None
    data = load_task(task, before.seed, config.cache_dir, config.offline, scoring=labels_known)
    longest = _longest(config, trained, before)
    return FilledPrompts(trained.learner(data.config), data, longest, before.seed, trained.precision)


def _longest(config: EvaluateConfig, trained: Trained, before: PretrainConfig) -> int:
    """Maximum tokens per prompt: as in training, or all positions of a published model."""
    require_length(config, before)
    from_lmtool = trained.saved.get("command") == "pretrain"
    return config.max_length or (before.max_length if from_lmtool else before.model.max_positions)


def _summary(kind: TaskKind, train: Rows, evaluations: Sequence[PromptedEvaluation]) -> JsonObject:
    """Plain data: `n`, `metrics` by name ("mean", "standard_deviation", "draws"), the `baseline` with its `metrics`,
    the number of `questions`, how many of them were `cut` (had fewer demonstrations than requested), the mean number
    of demonstrations `kept`, and `warnings`."""
    rows = evaluations[0].rows
    name, constant = kind.constant(train)
    metrics = {}
    for metric in evaluations[0].scores:
        values = [evaluation.scores[metric] for evaluation in evaluations]
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        metrics[metric] = {"mean": float(np.mean(values)), "standard_deviation": deviation, "draws": values}
    demonstration_counts = np.concatenate([evaluation.shown for evaluation in evaluations])
    warnings = []
    for seed, evaluation in enumerate(evaluations):
        predicted_values = {repr(prediction.value) for prediction in evaluation.predictions}
        if len(predicted_values) == 1 and len(rows) > 1:
            answer = kind.shown(evaluation.predictions[0].value) or "nothing"
            warnings.append(f"draw {seed}: every {kind.unit} was predicted {answer}")
    return {
        "n": len(rows),
        "metrics": metrics,
        "baseline": {"name": name, "metrics": kind.metrics(rows, [constant] * len(rows))},
        "questions": len(demonstration_counts),
        "cut": int(np.sum(demonstration_counts < evaluations[0].shots)),
        "kept": float(demonstration_counts.mean()),
        "warnings": warnings,
    }


def _records(kind: TaskKind, splits: Mapping[str, Sequence[PromptedEvaluation]]) -> Iterator[JsonObject]:
    for split, evaluations in splits.items():
        for seed, evaluation in enumerate(evaluations):
            for number, prediction in enumerate(evaluation.predictions):
                rows = evaluation.rows
                record = kind.record(rows, number, prediction)
                yield {"id": rows.ids[number], "split": split, "draw": seed, **record}


def _checksum(module: nn.Module) -> str:
    """A checksum over the bits of all tensors, which reads each only once."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        kind = torch.int32 if tensor.element_size() == 4 else torch.uint8
        digest.update(f"{name} {int(tensor.detach().contiguous().view(kind).sum(dtype=torch.int64))}".encode())
    return digest.hexdigest()
