"""Progress of a training: a bar on a terminal, one plain line per log interval elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lmtool.reporting.console import Output
from lmtool.reporting.run_files import Baseline
from lmtool.reporting.scores import CONSTANTS
from lmtool.reporting.text import clock, count, exponent, lower_is_better, number, plain, title

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

# Keys of a validation row that are no score.
_BOOKKEEPING = (
    "step", "split", "tokens", "seconds", "epoch", "learning_rate", "tokens_per_second", "grad_norm", "flops", "count",
    "examples", "best", "time", "padding_fraction", "standard_error", "weight", "micro_batches", "phase",
)  # fmt: skip
_SCORES = 6
_TELLING_SHARE = 0.01


class ProgressDisplay:
    """Listens to the loop.

    output: where to speak. metric: the metric whose best row gets the star. log_every: steps between plain lines;
    the first step is always told. baseline: the metric's value of the baseline, named in the table's head.
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
        self._steps: int | None = None
        self._started = 0
        self._max_seconds: float | None = None
        self._trained_seconds = self._first_seconds = self._first_time = 0.0
        self._tokens: int | None = None
        self._first_step: int | None = None
        self._last_drawn = -math.inf
        self._last_row: Mapping[str, Any] = {}

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end()

    def on_start(self, step: int, steps: int | None, max_seconds: float | None = None) -> None:
        """Training begins after `step`; `steps` in all (None: no such budget), at most `max_seconds`."""
        self._started, self._steps, self._max_seconds, self._trained_seconds = step, steps, max_seconds, 0.0
        self._tokens, self._first_step = None if step else 0, None
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
        """By the clock on the wall, estimated from the steps since the first one (which also warms up); nan while
        nothing is known. A budget in seconds counts training alone: evaluations are taken to go on as before."""
        elapsed, left = self._now() - self._first_time, []
        known = self._first_step is not None and step > self._first_step
        if self._steps is not None and known:
            left.append((self._steps - step) * elapsed / (step - (self._first_step or 0)))
        if self._max_seconds is not None and (known or self._steps is None):
            trained = self._trained_seconds - self._first_seconds
            slowdown = max(elapsed / trained, 1.0) if trained > 0 else 1.0
            left.append((self._max_seconds - self._trained_seconds) * slowdown)
        return max(min(left), 0.0) if left else math.nan

    def on_step(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl with split train."""
        step = int(row["step"])
        self._last_row = row
        first = self._first_step is None
        if first:
            self._first_step, self._first_time = step, self._now()
        if row.get("tokens_per_second") and "tokens" in row:
            if self._tokens is not None:
                self._trained_seconds += (row["tokens"] - self._tokens) / row["tokens_per_second"]
            self._tokens = row["tokens"]
        if first:
            self._first_seconds = self._trained_seconds
        text = self._step_text(row, step)
        printed = first or step % self.log_every == 0 or step == self._steps
        if self._bar is None:
            if printed:
                self.output.line(text)
            return
        if printed:
            self.output.log(text)
        if first or self._now() - self._last_drawn >= 0.1 or step == self._steps:
            self._last_drawn = self._now()
            total, _ = self._total(step)
            head, tail = self._head(step), self._tail(row, step)
            self._bar.update(self._bar.task_ids[0], total=total, completed=step, head=head, tail=tail)
            self._bar.refresh()

    def _total(self, step: int) -> tuple[int | None, bool]:
        """Steps in all, and whether time ends the run: then by the speed since the start. None where too few are taken
        to say so: the first ones take longer."""
        if self._max_seconds is None:
            return self._steps, False
        if not self._trained_seconds:
            return None, False
        steps = self._started + round((step - self._started) * self._max_seconds / self._trained_seconds)
        if self._steps is not None and steps >= self._steps:
            return self._steps, False
        return (
            (max(steps, step), True) if self._trained_seconds >= _TELLING_SHARE * self._max_seconds else (None, False)
        )

    def _head(self, step: int) -> str:
        total, in_time = self._total(step)
        return f"step {step}" if total is None else f"step {step}/{'~' if in_time else ''}{total}"

    def _tail(self, row: Mapping[str, Any], step: int) -> str:
        parts = [f"loss {number(row['loss'])}"] if "loss" in row else []
        if row.get("tokens_per_second") is not None:
            parts.append(f"{count(round(row['tokens_per_second']))} tokens/s")
        left = self.seconds_left(step)
        if math.isfinite(left):
            parts.append(f"left {clock(left)}")
        return " · ".join(parts)

    def _step_text(self, row: Mapping[str, Any], step: int) -> str:
        rate = f" · lr {exponent(row['learning_rate'])}" if row.get("learning_rate") is not None else ""
        tail = self._tail(row, step)
        loss, _, rest = tail.partition(" · ")
        phase = f" · phase {row['phase']}" if "phase" in row else ""
        return f"{self._head(step)}{phase} · {loss}{rate}{' · ' + rest if rest else ''}"

    def _is_best(self, row: Mapping[str, Any]) -> bool:
        value = row.get(self.metric)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        if self.best is None or (value < self.best if lower_is_better(self.metric) else value > self.best):
            self.best = float(value)
            return True
        return False

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl with split validation. Its own "best" is believed where it has one."""
        better = self._is_best(row)
        best = bool(row["best"]) if "best" in row else better
        if self._scores is None:
            self._choose_scores(row)
        assert self._scores is not None
        if self._bar is None:
            scores = " · ".join(f"{title(key)} {self._cell(row, key)}" for key in self._scores if key in row)
            self.output.line(f"step {int(row['step'])} · validation · {scores}{' · ★ best' if best else ''}")
            return
        train = number(self._last_row["loss"]) if "loss" in self._last_row else ""
        cells = [f"{int(row['step']):>8}", f"{train:>12}"]
        cells += [f"{self._cell(row, key):>{self._width(key)}}" for key in self._scores]
        self.output.line("".join(cells) + ("  ★" if best else ""), "bold green" if best else None)
        self._bar.refresh()

    def _cell(self, row: Mapping[str, Any], key: str) -> str:
        """A score, and the loss of a term beside that of its best constant."""
        if key not in row:
            return ""
        baseline = row.get(f"{key.removesuffix('_loss')}_baseline") if key.endswith("_loss") else None
        return number(row[key]) if baseline is None else f"{number(row[key])} of {number(baseline)}"

    def _width(self, key: str) -> int:
        return max(len(title(key)), 16 if key.endswith("_loss") else 10) + 2

    def _choose_scores(self, row: Mapping[str, Any]) -> None:
        """What is learned, a column each: constants and bookkeeping are none, nor is a sum of losses that are there by
        themselves, or the loss of the one term there is."""
        terms = [key for key in row if key.endswith("_loss") and f"{key.removesuffix('_loss')}_baseline" in row]
        twice = {"loss"} if len(terms) > 1 or self.metric in terms else {*terms}
        known = [
            key
            for key, value in row.items()
            if key not in _BOOKKEEPING
            and not key.endswith(CONSTANTS)
            and (key not in twice or key == self.metric)
            and isinstance(value, (int, float))
            and not isinstance(value, bool)
        ]
        known.sort(key=lambda key: (key != self.metric, key != "loss"))
        self._scores = known[:_SCORES]
        if self._bar is not None:
            heads = "".join(f"{title(key):>{self._width(key)}}" for key in self._scores)
            baseline_text = ""
            if (value := self.baseline.get("value")) is not None:
                baseline_text = f"   ({title(str(self.baseline.get('name')))} {number(value)})"
            self.output.line(f"{'step':>8}{'train loss':>12}{heads}{baseline_text}", "dim")

    def on_checkpoint(self, step: int, path: str) -> None:
        """A checkpoint was written: told in the log alone, the screen keeps its line an interval."""
        self.output.log(f"step {step} · checkpoint {plain(path)}")

    def on_end(self) -> None:
        """Take the bar away. Safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
