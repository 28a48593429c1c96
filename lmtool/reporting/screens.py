"""The screens of a run: its plan at the start, its progress (a bar on a terminal, or a line per log interval), and its
result at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, TypedDict

from lmtool import __version__
from lmtool.config.base import JsonMapping
from lmtool.reporting.console import Output
from lmtool.reporting.costs import RunPlan
from lmtool.reporting.run_files import Baseline
from lmtool.reporting.scores import CONSTANT_SUFFIXES, score_of, selection_note, stop_reason, test_scores
from lmtool.reporting.text import (
    clock,
    count,
    duration,
    exponent,
    format_value,
    is_number,
    lower_is_better,
    number,
    percent,
    plain,
    shorten,
    size,
    title,
)
from lmtool.system.terminal import plural

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

# Labels that are listed with their counts; of more labels, only two are.
_MAX_LABELS = 20
_STYLES = {"better": "bold green", "worse": "bold red", "unclear": "bold yellow", "unknown": "bold"}


def metadata_text(metadata: Mapping[str, object]) -> str:
    """Returns metadata on one line: 'documents 1 234 · tokens 1.2 M'."""
    known = {key: value for key, value in metadata.items() if value is not None}
    return " · ".join(f"{title(key)} {format_value(key, value)}" for key, value in known.items())


def _sections(label: str, metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    flat = {key: value for key, value in metadata.items() if not isinstance(value, Mapping)}
    texts = [metadata_text(flat)] if flat else []
    for key, value in metadata.items():
        if isinstance(value, Mapping):
            texts.append(f"{title(key)}: {_label_counts(value) if key == 'labels' else metadata_text(value)}")
    return _rows_under_label(label, texts)


def _rows_under_label(label: str, texts: Iterable[str]) -> list[tuple[str, str]]:
    return [(label if index == 0 else "", text) for index, text in enumerate(texts)]


def _label_counts(metadata: Mapping[str, int]) -> str:
    counts = [f"{name} {count(rows)}" for name, rows in zip(shorten(metadata, 40), metadata.values(), strict=True)]
    if len(counts) <= _MAX_LABELS:
        return " · ".join(counts)
    order = sorted(range(len(counts)), key=list(metadata.values()).__getitem__)
    return f"{count(len(counts))}, from {counts[order[0]]} to {counts[order[-1]]}"


def _plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    parts = " · ".join(f"{title(part)} {count(number)}" for part, number in plan.parameters.items())
    passes = f" = {format_value('', float(plan.epochs))} epochs" if plan.epochs is not None else ""
    time = "time unknown" if plan.seconds is None else plan.time_text
    return [
        ("params", f"{count(plan.total_parameters)} · {count(plan.trainable_parameters)} trainable · {parts}"),
        (
            "plan",
            f"{plan.steps_text} {plural(plan.steps, 'step')} × {count(round(plan.tokens_per_step))} tokens = "
            f"{count(round(plan.tokens))} tokens{passes} · {time} · memory about {size(plan.needed_bytes)} · "
            f"disk {size(plan.disk_bytes)}{f' in {plan.checkpoints:,} checkpoints' if plan.checkpoints > 3 else ''}",
        ),
        *([("ends", plan.ends_text)] if plan.ends_by else []),
        *((f"phase {number}", phase.text) for number, phase in enumerate(plan.phases, 1)),
        *(("", note) for note in plan.notes),
    ]


def parameter_rows(counts_by_role: Mapping[str, Mapping[str, int]]) -> list[tuple[str, ...]]:
    """Returns (role, trainable, total) of each role with parameters, and the sum. counts_by_role: {"trainable",
    "total"}. The numbers are exact, for comparison with published ones."""
    present = {role: counts for role, counts in counts_by_role.items() if counts["total"]}
    rows = [(title(role), f"{counts['trainable']:,}", f"{counts['total']:,}") for role, counts in present.items()]
    trainable, total = (sum(counts[kind] for counts in present.values()) for kind in ("trainable", "total"))
    return [*rows, ("in all", f"{trainable:,}", f"{total:,}")]


def _parameter_text(counts_by_role: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    if not counts_by_role:
        return []
    rows = parameter_rows(counts_by_role)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    texts = (f"{role:{widths[0]}}  {trainable:>{widths[1]}} of {total:>{widths[2]}}" for role, trainable, total in rows)
    return _rows_under_label("learns", texts)


class RateRow(TypedDict):
    """The optimizer settings of a group of parameters, as in facts.json.

    group: "layer 12 to layer 7". learning_rate: the peak, before the schedule. without_decay: number of parameters
    without weight decay (norms, biases). from_step: first training step; None if frozen during the whole run.
    """

    group: str
    parameters: int
    learning_rate: float
    weight_decay: float
    without_decay: int
    from_step: int | None


def rate_text(row: RateRow) -> str:
    """Returns a row of the learning rates by depth: 'layer 2: 198 272 · rate 0.0001 · decay 0.01 (1 280 without) · from
    step 1'."""
    without = f" ({count(row['without_decay'])} without)" if row["weight_decay"] and row["without_decay"] else ""
    decay = f"decay {row['weight_decay']:.3g}{without}" if row["weight_decay"] else "no decay"
    first = "not in this run" if row["from_step"] is None else f"from step {count(row['from_step'])}"
    parameters = f"{title(str(row['group']))}: {count(row['parameters'])}"
    return " · ".join([parameters, f"rate {row['learning_rate']:.3g}", decay, first])


def baseline_text(baseline: Baseline | None) -> str:
    """Returns 'unigram: loss 6.931'."""
    value = None if baseline is None else baseline.get("value")
    if baseline is None or value is None:
        return "none known"
    return f"{title(str(baseline.get('name')))}: {title(str(baseline.get('metric')))} {number(value)}"


@dataclass(frozen=True)
class StartScreen:
    """The contents of the start screen.

    choices: selected components ({"model": "bert_tiny", "data": "pydocs"}). data: metadata, with a section per split.
    model: layers, width, origin of the weights. trainable: parameter counts by role. rates: learning rates by depth.
    machine: device, precision, attention path, kind of dropout. resumed_step: step of the checkpoint that the run
    resumes from. branch: run and step that the run branches from. export: why the model or its head cannot be exported.
    """

    command: str
    run_dir: str
    choices: Mapping[str, object]
    data: Mapping[str, object]
    model: Mapping[str, object]
    plan: RunPlan
    baseline: Baseline
    machine: Mapping[str, object]
    trainable: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rates: Sequence[RateRow] = ()
    resumed_step: int | None = None
    branch: str | None = None
    export: str = ""


def print_start(output: Output, screen: StartScreen) -> None:
    """Prints the start screen."""
    choices = " ".join(f"{plain(key)}={plain(value, 80)}" for key, value in screen.choices.items())
    output.line(f"lmtool {__version__} · {screen.command} · {choices}", "bold")
    run_dir = plain(screen.run_dir)
    if screen.branch is not None:
        run_dir += f" · branches from {plain(screen.branch)}"
    elif screen.resumed_step is not None:
        run_dir += f" · resumes from step {count(screen.resumed_step)}"
    rows = [("run", run_dir), *_sections("data", screen.data), *_sections("model", screen.model)]
    rows += [*_plan_rows(screen.plan), ("baseline", baseline_text(screen.baseline)), *_parameter_text(screen.trainable)]
    if len(screen.rates) > 1:  # a single rate is in the configuration
        rows += _rows_under_label("rates", map(rate_text, screen.rates))
    rows.append(("machine", metadata_text(screen.machine)))
    output.rows([*rows, *([("export", plain(screen.export))] if screen.export else [])])


# Keys of a validation row whose values are not scores.
_BOOKKEEPING = (
    {"step", "split", "epoch", "phase", "time", "seconds", "best"}
    | {"tokens", "examples", "count", "weight", "micro_batches", "flops", "standard_error"}
    | {"learning_rate", "grad_norm", "tokens_per_second", "padding_fraction"}
)
_MAX_SCORES = 6
# The total number of steps is estimated once this fraction of a time budget is spent.
_MIN_TIME_FRACTION = 0.01


class ProgressDisplay:
    """Shows the progress of the loop.

    metric: the metric whose best row is marked with a star. log_every: steps between plain lines; the first step is
    always printed. baseline: printed in the header of the table. now: a clock in seconds.
    """

    def __init__(
        self,
        output: Output,
        metric: str = "loss",
        log_every: int = 1,
        baseline: Baseline | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self.output = output
        self.metric = metric
        self.log_every = log_every
        self.baseline: Baseline = baseline or {}
        self.best: float | None = None
        self._now = now
        self._bar: Bar | None = None
        self._scores: list[str] | None = None
        self._max_steps: int | None = None
        self._start_step = 0
        self._max_seconds: float | None = None
        self._trained_seconds = self._first_step_seconds = self._first_step_time = 0.0
        self._last_tokens: int | None = None
        self._first_step: int | None = None
        self._last_refresh = -math.inf
        self._last_row: JsonMapping = {}

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end()

    def on_start(self, step: int, steps: int | None, max_seconds: float | None = None) -> None:
        """Called before training, which continues after `step`. steps, max_seconds: the budgets; None without one."""
        self._start_step, self._max_steps, self._max_seconds, self._trained_seconds = step, steps, max_seconds, 0.0
        self._last_tokens, self._first_step = None if step else 0, None
        if not self.output.live:
            return
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.fields[head]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[tail]}", markup=False),
            console=self.output.console,
            auto_refresh=False,  # drawn from the loop: no thread, and a lost terminal raises where it is caught
            transient=True,
        )
        total = steps if max_seconds is None else None
        self._bar.add_task("train", total=total, completed=step, head=self._head(step), tail="first step …")
        self._bar.start()
        self._bar.refresh()

    def seconds_left(self, step: int) -> float:
        """Returns the estimated wall-clock seconds left; nan if unknown. The first step does not count, since it takes
        longer. A budget in seconds counts only training: evaluations are assumed to take the same fraction of time
        as before."""
        elapsed, estimates = self._now() - self._first_step_time, []
        known = self._first_step is not None and step > self._first_step
        if self._max_steps is not None and known:
            estimates.append((self._max_steps - step) * elapsed / (step - (self._first_step or 0)))
        if self._max_seconds is not None and (known or self._max_steps is None):
            trained = self._trained_seconds - self._first_step_seconds
            slowdown = max(elapsed / trained, 1.0) if trained > 0 else 1.0
            estimates.append((self._max_seconds - self._trained_seconds) * slowdown)
        return max(min(estimates), 0.0) if estimates else math.nan

    def on_step(self, row: JsonMapping) -> None:
        """Shows a training row of metrics.jsonl."""
        step = int(row["step"])
        self._last_row = row
        first = self._first_step is None
        if first:
            self._first_step, self._first_step_time = step, self._now()
        if row.get("tokens_per_second") and "tokens" in row:
            if self._last_tokens is not None:
                self._trained_seconds += (row["tokens"] - self._last_tokens) / row["tokens_per_second"]
            self._last_tokens = row["tokens"]
        if first:
            self._first_step_seconds = self._trained_seconds
        text = self._step_text(row, step)
        printed = first or step % self.log_every == 0 or step == self._max_steps
        if self._bar is None:
            if printed:
                self.output.line(text)
            return
        if printed:
            self.output.log(text)
        if first or self._now() - self._last_refresh >= 0.1 or step == self._max_steps:
            self._last_refresh = self._now()
            total, _ = self._total(step)
            head, tail = self._head(step), self._tail(row, step)
            self._bar.update(self._bar.task_ids[0], total=total, completed=step, head=head, tail=tail)
            self._bar.refresh()

    def _total(self, step: int) -> tuple[int | None, bool]:
        """Returns the total number of steps, and whether it is estimated from the speed since the start; None while it
        is too early for an estimate."""
        if self._max_seconds is None:
            return self._max_steps, False
        if not self._trained_seconds:
            return None, False
        steps = self._start_step + round((step - self._start_step) * self._max_seconds / self._trained_seconds)
        if self._max_steps is not None and steps >= self._max_steps:
            return self._max_steps, False
        if self._trained_seconds < _MIN_TIME_FRACTION * self._max_seconds:
            return None, False
        return max(steps, step), True

    def _head(self, step: int) -> str:
        total, is_estimated = self._total(step)
        return f"step {step}" if total is None else f"step {step}/{'~' if is_estimated else ''}{total}"

    def _tail(self, row: JsonMapping, step: int) -> str:
        parts = [f"loss {number(row['loss'])}"] if "loss" in row else []
        if row.get("tokens_per_second") is not None:
            parts.append(f"{count(round(row['tokens_per_second']))} tokens/s")
        seconds = self.seconds_left(step)
        if math.isfinite(seconds):
            parts.append(f"left {clock(seconds)}")
        return " · ".join(parts)

    def _step_text(self, row: JsonMapping, step: int) -> str:
        rate = f" · lr {exponent(row['learning_rate'])}" if row.get("learning_rate") is not None else ""
        tail = self._tail(row, step)
        loss, _, details = tail.partition(" · ")
        phase = f" · phase {row['phase']}" if "phase" in row else ""
        return f"{self._head(step)}{phase} · {loss}{rate}{' · ' + details if details else ''}"

    def _is_best(self, row: JsonMapping) -> bool:
        value = row.get(self.metric)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        if self.best is None or (value < self.best if lower_is_better(self.metric) else value > self.best):
            self.best = float(value)
            return True
        return False

    def on_evaluation(self, row: JsonMapping) -> None:
        """Shows a validation row of metrics.jsonl. Its key `best` has precedence over the display's own record."""
        improves = self._is_best(row)
        is_best = bool(row["best"]) if "best" in row else improves
        if self._scores is None:
            self._choose_scores(row)
        assert self._scores is not None
        if self._bar is None:
            scores = " · ".join(f"{title(key)} {self._cell(row, key)}" for key in self._scores if key in row)
            self.output.line(f"step {int(row['step'])} · validation · {scores}{' · ★ best' if is_best else ''}")
            return
        train = number(self._last_row["loss"]) if "loss" in self._last_row else ""
        cells = [f"{int(row['step']):>8}", f"{train:>12}"]
        cells += [f"{self._cell(row, key):>{self._width(key)}}" for key in self._scores]
        self.output.line("".join(cells) + ("  ★" if is_best else ""), "bold green" if is_best else None)
        self._bar.refresh()

    def _cell(self, row: JsonMapping, key: str) -> str:
        if key not in row:
            return ""
        baseline = row.get(f"{key.removesuffix('_loss')}_baseline") if key.endswith("_loss") else None
        return number(row[key]) if baseline is None else f"{number(row[key])} of {number(baseline)}"

    def _width(self, key: str) -> int:
        return max(len(title(key)), 16 if key.endswith("_loss") else 10) + 2

    def _choose_scores(self, row: JsonMapping) -> None:
        terms = [key for key in row if key.endswith("_loss") and f"{key.removesuffix('_loss')}_baseline" in row]
        repeated = {"loss"} if len(terms) > 1 or self.metric in terms else {*terms}
        columns = [
            key
            for key, value in row.items()
            if key not in _BOOKKEEPING
            and not key.endswith(CONSTANT_SUFFIXES)
            and (key not in repeated or key == self.metric)
            and is_number(value)
        ]
        columns.sort(key=lambda key: (key != self.metric, key != "loss"))
        self._scores = columns[:_MAX_SCORES]
        if self._bar is not None:
            headings = "".join(f"{title(key):>{self._width(key)}}" for key in self._scores)
            baseline_text = ""
            if (value := self.baseline.get("value")) is not None:
                baseline_text = f"   ({title(str(self.baseline.get('name')))} {number(value)})"
            self.output.line(f"{'step':>8}{'train loss':>12}{headings}{baseline_text}", "dim")

    def on_checkpoint(self, step: int, path: str) -> None:
        """Writes the checkpoint's path to the log file only."""
        self.output.log(f"step {step} · checkpoint {plain(path)}")

    def on_end(self) -> None:
        """Removes the bar. Safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _forgetting_rows(forgetting: JsonMapping) -> list[tuple[str, str]]:
    before, after = (float(forgetting[moment]["loss"]) for moment in ("before", "after"))
    sentence = f"{plain(forgetting['objective'])} loss {number(before)} before, {number(after)} after"
    distances = " · ".join(f"{plain(level)} {percent(share)}" for level, share in forgetting["distance"].items())
    added_parameters = f" · {count(forgetting['added'])} parameters added" if forgetting["added"] else ""
    return [("forgets", f"{sentence}, on {plain(forgetting['text'])}"), ("moved", f"{distances}{added_parameters}")]


def _headline(result: JsonMapping, elapsed: float) -> str:
    """The times of training and evaluation are those of all commands that trained the run."""
    text = f"{title(str(result.get('status', 'done')))} in {duration(elapsed)}"
    if result.get("seconds") is not None:
        seconds, evaluation_seconds = result["seconds"], result.get("evaluation_seconds") or 0.0
        text += f", training {duration(seconds)}"
        text += f", evaluation {duration(evaluation_seconds)}" if evaluation_seconds > 0.05 * seconds else ""
        text += " in all" if seconds + evaluation_seconds > elapsed else ""
    if result.get("steps") is not None:
        text += f" · {count(result['steps'])} {plural(result['steps'], 'step')}"
    return " · ".join(filter(None, (text, stop_reason(result))))


def _speed_text(result: JsonMapping) -> str:
    formats: dict[str, Callable[[float], str]] = {
        "tokens_per_second": lambda rate: f"{count(round(rate))} tokens/s",
        "tokens": lambda tokens: f"{count(tokens)} tokens",
        "padding_fraction": lambda fraction: f"padding {percent(fraction)}",
        "peak_memory_bytes": lambda memory: f"peak memory {size(memory)}" if memory else "",
    }
    parts = [formatter(result[key]) for key, formatter in formats.items() if result.get(key) is not None]
    return " · ".join(filter(None, parts))


def print_end(
    output: Output,
    *,
    result: JsonMapping,
    elapsed: float,
    baseline: Baseline | None,
    run_dir: str,
    report: str,
    next_commands: Sequence[str],
) -> None:
    """Prints the end screen. result: result.json. elapsed: seconds since the command started. report: path of the
    report. next_commands: suggested commands."""
    score = score_of(result, baseline)
    output.line(_headline(result, elapsed), _STYLES[score.verdict] if score else "bold")
    rows = []
    if score:
        rows.append(("score", " · ".join(filter(None, (score.text, score.sentence, selection_note(result))))))
    rows += _rows_under_label("test", test_scores(result))
    if mixture := result.get("mixture"):
        members = [f"{plain(name)} {count(row['examples'])} ({percent(row['share'])})" for name, row in mixture.items()]
        rows.append(("mixture", f"examples read: {' · '.join(members)}"))
    other_metrics = {
        key: value
        for key, value in (result.get("metrics") or {}).items()
        if isinstance(value, (int, float))
        and (score is None or (key != score.metric and (value != score.value or not key.endswith("_loss"))))
        and not key.endswith((*CONSTANT_SUFFIXES, "standard_error"))
    }
    if other_metrics:
        rows.append(("also", metadata_text(other_metrics)))
    if mix := result.get("layer_mix"):
        layers = [f"{layer or 'embedding'} {percent(share)}" for layer, share in enumerate(mix["weights"])]
        rows.append(("layers", f"{' · '.join(layers)} · gamma {number(mix['gamma'])}"))
    if forgetting := result.get("forgetting"):
        rows += _forgetting_rows(forgetting)
    if speed := _speed_text(result):
        rows.append(("speed", speed))
    rows.append(("run", plain(run_dir)))
    if result.get("delta_bytes"):
        rows.append(("weights", f"{size(result['delta_bytes'])} in addition to {plain(str(result['base']))}"))
    rows.append(("report", plain(report)))
    output.rows([*rows, *_rows_under_label("next", map(plain, next_commands))])
