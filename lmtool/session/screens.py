"""The first and the last screen of a run, and the files written together with them: facts.json, result.json and the
report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.costs.memory_of_run import trainable_by_role
from lmtool.errors import Stopped
from lmtool.learners.base import BaseLearner
from lmtool.nn.stack import attention_path
from lmtool.reporting.costs import RunPlan
from lmtool.reporting.report import write_report
from lmtool.reporting.run_files import Baseline
from lmtool.reporting.screens import RateRow, StartScreen, print_end, print_start
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.runs.finding import read_state
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
from lmtool.tuning.schemes import first_step
from lmtool.weights.assemble import LoadReport


class _ParameterSettings(NamedTuple):
    """scale: the factor of the learning rate. decay: the weight decay. size: the number of elements."""

    scale: float
    decay: float
    size: int


class _GroupSettings(NamedTuple):
    """rate: the maximum learning rate. first_step: the first step that trains them; None if no step does."""

    rate: float
    decay: float
    first_step: int | None


def rates(learner: BaseLearner, optimizer: OptimizerConfig, steps: int) -> list[RateRow]:
    """Returns the table of learning rates on the first screen: one row per group of levels, from the head down.

    A level is the embedding, a layer or a head. Adjacent levels with the same settings are one row, which is named
    "all" if it is the only row. Frozen parameters are omitted.
    """
    decay = getattr(optimizer, "weight_decay", getattr(optimizer, "l2", 0.0))
    parameter_settings = {
        name: _ParameterSettings(group.learning_rate_scale, decay * group.weight_decay_scale, parameter.numel())
        for group in training_groups(learner, optimizer.layer_decay)
        for name, parameter in group.parameters
    }
    rows: list[tuple[list[str], int, int, _GroupSettings]] = []
    for level, members in levels(name for name, _ in learner.named_parameters()).items():
        trained = [name for name in members if name in parameter_settings]
        for scale in dict.fromkeys(parameter_settings[name].scale for name in trained):
            names = [name for name in trained if parameter_settings[name].scale == scale]
            settings = [parameter_settings[name] for name in names]
            first_steps = [first_step(learner, name, steps) for name in names]
            first = None if None in first_steps else max(step for step in first_steps if step is not None)
            shared = _GroupSettings(optimizer.lr * scale, max(setting.decay for setting in settings), first)
            size = sum(setting.size for setting in settings)
            without_decay = sum(setting.size for setting in settings if not setting.decay)
            titles: list[str] = []
            if rows and rows[-1][3] == shared:
                # The level joins the row of the level above it.
                titles, above_size, above_without_decay, _ = rows.pop()
                size, without_decay = size + above_size, without_decay + above_without_decay
            rows.append(([*titles, level], size, without_decay, shared))
    return [
        {
            "group": titles[0] if len(titles) == 1 else "all" if len(rows) == 1 else f"{titles[0]} to {titles[-1]}",
            "parameters": size,
            "learning_rate": shared.rate,
            "weight_decay": shared.decay,
            "without_decay": without_decay,
            "from_step": shared.first_step,
        }
        for titles, size, without_decay, shared in rows
    ]


def never_trained_warning(rows: Sequence[RateRow]) -> str | None:
    """Returns a warning if the run ends before some frozen groups begin to be trained; otherwise None."""
    names = [row["group"] for row in rows if row["from_step"] is None]
    if not names:
        return None
    hint = "train for more steps, or set a smaller tuning.schedule.every_steps="
    return f"the run ends before these groups begin to be trained: {', '.join(names)}; {hint}"


# Metadata that the report shows, but the first screen does not, to keep it short.
_REPORT_ONLY = frozenset(
    {
        "fingerprint", "split", "held_out", "steps_per_epoch", "store_tokens", "tokens", "files",
        "document", "random_next_fraction", "predicted_fraction", "truncated", "train_rows_available", "warnings",
        "few_shot", "padding_avoided", "longest", "bytes_per_second",
    }
)  # fmt: skip

# Metadata of the training data that result.json repeats: the fractions of padding tokens and of truncated tokens.
WASTE = ("padding_fraction", "truncated_fraction")


def machine_metadata(
    config: RunConfig, learner: nn.Module, precision: Precision, compilation: Compilation, group: ProcessGroup = ALONE
) -> dict[str, str]:
    """Describes the devices, number format and kernels of a run, for the first screen and the report."""
    prefixes = {False}  # whether texts have a prefix that the whole text attends to
    if isinstance(config, PretrainConfig) and config.model.architecture == "decoder":
        prefixes = {member.prefixes for member in config.objective.member_configs()}
    attention = attention_path(learner, precision.device, precision.dtype, prefixes)
    return {
        **_devices(config, precision, group),
        "precision": f"{precision.name} ({precision.why})",
        **({"attention": attention} if attention else {}),
        "compiled": str(compilation),
        "dropout": "keyed by example and position" if precision.device.type == "cpu" else "seeded by step",
    }


def _devices(config: RunConfig, precision: Precision, group: ProcessGroup) -> dict[str, str]:
    if group.size == 1:
        return {"device": str(precision.device)}
    threads = torch.get_num_threads()
    threads_text = f", {counted(threads, 'thread')} each" if precision.device.type == "cpu" else ""
    return {"device": precision.device.type, "processes": f"{group.size} ({config.parallel}{threads_text})"}


def show_start(session: Session, metadata: Mapping[str, JsonMapping], plan: RunPlan, baseline: Baseline) -> None:
    """Writes facts.json and prints the first screen. metadata: that of the session and its companions, by section:
    "data", "model" and "run". baseline: the score of a constant prediction."""
    opened, learner, compilation = session.run, session.learner, session.compilation
    config, data = opened.config, metadata["data"]
    machine = machine_metadata(config, learner, opened.precision, compilation, opened.group)
    copied = data.get("distillation", {}).get("started from")
    model = model_metadata(config, session.tokenizer, session.loaded, copied) | dict(metadata["model"])
    learning_rates = rates(learner, config.scaled_optimizer, plan.steps)
    state = {} if opened.checkpoint is None else read_state(opened.checkpoint)
    # Without a tuning method all parameters are trained, so there is nothing to list.
    trainable = {} if learner.tuning is None else trainable_by_role(learner)
    extra_targets = learner.config.extra_training_targets(learner.backbone.config)
    report: JsonObject = {
        "data": dict(data),
        "model": {**model, "parameters": plan.parameters, "blocks": plan.blocks, **machine},
        "learns": trainable,
        "rates": learning_rates,
        "baseline": dict(baseline),
        **({"trained_beside": extra_targets} if extra_targets else {}),
        **metadata["run"],
    }
    opened.folder.write_json("facts.json", report)
    hidden_names = {"dropout"}
    if opened.precision.device.type != "cuda" and not machine["compiled"].startswith("yes"):
        hidden_names |= {"attention", "compiled"}  # a CPU has one attention path, and compiles only on request
    screen = StartScreen(
        command=opened.verb,
        run_dir=str(opened.folder.path),
        choices=session.subject,
        data=_screen_data({name: value for name, value in data.items() if name != "export"}),
        export=str(data.get("export", "")),
        model=model,
        plan=plan,
        baseline=baseline,
        machine={name: text for name, text in machine.items() if name not in hidden_names},
        trainable=trainable,
        rates=learning_rates,
        resumed_step=state.get("step"),
        branch=config.branch if str(config.branch).endswith(f"@{state.get('step')}") else None,
    )
    print_start(opened.output, screen)
    _warn(session, (*warnings_of(data), *plan.warnings), learning_rates, state)


def _warn(session: Session, warnings: Sequence[str], learning_rates: Sequence[RateRow], state: JsonMapping) -> None:
    opened, config = session.run, session.config
    longest = max(
        phase.max_length for phase in (config.phase_configs if isinstance(config, PretrainConfig) else (config,))
    )
    remarks = never_trained_warning(learning_rates), config.model.remark(longest), _missing_rows(opened, state)
    for warning in (*warnings, *filter(None, remarks)):
        opened.output.warn(warning)
    threads, before = torch.get_num_threads(), state.get("threads")
    if before not in (None, threads) and opened.precision.device.type == "cpu":
        opened.output.warn(
            f"the run used {counted(before, 'thread')} before and uses {threads} now, which adds numbers in "
            "another order: its results differ by rounding from those of an uninterrupted run; set "
            f"OMP_NUM_THREADS={before} to keep them the same"
        )


def _missing_rows(run: OpenRun, state: JsonMapping) -> str | None:
    try:
        progress = Progress.from_plain(state)
    except ValueError:
        return None  # the training loop reports a state that cannot be read
    return run.folder.missing_rows(progress.rows, progress.step)


def updated_baseline(
    run: OpenRun, baseline: Baseline, weights: Mapping[str, float], metrics: Mapping[str, float]
) -> Baseline:
    """Returns the baseline that the final evaluation measured, if it measured one, and writes it to facts.json: a
    generator's labels (whether it replaced a token), and so their baseline, are only known in an evaluation. weights:
    the weight of each loss term in the headline loss."""
    baselines = {term: metrics.get(f"{term}_baseline") for term in weights}
    if any(value is None for value in baselines.values()):
        return baseline
    updated: Baseline = {**baseline, "value": sum(weights[term] * (value or 0.0) for term, value in baselines.items())}
    if run.folder.writes:
        path = run.folder.path / "facts.json"
        run.folder.write_json(path.name, {**json.loads(path.read_text(encoding="utf-8")), "baseline": updated})
    return updated


def _screen_data(metadata: JsonMapping) -> JsonObject:
    selected = {
        name: value
        for name, value in metadata.items()
        if name not in _REPORT_ONLY and (value or value is False or name == "truncated_fraction")
    }
    return {name: _screen_data(value) if isinstance(value, Mapping) else value for name, value in selected.items()}


def warnings_of(metadata: JsonMapping) -> Iterator[str]:
    """Yields the warnings in metadata and in its sections."""
    yield from metadata.get("warnings", ())
    for value in metadata.values():
        if isinstance(value, Mapping):
            yield from warnings_of(value)


# Maximum fraction of the time that the reports during training take, and the assumed seconds of the first one.
_REPORT_TIME_FRACTION, _FIRST_REPORT_SECONDS = 0.02, 1.0


class LiveReport:
    """Writes report.html at evaluations, for a look at a run that trains, and once more if training is stopped. An
    evaluation that would spend more than 2% of the time on reports writes none. No error of a report fails the run."""

    def __init__(self, run: OpenRun, clock: Callable[[], float] = time.monotonic):
        self.run, self._clock = run, clock
        self._last_end, self._seconds, self._has_rows = clock(), _FIRST_REPORT_SECONDS, False

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self._has_rows:
            self._write(trains=False, reason=str(error))

    def on_start(self, step: int, steps: int | None, max_seconds: float | None) -> None: ...

    def on_step(self, row: JsonMapping) -> None:
        self._has_rows = True

    def on_evaluation(self, row: JsonMapping) -> None:
        self._has_rows = True
        if self._clock() - self._last_end >= self._seconds / _REPORT_TIME_FRACTION:
            self._write(trains=True)

    def on_checkpoint(self, step: int, path: str) -> None: ...

    def on_end(self) -> None: ...

    def _write(self, trains: bool, reason: str = "") -> None:
        if not self.run.folder.writes:
            return
        start = self._clock()
        try:
            write_report(self.run.folder.path, trains=trains, reason=reason)
        except Stopped:
            raise
        # No defect of a page may stop the training; the page is written again at the end, where a fault is raised.
        except Exception as error:
            self.run.folder.log(f"report.html was not written: {type(error).__name__}: {error}")
        self._last_end = self._clock()
        self._seconds = self._last_end - start


def model_metadata(
    config: RunConfig, tokenizer: Tokenizer, loaded: LoadReport | None, copied: str | None = None
) -> JsonObject:
    """Describes the model for the first screen and the report. loaded: None for random weights. copied: a description
    of the layers that were copied from a teacher."""
    weights = f"of {config.branch}" if config.branch else "random" if loaded is None else loaded.sentence()
    tuning = config.tuning if isinstance(config, FinetuneConfig) else None
    return {
        "family": config.model.name,
        **config.model.metadata(),
        "vocabulary": tokenizer.vocab_size,
        **({"virtual tokens a text": tuning.positions} if tuning is not None and tuning.positions else {}),
        "weights": weights if copied is None else f"{weights}; copied from the teacher: {copied}",
    }


def result_of(
    run: OpenRun, training: TrainingResult, subjects: JsonMapping, metric: str, extra_rows: JsonMapping
) -> JsonObject:
    """Returns the content of result.json. subjects: the names of the run's components by section ("model", "task" or
    "objective", ...). metric: the metric that selects the best checkpoint."""
    training_values = asdict(replace(training, best=None, last=None))
    copied_names = (
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
        **{name: training_values[name] for name in copied_names},
        "devices": run.group.size,
        "seed": run.config.seed,
        **extra_rows,
    }


def finish(run: OpenRun, result: JsonObject, baseline: Baseline, next_commands: Sequence[str]) -> JsonObject:
    """Writes result.json and the report, and prints the last screen. Returns the content of result.json."""
    if not run.folder.writes:
        return result
    warning = run.folder.missing_rows(run.folder.row_counts, result["steps"])
    if warning is not None:
        run.output.warn(warning)
    run.folder.write_result(result)
    run.trackers.finish(result)
    report = write_report(run.folder.path)
    print_end(
        run.output,
        result=result,
        elapsed=time.monotonic() - run.started,
        baseline=baseline,
        run_dir=str(run.folder.path),
        report=str(report),
        next_commands=next_commands,
    )
    return result


def report_finished(run: OpenRun, result: JsonObject) -> JsonObject:
    """Prints the result of a run that has already finished, and writes its report if the file is missing."""
    folder, output = run.folder.path, run.output
    if run.folder.writes and not (folder / "report.html").is_file():
        write_report(folder)
    output.line(f"{folder} is finished: {result['metric']} {result['value']:.4g}; set another name= to start a new run")
    output.line(f" report   {folder / 'report.html'}")
    return result
