"""`lmtool evaluate` on text: what a pretrained checkpoint scores on held-out text, by windows as in training or by
windows that overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmtool.data.configs import DataConfig
from lmtool.data.file_source import FileSource
from lmtool.data.sources import open_source
from lmtool.data.split import SplitData
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.held_out import HeldOutSplits
from lmtool.models.base import Backbone, Remembers
from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.schema.run import EvaluateConfig, PretrainConfig
from lmtool.session.output_files import write_output
from lmtool.session.texts import text_of
from lmtool.session.trained import Trained
from lmtool.tasks.members import read_tasks, rows_of
from lmtool.terminal import counted

_ENDS = "the ends of documents count in loss and perplexity, not in word perplexity and bits per byte"


def evaluate_text(config: EvaluateConfig, trained: Trained, before: PretrainConfig, output: Output) -> dict[str, Any]:
    """Score, print, and write predictions where a file is named. Returns the metrics."""
    if config.task is not None:
        raise UserError(
            f"checkpoint={config.checkpoint} has no head for task={config.task.name}",
            f"prompt it: shots=4; or teach it: lmtool finetune task={config.task.name} checkpoint={config.checkpoint}",
        )
    require_absent(config, ("against", "report"), f"{config.checkpoint} was trained on text", "evaluate each by itself")
    require_length(config, before)
    learner, max_length = trained.learner(), config.max_length or before.max_length
    if config.memory_length is not None:
        remember(config, learner, max_length)
    if config.stride is not None and not learner.slides:
        raise UserError(
            f"stride={config.stride} is of causal language models; {config.checkpoint} learned {learner.config.name}",
            "leave stride= out",
        )
    data, title = text_to_score(config, trained, before)
    held_out = HeldOutSplits(learner, {"validation": data}, max_length, config.batch_tokens, before.seed)
    evaluations = held_out.score(trained.precision)
    if config.output is not None:
        write_output(config.output, evaluations.records())
    metrics = evaluations.metrics()
    rows = [[name, f"{value:.4f}"] for name, value in metrics.items()]
    print_table(output, ["metric", "value"], rows, heading=f"{config.checkpoint} · {title}")
    facts = held_out.first.loader.facts()
    policy = _carried(facts, max_length, learner.backbone) if "lanes" in facts else _policy(config, max_length)
    if learner.slides:
        output.line(f"{policy}; {_ENDS}")
    elif "lanes" in facts:
        output.line(policy)
    for warning in evaluations.warnings:
        output.line(f"warning: {warning}", "yellow")
    return metrics


def require_absent(config: EvaluateConfig, keys: Sequence[str], because: str, hint: str | None = None) -> None:
    """UserError for a key that would not be read."""
    for key in keys:
        if getattr(config, key) is not None:
            raise UserError(
                f"{key}={getattr(config, key)} does not apply: checkpoint={because}", hint or f"leave {key}= out"
            )


def require_length(config: EvaluateConfig, before: PretrainConfig) -> None:
    """UserError where the model has no room for max_length."""
    positions = before.model.max_positions
    if config.max_length is not None and config.max_length > positions:
        raise UserError(
            f"max_length={config.max_length} is more than the {positions} positions of checkpoint={config.checkpoint}",
            f"give max_length={positions} at most",
        )


def remember(config: EvaluateConfig, learner: BaseLearner, max_length: int) -> None:
    """Give a model another memory. UserError where it has none, and where its positions are fewer."""
    backbone, tokens, positions = learner.backbone, config.memory_length or 0, learner.backbone.config.max_positions
    if not isinstance(backbone, Remembers):
        raise UserError(
            f"memory_length={tokens}: model={backbone.config.name} of checkpoint={config.checkpoint} has no memory",
            "leave memory_length= out",
        )
    if tokens + max_length > positions:
        raise UserError(
            f"max_length={max_length} behind a memory of memory_length={tokens} tokens is more than the {positions} "
            f"positions of checkpoint={config.checkpoint}",
            f"give memory_length={max(0, positions - max_length)} at most",
        )
    backbone.remember(tokens)


def _carried(facts: Mapping[str, Any], max_length: int, backbone: Backbone) -> str:
    memory, apart = getattr(backbone, "memory_length", None), facts.get("segments_apart")
    kept = "the state is carried from one to the next" if memory is None else f"behind a memory of {memory} tokens"
    windows = f"segments of {max_length} tokens" if apart is None else f"windows of {max_length} tokens, {apart} apart"
    return f"{counted(facts['lanes'], 'lane')} in {windows}, {kept}"


def _policy(config: EvaluateConfig, max_length: int) -> str:
    stride = config.stride
    windows = f"windows of {max_length} tokens"
    if stride is None:
        return windows
    return f"{windows}, {stride} apart: each token is predicted once, from {max_length - stride} tokens or more"


def text_to_score(config: EvaluateConfig, trained: Trained, before: PretrainConfig) -> tuple[SplitData, str]:
    """The held-out text of what the checkpoint was trained on, or other text; and what to call it. Text files that are
    typed are scored completely, or where data.validation= is typed, that."""
    data, known = config.data or before.data, before.data
    source, title = open_source(data, config.cache_dir, offline=config.offline), f"validation text of data={data.name}"
    if isinstance(source, FileSource) and _names_no_validation(data, known):
        named = next(f"data.{key}={getattr(data, key)}" for key in ("path", "hub") if hasattr(data, key))
        source, title = source.complete(), f"all text of {named}"
    _, tasks = read_tasks(before.objective, before.seed, config.cache_dir, config.offline)
    rows, progress = rows_of(tasks, "validation"), Output().stage
    text = text_of(data, source, "validation", trained.tokenizer, config.cache_dir, progress, rows, config.stride)
    return text, title


def _names_no_validation(data: DataConfig, known: DataConfig) -> bool:
    """Whether other files are named than those of training, or another data set, and none to validate on."""
    typed, trained_on = data.model_dump(), known.model_dump()
    other = any(typed.get(key) != trained_on.get(key) for key in ("path", "hub", "split"))
    return other and typed["validation"] in (None, trained_on.get("validation"))
