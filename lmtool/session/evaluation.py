"""`lmtool evaluate` of a pretrained checkpoint: its loss on text, and its scores on a task by prompts.

`lmtool evaluate` of a finetuned checkpoint is in commands/evaluate.py.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast, get_args

import numpy as np
import torch
from torch import nn

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import build
from lmtool.data.configs import DataConfig
from lmtool.data.examples import Rows, SplitData
from lmtool.data.file_source import FileSource
from lmtool.data.sources import open_source
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.evaluation import Evaluation
from lmtool.learners.held_out import HeldOutSplits
from lmtool.learners.metrics import interval, resample_count, resampled_rows
from lmtool.learners.writing import DOCUMENT_LOSSES
from lmtool.models.base import AdjustableMemory, Backbone
from lmtool.nn.configs import Extension
from lmtool.nn.positions import Rotary
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.evaluations import (
    interval_text,
    print_difference,
    print_few_shot,
    print_text_scores,
    write_evaluation,
)
from lmtool.reporting.text import count
from lmtool.resolver.commands import EvaluateConfig, PretrainConfig
from lmtool.runs.files import SCORED_ROWS, rows_digest
from lmtool.session.requests import write_output
from lmtool.session.session import tokenized_split
from lmtool.session.trained import Trained, read_trained
from lmtool.system.files import user_path
from lmtool.system.terminal import counted
from lmtool.tasks.configs.base import PROMPT, TaskConfig
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.loading import TaskData, load_task
from lmtool.tasks.mixture import read_tasks, rows_of
from lmtool.tasks.prompting.few_shot import FewShot, PromptedEvaluation, demonstrations

# Evaluation on text, which is split into windows as in training, or into overlapping windows with stride=.

_END_NOTE = (
    "predictions of end-of-document tokens count in loss and perplexity, not in word perplexity and bits per byte"
)


def evaluate_text(
    config: EvaluateConfig, trained: Trained, pretraining: PretrainConfig, output: Output
) -> tuple[JsonObject, JsonObject]:
    """Scores a pretrained checkpoint on text and prints the metrics. Returns the metrics, and no intervals.
    pretraining: the configuration with which the checkpoint was trained."""
    if config.task is not None:
        raise UserError(
            f"checkpoint={config.checkpoint} has no head for task={config.task.name}",
            f"set shots=4 to prompt the model; or train a head: lmtool finetune task={config.task.name} "
            f"checkpoint={config.checkpoint}",
        )
    # Without rows there are no predictions to write.
    require_unset(config, ("output", "report"), f"{config.checkpoint} was trained on text", "omit it")
    require_length(config, pretraining)
    if config.lengths is not None:
        return evaluate_lengths(config, trained, pretraining, output), {}
    learner, max_length = trained.learner(), config.max_length or pretraining.max_length
    if config.memory_length is not None:
        set_memory_length(config, learner, max_length)
    if config.stride is not None and not learner.config.supports_stride:
        raise UserError(
            f"stride={config.stride} needs a causal language model; {config.checkpoint} was trained on "
            f"{learner.config.name}",
            "omit stride=",
        )
    data, title = text_to_score(config, trained, pretraining)
    held_out = HeldOutSplits(learner, {"validation": data}, max_length, config.batch_tokens, pretraining.seed)
    other = None if config.against is None else _held_out_of_other(config, trained, pretraining, held_out)
    progress = _scoring_progress(output, config.checkpoint)
    evaluations = held_out.score(trained.precision, by_document=other is not None, progress=progress)
    metrics = evaluations.metrics()
    print_text_scores(output, f"{config.checkpoint} · {title}", metrics)
    metadata = held_out.first.loader.metadata()
    in_lanes = "lanes" in metadata
    description = (
        _describe_streams(metadata, max_length, learner.backbone) if in_lanes else _describe_windows(config, max_length)
    )
    if learner.config.supports_stride:
        output.line(f"{description}; {_END_NOTE}")
    elif in_lanes:
        output.line(description)
    for warning in evaluations.warnings:
        output.warn(warning)
    if other is not None:
        progress = _scoring_progress(output, str(config.against))
        second = other.score(trained.precision, by_document=True, progress=progress).first
        differences = {BITS: paired_difference(evaluations.first, second, document_bytes(trained, data.text))}
        print_difference(output, config.checkpoint, str(config.against), metrics, differences, "documents")
    return metrics, {}


BITS = "bits_per_byte"


def _held_out_of_other(
    config: EvaluateConfig, trained: Trained, pretraining: PretrainConfig, held_out: HeldOutSplits
) -> HeldOutSplits:
    checkpoint, data = str(config.against), held_out.first.data
    if data.store is None or len(data.text) < 2:
        raise UserError(
            f"against={checkpoint}: the difference has no interval without at least two documents of one text",
            "set data.document=line or block, which split a text into documents",
        )
    other = read_trained(checkpoint, config.offline, trained.precision)
    if not isinstance(other.config, PretrainConfig):
        raise UserError(f"against={checkpoint} was trained for a task", "use a checkpoint of lmtool pretrain")
    text, _ = text_to_score(config, other, pretraining)
    length = config.max_length or other.config.max_length
    prepared = HeldOutSplits(other.learner(), {"validation": text}, length, config.batch_tokens, other.config.seed)
    for name, model in ((config.checkpoint, held_out), (checkpoint, prepared)):
        if model.has_documents:
            continue
        objective = model.learner.config
        reason = (
            f"{name} carries state from one document to the next"
            if objective.supports_stride
            else f"the loss of {name} (objective={objective.name}) is not that of predicting every next token"
        )
        raise UserError(
            f"{config.checkpoint} and {checkpoint} cannot be compared on a text: {reason}",
            "set task=blimp, which compares language models of all kinds on minimal pairs, or finetune both on a task",
        )
    return prepared


def _scoring_progress(output: Output, checkpoint: str) -> Callable[[int, int], None]:
    began = time.perf_counter()

    def show(done: int, total: int) -> None:
        rate = f"{count(round(done / max(time.perf_counter() - began, 1e-9)))} tokens/s"
        output.stage(f"scoring {checkpoint}", done, total, rate)

    return show


def document_bytes(trained: Trained, text: TokenStore) -> np.ndarray:
    """Returns the number of bytes of each document of a text, (D,)."""
    documents = (text.document(number) for number in range(len(text)))
    return np.array([len(trained.tokenizer.decode(tokens.tolist()).encode()) for tokens in documents])


def paired_difference(first: Evaluation, second: Evaluation, sizes_D: np.ndarray) -> dict[str, float]:
    """Returns the bits per byte of one evaluation by document minus those of another on the same text: "value", and the
    ends "low" and "high" of a 95% interval that resamples documents. sizes_D: the bytes of each document."""
    losses = [
        np.array([sums[number] for number in range(len(sizes_D))])
        for sums in (cast(Counter[int], evaluation.details[DOCUMENT_LOSSES]) for evaluation in (first, second))
    ]
    bits = (losses[0] - losses[1]) / np.log(2)
    resamples = resampled_rows(len(bits), resample_count(len(bits), [BITS]))
    values = [float(bits[rows].sum() / max(sizes_D[rows].sum(), 1)) for rows in resamples]
    return {"value": float(first.scores[BITS] - second.scores[BITS]), **interval(values)._asdict()}


# `lmtool evaluate lengths=`: windows longer than in training (Press et al. 2022, "Train Short, Test Long").


def evaluate_lengths(
    config: EvaluateConfig, trained: Trained, pretraining: PretrainConfig, output: Output
) -> JsonObject:
    """Scores a causal language model on windows of several lengths of the same text, and prints a table.

    Windows that are longer than in training are scored with the positions of training and, if these are rotary, with
    each extension of them. Returns the bits per byte by length; with an extension, `LENGTH_EXTENSION`.
    """
    learner, longest = trained.learner(), pretraining.model.max_positions
    if _is_from_lmtool(trained):
        longest = max(phase.max_length for phase in pretraining.phase_configs)
    if not learner.config.supports_stride or learner.backbone.config.carries_state:
        raise UserError(
            f"lengths=[...] compares causal language models without carried state; {config.checkpoint} is none",
            "omit lengths=, and set max_length=",
        )
    data, title = text_to_score(config, trained, pretraining)
    if data.store is None or len(data.text) < 2:
        raise UserError(
            "lengths=[...]: the differences have no interval without at least two documents of one text",
            "set data.document=line or block, which split a text into documents",
        )
    rotary = [module for module in learner.backbone.modules() if isinstance(module, Rotary)]

    def score(length: int, extension: Extension | None) -> Evaluation:
        for module in rotary:
            module.extend(extension, length / longest, longest)
        held_out = HeldOutSplits(learner, {"validation": data}, length, config.batch_tokens, pretraining.seed)
        return held_out.score(trained.precision, by_document=True).first

    trained_length, sizes_D = score(longest, None), document_bytes(trained, data.text)
    metrics, rows = {f"{BITS}_{longest}": trained_length.scores[BITS]}, []
    rows.append([f"{longest:,}", "as in training", f"{trained_length.scores[BITS]:.4f}", "", ""])
    for length in sorted(set(config.lengths or ()) - {longest}):
        for extension in (None, *get_args(Extension)) if rotary and length > longest else (None,):
            evaluation = score(length, extension)
            difference = paired_difference(evaluation, trained_length, sizes_D)
            metrics["_".join(filter(None, (BITS, str(length), extension)))] = evaluation.scores[BITS]
            row = [f"{length:,}", extension or "as in training", f"{evaluation.scores[BITS]:.4f}"]
            rows.append([*row, f"{difference['value']:+.4f}", interval_text(difference, "+")])
    headings = ["tokens", "positions", "bits per byte", f"minus {longest} tokens", "95% interval"]
    print_table(output, headings, rows, heading=f"{config.checkpoint} · {title}")
    output.line(
        f"trained on windows of {longest} tokens; n = {len(data.text):,} documents, resampled for the intervals. "
        "Longer windows also give more context"
    )
    return metrics


def require_unset(config: EvaluateConfig, keys: Sequence[str], reason: str, hint: str | None = None) -> None:
    """Raises UserError if one of some keys is set although it has no effect. reason: the checkpoint and why: "runs/NAME
    was trained on text". hint: what to do; None means to omit the key."""
    for key in keys:
        value = getattr(config, key)
        if value is not None:
            displayed = value.name if isinstance(value, DataConfig) else value
            raise UserError(f"{key}={displayed} does not apply: checkpoint={reason}", hint or f"omit {key}=")


def require_length(config: EvaluateConfig, pretraining: PretrainConfig) -> None:
    """Raises UserError if max_length or one of lengths exceeds the positions of the model."""
    positions = pretraining.model.max_positions
    for key, length in (("max_length", config.max_length), ("lengths", max(config.lengths or (0,)))):
        if length is not None and length > positions:
            raise UserError(
                f"{key}={length} exceeds the {positions} positions of checkpoint={config.checkpoint}",
                f"set max_length={positions} or lower" if key == "max_length" else f"omit lengths above {positions}",
            )


def set_memory_length(config: EvaluateConfig, learner: BaseLearner, max_length: int) -> None:
    """Sets the length of a model's memory to memory_length=. Raises UserError if the model has no memory, or too few
    positions."""
    backbone, tokens, positions = learner.backbone, config.memory_length or 0, learner.backbone.config.max_positions
    if not isinstance(backbone, AdjustableMemory):
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
    backbone.set_memory_length(tokens)


def _describe_streams(metadata: JsonMapping, max_length: int, backbone: Backbone) -> str:
    memory, distance = backbone.memory_length, metadata.get("segments_apart")
    state = "state carried from one to the next" if memory is None else f"each with a memory of {memory} tokens"
    windows = f"segments of {max_length} tokens"
    if distance is not None:
        windows = f"windows of {max_length} tokens, {distance} apart"
    return f"{counted(metadata['lanes'], 'stream')} of text in {windows}, {state}"


def _describe_windows(config: EvaluateConfig, max_length: int) -> str:
    stride = config.stride
    windows = f"windows of {max_length} tokens"
    if stride is None:
        return windows
    return (
        f"{windows}, {stride} apart: each token is predicted once, with {max_length - stride} tokens of context or more"
    )


def text_to_score(config: EvaluateConfig, trained: Trained, pretraining: PretrainConfig) -> tuple[SplitData, str]:
    """Returns the tokenized text to score and its title.

    The text is the held-out text of the training data, or of data=. If data= names other files than the training data,
    they are scored completely, unless data.validation= names files to score.
    """
    data, trained_on = config.data or pretraining.data, pretraining.data
    source, title = open_source(data, config.cache_dir, offline=config.offline), f"validation text of data={data.name}"
    if isinstance(source, FileSource) and _is_other_text_without_validation(data, trained_on):
        setting = next(f"data.{key}={getattr(data, key)}" for key in ("path", "hub") if hasattr(data, key))
        source, title = source.complete(), f"all text of {setting}"
    # The members of a mixture that are tasks are scored on their own rows.
    _, tasks = read_tasks(pretraining.objective, pretraining.seed, config.cache_dir, config.offline)
    rows, on_stage = rows_of(tasks, "validation"), Output().stage

    def progress(stage: str, done: int, total: int, rate: str = "", /) -> None:
        on_stage(stage.replace("validation", title, 1), done, total, rate)

    text = tokenized_split(
        data, source, "validation", trained.tokenizer, config.cache_dir, progress, rows, config.stride
    )
    return text, title


def _is_other_text_without_validation(data: DataConfig, training_data: DataConfig) -> bool:
    requested, trained_on = data.model_dump(), training_data.model_dump()
    differs = any(requested.get(key) != trained_on.get(key) for key in ("path", "hub", "split"))
    return differs and requested["validation"] in (None, trained_on.get("validation"))


# `lmtool evaluate shots=`: prompts with demonstrations, which are labeled training rows. Several random sets of
# demonstrations are tried, and nothing is trained.


def evaluate_prompted(config: EvaluateConfig, trained: Trained, output: Output) -> tuple[JsonObject, JsonObject]:
    """Scores a task by prompts, once per set of demonstrations, prints means and standard deviations over these sets,
    and writes the files of output= and report=.

    Returns, for the first split, the mean of each metric and, with several sets, its `_standard_deviation`, and the
    digest of its rows; and no intervals. Raises UserError if the checkpoint is not a generative language model, or no
    task is set.
    """
    shots = config.shots or 0
    task, pretraining = _promptable(config, trained)
    require_unset(config, ("against", "stride", "lengths"), f"{config.checkpoint} is prompted, by shots={shots}")
    # With shots=0 the training rows may be missing: only the baseline uses them.
    data = load_task(task, pretraining.seed, config.cache_dir, config.offline, scoring=not shots)
    learner, kind = trained.learner(), build(data.config)
    few_shot = FewShot(
        kind, learner.writer(), _prompt_length(config, trained, pretraining), config.normalisation, config.batch_tokens,
        trained.precision,
    )  # fmt: skip
    checksum_before = _checksum(learner)
    scored = [*data.validation.values(), *data.test.values()]
    seeds = range(config.prompt_seeds if shots else 1)
    demonstration_sets = [demonstrations(kind, data.train, scored, shots, seed) for seed in seeds]
    splits = {
        split: [few_shot.evaluate(examples, rows, seed) for seed, examples in enumerate(demonstration_sets)]
        for split, rows in data.validation.items()
    }
    if _checksum(learner) != checksum_before:
        raise RuntimeError("prompting changed the model's parameters")
    if config.output is not None:
        write_output(config.output, _records(kind, splits))
    results = {split: _summary(kind, data.train, evaluations) for split, evaluations in splits.items()}
    if config.report is not None:
        folder = user_path(config.report)
        write_output(str(folder / "predictions.jsonl"), _records(kind, splits), key="report")
        settings = {"checkpoint": config.checkpoint, "task": data.config.name, "shots": shots}
        settings |= {"template": few_shot.template.text, "normalisation": config.normalisation}
        write_evaluation(folder, {**settings, "splits": results})
    for split, evaluations in splits.items():
        title = f"{config.checkpoint} · {data.config.name} · {split}"
        print_few_shot(output, title, shots, results[split], evaluations[0].prompt)
    if config.report is not None:
        output.line(f"evaluation.json and predictions.jsonl: {user_path(config.report)}")
    first = next(iter(results.values()))["metrics"]
    metrics = {name: score["mean"] for name, score in first.items()}
    deviations = {f"{name}_standard_deviation": score["standard_deviation"] for name, score in first.items()}
    metrics |= {name: value for name, value in deviations.items() if value is not None}
    return metrics | {SCORED_ROWS: rows_digest(kind.scored_rows(next(iter(splits.values()))[0].rows))}, {}


def _promptable(config: EvaluateConfig, trained: Trained) -> tuple[TaskConfig, PretrainConfig]:
    pretraining, shots = trained.config, config.shots or 0
    if config.task is None or not isinstance(pretraining, PretrainConfig):
        if config.task is None:
            raise UserError(
                f"shots={shots} prompts a language model to solve a task, but no task is set", "set task=NAME"
            )
        raise UserError(
            f"shots={shots} needs a pretrained language model, but checkpoint={config.checkpoint} was finetuned and "
            "predicts with its task's head",
            "set checkpoint= to a run of lmtool pretrain, or to a published language model",
        )
    if pretraining.model.architecture == "encoder":
        raise UserError(
            f"shots={shots} needs a generative model, but checkpoint={config.checkpoint} fills masks",
            f"set shots=0 (classification tasks only), use a decoder or an encoder-decoder, or: lmtool finetune "
            f"task={config.task.name} checkpoint={config.checkpoint}",
        )
    if pretraining.objective.member_configs()[0].rewrites_texts:
        raise UserError(
            f"shots={shots} needs a model that continues texts, but checkpoint={config.checkpoint} was trained to "
            f"repeat them, by objective={pretraining.objective.member_configs()[0].name}",
            "use a model that was trained with objective=clm",
        )
    return config.task, pretraining


def masked_prompts(config: EvaluateConfig, trained: Trained) -> tuple[TaskData, BaseLearner, int] | None:
    """Prepares shots=0 with a masked language model: classes are scored by the words that the model predicts at a mask,
    without training (Schick and Schuetze 2021, section 3.1; Gao et al. 2021, table 3).

    Returns the rows, which become prompts, the model, and the maximum number of tokens per prompt; None for other
    values of shots= and for generative models. Raises UserError if a word of a class does not fit the vocabulary.
    """
    pretraining = trained.config
    if config.shots != 0 or not isinstance(pretraining, PretrainConfig) or pretraining.model.architecture != "encoder":
        return None
    if config.task is None or not config.task.fills_prompts:
        return None
    require_unset(config, ("against", "stride", "lengths"), f"{config.checkpoint} is prompted, by shots=0")
    if config.normalisation == "calibrated":
        raise UserError(
            "normalisation=calibrated is supported for generative models only; "
            f"checkpoint={config.checkpoint} fills a mask",
            "omit normalisation=, or prompt a decoder or an encoder-decoder",
        )
    task = config.task.model_copy(update={"head": PROMPT})
    problem = task.first_conflict(pretraining.model)
    if problem is not None:
        raise UserError(problem.message, problem.hint)
    labels_known = task.class_names is not None
    data = load_task(task, pretraining.seed, config.cache_dir, config.offline, scoring=labels_known)
    return data, trained.learner(data.config), _prompt_length(config, trained, pretraining)


def _prompt_length(config: EvaluateConfig, trained: Trained, pretraining: PretrainConfig) -> int:
    require_length(config, pretraining)
    trained_length = pretraining.max_length if _is_from_lmtool(trained) else pretraining.model.max_positions
    return config.max_length or trained_length


def _is_from_lmtool(trained: Trained) -> bool:
    return trained.saved.get("command") == "pretrain"


def _summary(kind: TaskKind, train: Rows, evaluations: Sequence[PromptedEvaluation]) -> JsonObject:
    """A draw is one set of demonstrations. By metric: its mean, its standard deviation, its value for each draw."""
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
            answer = kind.shown(evaluation.predictions[0].value) or "empty"
            warnings.append(f"draw {seed}: the prediction for every {kind.unit} is {answer}")
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
    """Returns a checksum of all tensors: a hash over the sum of each tensor's bits, read as integers."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        integer_type = torch.int32 if tensor.element_size() == 4 else torch.uint8
        digest.update(f"{name} {int(tensor.detach().contiguous().view(integer_type).sum(dtype=torch.int64))}".encode())
    return digest.hexdigest()
