"""The first and last screen of a run, and the files that it writes with them: facts.json, result.json, the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
from torch import nn

from lmtool.config.checkpoint import read_state
from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.costs.memory_of_run import trainable_by_role
from lmtool.learners.base import BaseLearner
from lmtool.nn.stack import attention_path
from lmtool.reporting.costs import RunPlan
from lmtool.reporting.progress import ProgressDisplay
from lmtool.reporting.report import write_report
from lmtool.reporting.run_files import Baseline
from lmtool.reporting.screens import RateRow, StartScreen, end_screen, print_start
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.session.open_run import OpenRun
from lmtool.session.session import Session
from lmtool.system.terminal import counted
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.compiling import Compilation
from lmtool.training.configs import OptimizerConfig
from lmtool.training.group import ALONE, ProcessGroup
from lmtool.training.optimizers import levels, training_groups
from lmtool.training.precision import Precision
from lmtool.training.progress import Progress, TrainingResult
from lmtool.weights.assemble import LoadReport


class _Kind(NamedTuple):
    """Settings shared by the parameters of a row. rate: maximum learning rate. decay: weight decay. first: the first
    step in which they learn; None if they never do in this run."""

    rate: float
    decay: float
    first: int | None


def rates(learner: BaseLearner, optimizer: OptimizerConfig, steps: int) -> list[RateRow]:
    """Rows of learning rates from the head down. Levels with the same settings share a row, named "all" if it is the
    only one. Frozen parameters are left out."""
    decay = getattr(optimizer, "weight_decay", getattr(optimizer, "l2", 0.0))
    of_name = {
        name: (group.learning_rate_scale, decay * group.weight_decay_scale, parameter.numel())
        for group in training_groups(learner, optimizer.layer_decay)
        for name, parameter in group.parameters
    }
    rows: list[tuple[list[str], int, int, _Kind]] = []
    for level, members in levels(name for name, _ in learner.named_parameters()).items():
        learning = [name for name in members if name in of_name]
        for scale in dict.fromkeys(of_name[name][0] for name in learning):
            names = [name for name in learning if of_name[name][0] == scale]
            first_steps = [learner.first_step(name, steps) for name in names]
            first = None if None in first_steps else max(step for step in first_steps if step is not None)
            kind = _Kind(optimizer.lr * scale, max(of_name[name][1] for name in names), first)
            size = sum(of_name[name][2] for name in names)
            without = sum(of_name[name][2] for name in names if not of_name[name][1])
            titles: list[str] = []
            if rows and rows[-1][3] == kind:
                titles, above, above_without, _ = rows.pop()
                size, without = size + above, without + above_without
            rows.append(([*titles, level], size, without, kind))
    return [
        {
            "group": titles[0] if len(titles) == 1 else "all" if len(rows) == 1 else f"{titles[0]} to {titles[-1]}",
            "parameters": size,
            "learning_rate": kind.rate,
            "weight_decay": kind.decay,
            "without_decay": without,
            "from_step": kind.first,
        }
        for titles, size, without, kind in rows
    ]


def never_trained_warning(rows: Sequence[RateRow]) -> str | None:
    """A warning if the run ends before some groups begin to learn; otherwise None."""
    names = [row["group"] for row in rows if row["from_step"] is None]
    if not names:
        return None
    hint = "use more epochs, or tuning.schedule.every_steps="
    return f"the run ends before these begin to learn: {', '.join(names)}; {hint}"


# Metadata that only the report shows, to keep the first screen short.
_REPORT_ONLY = frozenset(
    {
        "fingerprint", "split", "held_out", "steps_per_epoch", "store_tokens", "tokens", "files",
        "document", "random_next_fraction", "predicted_fraction", "truncated", "train_rows_available", "warnings",
        "few_shot", "padding_avoided", "longest", "bytes_per_second",
    }
)  # fmt: skip

# Fractions of padding tokens and of truncated tokens.
WASTE = ("padding_fraction", "truncated_fraction")


def machine_metadata(
    config: RunConfig, learner: nn.Module, precision: Precision, compilation: Compilation, group: ProcessGroup = ALONE
) -> dict[str, str]:
    """Devices, number format and kernels of a run, for the first screen and the report."""
    prefixes = {False}
    if isinstance(config, PretrainConfig) and config.model.architecture == "decoder":
        prefixes = {part.prefixes for part in config.objective.parts()}
    attention = attention_path(learner, precision.device, precision.dtype, prefixes)
    return {
        **_devices(config, precision, group),
        "precision": f"{precision.name} ({precision.why})",
        **({"attention": attention} if attention else {}),
        "compiled": str(compilation),
        "dropout": "keyed by example and position" if precision.device.type == "cpu" else "seeded by step",
    }


def _devices(config: RunConfig, precision: Precision, group: ProcessGroup) -> dict[str, str]:
    """The device; for several processes also their number and, on a CPU, the threads of each."""
    if group.size == 1:
        return {"device": str(precision.device)}
    threads = torch.get_num_threads()
    each = f", {counted(threads, 'thread')} each" if precision.device.type == "cpu" else ""
    return {"device": precision.device.type, "processes": f"{group.size} ({config.parallel}{each})"}


def begin(session: Session, metadata: Mapping[str, JsonMapping], plan: RunPlan, baseline: Baseline) -> None:
    """Write facts.json and print the first screen. metadata: by section, "data", "model" and "run"."""
    opened, learner, compilation = session.run, session.learner, session.compilation
    config, data = opened.config, metadata["data"]
    machine = machine_metadata(config, learner, opened.precision, compilation, opened.group)
    copied = data.get("distillation", {}).get("started from")
    model = model_metadata(config, session.tokenizer, session.loaded, copied) | dict(metadata["model"])
    learning_rates = rates(learner, config.optimizer, plan.steps)
    state = {} if opened.checkpoint is None else read_state(opened.checkpoint)
    # Without a tuning method everything learns.
    learns = {} if learner.tuning is None else trainable_by_role(learner)
    report: JsonObject = {
        "data": dict(data),
        "model": {**model, "parameters": plan.parameters, **machine},
        "learns": learns,
        "rates": learning_rates,
        "baseline": dict(baseline),
        **({"trained_beside": learner.extra_training_targets} if learner.extra_training_targets else {}),
        **metadata["run"],
    }
    opened.folder.write_json("facts.json", report)
    hidden = {"dropout"}
    if opened.precision.device.type != "cuda" and not machine["compiled"].startswith("yes"):
        hidden |= {"attention", "compiled"}  # a CPU has one attention path, and compiles only on request
    screen = StartScreen(
        command=opened.verb,
        run_dir=str(opened.folder.path),
        choices=session.subject,
        data=_screen_data(data),
        model=model,
        plan=plan,
        baseline=baseline,
        machine={name: text for name, text in machine.items() if name not in hidden},
        trainable=learns,
        rates=learning_rates,
        resumed_step=state.get("step"),
        branch=config.branch if str(config.branch).endswith(f"@{state.get('step')}") else None,
    )
    print_start(opened.output, screen)
    _warn(session, (*warnings_of(data), *plan.warnings), learning_rates, state)


def _warn(session: Session, warnings: Sequence[str], learning_rates: Sequence[RateRow], state: JsonMapping) -> None:
    """Print the warnings below the first screen. state: of the checkpoint that the run resumes from."""
    opened, config = session.run, session.config
    longest = max(phase.max_length for phase in (config.forms if isinstance(config, PretrainConfig) else (config,)))
    remarks = never_trained_warning(learning_rates), config.model.remark(longest), _missing_rows(opened, state)
    for warning in (*warnings, *filter(None, remarks)):
        opened.output.line(f"warning: {warning}", "yellow")
    threads, before = torch.get_num_threads(), state.get("threads")
    if before not in (None, threads) and opened.precision.device.type == "cpu":
        opened.output.line(
            f"warning: {counted(before, 'thread')} before, {threads} now: sums are added in another order, so the run "
            f"differs by rounding from an uninterrupted one; set OMP_NUM_THREADS={before} to keep it the same",
            "yellow",
        )


def _missing_rows(run: OpenRun, state: JsonMapping) -> str | None:
    """A warning if rows have disappeared since the run's checkpoint was saved; otherwise None. The loop refuses a state
    that cannot be read."""
    try:
        progress = Progress.from_plain(state)
    except ValueError:
        return None
    return run.folder.missing_rows(progress.rows, progress.step)


def updated_baseline(
    run: OpenRun, baseline: Baseline, weights: Mapping[str, float], metrics: Mapping[str, float]
) -> Baseline:
    """The baseline after the evaluation, also written to facts.json. Only the evaluation knows a baseline over labels
    that the model itself makes (which tokens are replaced)."""
    baselines = {term: metrics.get(f"{term}_baseline") for term in weights}
    if any(value is None for value in baselines.values()):
        return baseline
    updated: Baseline = {**baseline, "value": sum(weights[term] * (value or 0.0) for term, value in baselines.items())}
    if run.folder.writes:
        path = run.folder.path / "facts.json"
        run.folder.write_json(path.name, {**json.loads(path.read_text(encoding="utf-8")), "baseline": updated})
    return updated


def _screen_data(metadata: JsonMapping) -> JsonObject:
    """Metadata for the first screen: without `_REPORT_ONLY` and without zeros, except the truncated fraction."""
    shown = {
        name: value
        for name, value in metadata.items()
        if name not in _REPORT_ONLY and (value or value is False or name == "truncated_fraction")
    }
    return {name: _screen_data(value) if isinstance(value, Mapping) else value for name, value in shown.items()}


def warnings_of(metadata: JsonMapping) -> Iterator[str]:
    """The warnings in metadata and its sections."""
    yield from metadata.get("warnings", ())
    for value in metadata.values():
        if isinstance(value, Mapping):
            yield from warnings_of(value)


def listener(run: OpenRun, metric: str, baseline: Baseline) -> ProgressDisplay:
    """The display of the steps: a bar on a terminal, otherwise lines."""
    return ProgressDisplay(run.output, metric, run.config.log_every, baseline)


def model_metadata(
    config: RunConfig, tokenizer: Tokenizer, loaded: LoadReport | None, copied: str | None = None
) -> JsonObject:
    """Metadata of the model for the first screen and the report. copied: layers copied from the teacher at the
    start."""
    weights = f"of {config.branch}" if config.branch else "random" if loaded is None else loaded.sentence()
    tuning = config.tuning if isinstance(config, FinetuneConfig) else None
    return {
        "family": config.model.name,
        **config.model.metadata(),
        "vocabulary": tokenizer.vocab_size,
        **({"virtual tokens a text": tuning.positions} if tuning is not None and tuning.positions else {}),
        "weights": weights if copied is None else f"{weights}; copied of the teacher: {copied}",
    }


def result_of(
    run: OpenRun, training: TrainingResult, subjects: JsonMapping, metric: str, more: JsonMapping
) -> JsonObject:
    """The content of result.json. subjects: names of the components ("model", "task" or "objective", ...). more:
    additional rows."""
    numbers = asdict(replace(training, best=None, last=None))
    copied = (
        "status", "ended", "steps", "epochs", "tokens", "seconds", "evaluation_seconds", "tokens_per_second",
        "peak_memory_bytes", "parameters", "trainable_parameters", "best_step",
    )  # fmt: skip
    return {
        "status": training.status,
        "command": run.verb,
        **subjects,
        "metric": metric,
        "value": training.best_value,
        "metrics": training.metrics,
        **{name: numbers[name] for name in copied},
        "devices": run.group.size,
        "seed": run.config.seed,
        **more,
    }


def finish(run: OpenRun, result: JsonObject, baseline: Baseline, next_commands: Sequence[str]) -> JsonObject:
    """Write result.json and the report, and print the last screen."""
    if not run.folder.writes:
        return result
    missing = run.folder.missing_rows(run.folder.row_counts, result["steps"])
    if missing is not None:
        run.output.line(f"warning: {missing}", "yellow")
    run.folder.write_result(result)
    run.trackers.finish(result)
    report = write_report(run.folder.path)
    end_screen(
        run.output,
        result=result,
        baseline=baseline,
        run_dir=str(run.folder.path),
        report=str(report),
        next_commands=next_commands,
    )
    return result


def report_finished(run: OpenRun, result: JsonObject) -> JsonObject:
    """Print the result of a finished run, and write a missing report."""
    folder, output = run.folder.path, run.output
    if run.folder.writes and not (folder / "report.html").is_file():
        write_report(folder)
    output.line(f"{folder} is finished: {result['metric']} {result['value']:.4g}; another name= starts anew")
    output.line(f" report   {folder / 'report.html'}")
    return result
