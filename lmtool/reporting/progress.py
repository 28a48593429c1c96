"""Progress of a training: a bar on a terminal, one plain line per log interval elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from lmtool.config.base import JsonMapping
from lmtool.reporting.console import Output
from lmtool.reporting.run_files import Baseline
from lmtool.reporting.scores import CONSTANT_SUFFIXES
from lmtool.reporting.text import clock, count, exponent, is_number, lower_is_better, number, plain, title

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

# Keys of a validation row whose values are not scores.
_BOOKKEEPING = (
    "step", "split", "tokens", "seconds", "epoch", "learning_rate", "tokens_per_second", "grad_norm", "flops", "count",
    "examples", "best", "time", "padding_fraction", "standard_error", "weight", "micro_batches", "phase",
)  # fmt: skip
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
        """Returns the total number of steps, and whether it is estimated. If a time budget ends the run, the number is
        estimated from the speed since the start; None while it is too early for that, since the first steps take
        longer."""
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
        """Returns a score as text; the loss of a term is followed by the loss of the term's baseline."""
        if key not in row:
            return ""
        baseline = row.get(f"{key.removesuffix('_loss')}_baseline") if key.endswith("_loss") else None
        return number(row[key]) if baseline is None else f"{number(row[key])} of {number(baseline)}"

    def _width(self, key: str) -> int:
        return max(len(title(key)), 16 if key.endswith("_loss") else 10) + 2

    def _choose_scores(self, row: JsonMapping) -> None:
        """Chooses the columns: no constants, no bookkeeping, and neither the sum of several losses nor the loss of a
        single term, which would repeat other columns."""
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
